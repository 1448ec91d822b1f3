"""The black boxes that a fleet of virtual ranks would leave when one of them doesn't come to a collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bessemer.inspect.flight_records import Placement
from bessemer.runtime.blackbox import Blackbox, Group, Mark, Operation

__all__ = ["boxes_of_hang"]

TENSOR, REPLICA, PIPELINE = range(3)
MICRO_BATCH = 3
"""Of the step, in which the rank stays away."""


@dataclass(frozen=True)
class _Step:
    """What all boxes of one hang have in common. t: unix seconds of the step's begin, which is 0 of all clocks."""

    step: int
    t: float
    groups: Mapping[int, Mapping[int, Group]]  # of each rank


def boxes_of_hang(
    placement: Placement, groups: Mapping[str, tuple[tuple[int, ...], ...]], guilty: int, step: int, t: float
) -> list[Blackbox]:
    """One box a rank, while `guilty` is in a forward pass of `step` and everybody else waits.

    Its peers in tensor parallelism wait for it at an all-reduce, later stages of its copy for the stage before at a
    message, all other copies and the earlier stages at the sum over copies. The step began at `t` (unix seconds).
    """
    of_rank: dict[int, dict[int, Group]] = {rank: {} for rank in placement.ranks.tolist()}
    for number, name in ((TENSOR, "tensor"), (REPLICA, "replica")):
        for ranks in groups.get(name, ()):
            group = Group(number, name, ranks, "nccl", True)
            for rank in ranks:
                of_rank[rank][number] = group
    stages, copies = placement.stage.tolist(), placement.copy.tolist()
    inner = stages.count(0) // (copies[-1] + 1)
    told = _Step(step, t, of_rank)
    boxes = []
    for rank, host in zip(placement.ranks.tolist(), placement.hosts, strict=True):
        same_copy = copies[rank] == copies[guilty]
        if rank == guilty:
            box = _box(told, rank, host, "forward_s", None)
        elif same_copy and stages[rank] == stages[guilty]:
            box = _box(told, rank, host, "forward_s", _collective(told, rank, TENSOR))
        elif same_copy and stages[rank] > stages[guilty]:
            box = _box(told, rank, host, "comm_s", _message(rank, rank - inner))
        else:
            box = _box(told, rank, host, "comm_s", _collective(told, rank, REPLICA))
        boxes.append(box)
    return boxes


def _collective(told: _Step, rank: int, group: int) -> Operation | None:
    """That of this step at which the rank waits; the order is the step's."""
    found = told.groups[rank].get(group)
    if found is None:
        return None
    at_s = 1.0 if group == TENSOR else 1.5  # those that can end the step wait later
    return Operation(told.step, found, "all_reduce", told.step, "bfloat16", 2, 1 << 20, 1 << 20, None, at_s, at_s, None)


def _message(rank: int, source: int) -> Operation:
    pair = Group(PIPELINE, "pipeline", (source, rank), "nccl", True)
    return Operation(1, pair, "recv", MICRO_BATCH + 1, "bfloat16", 2, 1 << 20, 1 << 20, source, 1.1, 1.1, None)


def _box(told: _Step, rank: int, host: str, phase: str, waits: Operation | None) -> Blackbox:
    mark = Mark(1, 0.5, phase, True, "step", told.step, MICRO_BATCH, None, None, None, 1)
    groups = told.groups[rank]
    before = tuple(
        Operation(1, group, "all_reduce", told.step - 1, "bfloat16", 2, 1 << 20, 1 << 20, None, 0.1, 0.1, 0.2)
        for group in groups.values()
    )
    return Blackbox(
        path=Path(f"blackbox/rank-{rank}"),
        rank=rank,
        world=len(told.groups),
        host=host,
        pid=1000 + rank,
        job_hash="simulated",
        groups=dict(groups),
        marks=(mark,),
        operations=(*before, *([] if waits is None else [waits])),
        torn=0,
        ahead_s=told.t,
    )
