"""Contradictions in replicas, units and checkpoints. No torch: `bessemer check` runs them before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bessemer.core.job import Job, KeepSection
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, divisors_near, nearest, one_of

__all__ = ["problems"]


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """All contradictions of the [keep] table with itself, the data-parallel layout and `run.resume`."""
    del spec, machine
    return [*_replicas(job), *_unit(job), *_mode(job), *_policy(job.keep), *_resume(job)]


def _problem(code: str, where: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=where, what=what, why=why, fix=fix)


def _replicas(job: Job) -> Iterator[Problem]:
    dp, dp_shard, replicas = job.layout.dp, job.layout.dp_shard, job.replicas
    span = job.layout.expert_span
    if dp_shard == "none" and replicas != dp // span:
        what = f"replicas = {replicas} with dp = {dp} and nothing sharded"
        why = 'with layout.dp_shard = "none" each data-parallel rank is a whole copy of the model'
        if span > 1:
            why = f"{span} data-parallel ranks share the experts, and so are one copy of the model"
        fix = f"delete keep.replicas (it is {dp // span}), or layout.dp = {replicas * span}"
        if dp % replicas == 0:
            fix += ', or layout.dp_shard = "full"'
        yield _problem("replicas", "keep.replicas", what, why=why, fix=fix)
    elif dp % replicas:
        what = f"replicas = {replicas} does not divide dp = {dp}"
        why = "dp = replicas x the ranks that one copy is sharded over"
        yield _problem("replicas", "keep.replicas", what, why=why, fix=one_of("keep.replicas", divisors_near(dp)))
    elif dp_shard != "none" and job.shard * job.layout.cp == 1:
        what = f'dp_shard = "{dp_shard}" has nothing to share out: dp {dp} / replicas {replicas} leaves one rank a copy'
        fix = 'layout.dp_shard = "none"' + (", or fewer keep.replicas" if replicas > 1 else ", or layout.dp = 2")
        yield _problem("ignored-setting", "layout.dp_shard", what, why="state is sharded inside a copy", fix=fix)


def _unit(job: Job) -> Iterator[Problem]:
    if job.keep.unit is None or job.layout.dp % job.replicas:
        return
    pass_samples = job.train.micro_batch * job.shard
    if job.keep.unit % pass_samples:
        what = f"unit = {job.keep.unit} is not a multiple of micro_batch {job.train.micro_batch} x shard {job.shard}"
        below = job.keep.unit // pass_samples * pass_samples
        near = [u for u in (below, below + pass_samples) if u > 0]
        why = "a unit is a whole number of forward passes of one copy of the model"
        yield _problem("unit-split", "keep.unit", what, why=why, fix=one_of("keep.unit", near))


def _mode(job: Job) -> Iterator[Problem]:
    keep, default = job.keep, KeepSection()
    if keep.memory_every and not keep.restarts:
        what = f"memory_every = {keep.memory_every} has no effect with restarts = 0"
        why = "copies in memory are for ranks that are started again; without, the run and its memory end"
        yield _problem("ignored-setting", "keep.memory_every", what, why=why, fix="keep.restarts = 3, or delete it")
    if keep.mode == "restart":
        for name in ("min_replicas", "spares", "sums", "lease_s"):
            value = getattr(keep, name)
            if value != getattr(default, name):
                shown = f'"{value}"' if isinstance(value, str) else value
                what = f'{name} = {shown} has no effect with mode = "restart"'
                why = "it is for runs that go on while members die"
                yield _problem("ignored-setting", f"keep.{name}", what, why=why, fix="delete it")
        return
    if job.replicas < 2 and not keep.spares:
        what = 'mode = "zero-interruption" with one copy of the model and no spare'
        why = "when a rank of the only copy dies nobody is left that could go on"
        fix = "layout.dp = 2, or keep.spares = 1"
        yield _problem("one-replica", "keep.mode", what, why=why, fix=fix)
    if keep.sums == "exact" and job.precision.fall_back:
        what = 'sums = "exact" with precision.fall_back'
        why = "a layer falls back by figures that are summed in floating point, in an order that a lost group changes"
        yield _problem("not-exact", "keep.sums", what, why=why, fix='keep.sums = "fast", or delete precision.fall_back')
    if keep.min_replicas is not None and keep.min_replicas > job.replicas:
        what = f"min_replicas = {keep.min_replicas} is more than the {job.replicas} replicas of the run"
        why = "the run would stop at once"
        fix = f"keep.min_replicas = {job.replicas} or less"
        yield _problem("min-replicas", "keep.min_replicas", what, why=why, fix=fix)


def _policy(keep: KeepSection) -> Iterator[Problem]:
    if keep.every == 0 and keep.keep_every:
        what = f"keep_every = {keep.keep_every} has no effect with every = 0"
        why = "every = 0 saves only at the end"
        fix = f"delete it, or keep.every = {keep.keep_every}"
        yield _problem("ignored-setting", "keep.keep_every", what, why=why, fix=fix)


def _resume(job: Job) -> Iterator[Problem]:
    """Whether an explicitly named checkpoint is there; whether it can be read is found when it is opened."""
    resume = job.run.resume
    if resume in ("auto", "never") or Path(resume).expanduser().is_dir():
        return
    near = nearest(resume, ("auto", "never"), count=1)
    found = sorted((job.run.folder / "checkpoints").glob("step-*"), key=_step)
    choices = [f'"{near[0]}"'] if near else ['"auto"', '"never"']
    choices += [f'"{path}"' for path in found[-2:]]
    what = f'resume = "{resume}" is not a checkpoint folder'
    why = "a checkpoint that is named must be there; the run won't silently start afresh"
    yield _problem("resume-missing", "run.resume", what, why=why, fix=one_of("run.resume", choices))


def _step(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1
