"""What always-on marks add to a step: CPU time of phase marks and of marked communication.

    python bench/marks.py [--json]

The work that the marks add is run alone and held against a step of 100 ms, since on this machine a step's own time
moves by more than that. torch's operations are replaced by ones that do nothing, and their own cost is taken off.
Figures are medians over rounds; the note has the fastest round. Nobody subscribes to the marks
(`runtime/tracing.py`) but in the two rows that say so.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from table import Row, main

from bessemer.comm import collectives
from bessemer.runtime.blackbox import read_blackbox
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
from bessemer.runtime.tracing import Recording, subscribe

STEP_S = 0.1
PHASES, PLACES, OPERATIONS = 200, 32, 50  # of a step: each phase is two marks
ROUNDS, CALLS = 100, 500
SUM = dist.ReduceOp.SUM


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        recorder = Recorder(Path(folder) / "rank-0", rank=0, world=1, job_hash="bench")
        phases = Phases()
        plain = _cost(lambda: _marks(phases))
        phases.attach(recorder)
        boxed = _cost(lambda: _marks(phases))
        with Recording(lambda buffer: None, ("phase",)):
            recorded = _cost(lambda: _marks(phases))
        with subscribe(lambda point, activity: None, ("phase",)):
            called = _cost(lambda: _marks(phases))
        operations = _operation_rows(recorder)
        read_s, _ = _cost(lambda: read_blackbox(recorder.path), rounds=5)
        dist.destroy_process_group()
    median_s, best_s = boxed
    call_s = operations[0].value * 1e-6
    marks, percent = 2 * PHASES, "% of a 100 ms step"
    return [
        Row(f"{marks} marks", 100 * median_s / STEP_S, percent, "lower", bar=0.5, note=f"{100 * best_s / STEP_S:.3f}"),
        Row(
            f"{marks} marks and {OPERATIONS} operations",
            100 * (median_s + OPERATIONS * call_s) / STEP_S,
            percent,
            "lower",
            bar=0.5,
        ),
        Row("a mark", 1e6 * median_s / marks, "us", "lower", note=f"{1e6 * best_s / marks:.2f}"),
        Row("a mark without a black box", 1e6 * plain[0] / marks, "us", "lower", note=f"{1e6 * plain[1] / marks:.2f}"),
        Row(
            "a mark with a callback that does nothing",
            1e6 * called[0] / marks,
            "us",
            "lower",
            note=f"{1e6 * called[1] / marks:.2f}",
        ),
        Row(
            "a mark with a recording", 1e6 * recorded[0] / marks, "us", "lower", note=f"{1e6 * recorded[1] / marks:.2f}"
        ),
        *operations,
        Row("reading a black box", 1e3 * read_s, "ms", "lower", note="every slot in use"),
    ]


def _marks(phases: Phases) -> None:
    """The marks of a step: pairs of phases one in the other, and now and then another place."""
    phases.at(step=1)
    for index in range(PHASES // 2):
        if index % (PHASES // 2 // PLACES) == 0:
            phases.at(micro_batch=index, stage=1)
        with phases("backward_s"), phases("comm_s"):
            pass
    phases.take()


def _cost(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """(median, fastest) CPU seconds of a round."""
    spent = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        spent.append(time.thread_time() - start)
    return statistics.median(spent), min(spent)


class _Over:
    """A work that is over."""

    def wait(self) -> bool:
        return True


def _nothing(tensor: object, op: object, group: object, async_op: bool) -> _Over | None:
    """In place of torch's all_reduce."""
    return _Over() if async_op else None


def _operation_rows(recorder: Recorder) -> list[Row]:
    """What a call costs beyond torch's own."""
    group = dist.new_group([0])
    collectives.name_group(group, "tensor")
    collectives.record_to(recorder)
    with patch.object(dist, "all_reduce", _nothing):
        found = [
            _added("all_reduce", lambda function, x: function(x, SUM, group, False), bar=2.0),
            _added("all_reduce, asynchronous", lambda function, x: function(x, SUM, group, True), bar=2.0),
            _added("that and its wait, two calls", lambda function, x: function(x, SUM, group, True).wait()),
        ]
    collectives.record_to(None)
    return found


def _added(name: str, call: Callable[[Callable[..., Any], torch.Tensor], object], bar: float | None = None) -> Row:
    x = torch.ones(1024)

    def times(function: Callable[..., Any]) -> tuple[float, float]:
        def calls() -> None:
            for _ in range(CALLS):
                call(function, x)

        return _cost(calls)

    marked, bare = times(collectives.all_reduce), times(_nothing)
    median_us, best_us = (1e6 * (a - b) / CALLS for a, b in zip(marked, bare, strict=True))
    return Row(name, median_us, "us added", "lower", bar=bar, note=f"{best_us:.2f}")


if __name__ == "__main__":
    main(rows)
