"""What every rank of a run does, from the black boxes that its ranks write, no mark read twice.

    boxes = Boxes(run / "blackbox")
    for box in boxes.read(): box.rank, box.step, box.seconds, box.doing

A step counts as whole when its optimizer has ended, or when marks of a later one begin; what a rank does between two
steps (an evaluation, a save) is added to the earlier one. Seconds are exclusive, as those of `runtime.phases`.
"""

from __future__ import annotations

import math
import mmap
import re
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.runtime import ring

__all__ = ["COMPUTE", "PHASES", "BoxTail", "Boxes"]

PHASES = ("forward", "backward", "waiting", "data", "rest")
"""Into what the phases of a box are gathered: waiting is `comm_s`; rest the optimizer, saves and evaluations."""
COMPUTE = (0, 1)
"""Of these, what a rank computes itself."""
HISTORY = 64
"""Steps that are kept of each rank."""
LOOK_AGAIN_S = 5.0
"""Between two looks for boxes that are new or were replaced."""
_PLACE = {"forward_s": 0, "backward_s": 1, "comm_s": 2, "data_s": 3}
_REST = len(PHASES) - 1
_BETWEEN = ("evaluate_s", "checkpoint_s")
_FIRST_MARKS = 1536  # of a box that is seen for the first time
_NUMBERS = np.dtype({"names": ["number"], "formats": ["<u8"], "offsets": [0], "itemsize": ring.MARK_BYTES})


class BoxTail:
    """One black box.

    steps: (step, seconds by phase [P]) of the last whole steps; step 0 where the rank didn't say which. doing: the
    innermost phase that is open, "" between phases, since `since_t` (unix seconds; NaN where nothing was marked).
    """

    def __init__(self, path: Path) -> None:
        """ValueError where the file is no black box, OSError where it can't be read."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.inode = path.stat().st_ino
        head = self._map[: ring.HEAD.size]
        if len(head) < ring.HEAD.size or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
            raise ValueError(f"{path} is no black box")
        magic, self._table_bytes, self._num_marks, _, _ = ring.HEAD.unpack(head)
        entries = self._entries()
        if magic != ring.MAGIC or not entries:
            raise ValueError(f"{path} is a black box of another version")
        self.rank, self.host = int(entries[0]["rank"]), str(entries[0]["host"])
        self._ahead_s = float(entries[0]["wall_s"]) - float(entries[0]["clock_s"])
        self._marks_at = ring.HEAD_BYTES + self._table_bytes
        self._named: dict[str, dict[int, str]] = {"phase": {}, "lane": {}}
        self.steps: deque[tuple[int, list[float]]] = deque(maxlen=HISTORY)
        self.num_steps = 0  # that were whole since it was opened
        self._open: list[str] = []
        self._at_s = math.nan  # of the last mark
        self._seconds: list[float] | None = None  # of the step that runs; None while it isn't known from its begin
        self._step = ring.NONE
        self._last = max(0, self._newest() - min(_FIRST_MARKS, self._num_marks - 1))
        self._whole = self._last == 0  # whether that step is kept already: the next phase begins another

    @property
    def doing(self) -> str:
        return self._open[-1] if self._open else ""

    @property
    def since_t(self) -> float:
        return self._at_s + self._ahead_s

    def read(self) -> None:
        """Takes in the marks that are new."""
        while (raw := self._sealed(self._last + 1)) is not None:
            self._last += 1
            self._take(raw)
        if (newest := self._newest_near()) > self._last + self._num_marks // 2:  # it was overtaken
            self._last, self._open = newest - self._num_marks // 4, []
            self._seconds, self._whole = None, False
            self.read()

    def _entries(self) -> list[dict[str, Any]]:
        return list(ring.lines(self._map[ring.HEAD_BYTES : ring.HEAD_BYTES + self._table_bytes]))

    def _newest(self) -> int:
        size = min(self._num_marks, (len(self._map) - self._marks_at) // ring.MARK_BYTES)
        numbers = np.frombuffer(self._map, _NUMBERS, size, self._marks_at)["number"]
        slots = numbers % self._num_marks == np.arange(size)
        return int(numbers[slots].max(initial=0))

    def _newest_near(self) -> int:
        """The number in the slot of the next mark: a later one where the writer has gone round."""
        at = self._marks_at + (self._last + 1) % self._num_marks * ring.MARK_BYTES
        return int.from_bytes(self._map[at : at + 8], "little")

    def _sealed(self, number: int) -> bytes | None:
        at = self._marks_at + number % self._num_marks * ring.MARK_BYTES
        raw, seal = self._map[at : at + ring.MARK.size], self._map[at + ring.MARK.size : at + ring.MARK.size + 4]
        whole = int.from_bytes(raw[:8], "little") == number and zlib.crc32(raw) == int.from_bytes(seal, "little")
        return raw if whole else None

    def _name(self, kind: str, number: int) -> str:
        """As the table has it, which is read again for a number that is new."""
        named = self._named[kind]
        if number not in named:
            named |= {entry[kind]: entry["name"] for entry in self._entries()[1:] if kind in entry}
        return named.setdefault(number, "unlisted")

    def _take(self, raw: bytes) -> None:
        _, at_s, step, phase, kind, lane, *_ = ring.MARK.unpack(raw)
        if kind == ring.CLOCK:
            self._ahead_s = ring.PAIR.unpack(raw)[6] - at_s
            return
        if self._name("lane", lane) != "step":
            return
        name, depth = self._name("phase", phase), ring.MARK.unpack(raw)[10]
        if self._open and self._seconds is not None:
            self._seconds[_PLACE.get(self._open[-1], _REST)] += at_s - self._at_s
        del self._open[depth - 1 :]
        self._at_s = at_s
        if kind == ring.BEGIN:
            self._begin(name, step)
            self._open.append(name)
        elif name == "optimizer_s" and not self._whole:
            self._close()

    def _begin(self, name: str, step: int) -> None:
        """An outermost phase: of the next step, if the last one is whole or it says another step."""
        if self._open or name in _BETWEEN:
            return
        if self._whole or step != self._step:
            known = self._whole or self._seconds is not None
            if not self._whole:
                self._close()
            self._seconds, self._whole = ([0.0] * len(PHASES) if known else None), False
        self._step = step

    def _close(self) -> None:
        """Keeps the step's seconds; what comes until another step begins is still added to them."""
        if self._seconds is not None:
            self.steps.append((max(self._step, 0), self._seconds))
            self.num_steps += 1
        self._whole = True


class Boxes:
    """All black boxes of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generation = 0  # grows with each box that is new or was replaced
        self._tails: dict[str, BoxTail] = {}
        self._refused: dict[str, int] = {}
        self._looked_s = -math.inf

    def read(self) -> list[BoxTail]:
        """By rank, each read up to its newest mark."""
        if time.monotonic() - self._looked_s >= LOOK_AGAIN_S:
            self._look()
        for tail in self._tails.values():
            tail.read()
        return sorted(self._tails.values(), key=lambda tail: tail.rank)

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        for path, inode in self._files():
            known = self._tails.get(path.name)
            if (known is not None and known.inode == inode) or self._refused.get(path.name) == inode:
                continue
            try:
                self._tails[path.name] = BoxTail(path)
                self.generation += 1
            except (ValueError, OSError):
                self._refused[path.name] = inode

    def _files(self) -> Iterator[tuple[Path, int]]:
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if re.fullmatch(r"rank-\d+", path.name):
                    yield path, path.stat().st_ino
