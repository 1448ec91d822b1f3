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

__all__ = ["Hang", "find_hang"]

LATE_S = 30.0
"""A rank that comes so long after all others held them up. Clocks of hosts differ by far less."""


@dataclass(frozen=True)
class Hang:
    """kind: "absent" (`ranks` didn't arrive), "order" (ranks wait for each other in different operations), "differs"
    (the same operation with different kinds or sizes) or "stuck" (all arrived). since_t: unix seconds since when the
    first of the waiting ranks has waited. The operation is that at which most wait."""

    kind: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since_t: float
    evidence: tuple[str, ...]


def find_hang(boxes: Sequence[Blackbox]) -> Hang | None:
    """None where no rank waits for another. Ranks without a black box can't be told from absent ones, so that they
    count as not arrived only where the boxes name them and nobody else explains it."""
    by_rank = {box.rank: box for box in boxes}
    waits = {box.rank: found for box in boxes if (found := _waits(box)) is not None}
    if not waits:
        return None
    since_t = min(by_rank[rank].wall_s(_since_s(operation)) for rank, operation in waits.items())
    missing = {rank: _missing(rank, operation, by_rank) for rank, operation in waits.items()}
    absent = sorted({who for of in missing.values() for who in of if who not in waits})
    if absent:
        lines = [_waiting_text(by_rank[r], op, missing[r]) for r, op in sorted(waits.items()) if missing[r]]
        doing = [_doing_text(by_rank.get(rank), rank) for rank in absent]
        return Hang("absent", tuple(absent), tuple(sorted(waits)), since_t, (*doing, *lines[:8]))
    lines = [_waiting_text(by_rank[r], op, missing[r]) for r, op in sorted(waits.items())]
    if any(missing.values()):
        return Hang("order", tuple(sorted(waits)), tuple(sorted(waits)), since_t, tuple(lines[:8]))
    late = _late(waits, by_rank)
    if late is not None:
        rank, late_s = late
        came = f"rank {rank} came to {_what(waits[rank])} only {late_s:.0f} s after the others"
        return Hang("absent", (rank,), tuple(sorted(set(waits) - {rank})), since_t, (came, *lines[:8]))
    return Hang("differs" if _differs(waits) else "stuck", (), tuple(sorted(waits)), since_t, tuple(lines[:8]))


def _waits(box: Blackbox) -> Operation | None:
    """The operation at which the rank's host waits."""
    waited = [operation for operation in box.unfinished() if operation.wait_s is not None]
    return waited[-1] if waited else None


def _since_s(operation: Operation) -> float:
    return operation.enqueue_s if operation.wait_s is None else operation.wait_s


def _missing(rank: int, operation: Operation, by_rank: dict[int, Blackbox]) -> list[int]:
    """The ranks of an operation that haven't come to it."""
    others = [operation.peer] if operation.peer is not None else [r for r in operation.group.ranks if r != rank]
    return [who for who in others if _last_order(by_rank.get(who), operation, rank) < operation.order]


def _last_order(box: Blackbox | None, operation: Operation, by: int) -> float:
    """How far a rank has come in the group (or, for a message, in that direction to `by`); 0: not at all."""
    if box is None:
        return 0
    name, ranks = operation.group.name, sorted(operation.group.ranks)
    other_end = {"send": "recv", "recv": "send"}.get(operation.operation)
    same = [
        o for o in box.operations
        if o.group.name == name and sorted(o.group.ranks) == ranks
        and ((o.peer is None) if operation.peer is None else (o.operation == other_end and o.peer == by))
    ]  # fmt: skip
    newest = max((o.group.number for o in same), default=0)
    orders = [o.order for o in same if o.group.number == newest]
    if not orders and box.operations and box.operations[0].number > 1:
        return math.inf  # its ring has lost them: nothing is known
    return max(orders, default=0)


def _late(waits: dict[int, Operation], by_rank: dict[int, Blackbox]) -> tuple[int, float] | None:
    """(rank, seconds) of the one that came to the operation long after all others, so that they gave up."""
    came = sorted((by_rank[rank].wall_s(operation.enqueue_s), rank) for rank, operation in waits.items())
    if len(came) < 2 or came[-1][0] - came[-2][0] < LATE_S:
        return None
    return came[-1][1], came[-1][0] - came[-2][0]


def _differs(waits: dict[int, Operation]) -> bool:
    """Whether ranks wait in the same place of the same group for different things."""
    seen: dict[tuple[str, tuple[int, ...], int], set[tuple[str, int, str]]] = {}
    for operation in waits.values():
        if operation.peer is None:
            key = (operation.group.name, tuple(sorted(operation.group.ranks)), operation.order)
            seen.setdefault(key, set()).add((operation.operation, operation.size_bytes, operation.dtype))
    return any(len(kinds) > 1 for kinds in seen.values())


def _waiting_text(box: Blackbox, operation: Operation, missing: list[int]) -> str:
    what = f"{_what(operation)}, {operation.size_bytes} bytes"
    lacks = f"; not arrived: {', '.join(map(str, missing))}" if missing else "; all arrived"
    since = clock_text(box.wall_s(_since_s(operation)))
    return f"blackbox/rank-{box.rank}: waits since {since} in {what}{lacks}"


def _what(operation: Operation) -> str:
    group = f"group {operation.group.name!r} (ranks {', '.join(map(str, operation.group.ranks[:16]))})"
    return f"{operation.operation} number {operation.order} of {group}"


def _doing_text(box: Blackbox | None, rank: int) -> str:
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
