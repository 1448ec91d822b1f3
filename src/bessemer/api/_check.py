"""The verb `check`: every contradiction of a job, before anything is allocated or started. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from bessemer.core import problems as core
from bessemer.core.counts import flops_per_token, parameter_counts
from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.job_file import read_job
from bessemer.core.machine import Machine, load_machine
from bessemer.core.memory import job_bytes, memory_lines
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, render
from bessemer.core.resolve import resolve_model
from bessemer.core.units import counted, format_bytes, format_count, format_rate
from bessemer.data import problems as data
from bessemer.inspect import problems as inspect
from bessemer.keep import problems as keep
from bessemer.models import problems as models
from bessemer.parallel import problems as parallel
from bessemer.plan.gains import layer_gains
from bessemer.train import problems as train

__all__ = ["CheckResult", "check"]

T = TypeVar("T")

ROOMS: tuple[Callable[[Job, ModelSpec | None, Machine | None], list[Problem]], ...] = (
    core.problems,
    models.problems,
    parallel.problems,
    data.problems,
    train.problems,
    keep.problems,
    inspect.problems,
)
"""Every room's checks; they go as far as they can where the model or the machine couldn't be read (None)."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What is wrong with a job; without problems it may start. `job` and `spec` are None where they couldn't be read.

    `summary` holds, by title, what the job amounts to, `memory` the modelled bytes of its fullest rank by line; both
    are empty where there are problems.
    """

    source: str
    problems: tuple[Problem, ...]
    job: Job | None
    spec: ModelSpec | None
    summary: dict[str, str]
    memory: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else ConfigError.exit_code

    def as_json(self) -> dict[str, Any]:
        found = {"ok": self.ok, "problems": [asdict(p) for p in self.problems]}
        if self.job is None or not self.ok:
            return found
        return {**found, "job_hash": self.job.hash, "summary": self.summary, "memory_bytes": self.memory}

    def __str__(self) -> str:
        if self.problems:
            return render(self.problems, self.source)
        width = max(map(len, self.summary)) + 2
        lines = [f"  {title:<{width}}{text}" for title, text in self.summary.items()]
        return "\n".join([f"{self.source}: no problems", *lines])


def check(job_path: str, sets: Sequence[str] = ()) -> CheckResult:
    """Find every contradiction in a job file before anything starts.

    Checks the file's spelling, then model, data, layout, batch, precision and machine against each other. Allocates
    nothing. Prints what the job amounts to, or all problems at once with what to type instead (exit code 2).

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=50. May be repeated.
    """
    draft = read_job(job_path, sets)
    job, problems = draft.job, list(draft.problems)
    spec = machine = None
    if job is not None:
        spec = _gather(lambda: resolve_model(job.model), problems)
        machine = _gather(lambda: load_machine(job.machine.name), problems)
        for room in ROOMS:
            problems += [p for p in room(job, spec, machine) if not _rests_on(p, draft.doubtful)]
    problems.sort(key=_place)
    if problems or job is None or spec is None or machine is None:
        return CheckResult(source=job_path, problems=tuple(problems), job=job, spec=spec, summary={}, memory={})
    summary = _summary(job, spec, machine)
    return CheckResult(
        source=job_path, problems=(), job=job, spec=spec, summary=summary, memory=memory_lines(job, spec)
    )


def _gather(read: Callable[[], T], problems: list[Problem]) -> T | None:
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


def _place(problem: Problem) -> int:
    """Problems are told in the order of the tables; what concerns the file as a whole stands first."""
    table = re.split(r"\W", problem.where, maxsplit=1)[0]
    return list(Job.model_fields).index(table) if table in Job.model_fields else -1


def _rests_on(problem: Problem, doubtful: Collection[str]) -> bool:
    """Whether a problem speaks of a field that stands at a guess: then it may vanish once the slip is mended."""
    text = f"{problem.where} {problem.what} {problem.why}"
    return any(re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", text) for name in doubtful)


def _summary(job: Job, spec: ModelSpec, machine: Machine) -> dict[str, str]:
    counts, seq_len, layout, batch = parameter_counts(spec), job.data.seq_len, job.layout, job.train.global_batch
    active = f" ({format_count(counts.active)} active)" if counts.active != counts.total else ""
    flops = flops_per_token(spec, seq_len).training
    tokens = job.samples_before(job.train.steps) * seq_len
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in ("dp", "cp", "tp", "pp") if getattr(layout, axis) > 1]
    corpus = "mixture" if job.data.mixture else ", ".join(job.data.paths) or job.data.corpus or "python-stdlib"
    hosted = () if machine.device == "cpu" else ("process", "checkpoint_copy")  # in the host's memory
    lines = {name: size for name, size in memory_lines(job, spec).items() if name not in hosted}
    largest = sorted(lines.items(), key=lambda line: -line[1])[:3]
    limit = machine.limit_bytes
    ranks = f"{layout.world_size} rank" + ("s: " + " x ".join(degrees) if layout.world_size > 1 else "")
    return {
        "model": f"{spec.family}, {counts.total:,} parameters{active}, {counted(spec.num_layers, 'layer')}",
        "data": f"{corpus}; tokenizer {job.data.tokenizer}; {counted(seq_len, 'token')} a sequence",
        "batch": f"{counted(batch, 'sequence')} = {counted(batch * seq_len, 'token')} a step, "
        f"in units of {counted(job.unit, 'sequence')}",
        "run": f"{counted(job.train.steps, 'step')} = {format_count(tokens)} token{'s' if tokens != 1 else ''}",
        "compute": f"{_flops(flops)} a token (forward and backward, causal), {_flops(flops * tokens)} in all",
        "layout": ranks + (f"; {job.shard} ranks share a copy (dp_shard {layout.dp_shard})" if job.shard > 1 else ""),
        "machine": f"{machine.name}, {job.precision.recipe}",
        **_quantised(job, spec, machine),
        "memory": f"{format_bytes(job_bytes(job, spec, machine))}"
        + (f" of {format_bytes(limit)}" if limit else "")
        + " (modelled); a rank's largest: "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in largest),
        "run folder": str(job.run.folder),
    }


def _quantised(job: Job, spec: ModelSpec, machine: Machine) -> dict[str, str]:
    """Which linear layers a quantised recipe runs, and what it is predicted to gain in them."""
    gains = layer_gains(job, spec, machine)
    if not gains:
        return {}
    low, high = ([g for g in gains if bool(g.high) is kept] for kept in (False, True))
    text = f"{job.precision.recipe}: {', '.join(dict.fromkeys(g.name for g in low)) or 'none'}"
    speeds = [g.speedup for g in low if g.speedup is not None]
    if speeds:
        text += f" ({min(speeds):.2f} to {max(speeds):.2f} times as fast as bf16, modelled)"
    elif gains[0].unknown:
        text += f" ({gains[0].unknown})"
    return {"linear layers": text + (f"; high: {', '.join(dict.fromkeys(g.name for g in high))}" if high else "")}


def _flops(count: float) -> str:
    return format_rate(count, "FLOP").removesuffix("/s")
