"""A fleet of virtual ranks whose records go through the same inspection as a live run's.

    fleet = FleetSimulator(faults=[SimulatedFault("slow_rank", step=50, rank=4711, amount=0.1)])
    flight = Flight(fleet.placement)
    findings = [f for record in fleet.records(100) for f in flight.take(record)]

10,240 ranks by default: 160 copies x 8 stages x 8 tensor-parallel ranks, 8 ranks a host. Everything follows from the
seed. Times are modelled; what makes ranks differ is correlated as in real fleets:

    a rank's own jitter, new each step; that of its host, which lasts (an autoregression); that of its stage and of its
    copy's batch, the same for all their ranks in a step; the time of day, for all, a little more in some rows.

The day's swing of 1 to 2 % is that of the Llama 3 run (arXiv:2407.21783, section 3.3.4); the other widths are
assumptions, which the tests vary.

Legend: R ranks, C copies, S stages, T tensor-parallel ranks, H hosts, P places in a copy, G groups of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bessemer.inspect.fleet_simulator_boxes import boxes_of_hang
from bessemer.inspect.flight_records import (
    FlightRecord,
    Floats,
    HashSample,
    LinkSample,
    MetricSample,
    Placement,
    Standstill,
    StepSample,
)

__all__ = ["FleetSimulator", "Jitter", "SimulatedFault"]

COMPUTE, DATA, TRANSFER_S = 0.7, 0.002, 0.004
"""Parts of a step without jitter: computing, and waiting for data; and the seconds of a group's transfers."""
TOKENS = 8192.0
MEMORY_BYTES = 60e9
LAST_STAGE = 1.08
"""The last stage has the output layer as well."""
LINK_JITTER, LINK_HOST_JITTER = 0.05, 0.05
HOST_MEMORY = 0.9
"""What of a host's jitter is left a step later."""
ROWS, ROW_SPREAD = 16, 0.05
"""Of the day's swing: so many rows of hosts have by this part more or less of it."""
DAY_STEPS = 4000


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Relative standard deviations of the seconds that a rank computes, and the day's swing."""

    rank: float = 0.03
    host: float = 0.003
    stage: float = 0.02
    batch: float = 0.02
    day: float = 0.015


@dataclass(frozen=True, kw_only=True)
class SimulatedFault:
    """What goes wrong from step `step` (counted from 1) until `until`, in rank `rank`.

    amount: slow_rank: by what part longer it computes. slow_link: by what part longer the transfers of its groups of
    kind `link` take. data_stall: the part of a step that it waits for data. memory_growth: bytes a step. loss_spike,
    gradient_spike: times the usual value. expert_imbalance: times the usual imbalance. corruption: it has other
    parameters from then on. hang: it does not come to an all-reduce of its tensor-parallel group, and nothing moves any
    more; stopped: the same, its process is stopped.
    """

    kind: Literal[
        "slow_rank", "slow_link", "data_stall", "memory_growth", "loss_spike", "gradient_spike", "expert_imbalance",
        "corruption", "hang", "stopped",
    ]  # fmt: skip
    step: int
    rank: int = 0
    amount: float = 0.0
    until: int = 2**62
    link: Literal["tensor", "pipeline", "replica"] = "tensor"

    def is_on(self, step: int) -> bool:
        return self.step <= step < self.until


class FleetSimulator:
    """The fleet. step_s: of a step without jitter. hash_every: steps between two comparisons of parameters."""

    def __init__(
        self,
        *,
        copies: int = 160,
        stages: int = 8,
        tensor: int = 8,
        step_s: float = 2.0,
        jitter: Jitter | None = None,
        faults: Sequence[SimulatedFault] = (),
        seed: int = 0,
        hash_every: int = 50,
    ) -> None:
        self.copies, self.stages, self.tensor = copies, stages, tensor
        self.step_s, self.hash_every, self.faults = step_s, hash_every, tuple(faults)
        self.jitter = jitter if jitter is not None else Jitter()
        world = copies * stages * tensor
        self._host_R = np.arange(world) // 8
        hosts = [f"node-{host}" for host in self._host_R.tolist()]
        self.placement = Placement.of_sizes(replicas=copies, pp=stages, inner=tensor, hosts=hosts)
        self._rng = np.random.default_rng(seed)
        num_hosts = int(self._host_R[-1]) + 1
        self._host_state_H = self.jitter.host * self._rng.standard_normal(num_hosts)
        row_H = self._rng.uniform(-ROW_SPREAD, ROW_SPREAD, ROWS)[np.arange(num_hosts) * ROWS // num_hosts]
        self._day_R = self.jitter.day * (1 + row_H)[self._host_R]
        self._groups = self._groups_by_kind()

    def records(self, steps: int, start_t: float = 0.0) -> Iterator[FlightRecord]:
        """Of steps 1 to `steps`, or until a fault keeps the fleet from going on; t counts from `start_t`."""
        t = start_t
        for step in range(1, steps + 1):
            halt = next((f for f in self.faults if f.kind in ("hang", "stopped") and f.step <= step), None)
            if halt is not None:
                yield self._standstill(halt, step, t)
                return
            sample = self._step(step, t)
            t = sample.t
            yield sample
            yield self._metric(step, t)
            for kind in self._groups:
                yield self._links(kind, step, t)
            if self.hash_every and step % self.hash_every == 0:
                yield self._hashes(step, t)

    def compute_s(self, step: int) -> Floats:
        """What each rank computes for a token of step `step`, times the usual tokens, in seconds [R]."""
        rng, jitter, p = self._rng, self.jitter, self.placement
        self._host_state_H *= HOST_MEMORY
        fresh = jitter.host * math.sqrt(1 - HOST_MEMORY**2)
        self._host_state_H += fresh * rng.standard_normal(len(self._host_state_H))
        stage_S = 1 + jitter.stage * rng.standard_normal(self.stages)
        stage_S[-1] *= LAST_STAGE
        batch_C = 1 + jitter.batch * rng.standard_normal(self.copies)
        own_R = 1 + jitter.rank * rng.standard_normal(len(p)) + self._host_state_H[self._host_R]
        day_R = 1 + self._day_R * math.sin(2 * math.pi * step / DAY_STEPS)
        compute_R = COMPUTE * self.step_s * own_R * day_R * stage_S[p.stage] * batch_C[p.copy]
        for fault in self._on("slow_rank", step):
            compute_R[fault.rank] *= 1 + fault.amount
        slowed: Floats = np.maximum(compute_R, 0.01 * self.step_s)
        return slowed

    # ---- what the records hold

    def _on(self, kind: str, step: int) -> list[SimulatedFault]:
        return [f for f in self.faults if f.kind == kind and f.is_on(step)]

    def _step(self, step: int, t: float) -> StepSample:
        rng, num_ranks = self._rng, len(self.placement)
        part_C = 1 + 0.05 * rng.uniform(-1, 1, self.copies)  # of the usual tokens
        part_R = part_C[self.placement.copy]
        compute_R = self.compute_s(step) * part_R
        data_R = DATA * self.step_s * rng.exponential(1.0, num_ranks)
        for fault in self._on("data_stall", step):
            data_R[fault.rank] += fault.amount / (1 - fault.amount) * self.step_s
        memory_R = MEMORY_BYTES * (1 + 0.002 * rng.standard_normal(num_ranks))
        for fault in self._on("memory_growth", step):
            memory_R[fault.rank] += fault.amount * (step - fault.step)
        busy_R = compute_R + data_R
        step_s = float(busy_R.max()) + (1 - COMPUTE - DATA) * self.step_s
        return StepSample(step, t + step_s, step_s, compute_R, data_R, step_s - busy_R, TOKENS * part_R, memory_R)

    def _metric(self, step: int, t: float) -> MetricSample:
        rng = self._rng
        loss = (2.0 + 8.0 * (step + 10) ** -0.3) * (1 + 0.006 * rng.standard_normal())
        norm = 0.8 * math.exp(0.2 * rng.standard_normal())
        load_L = 1.6 * (1 + 0.05 * rng.standard_normal(4))
        for fault in self._on("loss_spike", step):
            loss *= fault.amount
        for fault in self._on("gradient_spike", step):
            norm *= fault.amount
        for fault in self._on("expert_imbalance", step):
            load_L[2] *= fault.amount
        return MetricSample(step, t, float(loss), norm, tuple(load_L.tolist()))

    def _links(self, kind: str, step: int, t: float) -> LinkSample:
        groups = self._groups[kind]
        common = 1 + 0.1 * self._rng.standard_normal()  # what else the network does
        transfer_G = TRANSFER_S * abs(common) * (1 + LINK_JITTER * self._rng.standard_normal(len(groups)))
        transfer_G += TRANSFER_S * LINK_HOST_JITTER * self._rng.exponential(1.0, len(groups))
        for fault in self._on("slow_link", step):
            if fault.link == kind:
                transfer_G[[fault.rank in group for group in groups]] *= 1 + fault.amount
        return LinkSample(step, t, f"{kind} {_OPERATIONS[kind]}", groups, transfer_G)

    def _hashes(self, step: int, t: float) -> HashSample:
        places = self.stages * self.tensor
        hash_P = self._rng.integers(0, 2**63, places, dtype=np.uint64)
        hash_PC = np.repeat(hash_P[:, None], self.copies, axis=1)
        rank_PC = np.arange(len(self.placement)).reshape(self.copies, places).T
        for fault in self._on("corruption", step):
            hash_PC[fault.rank % places, fault.rank // places] ^= np.uint64(1 << 17)
        return HashSample(step, t, hash_PC, rank_PC)

    def _standstill(self, fault: SimulatedFault, step: int, t: float) -> Standstill:
        longest_s, lease_s = max(10.0, 5 * self.step_s), 1.5
        stopped = {fault.rank: lease_s + 0.5} if fault.kind == "stopped" else {}
        quiet_s = longest_s + 0.5 if fault.kind == "hang" else lease_s + 0.5
        boxes = boxes_of_hang(self.placement, self._groups, fault.rank, step, t)
        return Standstill(t + quiet_s, quiet_s, longest_s, lease_s, boxes, stopped)

    def _groups_by_kind(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Ranks of each tensor-parallel group, each pair of neighbouring stages, and each place's copies."""
        rank_CST = np.arange(len(self.placement)).reshape(self.copies, self.stages, self.tensor)
        tensor = rank_CST.reshape(-1, self.tensor)
        pairs = np.stack((rank_CST[:, :-1], rank_CST[:, 1:]), axis=-1).reshape(-1, 2)
        replica = rank_CST.reshape(self.copies, -1).T
        kinds = {"tensor": tensor, "pipeline": pairs, "replica": replica}
        return {kind: tuple(map(tuple, ranks.tolist())) for kind, ranks in kinds.items() if ranks.shape[1] > 1}


_OPERATIONS = {"tensor": "all_reduce", "pipeline": "send", "replica": "all_reduce"}
