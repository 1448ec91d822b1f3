"""Signs of life of a run's hosts in its folder, for an agent that can't reach a coordinator: is the run dead, or only
out of reach? Who takes a run for dead that goes on begins it a second time, in the same folder.

Each agent counts up in a file of its own (`hosts/NUMBER`). Whoever looks waits for a change: clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SIGN_S", "Signs", "give_signs"]

SIGN_S = 1.0
_FOLDER = "hosts"


@contextlib.contextmanager
def give_signs(run: Path, number: int, every_s: float = SIGN_S) -> Iterator[None]:
    """As long as the block lasts, from a thread of its own: a file system that hangs holds up nothing else."""
    ended = threading.Event()
    file = run / _FOLDER / str(number)

    def count() -> None:
        turn = 0
        while not ended.wait(every_s if turn else 0.0):
            turn += 1
            with contextlib.suppress(OSError):
                _write(file, turn)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)

    thread = threading.Thread(target=count, name="bessemer-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(every_s)


def _write(file: Path, turn: int) -> None:
    """In place, for which a full disk has room."""
    file.parent.mkdir(exist_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as out:
        out.write(b"%12d" % turn)


class Signs:
    """What was seen of the other hosts. `number`: of this host, of `count`."""

    def __init__(self, run: Path, number: int, count: int) -> None:
        # by their names: a listing may be half a minute old on a network's file system
        self._files = {n: run / _FOLDER / str(n) for n in range(count) if n != number}
        self._seen = self._read()

    def fresh(self) -> list[int]:
        """The hosts that have given a sign since the last call."""
        before, self._seen = self._seen, self._read()
        return [number for number, text in self._seen.items() if text and before.get(number, b"") != text]

    def _read(self) -> dict[int, bytes]:
        found = {}
        for number, file in self._files.items():
            with contextlib.suppress(OSError):
                found[number] = file.read_bytes()
        return found
