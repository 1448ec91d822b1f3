"""The verb `chaos`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bessemer.api._check import check
from bessemer.api._extras import need
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.paths import user_path
from bessemer.inspect.chaos import Chaos, run_chaos
from bessemer.inspect.chaos_faults import read_plan

__all__ = ["chaos"]

QUICK_MINUTES = 3.0


def chaos(
    job_path: str,
    sets: Sequence[str] = (),
    *,
    faults: str,
    quick: bool = False,
    minutes: float | None = None,
    runs: str = "",
) -> Chaos:
    """Train a job while ranks, coordinator and vault are killed and held up, and say what that cost.

    The same job runs undisturbed too, a part of it before the run with faults and the rest behind: the effective time
    is that of the committed steps at the control's pace, over the time from the first commit to the last. The final
    checkpoints are compared bit by bit. The job has to have keep.mode = "zero-interruption"; same bits need keep.sums =
    "exact". A run that fails is started again. Linux only.

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=500. May be repeated.
    faults: The file that says which faults come when (TOML), such as examples/chaos_faults.toml.
    quick: So many steps that the run with faults takes about three minutes, and the whole about seven.
    minutes: So many steps that the run with faults takes about so many minutes, instead of the job's train.steps.
    runs: The folder of the runs. Default: the job's run folder with -chaos and a number behind its name.
    """
    need("chaos", "train")
    if minutes is not None and (quick or minutes <= 0):
        what = "--quick and --minutes both say how long" if quick else f"--minutes {minutes:g} is no length of time"
        raise RequestError(what, code="chaos-minutes", fix="--quick, or --minutes 30")
    plan = read_plan(user_path(faults))
    checked = check(job_path, sets)
    if checked.problems:
        raise ConfigError(checked.problems, job_path)
    assert checked.job is not None, "a job without problems was read"
    folder = user_path(runs) if runs else _free(checked.job.run.folder)
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(
            f"{folder} holds something already", code="chaos-folder", fix=f"--runs {folder}-2, or remove it"
        )
    begin = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begin:7.0f} s  {text}", file=sys.stderr, flush=True)

    return run_chaos(checked.job, plan, folder, QUICK_MINUTES if quick else minutes, tell)


def _free(folder: Path) -> Path:
    """The first of NAME-chaos-1, NAME-chaos-2, ... that isn't there yet."""
    paths = (folder.with_name(f"{folder.name}-chaos-{number}") for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
