"""Flipped bits in the copies of a run's state that its vault has in memory, at the moment at which they count.

Copies are made again every few steps, and each is overwritten two copies later; so a bit that flips matters only where
the ranks die before that. All ranks are stopped first, so that nobody copies meanwhile; then the vault has computed the
checksums of what was copied and has written what was to be written; then the bits flip, and the ranks die. What flips
before its checksum is computed has the checksum of the flipped bytes: nothing finds it, as nothing finds a bit that has
flipped in the rank before it was copied.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from bessemer.core.errors import CheckpointError

__all__ = ["flip_and_kill"]

VAULT_S = 10.0
"""How long the vault may take to settle."""


def flip_and_kill(vault: int, ranks: Sequence[int]) -> bool:
    """Change one bit in the midst of each tensor of each copy that the process `vault` holds, and kill the processes
    `ranks`. Whether there was a copy; without one nobody is hurt."""
    socket = _socket_of(vault)
    try:
        if socket is None or not _flip(socket, change=False):
            return False
        _send(ranks, signal.SIGSTOP)
        flipped = _flip(socket, change=True)
    except CheckpointError:  # it has just died, or doesn't come to rest
        flipped = 0
    _send(ranks, signal.SIGKILL if flipped else signal.SIGCONT)
    return flipped > 0


def _flip(socket: Path, *, change: bool) -> int:
    """How many tensors are held; change: a bit of each, once nothing is being written."""
    from bessemer.keep.memory_copies import MemoryCopies, settled  # needs an extra

    if change:
        settled(socket, timeout_s=VAULT_S)
    with MemoryCopies(socket, timeout_s=VAULT_S) as copies:
        held = [block.data for _, block in copies.blocks() if len(block.data)]
        for data in held if change else ():
            data[len(data) // 2] ^= 1
        count = len(held)
        held.clear()
    return count


def _socket_of(vault: int) -> Path | None:
    """Where it listens, by its command line."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{vault}/cmdline").read_bytes().split(b"\0")
        return Path(os.fsdecode(words[words.index(b"--socket") + 1]))
    return None


def _send(ranks: Sequence[int], number: int) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
