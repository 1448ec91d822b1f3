"""Contradictions in what a run leaves for its inspection. No torch: `bessemer check` runs them before anything
starts."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.core.job import InspectSection, Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem
from bessemer.core.units import counted

__all__ = ["problems"]


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """All contradictions of the [inspect] table with itself and the length of the run."""
    del spec, machine
    return [*_dumps(job.inspect), *_traces(job), *_flight(job)]


def _problem(code: str, where: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=f"inspect.{where}", what=what, why=why, fix=fix)


def _dumps(section: InspectSection) -> Iterator[Problem]:
    if section.dumps:
        return
    default = InspectSection()
    for name in ("dump_mb", "redact"):
        value = getattr(section, name)
        if value != getattr(default, name):
            what = f"{name} = {str(value).lower()} has no effect with dumps = 0"
            fix = f"delete it, or inspect.dumps = {default.dumps}"
            yield _problem("ignored-setting", name, what, why="no dump is written that it could shape", fix=fix)


def _traces(job: Job) -> Iterator[Problem]:
    section, steps = job.inspect, job.train.steps
    if section.trace_every > steps:
        what = f"trace_every = {section.trace_every} is longer than the run of {counted(steps, 'step')}"
        fix = f"inspect.trace_every = {max(1, steps // 4)}, or 0: none"
        yield _problem("trace-every", "trace_every", what, why="it would never come to a step to record", fix=fix)
    if section.traces != InspectSection().traces and not section.trace_every and section.trace_on == "none":
        what = f'traces = {section.traces} has no effect with trace_every = 0 and trace_on = "none"'
        fix = 'delete it, or inspect.trace_every = 100, or inspect.trace_on = "file"'
        yield _problem("ignored-setting", "traces", what, why="no step is recorded", fix=fix)


def _flight(job: Job) -> Iterator[Problem]:
    section, default = job.inspect, InspectSection()
    if section.flight == "evict" and job.keep.mode == "restart" and not job.keep.restarts:
        what = 'flight = "evict" with keep.mode = "restart" and keep.restarts = 0'
        why = "the first rank that is evicted would end the run"
        fix = 'keep.restarts = 3, keep.mode = "zero-interruption", or inspect.flight = "tell"'
        yield _problem("flight-evict", "flight", what, why=why, fix=fix)
    for name in ("hash_every", "rerun_every") if job.replicas < 2 else ():
        if getattr(section, name) != getattr(default, name):
            what = f"{name} = {getattr(section, name)} has no effect with one copy of the model"
            yield _problem("ignored-setting", name, what, why="there is nothing to compare it with", fix="delete it")
