"""`bessemer train JOB --dry-run`: what each rank would hold, beside the planner's prediction."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.machine import Machine, load_machine
from bessemer.core.memory import rank_lines
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem
from bessemer.core.units import counted, format_bytes, format_count, format_seconds
from bessemer.plan.own_memory import own_rank_lines
from bessemer.plan.space import Layouts

__all__ = ["DryRun", "RankRow", "dry_run"]

LINES = ("weights", "gradients", "optimizer", "gathered", "activations", "working")
"""Bytes of a rank, as `train.dry_run` counts them."""
_IN_PLAN = {"working": "transient"}


@dataclass(frozen=True)
class RankRow:
    """A pipeline rank. `parameters`: elements that it keeps. `run`, `planner`: bytes by line, with their total."""

    pipeline_rank: int
    layers: tuple[int, ...]
    parameters: int
    run: Mapping[str, int]
    planner: Mapping[str, float]

    def difference(self, line: str) -> float | None:
        """By how much the planner is above what was counted, as a fraction; None where nothing was."""
        return self.planner[line] / self.run[line] - 1 if self.run[line] else None


@dataclass(frozen=True)
class DryRun:
    """A job that was built and run in shapes only."""

    job: Job
    spec: ModelSpec
    machine: Machine
    rows: tuple[RankRow, ...]
    seconds: float
    exit_code: int = 0

    @property
    def largest_bytes(self) -> int:
        return max(row.run["total"] for row in self.rows)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits the machine's memory (all ranks that of one computer); None: it isn't known."""
        limit = self.machine.limit_bytes
        if limit is None:
            return None
        sharing = 1
        if self.machine.device == "cpu":
            ranks = self.job.layout.world_size
            sharing = ranks if self.machine.name == "cpu-local" else min(ranks, self.machine.gpus_per_node)
        return self.largest_bytes * sharing <= limit

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": self.job.layout.world_size,
            "job_hash": self.job.hash,
            "machine": self.machine.name,
            "limit_bytes": self.machine.limit_bytes,
            "fits": self.fits,
            "pipeline_ranks": [
                {
                    "pipeline_rank": row.pipeline_rank,
                    "layers": list(row.layers),
                    "parameters": row.parameters,
                    "bytes": dict(row.run),
                    "planner_bytes": {line: round(size) for line, size in row.planner.items()},
                    "difference": {line: row.difference(line) for line in row.run},
                }
                for row in self.rows
            ],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        layout = self.job.layout
        degrees = [f"{axis} {getattr(layout, axis)}" for axis in ("dp", "cp", "tp", "pp") if getattr(layout, axis) > 1]
        inside = [f"{axis} {getattr(layout, axis)}" for axis in ("ep", "etp") if getattr(layout, axis) > 1]
        ranks = counted(layout.world_size, "rank") + (": " + " x ".join(degrees) if degrees else "")
        names = (*LINES, "total")
        head = f"  {'rank':>4}  {'layers':>6}  {'parameters':>10}  {'GiB':7}" + "".join(f"{n:>13}" for n in names)
        lines = [f"{ranks}{', ' + ', '.join(inside) if inside else ''}; {self.spec.family}, nothing was started", head]
        for row in self.rows:
            first = f"  {row.pipeline_rank:>4}  {len(row.layers):>6}  {format_count(row.parameters):>10}  "
            blank = " " * len(first)
            lines.append(first + f"{'run':7}" + "".join(f"{row.run[n] / 2**30:13.2f}" for n in names))
            lines.append(blank + f"{'planner':7}" + "".join(f"{row.planner[n] / 2**30:13.2f}" for n in names))
            differences = [row.difference(n) for n in names]
            lines.append(blank + " " * 7 + "".join(f"{'' if d is None else f'{d:+.1%}':>13}" for d in differences))
        limit = self.machine.limit_bytes
        room = "" if limit is None else f"; {self.machine.name} has {format_bytes(limit)}"
        lines.append(
            f"the fullest rank holds {format_bytes(self.largest_bytes)}{room}"
            + ("" if self.fits is not False else ": too little")
        )
        if self.job.train.compile != "none":
            lines.append("counted without train.compile: compiled blocks choose for themselves what they save")
        lines.append(f"built and run in shapes in {format_seconds(self.seconds)}")
        return "\n".join(lines)


def dry_run(job: Job, spec: ModelSpec, ranks: int | None, source: str) -> DryRun:
    """`ranks`: how many the layout is expected to have. ConfigError where it has another number."""
    if ranks is not None and ranks != job.layout.world_size:
        raise ConfigError([_other_ranks(job, ranks)], source)
    from bessemer.train import dry_run as train

    start = time.perf_counter()
    found = train.dry_run(job, spec)
    rows = []
    for rank, planner in zip(found, _predicted(job, spec), strict=True):
        run = {**rank.lines, "total": rank.total}
        row = RankRow(
            rank.pipeline_rank, rank.layers, rank.parameters, run, {**planner, "total": sum(planner.values())}
        )
        rows.append(row)
    return DryRun(job, spec, load_machine(job.machine.name), tuple(rows), time.perf_counter() - start)


def _predicted(job: Job, spec: ModelSpec) -> list[dict[str, float]]:
    """By pipeline rank; where a job makes a choice of its own what to recompute, by the closed form of `check`."""
    if job.train.recompute == "budget" or job.train.recompute_modules is not None:
        lines = rank_lines(job, spec)
        return [{n: rank[n] + (rank["gradient_sum"] if n == "gradients" else 0) for n in LINES} for rank in lines]
    micro = np.array([job.train.global_batch / (job.train.micro_batch * job.layout.dp)])
    priced = own_rank_lines(Layouts.from_job(job), spec, job.data.seq_len, micro, precision=job.precision)
    return [{line: rank[_IN_PLAN.get(line, line)] for line in LINES} for rank in priced]


def _other_ranks(job: Job, ranks: int) -> Problem:
    layout = job.layout
    each = layout.world_size // layout.dp
    fix = f"--ranks {layout.world_size}"
    if ranks % each == 0:
        fix += f", or --set layout.dp={ranks // each} (and a batch that fits it)"
    return Problem(
        code="dry-run-ranks",
        where="ranks",
        what=f"--ranks {ranks}, and the job has {counted(layout.world_size, 'rank')}",
        why="the layout says how many: dp x cp x tp x pp",
        fix=fix,
    )
