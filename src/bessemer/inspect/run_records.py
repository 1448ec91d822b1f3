"""A run as its folder tells it: the job, and the attempts with their committed steps and events.

Only `job.toml`, `metrics.jsonl` and `events.jsonl` are read. A torn last line of either is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.errors import DataError, RequestError
from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.keep.records import read_records

__all__ = ["Attempt", "RunRecords", "StepRecord", "read_run"]

ON_REQUEST = ("finished", "stopped")
FAILURES = ("rank_lost", "failed")


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl: `step` counts from 1, times in seconds, `t` when it was noted (unix seconds).

    comm_s is what the ranks waited for each other, on average, with nothing else to do. lost_s: seconds by cause that
    are no part of step_s any more (`inspect.interruptions`).
    """

    step: int
    samples: int
    step_s: float
    comm_s: float
    t: float
    lost_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def took_s(self) -> float:
        """From its begin to its commit."""
        return self.step_s + sum(self.lost_s.values())


@dataclass
class Attempt:
    """From one `start` event to the last record before the next one. Times in unix seconds.

    steps: those that count in the end. redone: those that a later attempt (or line) did again.
    """

    start: Mapping[str, Any]
    events: list[Mapping[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    redone: list[StepRecord] = field(default_factory=list)

    @property
    def start_t(self) -> float:
        return float(self.start["t"])

    @property
    def end_t(self) -> float:
        """The last sign of life."""
        times = [float(e["t"]) for e in self.events] + [s.t for s in (*self.steps, *self.redone)]
        return max(times, default=self.start_t)

    @property
    def world_size(self) -> int:
        return int(self.start["world_size"])

    @property
    def ended_on_request(self) -> bool:
        """Whether it finished, or was stopped by somebody who then gave its devices back."""
        return any(e["event"] in ON_REQUEST for e in self.events)

    def named(self, *names: str) -> list[Mapping[str, Any]]:
        """Its events of these names, in order."""
        return [e for e in self.events if e["event"] in names]


@dataclass(frozen=True)
class RunRecords:
    """All of a run. `attempts` is never empty, but may hold no steps."""

    folder: Path
    job: Job
    attempts: list[Attempt]

    @property
    def steps(self) -> list[StepRecord]:
        return [step for attempt in self.attempts for step in attempt.steps]


def read_run(folder: Path) -> RunRecords:
    """The records of the run folder.

    RequestError `no-run` where it is no run folder or nothing has started in it; DataError `damaged-records` for a
    line that is not a record, other than a torn last one.
    """
    for name in ("job.toml", "events.jsonl"):
        if not (folder / name).is_file():
            raise RequestError(f"{folder} is no run folder: it has no {name}", code="no-run", fix=_known_runs(folder))
    attempts: list[Attempt] = []
    for event in read_records(folder / "events.jsonl"):
        _require(event, ("t", "event"), folder / "events.jsonl")
        if event["event"] == "start":
            _require(event, ("world_size",), folder / "events.jsonl")
            attempts.append(Attempt(event))
        elif attempts:
            attempts[-1].events.append(event)
    if not attempts:
        raise RequestError(f"nothing has started in {folder} yet", code="no-run", fix="bessemer train JOB")
    _add_steps(attempts, folder / "metrics.jsonl")
    return RunRecords(folder, load_job(folder / "job.toml"), attempts)


def _add_steps(attempts: list[Attempt], file: Path) -> None:
    """Give each line to the attempt that wrote it. A step counts once: where it was done last, and only if no later
    attempt went back before it."""
    last_line: dict[int, int] = {}
    lines: list[tuple[int, StepRecord]] = []
    for number, record in enumerate(read_records(file)):
        step = _step(record, file)
        owner = max((i for i, a in enumerate(attempts) if a.start_t < step.t), default=0)
        lines.append((owner, step))
        last_line[step.step] = number
    back_to = [min((int(e["step"]) for e in a.named("loaded")), default=None) for a in attempts]
    for number, (owner, step) in enumerate(lines):
        later = (b for b in back_to[owner + 1 :] if b is not None)
        counts = last_line[step.step] == number and all(step.step <= b for b in later)
        (attempts[owner].steps if counts else attempts[owner].redone).append(step)


def _step(record: Mapping[str, Any], file: Path) -> StepRecord:
    _require(record, ("step", "samples", "step_s", "t"), file)
    first, end = record["samples"]
    comm_s = (record.get("phases") or {}).get("comm_s") or 0.0
    return StepRecord(int(record["step"]), int(end) - int(first), float(record["step_s"]), comm_s, float(record["t"]))


def _require(record: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> None:
    missing = [k for k in keys if record.get(k) is None]
    if missing:
        raise DataError(
            f"{file}: the record {dict(record)} has no {' and no '.join(missing)}",
            code="damaged-records",
            fix=f"delete that line of {file}, or restore the file",
        )


def _known_runs(folder: Path) -> str:
    """What to type instead: the run folders below or beside the path."""
    for place in (folder, folder.parent):
        found = sorted(str(p.parent) for p in place.glob("*/job.toml")) if place.is_dir() else []
        if found:
            return "a run folder, such as " + ", ".join(found[:4])
    return "the path of a run folder, runs/NAME"
