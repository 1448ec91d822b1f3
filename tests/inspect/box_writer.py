"""Writes the black box of a rank on any host, with clocks that the test chooses."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from bessemer.runtime import recorder as recorders
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
from bessemer.runtime.ring import NONE, OPERATIONS


def write_box(
    folder: Path, rank: int, host: str, *, ahead_s: float, at_s: float, overlapping: int = 1, num_marks: int = 64
) -> None:
    """Step 12 from `at_s` of a monotonic clock which the wall clock is `ahead_s` ahead of: in micro-batch 3 a backward
    phase of 4 ms with an all-reduce from 1 to 3 ms in it, or that many all-gathers; then an optimizer phase without an
    end."""
    now = [at_s]

    def clock() -> float:
        return now[0]

    with (
        patch.object(recorders, "_clock", clock),
        patch.object(recorders.time, "time", lambda: now[0] + ahead_s),
        patch.object(recorders.socket, "gethostname", lambda: host),
    ):
        path = folder / "blackbox" / f"rank-{rank}"
        box = Recorder(path, rank=rank, world=3, job_hash="x", num_marks=num_marks)
        phases = Phases(clock=clock)
        phases.attach(box)
        phases.at(step=12, micro_batch=3)
        channel = box.channel("data", [0, 1, 2] if overlapping == 1 else [0, 1], "gloo", blocks=True)
        operation = OPERATIONS.index("all_reduce" if overlapping == 1 else "all_gather")
        with phases("backward_s"):
            now[0] += 0.001
            with phases("comm_s"):
                dtype = box.dtype("float32", 4)
                numbers = [channel.enqueued(operation, dtype, 1024, 1024, NONE, True) for _ in range(overlapping)]
                now[0] += 0.002
                for number in numbers:
                    channel.finished(number)
            now[0] += 0.001
        phases("optimizer_s").__enter__()
        box.close()
