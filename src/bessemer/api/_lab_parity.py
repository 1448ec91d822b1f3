"""The verb `lab parity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.api._check import ROOMS, check
from bessemer.api._extras import need
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.job import Job
from bessemer.core.job_file import read_job
from bessemer.core.machine import load_machine
from bessemer.core.paths import user_path
from bessemer.core.problem import Problem
from bessemer.core.resolve import resolve_model
from bessemer.lab.parity import Parity, analyse
from bessemer.lab.parity_driver import train_all, train_child
from bessemer.lab.parity_jobs import check_folders, lab_jobs, recipe_names
from bessemer.lab.parity_page import write_report
from bessemer.lab.progress import Progress

__all__ = ["ParityReport", "parity"]

RECIPES = "bf16,fp8-delayed,fp8-current,fp8-block128,mxfp8"


@dataclass(frozen=True)
class ParityReport:
    """The comparison, and the folder of its runs and its report."""

    found: Parity
    folder: Path

    def as_json(self) -> dict[str, Any]:
        return {**self.found.as_json(), "folder": str(self.folder), "report": str(self.folder / "report.html")}

    def __str__(self) -> str:
        return f"{self.found.text()}\n\nreport: {self.folder / 'report.html'}"


def parity(
    job_path: str, sets: Sequence[str] = (), *, recipes: str = RECIPES, seeds: int = 3, runs: str = ""
) -> ParityReport:
    """Train a job under several recipes and tell whether any differs from bf16 by more than seeds do.

    Every run is a `bessemer train` of its own, one after another; a finished one is used again, a broken one goes on.
    Differences are taken between runs of the same seed, which share initialisation and order of data. Writes
    report.html, parity.json and the plots beside the runs.

    job_path: The job file (TOML). Its recipe is replaced; its seed is the first.
    sets: Override a field: --set train.steps=50. May be repeated.
    recipes: Names with commas between them; "current" is short for fp8-current. bf16 is always trained.
    seeds: How many seeds, counted up from the job's.
    runs: The folder of the runs and the report. Default: the job's run folder with -parity behind its name.
    """
    need("lab parity", "train")
    from bessemer.keep.launch import find_launch

    if find_launch() is not None:
        raise RequestError(
            "a launcher started this process as one rank of a run", code="lab-launcher", fix="start it by hand"
        )
    names = recipe_names(recipes)
    draft = read_job(job_path, sets)
    if draft.problems or draft.job is None:
        raise ConfigError(draft.problems, job_path)
    job = draft.job
    spec, machine = resolve_model(job.model), load_machine(job.machine.name)
    folder = user_path(runs) if runs else job.run.folder.with_name(f"{job.run.name}-parity")

    def problems(variant: Job) -> list[Problem]:
        return [problem for room in ROOMS for problem in room(variant, spec, machine)]

    series = lab_jobs(job, names, seeds, folder, problems)
    check_folders(series)
    train_all(series, folder / "jobs", Progress(series), train_child)
    summary = check(str(series[0].folder / "job.toml")).summary
    found, curves = analyse(job.run.name, {k: summary[k] for k in ("model", "data", "batch", "run")}, series)
    write_report(found, curves, folder)
    return ParityReport(found, folder)
