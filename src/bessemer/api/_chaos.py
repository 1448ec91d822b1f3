"""The verb `chaos`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bessemer.api._check import check
from bessemer.api._extras import need
from bessemer.core.errors import ConfigError, RequestError, Stopped
from bessemer.core.job import Job
from bessemer.core.paths import user_path
from bessemer.inspect.chaos import Chaos, run_chaos
from bessemer.inspect.chaos_faults import OF_HOSTS, Plan, read_plan
from bessemer.keep.hub import signals_raise

__all__ = ["chaos"]

QUICK_MINUTES = 3.0


def chaos(
    job_path: str,
    sets: Sequence[str] = (),
    *,
    faults: str,
    quick: bool = False,
    minutes: float | None = None,
    hosts: int = 1,
    runs: str = "",
) -> Chaos:
    """Train a job while ranks, coordinator and vault are killed and held up, and say what that cost.

    The same job runs undisturbed too, a part of it before the run with faults and the rest behind: the effective time
    is that of the committed steps at the control's pace, over the time from the first commit to the last. The final
    checkpoints are compared bit by bit; with keep.mode = "zero-interruption" same bits need keep.sums = "exact". With
    keep.mode = "restart" all ranks start again after each fault, for contrast. A run that fails is started again.
    Linux only.

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=500. May be repeated.
    faults: The file that says which faults come when (TOML), such as examples/chaos_faults.toml.
    quick: So many steps that the run with faults takes about three minutes, and the whole about seven.
    minutes: So many steps that the run with faults takes about so many minutes, instead of the job's train.steps.
    hosts: So many hosts, each an agent of its own on this machine; faults of kind "cut" need root.
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
    _check_hosts(plan, checked.job, hosts)
    folder = user_path(runs) if runs else _free(checked.job.run.folder)
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(
            f"{folder} holds something already", code="chaos-folder", fix=f"--runs {folder}-2, or remove it"
        )
    begin = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begin:7.0f} s  {text}", file=sys.stderr, flush=True)

    with signals_raise() as wishes:
        return run_chaos(checked.job, plan, folder, tell, minutes=QUICK_MINUTES if quick else minutes, hosts=hosts)
    raise Stopped(f"{wishes.names[0]}: what ran until then is in {folder}", code="chaos-stopped")


def _check_hosts(plan: Plan, job: Job, hosts: int) -> None:
    """RequestError (chaos-hosts) where the faults or the job are for another number of hosts."""
    of_hosts = sorted({kind for rule in plan.rules for kind in rule.kind if kind in OF_HOSTS})
    if hosts < 1 or (of_hosts and hosts < 2):
        what = f"faults of kind {', '.join(of_hosts)} befall one of several hosts" if of_hosts else f"--hosts {hosts}"
        raise RequestError(what, code="chaos-hosts", fix="--hosts 3")
    if hosts > 1 and job.keep.mode != "zero-interruption":
        raise RequestError(
            f'{hosts} hosts have agents of their own only where keep.mode is "zero-interruption"',
            code="chaos-hosts",
            fix='keep.mode = "zero-interruption", or --hosts 1',
        )


def _free(folder: Path) -> Path:
    """The first of NAME-chaos-1, NAME-chaos-2, ... that isn't there yet."""
    paths = (folder.with_name(f"{folder.name}-chaos-{number}") for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
