"""The verb `train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.api._check import check
from bessemer.api._extras import need
from bessemer.core.errors import ConfigError

__all__ = ["Trained", "train"]


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

    return Trained(run(checked.job, Options(quiet=quiet, again=_again(job_path, sets))))


def _again(job_path: str, sets: Sequence[str]) -> str:
    """The command that goes on with this run."""
    return shlex.join(["bessemer", "train", job_path, *(word for text in sets for word in ("--set", text))])
