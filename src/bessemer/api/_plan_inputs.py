"""What the verbs of `bessemer plan` read alike: the model, the machine with its calibration, a job."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

from bessemer.core.errors import ConfigError
from bessemer.core.job import Job, ModelSection
from bessemer.core.job_file import load_job
from bessemer.core.machine import Machine, load_machine, machine_names
from bessemer.core.model import ModelSpec
from bessemer.core.presets import PRESETS
from bessemer.core.problem import Problem, nearest
from bessemer.core.resolve import resolve_model
from bessemer.plan.axes import Request
from bessemer.plan.calibration import ERAS, Calibration
from bessemer.plan.local import LOCAL_ERA, local_calibration
from bessemer.plan.space import Layouts
from bessemer.plan.units_check import unit_problems
from bessemer.runtime.host import cpu_model, usable_cores

__all__ = ["ERA", "job_request", "read_machine", "read_model", "software"]

ERA = "megatron-2026"


def read_model(name: str) -> ModelSpec:
    """A preset, or the path of a Hugging Face folder or its config.json."""
    looks_like_path = name not in PRESETS and ("/" in name or name.endswith(".json") or Path(name).exists())
    return resolve_model(ModelSection(hf=name) if looks_like_path else ModelSection(preset=name))


def read_machine(name: str) -> tuple[Machine, Calibration | None]:
    """The machine of that name or file, and what was calibrated for it on this computer. ConfigError for an unknown
    one (with the way to calibrate it), for figures in the wrong unit, and for another device's calibration."""
    try:
        machine = load_machine(name)
    except ConfigError as error:
        hint = "`bessemer plan calibrate` measures the machine at hand; with --sheet it writes one from a data sheet"
        raise ConfigError([_with_hint(p, hint) for p in error.problems], error.source) from error
    problems = unit_problems(machine) if machine.name not in machine_names() else []
    if problems:
        raise ConfigError(problems, f"machine {machine.name}")
    by_path = "/" in name or name.endswith(".toml")
    device = _this_computer() if machine.name == "cpu-local" else machine.name
    return machine, local_calibration(machine, device=device, machine_path=name if by_path else None)


def _this_computer() -> str | None:
    """The words by which a calibration names the computer it was made on; None without torch, which it names too."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"{cpu_model()}, {usable_cores()} cores, torch {torch}"


def _with_hint(problem: Problem, hint: str) -> Problem:
    return replace(problem, fix=f"{problem.fix}, or {hint}") if problem.code == "machine-unknown" else problem


def software(name: str | None, calibration: Calibration | None) -> str:
    """The framework era that is priced: the given one, else this trainer's on a machine that was calibrated with it,
    else current Megatron."""
    if name is None:
        return ERA if calibration is None else LOCAL_ERA
    if name in (*ERAS, LOCAL_ERA):
        return name
    near = nearest(name, ERAS, count=1) or [ERA]
    problem = Problem(
        code="plan-software",
        where="software",
        what=f"{name!r} is no software that was calibrated",
        why="known: " + ", ".join((*ERAS, LOCAL_ERA)),
        fix=f"--software-era {near[0]}",
    )
    raise ConfigError([problem], "the request")


def job_request(path: str, sets: tuple[str, ...] = ()) -> tuple[Job, Request, Layouts]:
    """A job file as a request and its one layout."""
    job = load_job(path, sets)
    spec = resolve_model(job.model)
    machine, calibration = read_machine(job.machine.name)
    if machine.device != "cpu":
        machine = machine.model_copy(update={"gpus_per_node": job.machine.gpus_per_node})
    request = Request(
        spec=spec,
        machine=machine,
        num_gpus=job.layout.world_size,
        global_batch=job.train.global_batch,
        seq_len=job.data.seq_len,
        era=software(None, calibration),
        calibration=calibration,
        own=True,
        precision=job.precision,
    )
    return job, request, Layouts.from_job(job)
