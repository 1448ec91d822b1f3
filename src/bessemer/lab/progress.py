"""What a series of runs says while it works: which run of how many, its step and loss, and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from bessemer.core.units import format_seconds

__all__ = ["Progress", "Run"]

SAY_EVERY_S = 15.0
"""Between two lines where no terminal shows a moving one."""


class Run(Protocol):
    """What is told of a run: `kind` groups runs that take equally long."""

    @property
    def title(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def steps(self) -> int: ...


class Progress:
    """Prints to standard error, so that a result as JSON on standard output stays whole."""

    def __init__(self, runs: Sequence[Run], stream: IO[str] | None = None) -> None:
        self._runs = runs
        self._stream = stream if stream is not None else sys.stderr
        self._number = 0
        self._first: tuple[int, float] | None = None
        self._said = 0.0
        self._took_s: dict[str, float] = {}

    def reused(self, number: int, run: Run, took_s: float) -> None:
        """A run that was finished before; its steps took `took_s` seconds."""
        self._took_s[run.kind] = took_s
        self._line(f"{self._head(number, run)}  is there already")

    def begin(self, number: int, run: Run) -> None:
        self._number, self._first, self._said = number, None, time.monotonic()
        self._line(f"{self._head(number, run)}  starts")

    def tell(self, record: Mapping[str, Any] | None) -> None:
        """The newest record of the run that was begun: `step` and `loss`. None before its first step."""
        now, run = time.monotonic(), self._runs[self._number - 1]
        if record is None:
            return
        step = int(record["step"])
        if self._first is None:
            self._first = (step, now)
        first, start = self._first
        moving = self._stream.isatty()
        if step in (first, run.steps) or not (moving or now - self._said >= SAY_EVERY_S):
            return
        self._said = now
        pace_s = (now - start) / (step - first)
        left_s = pace_s * (run.steps - step)
        others_s = sum(self._took_s.get(r.kind, pace_s * r.steps) for r in self._runs[self._number :])
        loss = f"loss {record['loss']:.4f}" if record.get("loss") is not None else "loss -"
        text = f"{self._head(self._number, run)}  step {step}/{run.steps}  {loss}  {format_seconds(left_s)} left"
        if others_s:
            text += f", {format_seconds(left_s + others_s)} for all"
        if moving:
            self._stream.write(f"\r\033[K{text}")
            self._stream.flush()
        else:
            self._line(text)

    def end(self, run: Run, took_s: float) -> None:
        self._took_s[run.kind] = took_s
        self._line(f"{self._head(self._number, run)}  done, {format_seconds(took_s)} of steps")

    def diverged(self, number: int, run: Run) -> None:
        """A run that has no loss, now or from before: it isn't trained again."""
        self._line(f"{self._head(number, run)}  diverged: it has no loss, and isn't trained again")

    def _head(self, number: int, run: Run) -> str:
        return f"run {number}/{len(self._runs)}  {run.title}"

    def _line(self, text: str) -> None:
        start = "\r\033[K" if self._stream.isatty() else ""
        print(start + text, file=self._stream, flush=True)
