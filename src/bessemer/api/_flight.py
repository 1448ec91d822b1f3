"""The watch beside a run: `train` starts it, and it ends with the run's agent, or with rank 0 of another launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bessemer.core.job import Job

__all__ = ["beside"]


def beside(job: Job) -> Callable[[Path, Path], AbstractContextManager[object]]:
    """What an agent of `job`, or its rank 0, runs beside itself, given the run folder and the socket that takes records
    there."""
    return _watched if job.inspect.flight != "off" else lambda folder, agent: nullcontext()


@contextmanager
def _watched(folder: Path, agent: Path) -> Iterator[None]:
    """Watch the run in `folder`, whose agent listens at `agent`, from a process of its own. What it prints goes to
    logs/flight.log; when it fails the run goes on without."""
    from bessemer.keep.process import Child

    command = (sys.executable, "-m", "bessemer.inspect.flight_watch", "--run", str(folder), "--agent", str(agent))
    child = Child(
        command, {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, folder / "logs/flight.log"
    )
    try:
        child.start()
    except OSError as error:
        print(f"the run goes on without its watch, which can't be started: {error}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        child.kill_session()
        child.wait(5.0)
