"""Trains the runs of a comparison one after another, each as `bessemer train`, and goes on where it was stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bessemer.core.errors import BessemerError, Stopped
from bessemer.core.job_file import dump_job
from bessemer.keep.hub import Wishes
from bessemer.keep.process import Child
from bessemer.keep.records import read_records, write_atomically
from bessemer.lab.parity_jobs import REFERENCE, LabRun
from bessemer.lab.progress import Progress

__all__ = ["Trainer", "train_all", "train_child"]

Trainer = Callable[[LabRun, Path, Callable[[dict[str, Any] | None], None]], int]
"""Trains one run from its job file, tells the newest record now and then, and returns the exit code of `train`."""

LOOK_EVERY_S = 2.0


def train_all(runs: Sequence[LabRun], jobs_folder: Path, progress: Progress, trainer: Trainer) -> None:
    """Trains what isn't finished. BessemerError `lab-run-failed` where a run fails, Stopped where it was stopped on
    request; in both cases the same call goes on from there. The job file of each run stays in `jobs_folder`.

    A run that diverges is left at that, here and in later calls; `lab-reference-diverged` where it is the reference's.
    """
    jobs_folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        _refuse_diverged_reference(run)
    for number, run in enumerate(runs, 1):
        name = run.job.run.name
        if run.finished:
            progress.reused(number, run, run.seconds())
            continue
        if run.diverged:
            progress.diverged(number, run)
            continue
        job_file = jobs_folder / f"{name}.toml"
        write_atomically(job_file, dump_job(run.job))
        progress.begin(number, run)
        code = trainer(run, job_file, progress.tell)
        if code == Stopped.exit_code:
            raise Stopped(
                f"stopped on request in run {number} of {len(runs)}, {name}; what it did is saved",
                fix="the same command goes on from there",
            )
        if run.diverged:
            _refuse_diverged_reference(run)
            progress.diverged(number, run)
            continue
        if code != 0 or not run.finished:
            raise BessemerError(
                f"run {number} of {len(runs)}, {name}, ended with exit code {code}",
                code="lab-run-failed",
                fix=f"bessemer train {job_file}   shows why and goes on; the same lab command then goes on behind it",
            )
        progress.end(run, run.seconds())


def _refuse_diverged_reference(run: LabRun) -> None:
    if run.recipe == REFERENCE and run.diverged:
        raise BessemerError(
            f"{run.title} diverged, so there is nothing to compare the other recipes with ({run.folder})",
            code="lab-reference-diverged",
            fix=f"a job that {REFERENCE} can train, such as with a smaller train.lr, and --runs with another folder",
        )


def train_child(run: LabRun, job_file: Path, tell: Callable[[dict[str, Any] | None], None]) -> int:
    """`bessemer train JOB_FILE --quiet` in a process of its own, which ends with this one. SIGINT and SIGTERM are
    passed on as the wish to stop; a second one ends the run at once. What it printed is shown if it failed."""
    command = [sys.executable, "-m", "bessemer.cli", "train", str(job_file), "--quiet"]
    child = Child(command, os.environ, run.folder / "logs" / "train.log")
    passed_on = 0
    with _noted() as wishes:
        child.start()
        while (code := child.wait(LOOK_EVERY_S)) is None:
            if len(wishes.names) > passed_on:
                passed_on += 1
                child.signal(signal.SIGTERM)
            tell(_newest(run))
    if code not in (0, Stopped.exit_code):
        print("", *child.tail(), sep="\n", file=sys.stderr)
    ended = code == 0 or run.diverged  # before it took notice of the wish: no next one is begun
    return Stopped.exit_code if wishes.names and ended else code


@contextlib.contextmanager
def _noted() -> Iterator[Wishes]:
    """SIGINT and SIGTERM are noted instead of ending this process; not outside the main thread, which gets none."""
    wishes = Wishes()
    if threading.current_thread() is not threading.main_thread():
        yield wishes
        return
    before = {n: signal.signal(n, lambda number, _: wishes.add(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wishes
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _newest(run: LabRun) -> dict[str, Any] | None:
    newest = None
    for newest in read_records(run.folder / "metrics.jsonl"):  # noqa: B007 - the last one is wanted
        pass
    return newest
