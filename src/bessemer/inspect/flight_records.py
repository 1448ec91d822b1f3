"""What the flight inspection reads and what it says. The records are the same from a live run and from the simulator.

    StepSample, LinkSample, MetricSample, HashSample, Standstill   ->   inspect.flight.Flight   ->   Finding

Legend: R ranks of the fleet, G groups of one kind, P places in a copy of the model, C copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bessemer.runtime.blackbox import Blackbox

__all__ = [
    "ADVICE",
    "EVENT",
    "KINDS",
    "Advice",
    "Finding",
    "FlightRecord",
    "HashSample",
    "LinkSample",
    "MetricSample",
    "Placement",
    "Standstill",
    "StepSample",
]

Floats = NDArray[np.float64]
Advice = Literal["evict", "watch", "ignore"]
ADVICE: tuple[Advice, ...] = get_args(Advice)
EVENT = "finding"
"""The name in events.jsonl under which a finding is kept; its fields are those of `Finding.as_event`."""
LARGEST = 1e9
"""Stands for infinity in events, where JSON has none."""
KINDS = (
    "slow_rank",
    "slow_link",
    "data_stall",
    "loss_spike",
    "gradient_spike",
    "expert_imbalance",
    "memory_growth",
    "corruption",
    "hang",
    "stopped",
)


@dataclass(frozen=True)
class Placement:
    """Where each rank of a fleet stands. Arrays are [R], by index; `ranks` says by which number the run knows an index.

    stage: the pipeline stage, whose ranks do like work. copy: the copy of the model. place: the place in it; ranks of
    one place hold the same parameters. hosts: names, "" where unknown.
    """

    ranks: NDArray[np.int64]
    stage: NDArray[np.int64]
    copy: NDArray[np.int64]
    place: NDArray[np.int64]
    hosts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    @classmethod
    def of_sizes(
        cls, *, replicas: int, pp: int, inner: int, hosts: Sequence[str] = (), ranks: Sequence[int] = ()
    ) -> Placement:
        """Of world = replicas x pp x inner, as `parallel.mesh` numbers ranks; inner = shard x cp x tp.

        hosts: of each rank; by default all are unknown (""). ranks: their numbers, by default from 0 on.
        """
        world = replicas * pp * inner
        index_R = np.arange(world)
        return cls(
            ranks=np.asarray(ranks if len(ranks) else index_R, dtype=np.int64),
            stage=index_R // inner % pp,
            copy=index_R // (inner * pp),
            place=index_R % (inner * pp),
            hosts=tuple(hosts) if len(hosts) else ("",) * world,
        )


@dataclass(frozen=True)
class StepSample:
    """One step (counted from 1) of all ranks; arrays are [R] by index, NaN where nothing is known of one.

    t: unix seconds of its end. step_s: its length. compute_s: forward, backward and optimizer without waiting for
    anybody; data_s: waiting for batches; wait_s: for other ranks. tokens: what each rank computed, in tokens of
    its stage. memory_bytes: resident memory of the process, or what the device has allocated.
    """

    step: int
    t: float
    step_s: float
    compute_s: Floats
    data_s: Floats
    wait_s: Floats
    tokens: Floats
    memory_bytes: Floats


@dataclass(frozen=True)
class LinkSample:
    """Transfers of one kind in one step, such as "tensor all_reduce": for each group the seconds from the last arrival
    to the finish, summed over its operations ([G], NaN: unknown). Groups of a kind move the same bytes. groups: ranks.
    step_s: how long the step took, 0 where it isn't known.
    """

    step: int
    t: float
    kind: str
    groups: tuple[tuple[int, ...], ...]
    transfer_s: Floats
    step_s: float = 0.0


@dataclass(frozen=True)
class MetricSample:
    """A committed step as metrics.jsonl has it. imbalance: of each MoE layer the largest load over the mean one."""

    step: int
    t: float
    loss: float
    grad_norm: float
    imbalance: tuple[float, ...] = ()


@dataclass(frozen=True)
class HashSample:
    """Hashes of what ranks hold alike after a step, the parameters, or have made alike in it, the gradients of the same
    samples: uint64 [P, C], with the ranks' numbers, int64 [P, C]."""

    step: int
    t: float
    hashes: NDArray[np.uint64]
    ranks: NDArray[np.int64]
    of: Literal["parameters", "gradients"] = "parameters"


@dataclass(frozen=True)
class Standstill:
    """No step has come true for `quiet_s` seconds: the black boxes of all ranks, with ranks numbered as the run does.

    stopped: ranks whose process is stopped (state T), with for how long. longest_s: what a step may take before
    standing still is a hang; lease_s: how long a rank may be stopped while others wait.
    """

    t: float
    quiet_s: float
    longest_s: float
    lease_s: float
    boxes: Sequence[Blackbox]
    stopped: Mapping[int, float]


FlightRecord = StepSample | LinkSample | MetricSample | HashSample | Standstill


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a run while it goes on.

    kind: one of KINDS. ranks: whom it names, most suspect first; none where the whole run is concerned. score: of what
    the rule compares (a robust z, a ratio, seconds), always higher for worse; excess: by what part this costs more than
    it should (0.1: 10 % slower), 0 where that makes no sense. text: one line for people. evidence: what it rests on.
    """

    kind: str
    t: float
    step: int
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    score: float = 0.0
    excess: float = 0.0
    text: str
    advice: Advice = "watch"
    evidence: tuple[str, ...] = ()

    def as_event(self) -> dict[str, Any]:
        """The fields of the event `finding` in events.jsonl."""
        return {
            "t": self.t,
            "kind": self.kind,
            "step": self.step,
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "score": round(min(self.score, LARGEST), 3),
            "excess": round(min(self.excess, LARGEST), 4),
            "text": self.text,
            "advice": self.advice,
            "evidence": list(self.evidence),
        }

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Finding:
        """The finding that a line of events.jsonl tells. KeyError where it tells none."""
        return cls(
            kind=str(event["kind"]),
            t=float(event["t"]),
            step=int(event["step"]),
            ranks=tuple(int(r) for r in event["ranks"]),
            hosts=tuple(str(h) for h in event["hosts"]),
            score=float(event["score"]),
            excess=float(event["excess"]),
            text=str(event["text"]),
            advice=event["advice"],
            evidence=tuple(str(line) for line in event["evidence"]),
        )
