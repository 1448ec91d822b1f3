"""Schedules made ready for a replay: an order in which every pass comes after what it needs, and the walk along it.

DualPipe runs a forward and a backward of its two directions as one block (arXiv 2412.19437, figure 5: the kernels of
one hide the exchanges of the other): it starts when both inputs are there, and both results are there at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bessemer.core.schedules import Action, rank_of_stage, schedule, schedule_actions

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CODE", "KINDS", "Shape", "compiled", "num_stages", "walk"]

KINDS = ("F", "B", "I", "W")
"""Passes by their code: forward, whole backward, gradient of the input, gradient of the weights."""
CODE = {kind: code for code, kind in enumerate(KINDS)}
JOINED = ("dualpipe", "dualpipev")


def num_stages(name: str, pp: int, virtual_stages: int = 1) -> int:
    """Stages of a schedule: what `StageTimes` must give a figure for. ConfigError for an unknown schedule."""
    kind = schedule(name)
    if kind.shape == "two-way":
        return pp
    return pp * (virtual_stages if kind.chunks is None else kind.chunks)


@dataclass(frozen=True)
class Shape:
    """A schedule in an order that respects every dependency, whatever the durations. Lists are for the walk."""

    name: str
    ranks: int
    stages: int
    rank: NDArray[np.int64]
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    micro: NDArray[np.int64]
    needs: NDArray[np.int64]
    channel: NDArray[np.int64]  # of the message that the pass sends: source * ranks + target; -1: none
    boundary: NDArray[np.int64]  # the message passes between stages `boundary` and `boundary + 1`
    joint: NDArray[np.int64]  # forwards that make one block with the I and W which follow them
    walk: list[tuple[int, int, int, int]]  # rank, needs, what its block needs beside (or -1), channel (or -1)


@lru_cache(maxsize=32)
def compiled(name: str, pp: int, num_micro: int, virtual_stages: int) -> Shape:
    """The schedule in such an order; kept, since a search replays few shapes with many times. ConfigError as
    `schedule_actions`."""
    ranks = schedule_actions(name, pp, num_micro, virtual_stages)
    lists = [[action for action in actions if action.kind in CODE] for actions in ranks]
    stages = num_stages(name, pp, virtual_stages)
    order, needs, joint = _ordered(lists, stages, num_micro, joined=name in JOINED)
    kind = schedule(name)
    count = len(order)
    rank = np.fromiter((r for r, _ in order), np.int64, count)
    code = np.fromiter((CODE[a.kind] for _, a in order), np.int64, count)
    stage = np.fromiter((a.stage for _, a in order), np.int64, count)
    micro = np.fromiter((a.micro for _, a in order), np.int64, count)
    way = np.where(code == CODE["F"], 1, np.where(code == CODE["W"], 0, -1))
    goal = stage + way
    sends = (way != 0) & (goal >= 0) & (goal < stages)
    target = np.fromiter(
        (
            rank_of_stage(kind, pp, int(g), int(m), num_micro) if s else -1
            for g, m, s in zip(goal, micro, sends, strict=True)
        ),
        np.int64,
        count,
    )
    channel = np.where(sends & (target != rank), rank * pp + target, -1)
    boundary = np.minimum(stage, goal)
    after, blocks = np.array(needs, np.int64), np.array(joint, np.int64)
    others = np.where((after >= 0) & (rank[after] != rank), after, -1)  # a rank's own results are there in its order
    beside = np.full(count, -1)
    beside[blocks] = others[blocks + 1]
    walk = list(zip(rank.tolist(), others.tolist(), beside.tolist(), channel.tolist(), strict=True))
    return Shape(name, pp, stages, rank, code, stage, micro, after, channel, boundary, blocks, walk)


def _ordered(
    lists: list[list[Action]], stages: int, num_micro: int, *, joined: bool
) -> tuple[list[tuple[int, Action]], list[int], list[int]]:
    """(rank, action) in an order in which each comes after what it needs, the index of what that is (-1: none), and
    the indices of the forwards that begin a block (its I and W follow at once).

    Each pass must come once, and after its own forward (W: after its I); RuntimeError where the lists would hang.
    """
    size = stages * num_micro
    position = [-1] * (3 * size)  # of F, of B or I, of W
    order: list[tuple[int, Action]] = []
    needs: list[int] = []
    joint: list[int] = []
    waits: dict[int, int] = {}  # slot -> the rank that stands before it
    at = [0] * len(lists)
    ready = list(range(len(lists)))[::-1]
    while ready:
        rank = ready.pop()
        actions = lists[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]
            slot, need, own = _slots(action, stages, num_micro, size)
            block = joined and _is_block(actions[at[rank] : at[rank] + 3])
            both = (need, _slots(actions[at[rank] + 1], stages, num_micro, size)[1]) if block else (need,)
            missing = [n for n in both if n >= 0 and position[n] < 0]
            if missing:
                waits[missing[0]] = rank
                break
            if position[slot] >= 0 or (own >= 0 and position[own] < 0):
                raise RuntimeError(f"rank {rank} runs {action} twice or before its forward")
            if block:
                joint.append(len(order))
            position[slot] = len(order)
            order.append((rank, action))
            needs.append(position[need] if need >= 0 else -1)
            at[rank] += 1
            if slot in waits:
                ready.append(waits.pop(slot))
    backwards = size + sum(action.kind == "I" for _, action in order)
    if len(order) != size + backwards or any(i < len(a) for i, a in zip(at, lists, strict=True)):
        raise RuntimeError(f"the schedule hangs or leaves passes out: {len(order)} of {sum(map(len, lists))} can run")
    return order, needs, joint


def _is_block(actions: list[Action]) -> bool:
    """A forward, then the whole backward of another stage or direction."""
    if [a.kind for a in actions] != ["F", "I", "W"]:
        return False
    forward, inputs, weights = actions
    same_half = forward.stage == inputs.stage
    return not same_half and (inputs.stage, inputs.micro) == (weights.stage, weights.micro)


def _slots(action: Action, stages: int, num_micro: int, size: int) -> tuple[int, int, int]:
    """Where a pass, the pass whose result it waits for, and the one that its own rank must have run are kept."""
    here = action.stage * num_micro + action.micro
    if action.kind == "F":
        return here, here - num_micro if action.stage > 0 else -1, -1
    if action.kind == "W":
        return 2 * size + here, size + here, -1
    last = action.stage == stages - 1
    return size + here, here if last else size + here + num_micro, here


def walk(
    shape: Shape, durations: list[float], hops: list[float], blocking: bool, free: list[float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Start and end of each pass, when its result is where it is needed, and when each rank is free again."""
    free = list(free)
    starts: list[float] = []
    ends: list[float] = []
    there: list[float] = []
    line = [0.0] * (shape.ranks * shape.ranks)  # when each channel is free
    lags = _lags(shape, durations, blocking)
    for (rank, need, beside, channel), duration, hop, lag in zip(shape.walk, durations, hops, lags, strict=True):
        start = free[rank]
        if need >= 0 and there[need] > start:
            start = there[need]
        if beside >= 0 and there[beside] > start:
            start = there[beside]
        end = start + duration
        starts.append(start)
        ends.append(end)
        if channel < 0:
            there.append(end + lag)
            free[rank] = end
        elif blocking:
            there.append(end + hop)
            free[rank] = end + hop
        else:
            free[rank] = end
            out = end + lag
            sent = (line[channel] if line[channel] > out else out) + hop
            line[channel] = sent
            there.append(sent)
    return starts, ends, there, free


def _lags(shape: Shape, durations: list[float], blocking: bool) -> list[float]:
    """How long after its own end a pass gives its result away: the rest of its block. A blocking send breaks blocks."""
    lag = np.zeros(len(durations))
    if len(shape.joint) and not blocking:
        duration = np.array(durations)
        lag[shape.joint] = duration[shape.joint + 1] + duration[shape.joint + 2]
        lag[shape.joint + 1] = duration[shape.joint + 2]
    return lag.tolist()
