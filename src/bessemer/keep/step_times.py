"""How long the steps of a run take that goes on while groups are lost, and so for how long one is waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["LEAST_HANG_S", "StepTimes"]

LEAST_HANG_S = 10.0
"""A rank for which all others wait is given this long, or five times the 99th percentile of a step."""


@dataclass
class StepTimes:
    """Steps that the coordinator has made true: how long each took, and when the last was. worked: when somebody was
    last seen at work that takes its time."""

    step: int = 0
    last: float = field(default_factory=time.monotonic)
    lengths: list[float] = field(default_factory=list)
    worked: float = 0.0

    def note(self, step: int) -> None:
        now = time.monotonic()
        if step > self.step:
            self.lengths = [*self.lengths[-199:], now - self.last]
        self.step, self.last = step, now

    def since_s(self, now: float) -> float:
        """How long nothing has come true, and nobody was at such work."""
        return now - max(self.last, self.worked)

    def due(self, now: float) -> bool:
        """Whether that is too long."""
        return self.since_s(now) >= self.longest_s

    @property
    def longest_s(self) -> float:
        if len(self.lengths) < 5:
            return float("inf")  # the first steps load and compile, and say nothing of the others
        return max(LEAST_HANG_S, 5 * sorted(self.lengths)[int(0.99 * (len(self.lengths) - 1))])

    @property
    def usual_s(self) -> float:
        return sorted(self.lengths)[len(self.lengths) // 2] if self.lengths else 0.0
