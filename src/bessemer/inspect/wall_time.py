"""Where the wall-clock time of a run went that no committed step accounts for.

The wall clock runs from the first `start` event to the last record. Time between two attempts counts, since the
devices stood idle for this run, unless the earlier one ended on request (finished or stopped): then they were given
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.inspect.run_records import FAILURES, Attempt, RunRecords

__all__ = ["CAUSES", "WallTime", "wall_time"]

CAUSES = {
    "set_up": "start to first step",
    "checkpoint": "stalls for checkpoints",
    "evaluation": "evaluation",
    "between_steps": "between steps",
    "detection": "faults that were not known yet",
    "epoch": "links of new epochs",
    "redone": "work that was lost and done again",
    "donor": "copies of the state for groups that join",
    "fewer": "steps with fewer groups than wanted",
    "restart": "lost ranks: down, and starting again",
    "tail": "after the last step",
}


@dataclass(frozen=True)
class WallTime:
    """Seconds. lost_s (by cause, every cause present) sums to wall_s - committed_s.

    Where attempts had devices of different peak, lost_s and committed_s count a second by its attempt's peak over
    the mean peak. weighted_s is wall-clock time x peak, summed over attempts.
    """

    wall_s: float
    committed_s: float
    weighted_s: float
    lost_s: dict[str, float]


def wall_time(run: RunRecords, weights: Sequence[float]) -> WallTime:
    """Split the wall-clock time of `run`. `weights`: the peak of all devices of each attempt, or 1 for each."""
    wall, weighted, committed = 0.0, 0.0, 0.0
    lost = dict.fromkeys(CAUSES, 0.0)
    for number, attempt in enumerate(run.attempts):
        after = run.attempts[number + 1] if number + 1 < len(run.attempts) else None
        again = number > 0 and not run.attempts[number - 1].ended_on_request
        split = _split(attempt, after, again)
        seconds = sum(split.values()) + sum(s.step_s for s in attempt.steps)
        wall += seconds
        weighted += seconds * weights[number]
        committed += sum(s.step_s for s in attempt.steps) * weights[number]
        for cause, value in split.items():
            lost[cause] += value * weights[number]
    mean = weighted / wall if wall else 1.0
    return WallTime(wall, committed / mean, weighted, {cause: value / mean for cause, value in lost.items()})


def _split(attempt: Attempt, after: Attempt | None, again: bool) -> dict[str, float]:
    """Seconds by cause of one attempt and of the gap behind it; with its steps they add up to its wall-clock time."""
    ready_t = _ready_t(attempt)
    kept_t = max((s.t for s in attempt.steps), default=ready_t)
    end_t = max(attempt.end_t, kept_t, *_cut_t(after))
    lost_t = _lost_until(attempt, after, kept_t, end_t)
    inside, behind = _stalls(attempt, ready_t, kept_t), _stalls(attempt, lost_t, end_t)
    room = kept_t - ready_t - sum(s.took_s for s in attempt.steps)
    checkpoint, evaluation, between = _fill(room, inside)
    late_checkpoint, late_evaluation, tail = _fill(end_t - lost_t, behind)
    gap = after.start_t - end_t if after is not None and not attempt.ended_on_request else 0.0
    down = after is not None and not attempt.ended_on_request
    within = {cause: sum(s.lost_s.get(cause, 0.0) for s in attempt.steps) for cause in CAUSES}
    return {
        **within,
        "set_up": 0.0 if again else ready_t - attempt.start_t,
        "checkpoint": checkpoint + late_checkpoint,
        "evaluation": evaluation + late_evaluation,
        "between_steps": between,
        "redone": within["redone"] + lost_t - kept_t,
        "restart": (ready_t - attempt.start_t if again else 0.0) + gap + (tail if down else 0.0),
        "tail": 0.0 if down else tail,
    }


def _ready_t(attempt: Attempt) -> float:
    """When its first step began; without any step, when its ranks were ready, or its last sign of life."""
    first = min((*attempt.steps, *attempt.redone), key=lambda s: s.t, default=None)
    if first is None:
        return max((float(e["t"]) for e in attempt.named("ready", "loaded")), default=attempt.end_t)
    evaluation = sum(_seconds(e) for e in attempt.named("eval") if float(e["t"]) <= first.t)
    return max(attempt.start_t, first.t - first.took_s - evaluation)


def _lost_until(attempt: Attempt, after: Attempt | None, kept_t: float, end_t: float) -> float:
    """Until when it worked behind its last step that counts, for nothing; `kept_t` where it lost nothing.

    The lines of lost steps are usually cut from the metrics: then the next attempt's `cut` event says when the last
    one was noted, else the first failure ends the work, else the last sign of life.
    """
    if attempt.ended_on_request:
        return kept_t
    times = [s.t for s in attempt.redone]
    times += _cut_t(after)
    if not times:
        times = [float(e["t"]) for e in attempt.named(*FAILURES)][:1]
    if not times and after is not None:
        times = [end_t]
    return min(end_t, max([kept_t, *times]))


def _cut_t(after: Attempt | None) -> list[float]:
    """When the last line was noted that the next attempt cut from the metrics, where it says so."""
    return [float(e["last_t"]) for e in (after.named("cut") if after is not None else [])]


def _stalls(attempt: Attempt, begin_t: float, end_t: float) -> tuple[float, float]:
    """Seconds that saves and evaluations noted in (begin_t, end_t] held the ranks up."""
    within = [e for e in attempt.named("save", "eval") if begin_t < float(e["t"]) <= end_t]
    saves = sum(float(e.get("stall_s") or 0.0) for e in within if e["event"] == "save")
    return saves, sum(_seconds(e) for e in within if e["event"] == "eval")


def _fill(room_s: float, stalls: tuple[float, float]) -> tuple[float, float, float]:
    """Checkpoint and evaluation seconds as far as there is room for them beside the steps, and what is left."""
    checkpoint = min(stalls[0], max(room_s, 0.0))
    evaluation = min(stalls[1], max(room_s - checkpoint, 0.0))
    return checkpoint, evaluation, room_s - checkpoint - evaluation


def _seconds(event: Mapping[str, Any]) -> float:
    return float(event.get("seconds") or 0.0)
