"""Follows a black box while its rank writes it: only what is new, so that it may be asked every second.

    tail = BoxTail(run / "blackbox" / "rank-3", since_t=start_t)
    tail.look()                                  # is there a file, or another one?
    marks, operations = tail.marks(), tail.operations()

`runtime.blackbox` reads the whole file, which takes some 30 ms; a second's news of a rank takes about one.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from bessemer.runtime import ring

__all__ = ["BoxTail", "TailMark", "TailOperation"]

STEP_LANE = "step"


class TailMark(NamedTuple):
    """A phase of the step's thread that begins or ends, at seconds of the rank's monotonic clock. step: -1 unknown.
    depth: 1 for an outermost phase. gap: marks before it were overwritten before they were read."""

    at_s: float
    step: int
    phase: str
    begins: bool
    depth: int
    gap: bool = False


class TailOperation(NamedTuple):
    """An operation whose end is known, of a group on which a host that has waited knows it to be over.

    group: name and ranks in the group's order. peer: of a message, else -1. Times as in `runtime.blackbox.Operation`.
    """

    group: tuple[str, tuple[int, ...]]
    operation: str
    order: int
    peer: int
    enqueue_s: float
    wait_s: float
    finish_s: float


class BoxTail:
    """The black box at one path, from the middle of its rings when it is first seen. A file that takes its place, as of
    a rank that was started again, is read from its begin.

    One that was last written before `since_t` (unix seconds) is stale: an earlier attempt left it. It stays so until
    somebody writes to it, since the clock of its host may be wrong. Nothing comes of a stale one.
    """

    def __init__(self, path: Path, since_t: float = 0.0) -> None:
        self.path, self._since_t = path, since_t
        self.own: dict[str, Any] = {}
        """Rank, world, host, pid as the file says; empty while there is none."""
        self.stale = False
        self.ahead_s = 0.0
        """Of the wall clock over the rank's monotonic one."""
        self.restarts = 0
        """How many files have taken the place of the first."""
        self._file: _File | None = None
        self._seen = (-1, -1)  # inode and size of what was at the path
        self._gap = False

    @property
    def is_live(self) -> bool:
        """Whether there is a black box of this attempt."""
        return bool(self.own) and not self.stale

    def look(self) -> bool:
        """Whether another file lies at the path than at the last look. What is no black box is as good as none."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        if (status.st_ino, status.st_size) == self._seen:
            return False
        self._seen = status.st_ino, status.st_size
        try:
            file = _File(self.path)
        except (OSError, ValueError):
            return False
        self.close()
        self.restarts += bool(self.own)
        self._file, self.own, self.ahead_s, self._gap = file, file.own, file.ahead_s, False
        self.stale = max(file.own["wall_s"], file.marks.newest_s + file.ahead_s) < self._since_t
        return True

    def marks(self) -> list[TailMark]:
        """Those of the step's thread that were written since the last call, in order."""
        if not self._is_read():
            return []
        assert self._file is not None
        file, found = self._file, []
        for raw in file.marks.news():
            _, at_s, step, phase, kind, lane, _, _, _, _, depth = ring.MARK.unpack(raw)
            if kind == ring.CLOCK:
                self.ahead_s = ring.PAIR.unpack(raw)[6] - at_s
            elif file.named("lane", lane).get("name") == STEP_LANE:
                name = file.named("phase", phase).get("name", "unlisted")
                found.append(TailMark(at_s, step, name, kind == ring.BEGIN, depth, self._gap or file.marks.gap))
                self._gap = file.marks.gap = False
        self._gap |= file.marks.gap
        return found

    def operations(self) -> list[TailOperation]:
        """Those whose end became known since the last call."""
        if not self._is_read():
            return []
        assert self._file is not None
        return list(self._file.finished())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_read(self) -> bool:
        """Whether there is one, and not a stale one; one that has grown since it was first seen is none."""
        if self._file is not None and self.stale:
            self.stale = not self._file.marks.has_grown()
        return self._file is not None and not self.stale


class _File:
    """One file. ValueError where it is no black box of this form."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.own = self._opened()
        except BaseException:
            self._map.close()
            raise
        self.ahead_s = float(self.own["wall_s"]) - float(self.own["clock_s"])
        self._pending: dict[int, tuple[Any, ...]] = {}
        self._names: dict[tuple[str, int], dict[str, Any]] = {}

    def _opened(self) -> dict[str, Any]:
        head = self._map[: ring.HEAD.size]
        if len(head) < ring.HEAD.size or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
            raise ValueError("its first bytes are not those of a black box")
        magic, self._table_bytes, num_marks, num_operations, _ = ring.HEAD.unpack(head)
        operations_at = ring.HEAD_BYTES + self._table_bytes + num_marks * ring.MARK_BYTES
        entries = self._entries()
        if magic != ring.MAGIC or not entries:
            raise ValueError("its table is empty, or it is of another version")
        if len(self._map) < operations_at + num_operations * ring.OPERATION_BYTES:
            raise ValueError("it was cut off")
        self.marks = _RingTail(self._map, ring.MARK, ring.MARK_BYTES, ring.HEAD_BYTES + self._table_bytes, num_marks)
        self._operations = _RingTail(self._map, ring.OPERATION, ring.OPERATION_BYTES, operations_at, num_operations)
        return entries[0]

    def close(self) -> None:
        self._map.close()

    def named(self, kind: str, number: int) -> dict[str, Any]:
        """The table's entry; it's read again where a number is new. Empty for what found no place in it."""
        if (kind, number) not in self._names:
            for entry in self._entries()[1:]:
                found = next(iter(entry))
                if found == "group":
                    entry["key"] = entry["name"], ring.unfold(entry["ranks"])
                self._names.setdefault((found, entry[found]), entry)
            self._names.setdefault((kind, number), {})
        return self._names[kind, number]

    def _entries(self) -> list[dict[str, Any]]:
        return list(ring.lines(self._map[ring.HEAD_BYTES : ring.HEAD_BYTES + self._table_bytes]))

    def finished(self) -> Iterator[TailOperation]:
        """Those whose end has been written by now; one whose slot another has taken is forgotten."""
        for raw in self._operations.news():
            number, enqueue_s, order, _, _, peer, group, operation, _, waits = ring.OPERATION.unpack(raw)
            self._pending[number] = (enqueue_s, order, peer, group, operation, waits)
        for number, (enqueue_s, order, peer, group, operation, waits) in list(self._pending.items()):
            wait_s = enqueue_s if waits else self._ending(number, ring.WAIT_AT)
            finish_s = self._ending(number, ring.FINISH_AT)
            if finish_s is None or wait_s is None:
                if self._operations.next - number >= self._operations.slots:
                    del self._pending[number]
                continue
            del self._pending[number]
            entry = self.named("group", group)
            if entry.get("blocks"):
                name = ring.OPERATIONS[operation]
                yield TailOperation(entry["key"], name, order, peer, enqueue_s, wait_s, finish_s)

    def _ending(self, number: int, at: int) -> float | None:
        slot = self._operations.slot(number)[at : at + ring.ENDING.size]
        at_s, of = ring.ENDING.unpack(slot)
        return float(at_s) if of == number else None


class _RingTail:
    """The records of one ring from the next number on. gap: some were overwritten before they were read."""

    def __init__(self, mapped: mmap.mmap, form: Struct, size: int, start: int, slots: int) -> None:
        self._map, self._form, self._size, self._start, self.slots = mapped, form, size, start, slots
        newest = self._newest()
        self._first_seen = newest
        self.next = max(1, newest - slots // 2)
        self.gap = self.next > 1

    @property
    def newest_s(self) -> float:
        """The time of the newest record when the ring was first seen, 0.0 without any."""
        raw = self._whole(self._first_seen)
        return 0.0 if raw is None else float(ring.MARK.unpack_from(raw)[1])

    def has_grown(self) -> bool:
        """Whether a record has been added since the ring was first seen."""
        return self._newest() > self._first_seen

    def slot(self, number: int) -> bytes:
        at = self._start + number % self.slots * self._size
        return self._map[at : at + self._size]

    def news(self) -> Iterator[bytes]:
        """The fields of each new record. Where the writer has gone round, what it overwrote is skipped."""
        while True:
            raw = self._whole(self.next)
            if raw is not None:
                self.next += 1
                yield raw
                continue
            newest = _number(self.slot(self.next))
            if newest == self.next and self._whole(self.next + 1) is not None:  # half written, and left so
                self.next += 1
            elif newest > self.next:
                self.next = max(self.next + 1, self._newest() - self.slots // 2)
            else:
                return
            self.gap = True

    def _whole(self, number: int) -> bytes | None:
        """The record of that number, if it is there and isn't half written."""
        slot = self.slot(number)
        raw = slot[: self._form.size]
        sealed = zlib.crc32(raw) == int.from_bytes(slot[self._form.size : self._form.size + 4], "little")
        return raw if sealed and _number(raw) == number else None

    def _newest(self) -> int:
        """The highest number of a whole record."""
        numbers = np.ndarray((self.slots,), "<u8", self._map, self._start, (self._size,)).copy()
        placed = numbers[(numbers % self.slots == np.arange(self.slots)) & (numbers > 0)]
        return next((int(n) for n in np.sort(placed)[::-1] if self._whole(int(n)) is not None), 0)


def _number(slot: bytes) -> int:
    return int.from_bytes(slot[:8], "little")
