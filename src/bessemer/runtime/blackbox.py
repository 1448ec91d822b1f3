"""The reading side of the black box: what a rank was doing, from the file it left behind or is still writing.

    box = read_blackbox(run / "blackbox" / "rank-3")
    box.open_phases()        # [backward_s of step 12, comm_s of step 12]: the last one is where it stopped
    box.unfinished()         # operations that were enqueued and whose end nobody saw
    box.operations[-10:]     # what was handed to the communication library last

The file may be of a process that was killed, of another host, or change while it is read: records that are half
written are left out and counted. Nothing here needs torch.
"""

from __future__ import annotations

import math
import re
import zlib
from bisect import bisect
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import Any

from bessemer.core.errors import BessemerError
from bessemer.runtime import ring

__all__ = ["Blackbox", "Group", "Mark", "Operation", "read_blackbox", "read_blackboxes"]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. `ranks` are global, in the group's own order; `blocks` as in `Recorder.channel`."""

    number: int
    name: str
    ranks: tuple[int, ...]
    backend: str
    blocks: bool


@dataclass(frozen=True)
class Mark:
    """A phase that begins or ends, at `at_s` of the rank's monotonic clock. Places that weren't told are None."""

    number: int
    at_s: float
    phase: str
    begins: bool
    lane: str
    step: int | None
    micro_batch: int | None
    stage: int | None
    layer: int | None
    enclosing: str | None
    depth: int


@dataclass(frozen=True)
class Operation:
    """What a rank handed to the communication library.

    order: its place among the collectives of its group, or among the messages between the same two ranks in the same
    direction, from 1: the same operation has the same order on every rank. wait_s: when the host began to wait for
    it; finish_s: when the host knew it to be over (see `Group.blocks`). Times are of the rank's monotonic clock; the
    enqueue_s of a peer's record of the same operation is when that peer arrived.
    """

    number: int
    group: Group
    operation: str
    order: int
    dtype: str
    item_bytes: int
    taken: int  # elements of the input
    given: int  # and of the output
    peer: int | None  # global rank of a message's other end
    enqueue_s: float
    wait_s: float | None
    finish_s: float | None

    @property
    def size_bytes(self) -> int:
        """The full buffer, as `plan.collectives` counts it."""
        return (self.taken if self.operation == "all_to_all" else max(self.taken, self.given)) * self.item_bytes


@dataclass(frozen=True)
class Blackbox:
    """What a black box holds. Marks and operations are the last ones, in order."""

    path: Path
    rank: int
    world: int
    host: str
    pid: int
    job_hash: str
    groups: dict[int, Group]
    marks: tuple[Mark, ...]
    operations: tuple[Operation, ...]
    torn: int  # records that were half written
    ahead_s: float  # of the wall clock over the monotonic one, when they were last read together

    def wall_s(self, at_s: float) -> float:
        """A time of this rank's monotonic clock as seconds since the epoch."""
        return at_s + self.ahead_s

    def open_phases(self, lane: str = "step") -> list[Mark]:
        """The phases that began and didn't end, outermost first. One that began before the oldest mark that is left
        has the time NaN."""
        stack: list[Mark] = []
        for mark in self._by_lane.get(lane, []):
            del stack[mark.depth - 1 :]
            while len(stack) < mark.depth - 1:
                nearest = len(stack) == mark.depth - 2
                phase = mark.enclosing if nearest and mark.enclosing is not None else "unknown"
                stack.append(replace(mark, phase=phase, at_s=math.nan, depth=len(stack) + 1, enclosing=None))
            if mark.begins:
                stack.append(mark)
        return stack

    def unfinished(self) -> list[Operation]:
        """The operations that were enqueued and whose end the host didn't see, oldest first."""
        return [operation for operation in self.operations if operation.finish_s is None]

    def during(self, operation: Operation, lane: str = "step") -> Mark | None:
        """The mark before an operation, which tells its phase and place; None if it was overwritten."""
        marks = self._by_lane.get(lane, [])
        before = bisect(marks, operation.enqueue_s, key=lambda mark: mark.at_s)
        return marks[before - 1] if before else None

    @cached_property
    def _by_lane(self) -> dict[str, list[Mark]]:
        lanes: dict[str, list[Mark]] = {}
        for mark in self.marks:
            lanes.setdefault(mark.lane, []).append(mark)
        return lanes


def read_blackbox(path: Path) -> Blackbox:
    """BessemerError where `path` can't be read or isn't a black box."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    head = content[: ring.HEAD.size]
    if len(head) < ring.HEAD.size or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
        raise _unreadable(path, "its first bytes are not those of a black box")
    magic, table_bytes, num_marks, num_operations, _ = ring.HEAD.unpack(head)
    marks_at = ring.HEAD_BYTES + table_bytes
    entries = list(ring.lines(content[ring.HEAD_BYTES : marks_at]))
    if magic != ring.MAGIC or not entries:
        raise _unreadable(path, "its table is empty, or it is of another version")
    names = _Names(entries)
    operations_at = marks_at + num_marks * ring.MARK_BYTES
    marks = _slots(content[marks_at:operations_at], ring.MARK_BYTES)
    slots = _slots(content[operations_at : operations_at + num_operations * ring.OPERATION_BYTES], ring.OPERATION_BYTES)
    mark_records, torn_marks = _records(marks, ring.MARK, num_marks)
    operation_records, torn_operations = _records(slots, ring.OPERATION, num_operations)
    own = entries[0]
    clocks = [_clock(raw) for raw in mark_records if ring.MARK.unpack(raw)[4] == ring.CLOCK]
    return Blackbox(
        path=path,
        rank=own["rank"],
        world=own["world"],
        host=own["host"],
        pid=own["pid"],
        job_hash=own["job"],
        groups=names.groups,
        marks=tuple(names.mark(raw) for raw in mark_records if ring.MARK.unpack(raw)[4] != ring.CLOCK),
        operations=tuple(names.operation(raw, slots[_slot(raw, num_operations)]) for raw in operation_records),
        torn=torn_marks + torn_operations,
        ahead_s=clocks[-1] if clocks else own["wall_s"] - own["clock_s"],
    )


def read_blackboxes(folder: Path) -> list[Blackbox]:
    """Those of a run's folder, by rank; files that can't be read are left out, as of ranks that left none."""
    found = []
    for path in folder.iterdir():
        if re.fullmatch(r"rank-\d+", path.name):
            try:
                found.append(read_blackbox(path))
            except BessemerError:
                continue
    return sorted(found, key=lambda box: box.rank)


class _Names:
    """What the numbers in the records stand for."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        named: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in ("phase", "lane", "dtype", "group")}
        for entry in entries[1:]:
            kind = next(iter(entry))
            named[kind][entry[kind]] = entry
        self._phases = {number: entry["name"] for number, entry in named["phase"].items()}
        self._lanes = {number: entry["name"] for number, entry in named["lane"].items()}
        self._dtypes = {number: (entry["name"], entry["bytes"]) for number, entry in named["dtype"].items()}
        self.groups = {
            number: Group(number, entry["name"], ring.unfold(entry["ranks"]), entry["backend"], entry["blocks"])
            for number, entry in named["group"].items()
        }

    def mark(self, raw: bytes) -> Mark:
        number, at_s, step, phase, kind, lane, micro_batch, stage, layer, enclosing, depth = ring.MARK.unpack(raw)
        return Mark(
            number=number,
            at_s=at_s,
            phase=self._phases.get(phase, "unlisted"),
            begins=kind == ring.BEGIN,
            lane=self._lanes.get(lane, "unlisted"),
            step=_known(step),
            micro_batch=_known(micro_batch),
            stage=_known(stage),
            layer=_known(layer),
            enclosing=self._phases.get(enclosing),
            depth=depth,
        )

    def operation(self, raw: bytes, slot: bytes) -> Operation:
        number, enqueue_s, order, taken, given, peer, group, operation, dtype, waits = ring.OPERATION.unpack(raw)
        dtype_name, item_bytes = self._dtypes.get(dtype, ("unlisted", 0))
        return Operation(
            number=number,
            group=self.groups.get(group) or Group(group, "unlisted", (), "unlisted", False),
            operation=ring.OPERATIONS[operation],
            order=order,
            dtype=dtype_name,
            item_bytes=item_bytes,
            taken=taken,
            given=given,
            peer=_known(peer),
            enqueue_s=enqueue_s,
            wait_s=enqueue_s if waits else _ending(slot, ring.WAIT_AT, number),
            finish_s=_ending(slot, ring.FINISH_AT, number),
        )


def _slots(content: bytes, size: int) -> list[bytes]:
    """Those that a file, which may have been cut off, really holds."""
    return [content[at : at + size] for at in range(0, len(content), size)]


def _records(slots: list[bytes], form: Struct, num_slots: int) -> tuple[list[bytes], int]:
    """(the whole records by number, how many slots are neither whole nor empty)."""
    found: list[bytes] = []
    torn = 0
    for index, slot in enumerate(slots):
        raw = _sealed(slot, form)
        if raw is not None and _slot(raw, num_slots) == index:
            found.append(raw)
        elif any(slot):
            torn += 1
    return sorted(found, key=_number), torn


def _sealed(slot: bytes, form: Struct) -> bytes | None:
    raw, check = slot[: form.size], slot[form.size : form.size + 4]
    return raw if zlib.crc32(raw) == int.from_bytes(check, "little") and len(check) == 4 else None


def _number(raw: bytes) -> int:
    return int.from_bytes(raw[:8], "little")


def _slot(raw: bytes, num_slots: int) -> int:
    return _number(raw) % num_slots


def _clock(raw: bytes) -> float:
    fields = ring.PAIR.unpack(raw)
    return float(fields[6] - fields[1])


def _known(value: int) -> int | None:
    return None if value == ring.NONE else int(value)


def _ending(slot: bytes, at: int, number: int) -> float | None:
    """When the host began to wait, or had waited; None if it hasn't."""
    raw = slot[at : at + ring.ENDING.size]
    if len(raw) < ring.ENDING.size:
        return None
    at_s, of = ring.ENDING.unpack(raw)
    return float(at_s) if of == number else None


def _unreadable(path: Path, why: str) -> BessemerError:
    return BessemerError(f"{path} can't be read as a black box: {why}", code="blackbox-unreadable")
