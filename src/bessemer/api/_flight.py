"""The watch beside a run: `train` starts it, and it ends with the run's agent."""

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
    """What an agent of `job` runs beside itself, given the run folder and the agent's socket."""
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
    child.start()
    try:
        yield
    finally:
        child.kill_session()
        child.wait(5.0)
