"""The verb `train`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bessemer.api._check import check
from bessemer.api._extras import need
from bessemer.core.errors import ConfigError
from bessemer.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from bessemer.core.job import Job
    from bessemer.keep.progress import Printer

__all__ = ["Trained", "train"]

PROGRESS_EVERY_S = 3.0


@dataclass(frozen=True)
class Trained:
    """How the run ended; what there was to say has been printed on the way."""

    exit_code: int

    def __str__(self) -> str:
        return ""


def train(job_path: str, sets: Sequence[str] = (), *, quiet: bool = False) -> Trained:
    """Train the model of a job file, or go on with it.

    Checks the job, then starts one process a rank on this host and watches over them; under torchrun, Slurm or MPI
    it takes part as the rank that the launcher made it. Ctrl-C finishes the step, saves and exits with 3; the same
    command goes on from there.

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=50. May be repeated.
    quiet: Print no line a step.
    """
    need("train", "train")
    checked = check(job_path, sets)
    if checked.problems:
        raise ConfigError(checked.problems, job_path)
    assert checked.job is not None, "a job without problems was read"
    from bessemer.keep.launch import find_launch

    if find_launch() is not None:
        from bessemer.train.worker import join

        return Trained(join(checked.job))
    from bessemer.keep.agent import Options, run

    prepare = partial(_prepare_data, checked.job)
    return Trained(run(checked.job, Options(quiet=quiet, again=_again(job_path, sets), prepare=prepare)))


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
