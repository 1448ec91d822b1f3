"""An event by event replay of a pipeline's real schedule: when each pass and transfer starts and ends.

The lists of `bessemer.core.schedules` fix the order on every rank, so only the times are open: a pass starts when its
rank is free and its input has come. The order in which that can be worked out doesn't depend on durations; it is found
once for a schedule's shape and kept, and a replay is then one walk along it. `bessemer.plan.idle` says where the ranks
wait, `bessemer.plan.timeline` draws.

DualPipe runs a forward and a backward of its two directions as one block (arXiv 2412.19437, figure 5: the kernels of
one hide the exchanges of the other): it starts when both inputs are there, and both results are there at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bessemer.core.schedules import Action, rank_of_stage, schedule, schedule_actions

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KINDS", "MemoryCurve", "Replay", "StageTimes", "Transfers", "num_stages", "replay", "settled_step_s"]

KINDS = ("F", "B", "I", "W")
"""Passes by their code in `Replay.kind`: forward, whole backward, gradient of the input, gradient of the weights."""
_CODE = {kind: code for code, kind in enumerate(KINDS)}
_JOINED = ("dualpipe", "dualpipev")
PerRank = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What one micro-batch costs on each stage; a float stands for the same on all.

    forward_s, input_s, weight_s: seconds of F, of the gradient of the input and of the weights (B takes both).
    p2p_s: seconds of a message between stages s and s + 1, [num_stages - 1]. Messages from one rank to another follow
    each other. blocking_p2p: the sender computes nothing while its message leaves; else transfers run beside.
    dp_s, optimizer_s: of each rank, after its last pass: exposed data-parallel exchange, then, when all ranks are
    there (they share the gradient norm), the update.
    activation_bytes: held from the start of F to the end of B or W; kept_bytes: of those, what stays between I and W
    (None: all). static_bytes: of each rank, always there.
    """

    forward_s: PerRank
    input_s: PerRank
    weight_s: PerRank
    p2p_s: PerRank = 0.0
    blocking_p2p: bool = False
    dp_s: PerRank = 0.0
    optimizer_s: PerRank = 0.0
    activation_bytes: PerRank = 0.0
    kept_bytes: PerRank | None = None
    static_bytes: PerRank = 0.0


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of a rank over time: `bytes[i]` from `time_s[i]` to `time_s[i + 1]`."""

    time_s: NDArray[np.float64]
    bytes: NDArray[np.float64]

    @property
    def peak_bytes(self) -> float:
        return float(self.bytes.max())

    @property
    def peak_at_s(self) -> float:
        """When the peak is first reached."""
        return float(self.time_s[int(self.bytes.argmax())])


@dataclass(frozen=True)
class Transfers:
    """Messages between ranks, arrays [T]. `item` is the pass (index into `Replay`) that made what is sent."""

    item: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """A step, pass by pass: arrays [N] in an order in which each comes after what it needs.

    `kind`: index into `KINDS`; `needs`: the pass whose result it waits for (-1: none; of a block, the later of both);
    `arrived_s`: when that was there. `pipeline_s`: when all ranks are free; `step_s`: with exchange and update.
    """

    name: str
    ranks: int
    rank: NDArray[np.int64]
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    micro: NDArray[np.int64]
    needs: NDArray[np.int64]
    arrived_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    transfers: Transfers
    blocking_p2p: bool
    dp_s: NDArray[np.float64]
    optimizer_s: NDArray[np.float64]
    activation_bytes: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    static_bytes: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def num_events(self) -> int:
        """Passes and transfers (a send and its receive count once)."""
        return len(self) + len(self.transfers.item)

    @cached_property
    def by_rank(self) -> list[NDArray[np.int64]]:
        """Of each rank, the indices of its passes in the order in which it runs them."""
        order = np.argsort(self.rank, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.rank, minlength=self.ranks))[:-1])

    @cached_property
    def free_s(self) -> NDArray[np.float64]:
        """[ranks]: when each rank has done its last pass, and sent it off where sending blocks."""
        return _last(self.rank, self.end_s + self.sending_s, self.ranks)

    @cached_property
    def sending_s(self) -> NDArray[np.float64]:
        """[N]: seconds that the rank stands still after the pass to send its result; zero without blocking."""
        out = np.zeros(len(self))
        if self.blocking_p2p:
            out[self.transfers.item] = self.transfers.end_s - self.transfers.start_s
        return out

    @property
    def pipeline_s(self) -> float:
        return float(self.free_s.max())

    @property
    def step_s(self) -> float:
        return float((self.free_s + self.dp_s).max() + self.optimizer_s.max())

    @property
    def busy_s(self) -> NDArray[np.float64]:
        """[ranks]: seconds in passes."""
        return np.bincount(self.rank, weights=self.end_s - self.start_s, minlength=self.ranks)

    @property
    def bubble_share(self) -> float:
        """The share of the ranks' time in the pipeline that they don't spend in passes."""
        return 1.0 - float(self.busy_s.sum()) / (self.ranks * self.pipeline_s)

    def memory(self, rank: int) -> MemoryCurve:
        """Static bytes and activations in flight; what an F needs is there from its start, freed at an end."""
        items = self.by_rank[rank]
        kind, stage = self.kind[items], self.stage[items]
        whole, kept = self.activation_bytes[stage], self.kept_bytes[stage]
        gain = np.where(kind == _CODE["F"], whole, 0.0)
        loss = np.select([kind == _CODE["B"], kind == _CODE["I"], kind == _CODE["W"]], [whole, whole - kept, kept], 0.0)
        time_s = np.stack([self.start_s[items], self.end_s[items]], axis=1).ravel()
        held = np.cumsum(np.stack([gain, -loss], axis=1).ravel())
        return MemoryCurve(np.append(0.0, time_s), self.static_bytes[rank] + np.append(0.0, held))

    @property
    def peak_bytes(self) -> NDArray[np.float64]:
        """[ranks]"""
        return np.array([self.memory(rank).peak_bytes for rank in range(self.ranks)])


def num_stages(name: str, pp: int, virtual_stages: int = 1) -> int:
    """Stages of a schedule: what `StageTimes` must give a figure for. ConfigError for an unknown schedule."""
    kind = schedule(name)
    if kind.shape == "two-way":
        return pp
    return pp * (virtual_stages if kind.chunks is None else kind.chunks)


def replay(name: str, *, stages: int, micro_batches: int, virtual_stages: int = 1, times: StageTimes) -> Replay:
    """One step of the schedule `name` on `stages` pipeline ranks, from a standing start.

    ConfigError where the schedule can't be built from these numbers, ValueError for times of another number of stages.
    """
    shape = _compiled(name, stages, micro_batches, virtual_stages)
    return _walked(shape, times)


def settled_step_s(
    name: str, *, stages: int, micro_batches: int, virtual_stages: int = 1, times: StageTimes, most: int = 16
) -> float:
    """Seconds a step takes in a run without a barrier between steps: each rank starts its next step as soon as it is
    through with this one, so that the ranks stay staggered, which is what zero-bubble schedules count on.

    Replays steps until all ranks come at the same distance (RuntimeError if they don't within `most`).
    """
    shape = _compiled(name, stages, micro_batches, virtual_stages)
    durations, hops = _durations(shape, times)
    extra = _spread(times.dp_s, stages) + _spread(times.optimizer_s, stages)
    free = [0.0] * stages
    before = np.zeros(stages)
    for _ in range(most):
        _, _, _, free = _walk(shape, durations, hops, times.blocking_p2p, free)
        after = np.array(free) + extra
        gains, free, before = after - before, after.tolist(), after
        if np.ptp(gains) <= 1e-9 * gains.max():
            return float(gains.max())
    raise RuntimeError(f"{name} on {stages} ranks doesn't settle within {most} steps")


@dataclass(frozen=True)
class _Shape:
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
def _compiled(name: str, pp: int, num_micro: int, virtual_stages: int) -> _Shape:
    ranks = schedule_actions(name, pp, num_micro, virtual_stages)
    lists = [[action for action in actions if action.kind in _CODE] for actions in ranks]
    stages = num_stages(name, pp, virtual_stages)
    order, needs, joint = _ordered(lists, stages, num_micro, joined=name in _JOINED)
    kind = schedule(name)
    count = len(order)
    rank = np.fromiter((r for r, _ in order), np.int64, count)
    code = np.fromiter((_CODE[a.kind] for _, a in order), np.int64, count)
    stage = np.fromiter((a.stage for _, a in order), np.int64, count)
    micro = np.fromiter((a.micro for _, a in order), np.int64, count)
    way = np.where(code == _CODE["F"], 1, np.where(code == _CODE["W"], 0, -1))
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
    return _Shape(name, pp, stages, rank, code, stage, micro, after, channel, boundary, blocks, walk)


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


def _spread(value: PerRank, count: int) -> NDArray[np.float64]:
    array = np.asarray(value, float)
    if array.ndim and array.shape != (count,):
        raise ValueError(f"{array.shape} figures where the schedule has {count}")
    if np.any(array < 0) or not np.all(np.isfinite(array)):
        raise ValueError(f"durations and sizes are finite and not below zero: {value}")
    return np.broadcast_to(array, (count,))


def _durations(shape: _Shape, times: StageTimes) -> tuple[list[float], list[float]]:
    forward, inputs, weights = (_spread(x, shape.stages) for x in (times.forward_s, times.input_s, times.weight_s))
    table = np.stack([forward, inputs + weights, inputs, weights])
    hop = np.append(_spread(times.p2p_s, max(shape.stages - 1, 0)), 0.0)
    hops = np.where(shape.channel >= 0, hop[shape.boundary], 0.0)
    return table[shape.kind, shape.stage].tolist(), hops.tolist()


def _walk(
    shape: _Shape, durations: list[float], hops: list[float], blocking: bool, free: list[float]
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


def _lags(shape: _Shape, durations: list[float], blocking: bool) -> list[float]:
    """How long after its own end a pass gives its result away: the rest of its block. A blocking send breaks blocks."""
    lag = np.zeros(len(durations))
    if len(shape.joint) and not blocking:
        duration = np.array(durations)
        lag[shape.joint] = duration[shape.joint + 1] + duration[shape.joint + 2]
        lag[shape.joint + 1] = duration[shape.joint + 2]
    return lag.tolist()


def _walked(shape: _Shape, times: StageTimes) -> Replay:
    durations, hops = _durations(shape, times)
    whole = _spread(times.activation_bytes, shape.stages)
    kept = whole if times.kept_bytes is None else _spread(times.kept_bytes, shape.stages)
    starts, ends, there, _ = _walk(shape, durations, hops, times.blocking_p2p, [0.0] * shape.ranks)
    start_s, end_s, there_s = np.array(starts), np.array(ends), np.array(there)
    item = np.flatnonzero(shape.channel >= 0)
    source, target = np.divmod(shape.channel[item], shape.ranks)
    sent = there_s[item]
    moves = Transfers(item, source, target, sent - np.array(hops)[item], sent)
    needs, blocks = shape.needs.copy(), shape.joint
    if len(blocks) and not times.blocking_p2p:
        other = needs[blocks + 1]
        needs[blocks] = np.where((needs[blocks] < 0) | (there_s[other] > there_s[needs[blocks]]), other, needs[blocks])
    arrived = np.where(needs >= 0, there_s[needs], 0.0)
    own = [_spread(x, shape.ranks) for x in (times.dp_s, times.optimizer_s, times.static_bytes)]
    return Replay(
        shape.name, shape.ranks, shape.rank, shape.kind, shape.stage, shape.micro, needs, arrived,
        start_s, end_s, moves, times.blocking_p2p, own[0], own[1], whole, kept, own[2],
    )  # fmt: skip


def _last(rank: NDArray[np.int64], end_s: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    out = np.zeros(ranks)
    np.maximum.at(out, rank, end_s)
    return out
