"""Chaos: a job under faults beside the same job undisturbed, and what the faults cost.

    effective time = committed steps x median step of the control / seconds from the first commit to the last

A step lasts from one commit to the next. Steps that scatter have a mean above their median, so that the control itself
stays below 1 by this measure; `pace` leaves that out: the steps a second under faults over those of the control.

The control runs a part of its steps before the run with faults and the rest after it, since the machine may be quieter
at one time than at the other; the smaller median counts, of as many steps behind as before. It also gives the bits that
the disturbed run has to end with.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.core.units import counted, format_seconds
from bessemer.inspect.chaos_faults import Plan
from bessemer.inspect.chaos_hosts import Namespaces
from bessemer.inspect.chaos_run import ChaosRun, Thrown
from bessemer.inspect.ledger import read_ledger
from bessemer.keep.records import read_records

__all__ = ["Chaos", "Commits", "run_chaos", "same_bits", "summarise"]

COLD_STEPS = 5
"""First steps of a run, which load and compile."""
PACE_STEPS = 30
LEAST_STEPS = 40
LONG = 1.5
"""Between two commits: so many times the median is a loss."""
SETTLED_S = 20.0


@dataclass(frozen=True)
class Commits:
    """The committed steps of a run: numbers and unix times."""

    steps: tuple[int, ...]
    times: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> Commits:
        lines = [(int(r["step"]), float(r["t"])) for r in read_records(folder / "metrics.jsonl")]
        steps, times = zip(*sorted(lines), strict=True) if lines else ((), ())
        return cls(steps, times)

    def split(self, step: int) -> tuple[Commits, Commits]:
        """The steps up to and with `step`, and those behind it."""
        at = bisect.bisect_right(self.steps, step)
        return Commits(self.steps[:at], self.times[:at]), Commits(self.steps[at:], self.times[at:])

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each commit to the next."""
        return [end - begin for begin, end in pairwise(self.times)]

    @property
    def usual_s(self) -> float:
        """The median step, without the first ones."""
        if len(self.steps) <= COLD_STEPS + 1:
            raise RequestError(
                f"{counted(len(self.steps), 'step')} were committed: too few to tell how long one takes",
                code="chaos-job", fix=f"train.steps = {LEAST_STEPS}, or more",
            )  # fmt: skip
        return median(self.gaps_s[COLD_STEPS:])

    @property
    def mean_s(self) -> float:
        """The mean step, without the first ones."""
        return fmean(self.gaps_s[COLD_STEPS:])

    def effective_time(self, step_s: float) -> float:
        """What part of the time from the first commit to the last its steps would have taken at `step_s` each."""
        return (self.steps[-1] - self.steps[0]) * step_s / (self.times[-1] - self.times[0])

    def lost_s(self, t: float, until: float) -> float:
        """Seconds above the median interval of those intervals that end in (t, until] and are long."""
        usual = median(self.gaps_s)
        ends = zip(self.times[1:], self.gaps_s, strict=True)
        return sum(gap - usual for end, gap in ends if t < end and end - gap <= until and gap > LONG * usual)


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """What the faults cost. control_step_s: medians before and after; control_effective_time: of both parts by the same
    measure; pace: the control's mean step over that of the run with faults."""

    folder: Path
    finished: bool
    steps: int
    effective_time: float
    effective_time_all_devices: float
    pace: float
    control_effective_time: tuple[float, ...]
    control_step_s: tuple[float, ...]
    steps_lost: int
    restarts: int
    bitwise_equal: bool
    stability_lost_s: dict[str, float]
    faults: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "folder": str(self.folder)}

    def __str__(self) -> str:
        lines = [
            f"effective time          {self.effective_time:.2%}   of all devices, spares too "
            f"{self.effective_time_all_devices:.2%}   control "
            + ", ".join(f"{part:.2%}" for part in self.control_effective_time),
            f"pace                    {self.pace:.2%} of the control's",
            f"committed               {counted(self.steps, 'step')}, {self.steps_lost} lost, "
            f"{counted(self.restarts, 'restart')}" + ("" if self.finished else "; NOT FINISHED"),
            f"final state             {'equals the control, bit for bit' if self.bitwise_equal else 'DIFFERS'}",
            f"median step of control  {', '.join(format_seconds(s) for s in self.control_step_s)}",
        ]
        lost = {cause: s for cause, s in self.stability_lost_s.items() if s >= 0.0005}
        lines.append("lost                    " + ", ".join(f"{k} {format_seconds(s)}" for k, s in lost.items()))
        for fault in self.faults:
            whom = "" if fault["rank"] is None else f" rank {fault['rank']}{' (leader)' if fault['leader'] else ''}"
            whom += "" if fault["host"] is None else f" host {fault['host']}"
            end = fault["skipped"] or f"lost {format_seconds(fault['lost_s'])}"
            lines.append(f"  {fault['at_s']:8.1f} s  step {fault['step']:<6} {fault['kind']}{whom}: {end}")
        return "\n".join([*lines, f"runs: {self.folder}"])


def run_chaos(
    job: Job, plan: Plan, folder: Path, tell: Callable[[str], None], *, minutes: float | None = None, hosts: int = 1
) -> Chaos:
    """Part of the control, run with faults, rest of the control, in `folder`, each on so many hosts. `minutes`: how
    long the run with faults would take without them, instead of the job's number of steps."""

    def told(name: str) -> Callable[[str], None]:
        return lambda text: tell(f"{name:<9} {text}")

    if plan.cuts:
        Namespaces(hosts).__exit__()  # whether that can be done is better known before anything has run
    if minutes is not None:
        pace = _named(job, folder, "pace")
        told("pace")(f"{PACE_STEPS} steps, to know how many make {minutes:g} minutes")
        ChaosRun(pace, told("pace"), stop_after=PACE_STEPS, count=hosts).run()
        steps = max(LEAST_STEPS, round(60 * minutes / Commits.read(pace.run.folder).usual_s))
        job = job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})
    control, faulty = (_named(job, folder, name) for name in ("control", "faults"))
    part = max(PACE_STEPS, job.train.steps // 5)
    told("control")(f"{part} of {counted(job.train.steps, 'step')}")
    ChaosRun(control, told("control"), stop_after=part, count=hosts).run()
    stopped = Commits.read(control.run.folder).steps[-1]
    disturbed = ChaosRun(faulty, told("faults"), plan, count=hosts)
    told("faults")(counted(job.train.steps, "step"))
    disturbed.run()
    if stopped < job.train.steps:
        told("control")(f"the other {counted(job.train.steps - stopped, 'step')}")
        ChaosRun(control, told("control"), count=hosts).run()
    return summarise(job, folder, disturbed, stopped)


def summarise(job: Job, folder: Path, disturbed: ChaosRun, stopped: int) -> Chaos:
    """From the records of the two runs in `folder`. `stopped`: the step after which the control waited."""
    commits = Commits.read(folder / "faults")
    before, rest = Commits.read(folder / "control").split(stopped)
    near = before, rest.split(2 * stopped)[0]
    parts = [part for part in near if len(part.steps) > COLD_STEPS + 1]
    medians = tuple(part.usual_s for part in parts)
    effective = commits.effective_time(min(medians))
    events = list(read_records(folder / "faults" / "events.jsonl"))
    shared = job.replicas / (job.replicas + job.keep.spares)
    last = job.train.steps
    return Chaos(
        folder=folder,
        finished=bool(commits.steps) and commits.steps[-1] == last,
        steps=len(commits.steps),
        effective_time=effective,
        effective_time_all_devices=effective * shared,
        pace=fmean(part.mean_s for part in parts) / commits.mean_s,
        control_effective_time=tuple(part.effective_time(min(medians)) for part in parts),
        control_step_s=medians,
        steps_lost=sum(int(e["steps"]) for e in events if e["event"] == "cut"),
        restarts=disturbed.restarts,
        bitwise_equal=same_bits(folder / "control", folder / "faults", last),
        stability_lost_s=read_ledger(folder / "faults").wall.lost_s,
        faults=_faults(disturbed.thrown, commits),
    )


def same_bits(one: Path, other: Path, step: int) -> bool:
    """Whether both runs saved the same tensors at that step, by the checksums that were taken as they were written."""
    return (found := _checksums(one, step)) is not None and found == _checksums(other, step)


def _checksums(run: Path, step: int) -> set[tuple[Any, ...]] | None:
    from bessemer.keep.manifest import MANIFEST, Manifest, step_folder  # needs an extra

    file = run / "checkpoints" / step_folder(step) / MANIFEST
    if not file.exists():
        return None
    slices = Manifest.from_bytes(file.read_bytes(), str(file)).slices
    return {(s.name, s.dtype, s.global_shape, s.global_offset, s.shape, s.checksum) for s in slices}


def _faults(thrown: list[Thrown], commits: Commits) -> list[dict[str, Any]]:
    """Each with the seconds since the first commit, and what was lost until the next one, or until it had settled."""
    times = sorted(f.t for f in thrown)
    found = []
    for fault in thrown:
        following = times[bisect.bisect_right(times, fault.t) :]
        until = min([fault.t + SETTLED_S, *following])
        record = {k: v for k, v in fault.__dict__.items() if k != "t"}
        lost_s = 0.0 if fault.skipped else commits.lost_s(fault.t, until)
        found.append({**record, "at_s": fault.t - commits.times[0], "lost_s": lost_s})
    return found


def _named(job: Job, folder: Path, name: str) -> Job:
    return job.model_copy(update={"run": job.run.model_copy(update={"dir": str(folder), "name": name})})
