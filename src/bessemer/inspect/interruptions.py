"""What losses and arrivals of groups took of the steps that they disturbed, from the events of a run that goes on
through them (mode "zero-interruption").

Such a step is longer than it had to be: survivors wait until a loss is known, make new links, run what the lost group
had to, and donors copy their state. That is taken out of the step and charged to its cause, so that what is left is
the step as it would have been. All of it was measured by the groups themselves; where they differ, what held all of
them up counts: the least of their waiting, the most of their work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bessemer.inspect.run_records import Attempt, RunRecords, StepRecord

__all__ = ["charged"]

TRACES = ("rank_lost", "group_lost", "coordinator_lost")


@dataclass(frozen=True)
class _Epoch:
    """Formed at time `t` (unix seconds) when `step` steps were true. undetected_s: since the first trace of what led
    to it, 0 for a planned change."""

    t: float
    step: int
    active: frozenset[int]
    undetected_s: float


def charged(run: RunRecords) -> RunRecords:
    """The records with `step_s` of each step reduced by what `lost_s` names. Unchanged for runs without epochs."""
    return replace(run, attempts=[_charged(run, attempt) for attempt in run.attempts])


def _charged(run: RunRecords, attempt: Attempt) -> Attempt:
    epochs = _epochs(attempt)
    if not epochs:
        return attempt
    costs = [_cost(attempt, epochs, step) for step in attempt.steps]
    steps = [_take(step, cost) for step, cost in zip(attempt.steps, costs, strict=True)]
    disturbed = {int(e["step"]) for e in attempt.named("adapted")}
    missing = [_missing(run, attempt, epochs, step) for step in steps]
    whole = [s.step_s for s, lacks in zip(steps, missing, strict=True) if not lacks and s.step not in disturbed]
    if whole:
        usual = median(whole)
        steps = [
            _take(s, {"fewer": max(0.0, s.step_s - usual)}) if lacks else s
            for s, lacks in zip(steps, missing, strict=True)
        ]
    return replace(attempt, steps=steps)


def _epochs(attempt: Attempt) -> list[_Epoch]:
    found: list[_Epoch] = []
    losses = _losses(attempt)
    for event in sorted(attempt.named("epoch"), key=lambda e: (int(e["term"]), int(e["epoch"]))):
        t = float(event["t"])
        known = {who for who, (told, _) in losses.items() if told <= t}
        first = min((losses.pop(who)[1] for who in known), default=t)
        found.append(_Epoch(t, int(event["step"]), frozenset(event["active"]), t - first))
    return found


def _losses(attempt: Attempt) -> dict[Any, tuple[float, float]]:
    """Of each group, and of the coordinator at each address: when its loss was told, and when its first trace was."""
    found: dict[Any, tuple[float, float]] = {}
    for event in attempt.named(*TRACES):
        who = event["group"] if "group" in event else ("coordinator", event.get("address"))
        t = float(event["t"])
        told, trace = found.get(who, (t, t))
        found[who] = min(told, t), min(trace, t - float(event.get("silent_s") or 0.0))
    return found


def _cost(attempt: Attempt, epochs: list[_Epoch], step: StepRecord) -> dict[str, float]:
    """Seconds by cause of what disturbed one step."""
    told = [e for e in attempt.named("adapted") if int(e["step"]) == step.step]
    active = _in_force(epochs, step.step)
    told = [e for e in told if active is None or int(e["group"]) in active.active]
    copies = [float(e["stall_s"]) for e in attempt.named("donated") if int(e["step"]) == step.step - 1]
    cost = {"donor": max(copies, default=0.0)}
    if told:
        undetected = sum(e.undetected_s for e in epochs if e.step == step.step - 1)
        cost["detection"] = min(undetected, *(float(e["waited_s"]) for e in told))
        cost["epoch"] = max(float(e["connect_s"]) for e in told)
        cost["redone"] = max(float(e["redone_s"]) for e in told)
    return cost


def _in_force(epochs: list[_Epoch], step: int) -> _Epoch | None:
    """In which step `step` (from 1) came true."""
    return next((e for e in reversed(epochs) if e.step < step), None)


def _missing(run: RunRecords, attempt: Attempt, epochs: list[_Epoch], step: StepRecord) -> bool:
    """Whether the step was done by fewer groups than were wanted then."""
    scaled: list[Mapping[str, Any]] = [e for e in attempt.named("scale") if float(e["t"]) < step.t]
    wanted = int(scaled[-1]["replicas"]) if scaled else run.job.replicas
    epoch = _in_force(epochs, step.step)
    return epoch is not None and len(epoch.active) < wanted


def _take(step: StepRecord, cost: Mapping[str, float]) -> StepRecord:
    """Charge the costs, as far as the step's time goes."""
    lost, left = dict(step.lost_s), step.step_s
    for cause, seconds in cost.items():
        part = min(seconds, left)
        if part > 0:
            lost[cause] = lost.get(cause, 0.0) + part
            left -= part
    return replace(step, step_s=left, lost_s=lost)
