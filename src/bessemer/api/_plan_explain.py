"""The verbs `plan explain` and `plan compare`. Import no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.api._plan_inputs import job_request
from bessemer.core.errors import ConfigError, DataError
from bessemer.core.job import Job
from bessemer.core.units import format_seconds
from bessemer.keep.records import read_records
from bessemer.plan.axes import request_problems
from bessemer.plan.figures import prices_of
from bessemer.plan.gains import Gain, gains_text, layer_gains
from bessemer.plan.outcome import Details, Prices, layout_problems
from bessemer.plan.replayed import with_replay
from bessemer.plan.text import compare_text, details_text, layout_words

__all__ = ["Comparison", "Explained", "compare", "explain"]

WARM_UP = 5
"""Steps of a run that don't count for its median: the first ones build kernels."""


@dataclass(frozen=True)
class Explained:
    """One job's prediction; `measured_s`: the median step of a run of it, where one was given; `gains`: what its
    recipe gains in each kind of linear layer."""

    job_path: str
    details: Details
    measured_s: float | None = None
    around: bool = False
    recipe: str = ""
    gains: list[Gain] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        row = {
            **self.details.priced.row(self.details.index),
            **self.details.as_json(around=self.around),
            "linear_layers": [gain.as_json() for gain in self.gains],
            "kind": "modelled",
        }
        if self.measured_s is not None:
            row.update(measured_s=self.measured_s, error=row["step_s"] / self.measured_s - 1)
        return row

    def __str__(self) -> str:
        details = self.details
        words = layout_words(details.priced, details.index)
        request = details.priced.request
        lines = [f"{self.job_path} on {request.num_gpus} x {request.machine.name}: {words}  (modelled)"]
        lines += details_text(details, around=self.around)
        if self.gains:
            lines += ["", *gains_text(self.gains, self.recipe)]
        if self.measured_s is not None:
            predicted = float(details.priced.prices.step_s[details.index])
            lines += [
                "",
                f"  predicted {format_seconds(predicted)}, measured {format_seconds(self.measured_s)} "
                f"(median step): {predicted / self.measured_s - 1:+.1%}",
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """Two jobs' predictions side by side."""

    names: tuple[str, str]
    both: tuple[Details, Details]

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                **d.priced.row(d.index),
                "breakdown_s": d.priced.breakdown(d.index),
                "memory_lines_bytes": d.priced.memory(d.index),
            }
            for d in self.both
        ]
        a, b = rows
        return {"a": a, "b": b, "step_ratio": b["step_s"] / a["step_s"], "kind": "modelled"}

    def __str__(self) -> str:
        return compare_text(self.names, self.both)


def explain(
    job_path: str,
    sets: Sequence[str] = (),
    *,
    run: str | None = None,
    around: bool = False,
    trace: str | None = None,
) -> Explained:
    """Say where each millisecond and byte of a job's step goes, without starting it.

    job_path: The job file (TOML).
    sets: Override a field: --set train.micro_batch=4. May be repeated.
    run: A run folder of this job: its measured median step is held against the prediction.
    around: Say too what each single change would cost, what breaks first, and what the step hangs on.
    trace: Write the replayed step of every pipeline rank to this file, for ui.perfetto.dev or chrome://tracing.
    """
    measured_s = None if run is None else _median_step_s(Path(run))
    job, details = _details(job_path, tuple(sets))
    if trace is not None:
        from bessemer.plan.replay_layout import replay_layout
        from bessemer.plan.timeline import write_trace

        write_trace(replay_layout(details.priced, details.index), Path(trace))
    gains = layer_gains(job, details.priced.request.spec, details.priced.request.machine)
    return Explained(job_path, details, measured_s, around, job.precision.recipe, gains)


def compare(job_a: str, job_b: str, sets: Sequence[str] = ()) -> Comparison:
    """Two jobs side by side: where the predicted step of each spends its time and memory.

    job_a: A job file (TOML).
    job_b: Another one.
    sets: Override a field in both: --set train.global_batch=512. May be repeated.
    """
    return Comparison((job_a, job_b), (_details(job_a, tuple(sets))[1], _details(job_b, tuple(sets))[1]))


def _details(path: str, sets: tuple[str, ...]) -> tuple[Job, Details]:
    job, request, layouts = job_request(path, sets)
    problems = request_problems(request) + layout_problems(request, layouts)
    if problems:
        raise ConfigError(problems, path)
    return job, Details(with_replay(prices_of(request, layouts)), 0, Prices())


def _median_step_s(run: Path) -> float:
    """The median of the measured steps of a run folder, its first ones left out. DataError without enough of them."""
    file = run / "metrics.jsonl"
    steps = [record["step_s"] for record in read_records(file)] if file.is_file() else []
    if len(steps) <= WARM_UP:
        raise DataError(f"{file} has {len(steps)} steps, a median needs more than {WARM_UP}", fix="train for longer")
    return statistics.median(steps[WARM_UP:])
