"""Goodput in closed form: which share of the time becomes committed training, with failures, restarts and spares.

Failures are Poisson with rate 1/M, whatever the job is doing. Three ways to live with them (`MODES`):

    disk    every failure stops all; they restart from the newest durable checkpoint, which was written while all wait
    memory  every failure stops all; they restart from copies in the memory of peers; a few failures take these along
            and fall back to the durable checkpoint, which is written in the background
    zero    survivors stall and go on with the same step; the replica that lost a node is missing until a spare has
            joined it; a few failures take all copies of something along and fall back as above

    effective time  =  running  x  nodes there  x  kept work  x  capacity

running: no failure within the last d seconds, the time it takes to get over one: e^(-d/M) (one that strikes meanwhile
starts it anew). nodes there (disk, memory): nodes under repair are Poisson (an M/G/infinity queue), the job waits when
they outnumber the spares. kept work: `bessemer.plan.intervals.efficiency`. capacity (zero): failures within the last
j seconds have their replica missing; when repairs outnumber the spares, replicas are taken apart to fill the others.
Running, nodes and capacity are exact and independent, being counts of one Poisson process over windows that don't
overlap; that kept work and capacity multiply, and the two levels of memory, is right to second order in the share of
fall-backs. `bessemer.plan.goodput_simulation` plays the same process out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from bessemer.plan.intervals import best_interval_s, daly_interval_s, efficiency, young_interval_s
from bessemer.plan.stragglers import pace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MODES", "Estimate", "GoodputInputs", "Mode", "capacity_by_missing", "estimate", "overcome_s", "poisson"]

Mode = Literal["disk", "memory", "zero"]
MODES: tuple[Mode, ...] = ("disk", "memory", "zero")


@dataclass(frozen=True, kw_only=True)
class GoodputInputs:
    """What goodput depends on. Seconds; `gpus` accelerators work, spares come on top.

    unit: accelerators of a replica, which stops as one in mode zero; min_replicas: with fewer it waits.
    micro_batches: of a replica in a step; then a missing one costs whole micro-batches of the others (None: divided
    exactly). mttf_s: between failures of the whole job; detection_s: until one is noticed, mean.
    restart_disk_s, restart_memory_s: from the notice to training again; stall_s: of the survivors; join_s: from the
    failure until the replica takes part again. checkpoint_s: all wait for a durable save (disk); snapshot_s: for a
    copy in memory; write_s: a durable write in the background. interval_s: between saves of the mode's own level
    (None: the optimum). drain_share: of the failures, those that need a repair of repair_s; other nodes return after
    reboot_s. fallback_share: failures that memory copies or survivors don't outlive.
    """

    gpus: int
    gpus_per_node: int = 8
    unit: int = 0
    min_replicas: int = 1
    micro_batches: int | None = None
    mttf_s: float
    detection_s: float
    restart_disk_s: float
    restart_memory_s: float
    stall_s: float
    join_s: float
    step_s: float
    checkpoint_s: float
    snapshot_s: float
    write_s: float
    interval_s: float | None = None
    drain_share: float
    repair_s: float
    reboot_s: float
    fallback_share: float
    jitter: float
    slow_share: float
    slow_by: float

    @property
    def replicas(self) -> int:
        return self.gpus // self.unit if self.unit else 1

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def under_repair(self) -> float:
        """Nodes that are away at a time, mean."""
        return (self.drain_share * self.repair_s + (1 - self.drain_share) * self.reboot_s) / self.mttf_s


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Shares of the time. `effective_time`: of the working accelerators' time what became committed training;
    `effective_time_all_devices`: of all, spares counted; `goodput`: that, at the pace that stragglers leave.

    `losses` add up, with `effective_time`, to one. interval_s: between saves of the mode's own level; it stalls for
    save_stall_s, and running time between failures that throw away what came after is losing_mttf_s (None: none).
    durable_interval_s: the same, or between durable saves where there are two levels. spares: nodes, None: never short.
    """

    mode: Mode
    spares: int | None
    interval_s: float
    durable_interval_s: float
    save_stall_s: float
    losing_mttf_s: float | None
    effective_time: float
    effective_time_all_devices: float
    pace: float
    losses: dict[str, float]

    @property
    def goodput(self) -> float:
        return self.effective_time_all_devices * self.pace

    @property
    def young_interval_s(self) -> float | None:
        return None if self.losing_mttf_s is None else young_interval_s(self.save_stall_s, self.losing_mttf_s)

    @property
    def daly_interval_s(self) -> float | None:
        return None if self.losing_mttf_s is None else daly_interval_s(self.save_stall_s, self.losing_mttf_s)


def poisson(mean: float, sigmas: float = 12.0) -> NDArray[np.float64]:
    """P(K = 0), P(K = 1) ... of a Poisson variable, as far as they matter."""
    count = np.arange(int(mean + sigmas * math.sqrt(mean) + 20))
    if mean <= 0:
        return np.where(count == 0, 1.0, 0.0)
    log = count * math.log(mean) - mean - np.append(0.0, np.cumsum(np.log(count[1:])))
    out: NDArray[np.float64] = np.exp(log)
    out /= out.sum()
    return out


def overcome_s(inputs: GoodputInputs, mode: Mode) -> tuple[float, float]:
    """Seconds from a failure to training again: of the common kind, and of one that falls back to disk."""
    back = inputs.detection_s + inputs.restart_disk_s
    common = {
        "disk": back,
        "memory": inputs.detection_s + inputs.restart_memory_s,
        "zero": inputs.detection_s + inputs.stall_s,
    }[mode]
    return common, back


def capacity_by_missing(inputs: GoodputInputs) -> NDArray[np.float64]:
    """[replicas + 1]: throughput with k replicas missing, relative to none."""
    replicas, left = inputs.replicas, inputs.replicas - np.arange(inputs.replicas + 1)
    share = left / replicas
    if inputs.micro_batches is not None:
        busiest = np.ceil(inputs.micro_batches * replicas / np.maximum(left, 1))
        share = np.where(left > 0, inputs.micro_batches / busiest, 0.0)
    out: NDArray[np.float64] = np.where(left >= inputs.min_replicas, share, 0.0)
    return out


def estimate(inputs: GoodputInputs, mode: Mode, spares: int | None = None) -> Estimate:
    """The closed form. ValueError for mode zero with fewer than two replicas."""
    if mode == "zero" and inputs.replicas < 2:
        raise ValueError("mode zero needs at least two replicas")
    rate, rare = 1 / inputs.mttf_s, 0.0 if mode == "disk" else inputs.fallback_share
    common_s, back_s = overcome_s(inputs, mode)
    running = math.exp(-rate * (1 - rare) * common_s)
    fallen = math.exp(-rate * rare * back_s)
    there = 1.0
    if mode != "zero" and spares is not None:
        there = float(poisson(inputs.under_repair)[: spares + 1].sum())
    capacity = _capacity(inputs, (rare, common_s, back_s), spares) if mode == "zero" else 1.0
    saves = _saves(inputs, mode, rare, common_s)
    shares = {"recovery": running, "fallback": fallen, "no_spare": there, "kept": saves.kept, "capacity": capacity}
    losses, left = {}, 1.0
    for name, share in shares.items():
        losses[name], left = left * (1 - share), left * share
    lost = losses.pop("kept")
    losses["checkpoints"] = min(lost, running * fallen * there * saves.stall_s / (saves.interval_s + saves.stall_s))
    losses["redone"] = lost - losses["checkpoints"]
    devices = inputs.gpus + (spares or 0) * inputs.gpus_per_node
    return Estimate(
        mode=mode,
        spares=spares,
        interval_s=saves.interval_s,
        durable_interval_s=saves.durable_interval_s,
        save_stall_s=saves.stall_s,
        losing_mttf_s=saves.losing_mttf_s,
        effective_time=left,
        effective_time_all_devices=left * inputs.gpus / devices,
        pace=pace(inputs.nodes, jitter=inputs.jitter, slow_share=inputs.slow_share, slow_by=inputs.slow_by),
        losses=losses,
    )


@dataclass(frozen=True)
class _Saves:
    """Intervals as in `Estimate`, and kept work over running time."""

    interval_s: float
    durable_interval_s: float
    stall_s: float
    losing_mttf_s: float | None
    kept: float


def _saves(inputs: GoodputInputs, mode: Mode, rare: float, common_s: float) -> _Saves:
    mttf, step, snapshot = inputs.mttf_s, inputs.step_s, inputs.snapshot_s
    if mode == "disk":
        own = inputs.interval_s or max(best_interval_s(inputs.checkpoint_s, mttf), step)
        return _Saves(own, own, inputs.checkpoint_s, mttf, efficiency(own, inputs.checkpoint_s, mttf))
    # A stop begins with a failure and lasts until `common_s` pass without one; any of these may be a rare one.
    calm = math.exp(-common_s / mttf)
    unharmed = (1 - rare) * calm / (1 - (1 - calm) * (1 - rare))
    fallback_s = mttf / (1 - unharmed) if rare > 0 else math.inf
    if mode == "zero":
        least = max(inputs.write_s, step)
        own = inputs.interval_s or (max(best_interval_s(snapshot, fallback_s), least) if rare > 0 else 1e3 * least)
        kept = efficiency(own, snapshot, fallback_s, inputs.write_s) if rare > 0 else own / (own + snapshot)
        losing_s = fallback_s if rare > 0 else None
        return _Saves(own, own, snapshot, losing_s, kept * math.exp(-step / 2 / mttf))
    own = inputs.interval_s or max(best_interval_s(snapshot, mttf), step)
    durable = max(best_interval_s(snapshot, fallback_s) if rare > 0 else 0.0, inputs.write_s, own)
    kept = efficiency(own, snapshot, mttf)
    if rare > 0:
        kept *= efficiency(durable, 0.0, fallback_s, inputs.write_s)
    return _Saves(own, durable, snapshot, mttf, kept)


def _capacity(inputs: GoodputInputs, kinds: tuple[float, float, float], spares: int | None) -> float:
    """Mean throughput of mode zero while it runs. `kinds`: share of fall-backs, seconds to overcome either kind."""
    rare, common_s, back_s = kinds
    joining = (1 - rare) * max(inputs.join_s - common_s, 0.0) + rare * max(inputs.join_s - back_s, 0.0)
    missing = poisson(joining / inputs.mttf_s)
    if spares is not None:
        away = poisson(inputs.under_repair)
        nodes = max(inputs.unit // inputs.gpus_per_node, 1)
        apart = np.ceil(np.maximum(np.arange(len(away)) - spares, 0) / nodes).astype(int)
        missing = np.convolve(missing, np.bincount(apart, weights=away))
    speed = capacity_by_missing(inputs)
    at = np.minimum(np.arange(len(missing)), inputs.replicas)
    return float(missing @ speed[at])
