"""An event by event replay of a pipeline's real schedule: when each pass and transfer starts and ends.

The lists of `bessemer.core.schedules` fix the order on every rank, so only the times are open: a pass starts when its
rank is free and its input has come. The order in which that can be worked out doesn't depend on durations; it is found
once for a schedule's shape and kept, and a replay is then one walk along it. `bessemer.plan.idle` says where the ranks
wait, `bessemer.plan.timeline` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bessemer.plan.walk import CODE, KINDS, Shape, compiled, num_stages, walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "KINDS", "MemoryCurve", "Replay", "StageTimes", "Transfers", "by_rank", "num_stages", "replay", "settled_step_s",
]  # fmt: skip

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

    `kind`: index into `KINDS`; `needs`: the pass whose result it takes (-1: none); `awaits`: the same, or for the first
    pass of a block what came last of the block's inputs; `arrived_s`: when that was there. `pipeline_s`: when all ranks
    are free; `step_s`: with exchange and update.
    """

    name: str
    ranks: int
    rank: NDArray[np.int64]
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    micro: NDArray[np.int64]
    needs: NDArray[np.int64]
    awaits: NDArray[np.int64]
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
    def items_of_rank(self) -> list[NDArray[np.int64]]:
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
        return by_rank(self.rank, self.end_s - self.start_s, self.ranks)

    @property
    def bubble_share(self) -> float:
        """The share of the ranks' time in the pipeline that they don't spend in passes."""
        return 1.0 - float(self.busy_s.sum()) / (self.ranks * self.pipeline_s)

    def memory(self, rank: int) -> MemoryCurve:
        """Static bytes and activations in flight; what an F needs is there from its start, freed at an end."""
        items = self.items_of_rank[rank]
        kind, stage = self.kind[items], self.stage[items]
        whole, kept = self.activation_bytes[stage], self.kept_bytes[stage]
        gain = np.where(kind == CODE["F"], whole, 0.0)
        loss = np.select([kind == CODE["B"], kind == CODE["I"], kind == CODE["W"]], [whole, whole - kept, kept], 0.0)
        time_s = np.stack([self.start_s[items], self.end_s[items]], axis=1).ravel()
        held = np.cumsum(np.stack([gain, -loss], axis=1).ravel())
        return MemoryCurve(np.append(0.0, time_s), self.static_bytes[rank] + np.append(0.0, held))

    @property
    def peak_bytes(self) -> NDArray[np.float64]:
        """[ranks]"""
        return np.array([self.memory(rank).peak_bytes for rank in range(self.ranks)])


def replay(name: str, *, stages: int, micro_batches: int, virtual_stages: int = 1, times: StageTimes) -> Replay:
    """One step of the schedule `name` on `stages` pipeline ranks, from a standing start.

    ConfigError where the schedule can't be built from these numbers, ValueError for times of another number of stages.
    """
    shape = compiled(name, stages, micro_batches, virtual_stages)
    return _walked(shape, times)


def settled_step_s(
    name: str, *, stages: int, micro_batches: int, virtual_stages: int = 1, times: StageTimes, most: int = 16
) -> float:
    """Seconds a step takes in a run without a barrier between steps: each rank starts its next step as soon as it is
    through with this one, so that the ranks stay staggered, which is what zero-bubble schedules count on.

    Replays steps until every rank is as much later than 1, 2, 3 or 4 steps before (such systems may settle in a cycle
    of several steps); the mean of the last `most` / 2 steps where that hasn't come about within `most`.
    """
    shape = compiled(name, stages, micro_batches, virtual_stages)
    durations, hops = _durations(shape, times)
    extra = _spread(times.dp_s, stages) + _spread(times.optimizer_s, stages)
    ends = [np.zeros(stages)]
    for _ in range(most):
        _, _, _, free = walk(shape, durations, hops, times.blocking_p2p, ends[-1].tolist())
        ends.append(np.array(free) + extra)
        for cycle in range(1, min(5, len(ends) - 1)):
            gains = ends[-1] - ends[-1 - cycle]
            if np.ptp(gains) <= 1e-9 * gains.max():
                return float(gains.max()) / cycle
    return float(ends[-1].max() - ends[-1 - most // 2].max()) / (most // 2)


def _spread(value: PerRank, count: int) -> NDArray[np.float64]:
    array = np.asarray(value, float)
    if array.ndim and array.shape != (count,):
        raise ValueError(f"{array.shape} figures where the schedule has {count}")
    if np.any(array < 0) or not np.all(np.isfinite(array)):
        raise ValueError(f"durations and sizes are finite and not below zero: {value}")
    return np.broadcast_to(array, (count,))


def _durations(shape: Shape, times: StageTimes) -> tuple[list[float], list[float]]:
    forward, inputs, weights = (_spread(x, shape.stages) for x in (times.forward_s, times.input_s, times.weight_s))
    table = np.stack([forward, inputs + weights, inputs, weights])
    hop = np.append(_spread(times.p2p_s, max(shape.stages - 1, 0)), 0.0)
    hops = np.where(shape.channel >= 0, hop[shape.boundary], 0.0)
    return table[shape.kind, shape.stage].tolist(), hops.tolist()


def _walked(shape: Shape, times: StageTimes) -> Replay:
    durations, hops = _durations(shape, times)
    whole = _spread(times.activation_bytes, shape.stages)
    kept = whole if times.kept_bytes is None else _spread(times.kept_bytes, shape.stages)
    starts, ends, there, _ = walk(shape, durations, hops, times.blocking_p2p, [0.0] * shape.ranks)
    start_s, end_s, there_s = np.array(starts), np.array(ends), np.array(there)
    item = np.flatnonzero(shape.channel >= 0)
    source, target = np.divmod(shape.channel[item], shape.ranks)
    sent = there_s[item]
    moves = Transfers(item, source, target, sent - np.array(hops)[item], sent)
    awaits, blocks = shape.needs.copy(), shape.joint
    if len(blocks) and not times.blocking_p2p:
        first, second = awaits[blocks], awaits[blocks + 1]
        awaits[blocks] = np.where((first < 0) | (there_s[second] > there_s[first]), second, first)
    arrived = np.where(awaits >= 0, there_s[awaits], 0.0)
    own = [_spread(x, shape.ranks) for x in (times.dp_s, times.optimizer_s, times.static_bytes)]
    return Replay(
        shape.name, shape.ranks, shape.rank, shape.kind, shape.stage, shape.micro, shape.needs, awaits, arrived,
        start_s, end_s, moves, times.blocking_p2p, own[0], own[1], whole, kept, own[2],
    )  # fmt: skip


def _last(rank: NDArray[np.int64], end_s: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    out = np.zeros(ranks)
    np.maximum.at(out, rank, end_s)
    return out


def by_rank(rank: NDArray[np.int64], seconds: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """[ranks]: the sums of `seconds` by rank."""
    return np.bincount(rank, weights=seconds, minlength=ranks).astype(np.float64)
