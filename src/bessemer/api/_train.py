"""The verb `train`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from bessemer.api._check import check
from bessemer.api._dry_run import DryRun
from bessemer.api._dry_run import dry_run as run_dry
from bessemer.api._extras import need
from bessemer.api._flight import beside
from bessemer.api._takeoff import before_training
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from bessemer.core.job import Job
    from bessemer.keep.progress import Printer

__all__ = ["Trained", "train"]

PROGRESS_EVERY_S = 3.0


@dataclass(frozen=True)
class Trained:
    """How the run ended; what there was to say has been printed on the way. `dry`: what a dry run found."""

    json_needs: ClassVar[str] = "dry_run"
    """The flag without which there is nothing to print as JSON."""

    exit_code: int
    dry: DryRun | None = None

    def as_json(self) -> dict[str, Any]:
        return {} if self.dry is None else self.dry.as_json()

    def __str__(self) -> str:
        return "" if self.dry is None else str(self.dry)


def train(
    job_path: str, sets: Sequence[str] = (), *, quiet: bool = False, dry_run: bool = False, ranks: int | None = None
) -> Trained:
    """Train the model of a job file, or go on with it.

    Checks the job, then starts one process a rank on this host and watches over them; under torchrun, Slurm or MPI
    it takes part as the rank that the launcher made it or, in a job that goes on while groups of ranks are lost, as
    the agent of one of several hosts. Ctrl-C finishes the step, saves and exits with 3; the same
    command goes on from there. Ranks on several hosts first check these (`run.takeoff`); exit code 4: one is bad.

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=50. May be repeated.
    quiet: Print no line a step.
    dry_run: Start nothing: build the job's ranks in shapes only, run a step of each kind of rank, and print what they
        hold beside the planner's prediction.
    ranks: With --dry-run: how many ranks the job is expected to have.
    """
    need("train", "train")
    if ranks is not None and not dry_run:
        raise RequestError("--ranks goes with --dry-run", code="dry-run-ranks", fix="the layout says how many ranks")
    checked = check(job_path, sets)
    # a dry run says how much memory is too little
    problems = tuple(p for p in checked.problems if not (dry_run and p.code == "memory"))
    if problems:
        raise ConfigError(problems, job_path)
    assert checked.job is not None and checked.spec is not None, "a job without problems was read"
    if dry_run:
        return Trained(0, run_dry(checked.job, checked.spec, ranks, job_path))
    from bessemer.keep.launch import find_launch

    job, launch = checked.job, find_launch()
    # what the check keeps lives as long as this function: see `inspect.takeoff_launch`
    code, _kept = before_training(job, checked.spec, launch if job.keep.mode == "restart" else None)
    if code:
        return Trained(code)
    if launch is not None and job.keep.mode == "restart":
        from bessemer.train.worker import join

        return Trained(join(job, beside(job)))
    from bessemer.keep.agent import Options, run

    prepare = partial(_prepare_data, job)
    options = Options(quiet=quiet, again=_again(job_path, sets), prepare=prepare, beside=beside(job))
    if launch is not None and launch.world_size > 1:
        from bessemer.keep.host_run import run_on_host
        from bessemer.keep.hosts import hosts_of_launch

        return Trained(run_on_host(job, options, hosts_of_launch(launch)))
    return Trained(run(job, options))


def _again(job_path: str, sets: Sequence[str]) -> str:
    """The command that goes on with this run."""
    return shlex.join(["bessemer", "train", job_path, *(word for text in sets for word in ("--set", text))])


def _prepare_data(job: Job, printer: Printer) -> None:
    """Tokenise what the cache lacks, with a line every few seconds, so that the ranks find everything there."""
    from bessemer.data import prepare

    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_EVERY_S:
            said = time.monotonic()
            printer.line("data", f"{done / max(total, 1):.0%} of {format_bytes(total)} tokenised", "cyan")

    prepared = prepare(job, progress)
    tokens, held_back = (prepared.total(split, "tokens") for split in ("train", "val"))
    printer.line(
        "data", f"{format_count(tokens or 0)} tokens to train on, {format_count(held_back or 0)} held back", "cyan"
    )
