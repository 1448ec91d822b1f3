"""torch's profiler on some steps of a rank: one in N, or the next one after a file was touched or a signal came.

    profiler = StepProfiler(run / "traces", rank=3, section=job.inspect, device=device)
    with profiler.step(12):
        ...

A trace is traces/step-12-rank-3.json.gz, in Chrome's format with one more key, "bessemer", that says when on the
rank's monotonic clock the step began, so that it can be laid beside the black boxes. A profiled step is slower (+19 to
+40 % of CPU time were measured on small operators), and the first one waits for what the profiler loads; other steps
cost nothing but one look at the file, where that is asked for. What is done before and after such a step is, in a run,
the phase `profile_s`, by which others know why the rank is late.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bessemer.core.job import InspectSection
from bessemer.runtime.trace_signal import take_trace_signal

__all__ = ["ASK_FILE", "StepProfiler"]

ASK_FILE = "now"
"""A `touch` of this file in the traces' folder asks every rank for a trace of its next step."""


class StepProfiler:
    """Writes traces of this rank to `folder`, and keeps its newest `section.traces`. Nothing that goes wrong in it
    reaches the step. aside: a context for what it takes, by which others know why the rank is late."""

    def __init__(
        self, folder: Path, *, rank: int, section: InspectSection, device: torch.device,
        aside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.folder, self.rank = folder, rank
        self._aside = aside
        self._every, self._keep, self._device = section.trace_every, section.traces, device
        self._file = folder / ASK_FILE if section.trace_on == "file" else None
        if self._file is not None:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)  # so that the file can be touched
        self._asked_at = self._touched()
        self._signalled = False
        if section.trace_on == "signal" and threading.current_thread() is threading.main_thread():
            take_trace_signal(self._signal)

    def step(self, step: int) -> AbstractContextManager[object]:
        """A context for step `step` (from 1), which profiles it where it is due."""
        return self._profiled(step) if self._due(step) else contextlib.nullcontext()

    def _signal(self) -> None:
        self._signalled = True

    def _touched(self) -> int:
        """When the file was last touched; 0 without one."""
        if self._file is None:
            return 0
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return 0

    def _due(self, step: int) -> bool:
        touched = self._touched()
        asked, self._asked_at = touched > self._asked_at, max(touched, self._asked_at)
        signalled, self._signalled = self._signalled, False
        return asked or signalled or (self._every > 0 and step % self._every == 0)

    @contextlib.contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        with self._aside():
            profiler = self._started(step)
        name = f"bessemer step {step}"
        anchor = {"rank": self.rank, "step": step, "name": name, "clock_s": time.perf_counter(), "wall_s": time.time()}
        try:
            with record_function(name) if profiler is not None else contextlib.nullcontext():
                yield
        finally:
            if profiler is not None:
                with self._aside():
                    self._stop(profiler, step, anchor)

    def _started(self, step: int) -> profile | None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            profiler = profile(activities=activities, acc_events=True)
            profiler.start()
        except Exception as error:
            self._complain(step, error)
            return None
        return profiler

    def _stop(self, profiler: profile, step: int, anchor: dict[str, Any]) -> None:
        try:
            profiler.add_metadata_json("bessemer", json.dumps(anchor))
            profiler.stop()
            self._write(profiler, step)
        except Exception as error:
            self._complain(step, error)

    def _write(self, profiler: profile, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder / f"step-{step}-rank-{self.rank}.json.gz"
        aside = self.folder / f".rank-{self.rank}.part.json.gz"  # the ending tells torch to compress it
        try:
            profiler.export_chrome_trace(str(aside))
            os.replace(aside, whole)
        finally:
            aside.unlink(missing_ok=True)
        own = sorted(self.folder.glob(f"step-*-rank-{self.rank}.json.gz"), key=lambda path: path.stat().st_mtime_ns)
        for path in own[: -self._keep]:
            path.unlink(missing_ok=True)

    def _complain(self, step: int, error: Exception) -> None:
        with contextlib.suppress(OSError):
            print(f"step {step} could not be profiled: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
