"""Reads a black box while its rank writes it: only what is new, so that it may be asked every second.

    tail = BoxTail(run / "blackbox" / "rank-3")
    marks, operations = tail.poll()

`runtime.blackbox` reads the whole file, which takes some 30 ms; a second's news of a rank takes about one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from bessemer.runtime import ring

__all__ = ["BoxTail", "TailMark", "TailOperation"]

STEP_LANE = "step"


@dataclass(frozen=True)
class TailMark:
    """A phase of the step's thread that begins or ends, at seconds of the rank's monotonic clock. step: -1 unknown.
    depth: 1 for an outermost phase."""

    at_s: float
    step: int
    phase: str
    begins: bool
    depth: int


@dataclass(frozen=True)
class TailOperation:
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
    """One black box file, from wherever its writer is when it is first polled. A file that takes its place, as of a
    rank that was started again, is read from its begin. One that was begun before `since_t` (unix seconds) is of an
    earlier attempt, and as good as none."""

    def __init__(self, path: Path, since_t: float = 0.0) -> None:
        self.path, self._since_t = path, since_t
        self.own: dict[str, Any] = {}
        """Rank, world, host, pid as the file says; empty while there is none."""
        self.ahead_s = 0.0
        """Of the wall clock over the rank's monotonic one."""
        self.restarts = 0
        """How many files have taken the place of the first."""
        self._map: mmap.mmap | None = None
        self._inode = -1

    def poll(self) -> tuple[list[TailMark], list[TailOperation]]:
        """What was written since the last poll, in order. Nothing where there is no file."""
        self._open_newest()
        if self._map is None:
            return [], []
        marks = [mark for raw in self._marks.news() if (mark := self._mark(raw)) is not None]
        for raw in self._operations.news():
            number, enqueue_s, order, _, _, peer, group, operation, _, waits = ring.OPERATION.unpack(raw)
            self._pending[number] = (enqueue_s, order, peer, group, operation, waits)
        return marks, list(self._finished())

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    # ---- inside

    def _open_newest(self) -> None:
        try:
            inode = self.path.stat().st_ino
        except OSError:
            return
        if inode == self._inode:
            return
        with contextlib.suppress(OSError, ValueError), open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, table_bytes, num_marks, num_operations, _ = ring.HEAD.unpack(mapped[: ring.HEAD.size])
            entries = list(ring.lines(mapped[ring.HEAD_BYTES : ring.HEAD_BYTES + table_bytes]))
            if magic != ring.MAGIC or not entries or entries[0]["wall_s"] < self._since_t:
                mapped.close()
                return
            self.close()
            self.restarts += self._inode >= 0
            self._map, self._inode, self.own = mapped, os.fstat(file.fileno()).st_ino, entries[0]
            self.ahead_s = self.own["wall_s"] - self.own["clock_s"]
            self._table_bytes = table_bytes
            marks_at = ring.HEAD_BYTES + table_bytes
            operations_at = marks_at + num_marks * ring.MARK_BYTES
            self._marks = _RingTail(mapped, ring.MARK, ring.MARK_BYTES, marks_at, num_marks)
            self._operations = _RingTail(mapped, ring.OPERATION, ring.OPERATION_BYTES, operations_at, num_operations)
            self._pending: dict[int, tuple[Any, ...]] = {}
            self._names: dict[tuple[str, int], dict[str, Any]] = {}

    def _named(self, kind: str, number: int) -> dict[str, Any]:
        """The table's entry; it's read again where a number is new. Empty for what found no place in it."""
        if (kind, number) not in self._names:
            assert self._map is not None
            for entry in list(ring.lines(self._map[ring.HEAD_BYTES : ring.HEAD_BYTES + self._table_bytes]))[1:]:
                found = next(iter(entry))
                if found == "group":
                    entry["key"] = entry["name"], ring.unfold(entry["ranks"])
                self._names.setdefault((found, entry[found]), entry)
            self._names.setdefault((kind, number), {})
        return self._names[kind, number]

    def _mark(self, raw: bytes) -> TailMark | None:
        _, at_s, step, phase, kind, lane, *_ = ring.MARK.unpack(raw)
        if kind == ring.CLOCK:
            self.ahead_s = ring.PAIR.unpack(raw)[6] - at_s
            return None
        if self._named("lane", lane).get("name") != STEP_LANE:
            return None
        name = self._named("phase", phase).get("name", "unlisted")
        return TailMark(at_s, step, name, kind == ring.BEGIN, ring.MARK.unpack(raw)[10])

    def _finished(self) -> Iterator[TailOperation]:
        """Those whose end has been written by now; one whose slot another has taken is forgotten."""
        for number, (enqueue_s, order, peer, group, operation, waits) in list(self._pending.items()):
            wait_s = enqueue_s if waits else self._ending(number, ring.WAIT_AT)
            finish_s = self._ending(number, ring.FINISH_AT)
            if finish_s is None or wait_s is None:
                if self._operations.next - number >= self._operations.slots:
                    del self._pending[number]
                continue
            del self._pending[number]
            entry = self._named("group", group)
            if entry.get("blocks"):
                name = ring.OPERATIONS[operation]
                yield TailOperation(entry["key"], name, order, peer, enqueue_s, wait_s, finish_s)

    def _ending(self, number: int, at: int) -> float | None:
        slot = self._operations.slot(number)[at : at + ring.ENDING.size]
        at_s, of = ring.ENDING.unpack(slot)
        return float(at_s) if of == number else None


class _RingTail:
    """The records of one ring from the next number on."""

    def __init__(self, mapped: mmap.mmap, form: Struct, size: int, start: int, slots: int) -> None:
        self._map, self._form, self._size, self._start, self.slots = mapped, form, size, start, slots
        self.next = max(1, self._newest() - slots // 2)

    def slot(self, number: int) -> bytes:
        at = self._start + number % self.slots * self._size
        return self._map[at : at + self._size]

    def news(self) -> Iterator[bytes]:
        """The fields of each new record. Where the writer has gone round, what it overwrote is skipped."""
        while True:
            raw = self._whole(self.next)
            if raw is None:
                newest = _number(self.slot(self.next))
                torn = newest == self.next and self._whole(self.next + 1) is not None
                if torn:
                    self.next += 1
                elif newest > self.next:
                    self.next = max(self.next + 1, self._newest() - self.slots // 2)
                else:
                    return
                continue
            self.next += 1
            yield raw

    def _whole(self, number: int) -> bytes | None:
        """The record of that number, if it is there and isn't half written."""
        slot = self.slot(number)
        raw = slot[: self._form.size]
        sealed = zlib.crc32(raw) == int.from_bytes(slot[self._form.size : self._form.size + 4], "little")
        return raw if sealed and _number(raw) == number else None

    def _newest(self) -> int:
        """The highest number of a whole record."""
        numbers = (_number(self.slot(index)) for index in range(self.slots))
        return max((n for n in numbers if self._whole(n) is not None), default=0)


def _number(slot: bytes) -> int:
    return int.from_bytes(slot[:8], "little")
