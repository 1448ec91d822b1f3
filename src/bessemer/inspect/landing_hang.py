"""Who held up whom, from the black boxes: the collective at which ranks wait, and the rank that didn't come to it.

Ranks that wait are victims. A rank that others wait for, and that waits for nothing itself, is the culprit. Operations
of a group are numbered alike on all its ranks, so a rank hasn't arrived where its last number is lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.inspect.landing_remains import clock_text
from bessemer.runtime.blackbox import Blackbox, Operation

__all__ = ["Hang", "doing_text", "find_hang"]

LATE_S = 30.0
"""A rank that comes so long after all others held them up. Clocks of hosts differ by far less."""

_Place = tuple[int, int]
"""A collective as all its ranks know it: the group, as `_Groups` counts them, and its order there."""
LINES = 8
"""Of evidence about ranks that wait: a fleet has thousands, which say the same."""
_Way = tuple[str, int] | None
"""Of messages: whether they are sent or received, and the other end. None for collectives."""


@dataclass(frozen=True)
class Hang:
    """kind: "absent" (`ranks` didn't arrive), "order" (ranks wait for each other in different operations; `ranks` wait
    elsewhere than most), "differs" (the same operation, of different kinds or sizes; `ranks` do otherwise than most) or
    "stuck" (all arrived). since_t: unix seconds since when the first of the waiting ranks has waited. at: the operation
    at which the first of absent `ranks` was waited for first, in words."""

    kind: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since_t: float
    evidence: tuple[str, ...]
    at: str = ""


def find_hang(boxes: Sequence[Blackbox]) -> Hang | None:
    """None where no rank waits for another. Ranks without a black box can't be told from absent ones, so that they
    count as not arrived only where the boxes name them and nobody else explains it."""
    by_rank = {box.rank: box for box in boxes}
    waits = {box.rank: found for box in boxes if (found := _waits(box)) is not None}
    if not waits:
        return None
    since_t = min(by_rank[rank].wall_s(_since_s(operation)) for rank, operation in waits.items())
    groups = _Groups()
    odd = _odd(waits, boxes, groups)
    if odd is not None:  # whatever else waits, it is because of that
        first = sorted(waits, key=lambda rank: (rank not in odd, rank))[:LINES]
        lines = tuple(_waiting_text(by_rank[r], waits[r], []) for r in first)
        return Hang("differs", odd, tuple(sorted(waits)), since_t, lines)
    progress = _Progress(by_rank, groups)
    missing = {rank: progress.missing(rank, operation) for rank, operation in waits.items()}
    shared = {id(of): of for of in missing.values()}  # those that wait for the same have the same list
    absent = sorted({who for of in shared.values() for who in of if who not in waits})
    if absent:
        held = sorted(
            (by_rank[r].wall_s(_since_s(op)), len(op.group.ranks), r) for r, op in waits.items() if missing[r]
        )
        lines = tuple(_waiting_text(by_rank[r], waits[r], missing[r]) for _, _, r in held[:LINES])
        doing = [doing_text(by_rank.get(rank), rank) for rank in absent]
        at = next(_what(waits[r]) for _, _, r in held if absent[0] in missing[r])
        return Hang("absent", tuple(absent), tuple(sorted(waits)), since_t, (*doing, *lines), at)
    lines = tuple(_waiting_text(by_rank[r], waits[r], missing[r]) for r in sorted(waits)[:LINES])
    if any(missing.values()):
        return Hang("order", _elsewhere(waits, groups), tuple(sorted(waits)), since_t, lines)
    late = _late(waits, by_rank)
    if late is not None:
        rank, late_s = late
        came = f"rank {rank} came to {_what(waits[rank])} only {late_s:.0f} s after the others"
        return Hang("absent", (rank,), tuple(sorted(set(waits) - {rank})), since_t, (came, *lines))
    return Hang("stuck", (), tuple(sorted(waits)), since_t, lines)


def _waits(box: Blackbox) -> Operation | None:
    """The operation at which the rank's host waits."""
    waited = [operation for operation in box.unfinished() if operation.wait_s is not None]
    return waited[-1] if waited else None


def _since_s(operation: Operation) -> float:
    return operation.enqueue_s if operation.wait_s is None else operation.wait_s


class _Groups:
    """Groups, of which each box has its own, by number: those of one name and the same ranks have the same. A group may
    be of thousands of ranks, and is named in every operation: its ranks are sorted and compared once a box."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, tuple[int, ...]], int] = {}
        self._known: dict[int, int] = {}  # the same by the identity of a group, which its box keeps alive

    def of(self, operation: Operation) -> int:
        group = operation.group
        known = self._known.get(id(group))
        if known is None:
            name = group.name, tuple(sorted(group.ranks))
            known = self._known[id(group)] = self._names.setdefault(name, len(self._names))
        return known

    def place(self, operation: Operation) -> _Place:
        return self.of(operation), operation.order


class _Progress:
    """How far each rank has come in each group. Read from the boxes once, since every rank of a fleet may ask."""

    def __init__(self, boxes: dict[int, Blackbox], groups: _Groups) -> None:
        self._boxes, self._groups = boxes, groups
        self._last: dict[tuple[int, _Way, int], tuple[int, int]] = {}
        self._missing: dict[tuple[int, int], list[int]] = {}
        for rank, box in boxes.items():
            for o in box.operations:
                key = groups.of(o), None if o.peer is None else (o.operation, o.peer), rank
                # of a group that was made anew, whose order starts again, only the newest counts
                self._last[key] = max(self._last.get(key, (0, 0)), (o.group.number, o.order))

    def missing(self, rank: int, operation: Operation) -> list[int]:
        """The ranks of an operation at which `rank` waits that haven't come to it."""
        group = self._groups.of(operation)
        if operation.peer is not None:
            other_end = {"send": "recv", "recv": "send"}[operation.operation]
            come = self._come(group, (other_end, rank), operation.peer)
            return [operation.peer] if come < operation.order else []
        key = group, operation.order
        if key not in self._missing:
            who = operation.group.ranks
            self._missing[key] = [r for r in who if self._come(group, None, r) < operation.order]
        return self._missing[key]

    def _come(self, group: int, way: _Way, who: int) -> float:
        """The last order of `who` in the group, or in that direction; 0: not at all."""
        last, box = self._last.get((group, way, who)), self._boxes.get(who)
        if last is None and box is not None and box.operations and box.operations[0].number > 1:
            return math.inf  # its ring has lost them: nothing is known
        return 0 if last is None else last[1]


def _late(waits: dict[int, Operation], by_rank: dict[int, Blackbox]) -> tuple[int, float] | None:
    """(rank, seconds) of the one that came to the operation long after all others, so that they gave up."""
    came = sorted((by_rank[rank].wall_s(operation.enqueue_s), rank) for rank, operation in waits.items())
    if len(came) < 2 or came[-1][0] - came[-2][0] < LATE_S:
        return None
    return came[-1][1], came[-1][0] - came[-2][0]


def _odd(waits: dict[int, Operation], boxes: Sequence[Blackbox], groups: _Groups) -> tuple[int, ...] | None:
    """Whether ranks have come to an operation at which one waits for different things: those that did otherwise than
    most, none where there is no strict majority; None where all did alike."""
    places: dict[_Place, dict[tuple[str, int, str], list[int]]] = {
        groups.place(o): {} for o in waits.values() if o.peer is None
    }  # fmt: skip
    for box in boxes:
        latest: dict[_Place, Operation] = {}
        for o in box.operations:
            place = groups.place(o)
            if o.peer is not None or place not in places:
                continue
            if place not in latest or latest[place].group.number <= o.group.number:
                latest[place] = o  # of a group that was made anew the orders come again
        for place, o in latest.items():
            size = 0 if o.operation == "all_to_all" else o.size_bytes  # there each rank has its own
            places[place].setdefault((o.operation, size, o.dtype), []).append(box.rank)
    for kinds in places.values():
        if len(kinds) > 1:
            most = max(kinds.values(), key=len)
            known = sum(map(len, kinds.values()))
            return tuple(r for of in kinds.values() if of is not most for r in of) if 2 * len(most) > known else ()
    return None


def _elsewhere(waits: dict[int, Operation], groups: _Groups) -> tuple[int, ...]:
    """Those that belong to the operation at which most wait, and wait at another; none without a strict majority."""
    at: dict[_Place, list[int]] = {}
    for rank, operation in sorted(waits.items()):
        if operation.peer is None:
            at.setdefault(groups.place(operation), []).append(rank)
    most = max(at.values(), key=len, default=[])
    ranks = set(waits[most[0]].group.ranks) if most else set()
    of_group, there = [r for r in sorted(waits) if r in ranks], set(most)
    return tuple(r for r in of_group if r not in there) if 2 * len(most) > len(of_group) else ()


def _waiting_text(box: Blackbox, operation: Operation, missing: list[int]) -> str:
    what = f"{_what(operation)}, {operation.size_bytes} bytes"
    lacks = f"; not arrived: {', '.join(map(str, missing))}" if missing else "; all arrived"
    since = clock_text(box.wall_s(_since_s(operation)))
    return f"blackbox/rank-{box.rank}: waits since {since} in {what}{lacks}"


def _what(operation: Operation) -> str:
    group = f"group {operation.group.name!r} (ranks {', '.join(map(str, operation.group.ranks[:16]))})"
    return f"{operation.operation} number {operation.order} of {group}"


def doing_text(box: Blackbox | None, rank: int) -> str:
    """What a rank was doing last, as its black box says."""
    if box is None:
        return f"rank {rank} left no black box of this attempt"
    phases = box.open_phases()
    doing = " > ".join(mark.phase for mark in phases) or "no phase open"
    places = {} if not phases else {
        "step": phases[-1].step, "micro-batch": phases[-1].micro_batch, "layer": phases[-1].layer
    }  # fmt: skip
    at = "".join(f", {name} {value}" for name, value in places.items() if value is not None)
    last = box.operations[-1] if box.operations else None
    came = f"; its last operation: {last.operation} number {last.order} of {last.group.name!r}" if last else ""
    return f"blackbox/rank-{rank} on {box.host}: doing {doing}{at}{came}"
