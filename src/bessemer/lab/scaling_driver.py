"""Trains the grid: processes of one thread side by side, each finished point a line of results.jsonl."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bessemer.core.errors import BessemerError, Stopped
from bessemer.core.units import format_seconds
from bessemer.keep.hub import signals_raise
from bessemer.keep.records import RecordWriter
from bessemer.lab.scaling_grid import GridPoint, finished

__all__ = ["train_grid"]

WORKER = ["-m", "bessemer.lab.scaling_worker"]

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""glibc keeps memory that is freed: giving it back after every operator took a fifth of a step in page faults."""


class _Worker:
    """One process and the point it works on."""

    def __init__(self, cache: str) -> None:
        command = [sys.executable, *WORKER, cache]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **_ENVIRONMENT}
        )
        self.point: GridPoint | None = None

    @property
    def answers(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, point: GridPoint) -> None:
        self.point = point
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(vars(point)) + "\n")
        self.process.stdin.flush()


class _Clock:
    """Time left: the effort that is left, at the pace since the start."""

    def __init__(self, points: Sequence[GridPoint], done: int, stream: IO[str]) -> None:
        self._total = done + len(points)
        self._done, self._left = done, sum(p.effort for p in points)
        self._whole, self._start, self._stream = self._left, time.monotonic(), stream

    def finished(self, point: GridPoint, text: str) -> None:
        self._done += 1
        self._left -= point.effort
        used = time.monotonic() - self._start
        left_s = used * self._left / max(self._whole - self._left, 1.0)
        bar = "#" * round(20 * self._done / self._total)
        left = f"{format_seconds(left_s)} left" if self._done < self._total else "the last"
        line = f"[{bar:<20}] {self._done}/{self._total}  {left}  {text}"
        print(line, file=self._stream, flush=True)


def train_grid(
    points: Sequence[GridPoint], results: Path, *, cache: str, workers: int, stream: IO[str] | None = None
) -> None:
    """Trains those points that `results` lacks. However it ends, only the points that were under way are lost.
    Stopped after SIGINT or SIGTERM, BessemerError `lab-worker` where a process dies."""
    results.parent.mkdir(parents=True, exist_ok=True)
    have = finished(results)
    waiting = [p for p in points if p.key not in have]
    clock = _Clock(waiting, len(points) - len(waiting), stream if stream is not None else sys.stderr)
    with RecordWriter(results) as writer, _started(min(workers, len(waiting)), cache) as (crew, ready):
        queue = list(reversed(waiting))
        for worker in crew:
            worker.give(queue.pop())
        with signals_raise() as wishes:
            while any(worker.point is not None for worker in crew):
                for key, _ in ready.select():
                    writer.write(_answer(key.data, clock))
                    if queue:
                        key.data.give(queue.pop())
    if wishes.names:
        what = f"stopped on request; {len(finished(results))} points are kept in {results}"
        raise Stopped(what, fix="the same command goes on from there")


def _answer(worker: _Worker, clock: _Clock) -> dict[str, Any]:
    """The record of a worker that has something to say, which then waits for work."""
    line, point = worker.answers.readline(), worker.point
    assert point is not None
    if not line:
        what = f"the process that trained {point.name} ended with exit code {worker.process.wait()}"
        raise BessemerError(what, code="lab-worker", fix="see above; the same command goes on from there")
    record: dict[str, Any] = json.loads(line)
    loss = "diverged" if record["loss"] is None else f"loss {record['loss']:.4f}"
    clock.finished(point, f"{point.name}: {loss}, {format_seconds(record['cpu_s'])} of CPU")
    worker.point = None
    return record


@contextlib.contextmanager
def _started(count: int, cache: str) -> Iterator[tuple[list[_Worker], selectors.BaseSelector]]:
    """The processes, and what waits for their answers; none of them outlives the block."""
    crew: list[_Worker] = []
    with selectors.DefaultSelector() as ready:
        try:
            for _ in range(count):
                crew.append(_Worker(cache))
                ready.register(crew[-1].answers, selectors.EVENT_READ, crew[-1])
            yield crew, ready
        finally:
            for worker in crew:
                worker.process.kill()
                with worker.process:
                    pass
