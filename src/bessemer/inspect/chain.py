"""The chain of amounts whose neighbouring ratios are the factors of the ledger.

Every amount is work that the devices could have done in some time, in FLOPs at the declared peak P:

    useful     F: tokens of the committed steps x 3 x forward FLOPs a token (causal attention; nothing recomputed)
    paths      sum over paths of F_i x P / P_i     F at the peaks of the paths that it ran on
    kernels    P x K       K: seconds in the kernels that ran F, mean of the ranks
    one node   P x T_1     T_1: what the committed steps take on one node
    steps      P x T       T: what they took
    wall       P x wall-clock time

F_i and K come from sampled steps: the shares of the counted FLOPs by path, and the median over samples of kernel
seconds for each counted FLOP, both applied to F. Work that the kernels did beyond F (recompute, a mask's hidden half)
is thereby taken out of K, so that it counts as a loss of the node, as the definition wants it. Pairs that F counts and
the kernels skipped, since packed documents hide them, took no time: there K is the kernel time as it was, and effective
compute has the gain. Where attempts had other devices, each step and second counts with the peak of its attempt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from bessemer.core.counts import flops_per_token
from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.recipes import RECIPES
from bessemer.core.resolve import resolve_model
from bessemer.inspect.one_node import one_node
from bessemer.inspect.run_records import Attempt, RunRecords
from bessemer.inspect.wall_time import WallTime, wall_time

__all__ = ["Chain", "Link", "build_chain", "weakest"]

AGREES = 0.02
"""Counted and useful FLOPs may differ by this fraction before the kernel time counts as modelled."""

NO_SAMPLES = "no `kernels` event: no step of the run was sampled"
NO_PEAK = "no `machine` event says the peak of the devices"


@dataclass(frozen=True)
class Link:
    """One amount, or None with the reason. kind: measured, published or modelled."""

    amount: float | None
    kind: str = "measured"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The amounts in order, the split of the wall-clock time, and the weight (peak, FLOP/s) of a mean second."""

    useful: Link
    paths: Link
    kernels: Link
    one_node: Link
    steps: Link
    wall: Link
    split: WallTime
    useful_flops: float | None
    single_node: bool  # then steps and one node are the same amount
    peak_known: bool  # else every attempt has the weight 1
    notes: list[str]

    @property
    def mean_weight(self) -> float:
        return self.split.weighted_s / self.split.wall_s if self.split.wall_s else 1.0


@dataclass(frozen=True)
class _Sampled:
    """What the samples of an attempt say: shares of the FLOPs by path, seconds for each counted FLOP, FLOPs a
    sequence counted by all ranks."""

    shares: Mapping[str, float]
    seconds_per_flop: float
    flops_per_sample: float


@dataclass(frozen=True)
class _Facts:
    """Per attempt: peaks by path or None, the weight of its seconds, its samples or None."""

    peaks: list[Mapping[str, float] | None]
    weights: list[float]
    sampled: list[_Sampled | None]
    peak_kind: str
    why_no_peak: str  # empty where each attempt has a peak at the job's precision
    flops_per_sample: float | None
    least_per_sample: float  # where packed documents hide from each token all but itself
    why_no_flops: str

    def skipped(self, sampled: _Sampled) -> bool:
        """Whether fewer FLOPs were counted than are useful, by no more than packed documents can hide."""
        least = self.least_per_sample / (1 + AGREES)
        return self.flops_per_sample is not None and least <= sampled.flops_per_sample < self.flops_per_sample


def build_chain(run: RunRecords, reference: RunRecords | None) -> Chain:
    """The chain of `run`; `reference` is a one-node run of the same work a device."""
    facts = _facts(run)
    split = wall_time(run, facts.weights)
    single = one_node(run, reference)
    one = sum(w * single.step_s(a, s) for a, w in zip(run.attempts, facts.weights, strict=True) for s in a.steps)
    took = sum(w * s.step_s for a, w in zip(run.attempts, facts.weights, strict=True) for s in a.steps)
    samples = sum(s.samples for s in run.steps)
    flops = None if facts.flops_per_sample is None else facts.flops_per_sample * samples
    useful = Link(flops, facts.peak_kind, facts.why_no_flops)
    if facts.why_no_peak:
        useful = Link(None, reason=facts.why_no_peak)
    kernels = _kernels(run, facts)
    return Chain(
        useful=useful,
        paths=_paths(run, facts),
        kernels=kernels,
        one_node=Link(one, single.kind, single.reason),
        steps=Link(took),
        wall=Link(split.weighted_s),
        split=split,
        useful_flops=flops,
        single_node=single.itself,
        peak_known=not facts.why_no_peak,
        notes=[*_counting_notes(run, facts), *single.notes],
    )


def weakest(*kinds: str) -> str:
    """The weakest of some kinds of figure: modelled, then published, then measured."""
    return max(kinds, key=("measured", "published", "modelled").index)


def _facts(run: RunRecords) -> _Facts:
    path = RECIPES[run.job.precision.recipe].gemm
    peaks = _nearest(run.attempts, [_own_peaks(a) for a in run.attempts])
    why = ""
    if None in peaks:
        why = NO_PEAK
    elif any(path not in p for p in peaks if p is not None):
        why = f"the machine gives no peak for {path}, the path of precision.recipe = {run.job.precision.recipe!r}"
    weights = [1.0 if why or p is None else float(p[path]) for p in peaks]
    each, least, why_no_flops = _flops_per_sample(run.job)
    machines = [e for a in run.attempts for e in a.named("machine")]
    return _Facts(
        peaks=peaks,
        weights=weights,
        sampled=_nearest(run.attempts, [_samples(run.job, a) for a in run.attempts]),
        peak_kind=weakest("measured", *(str(e.get("kind", "published")) for e in machines)),
        why_no_peak=why,
        flops_per_sample=each,
        least_per_sample=least,
        why_no_flops=why_no_flops,
    )


def _flops_per_sample(job: Job) -> tuple[float | None, float, str]:
    """Useful FLOPs of one sequence, forward and backward, and the least that a kernel which skips hidden pairs has to
    do for them; or None and why."""
    try:
        spec = resolve_model(job.model)
    except ConfigError as error:
        return None, 0.0, f"the model of the job can't be read any more: {error.problems[0].what}"
    length = job.data.seq_len
    each = flops_per_token(spec, length).training
    alone = flops_per_token(spec, 1).training if job.data.document_mask else each
    return each * length, alone * length, ""


def _own_peaks(attempt: Attempt) -> Mapping[str, float] | None:
    found = attempt.named("machine")
    return found[-1]["peak_flops"] if found else None


def _nearest(attempts: list[Attempt], own: list[Any]) -> list[Any]:
    """Fills the gaps of `own` from the nearest attempt with as many ranks; None stays where there is none.

    An attempt that died before it said what devices it has had those of the next one.
    """
    found = []
    for number, value in enumerate(own):
        others = [
            (abs(other - number), other)
            for other, known in enumerate(own)
            if known is not None and attempts[other].world_size == attempts[number].world_size
        ]
        found.append(own[min(others)[1]] if value is None and others else value)
    return found


def _samples(job: Job, attempt: Attempt) -> _Sampled | None:
    """The sampled steps of an attempt, whether or not they were done again later."""
    events = [e for e in attempt.named("kernels") if sum(e["flops"].values()) > 0]
    if not events:
        return None
    totals = [float(sum(e["flops"].values())) for e in events]
    paths = sorted({path for e in events for path in e["flops"]})
    shares = {path: sum(float(e["flops"].get(path, 0)) for e in events) / sum(totals) for path in paths}
    sequences = sum(job.global_batch_at(int(e["step"]) - 1) for e in events)
    return _Sampled(
        shares=shares,
        seconds_per_flop=median(float(e["kernel_s"]) / total for e, total in zip(events, totals, strict=True)),
        flops_per_sample=sum(totals) / sequences,
    )


def _paths(run: RunRecords, facts: _Facts) -> Link:
    amount = 0.0
    for attempt, peaks, weight, sampled in zip(run.attempts, facts.peaks, facts.weights, facts.sampled, strict=True):
        if not attempt.steps:
            continue
        if facts.why_no_peak or facts.flops_per_sample is None or sampled is None or peaks is None:
            return Link(None, reason=facts.why_no_peak or facts.why_no_flops or NO_SAMPLES)
        if unknown := [path for path in sampled.shares if path not in peaks]:
            return Link(None, reason=f"FLOPs ran on {', '.join(unknown)}, for which the machine gives no peak")
        flops = facts.flops_per_sample * sum(s.samples for s in attempt.steps)
        amount += flops * sum(share * weight / float(peaks[path]) for path, share in sampled.shares.items())
    return Link(amount, facts.peak_kind)


def _kernels(run: RunRecords, facts: _Facts) -> Link:
    amount, worst = 0.0, 1.0
    for attempt, weight, sampled in zip(run.attempts, facts.weights, facts.sampled, strict=True):
        if not attempt.steps:
            continue
        if facts.flops_per_sample is None or sampled is None:
            return Link(None, reason=facts.why_no_flops or NO_SAMPLES)
        flops = facts.flops_per_sample * sum(s.samples for s in attempt.steps)
        ratio = sampled.flops_per_sample / facts.flops_per_sample
        if facts.skipped(sampled):
            flops *= ratio
        else:
            worst = max(worst, ratio, key=_off)
        amount += weight * flops * sampled.seconds_per_flop
    if _off(worst) <= math.log1p(AGREES):
        return Link(amount)
    return Link(amount, "modelled", f"kernels ran {worst:.3f} times the useful FLOPs; their time is scaled to those")


def _off(ratio: float) -> float:
    return abs(math.log(ratio))


def _counting_notes(run: RunRecords, facts: _Facts) -> list[str]:
    """One line on how the counted FLOPs compare with the useful ones."""
    sampled = [s for a, s in zip(run.attempts, facts.sampled, strict=True) if s is not None and a.steps]
    if facts.flops_per_sample is None or not sampled:
        return []
    ratio = max((s.flops_per_sample / facts.flops_per_sample for s in sampled), key=_off)
    count = sum(len(a.named("kernels")) for a in run.attempts)
    notes = [f"counted in {count} sampled steps: {ratio:.4f} x the useful FLOPs (3 x forward, causal attention)"]
    if ratio < 1 / (1 + AGREES) and all(facts.skipped(s) for s in sampled):
        notes.append(
            "fewer were counted than are useful, as when attention skips what packed documents hide; the kernels' time "
            "is taken as it was, so effective compute has the gain"
        )
    return notes
