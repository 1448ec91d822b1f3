"""What groups that don't lead have told of the latest steps, for those of which no leader lives to tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["KeptMetrics"]

_MOST = 64


class KeptMetrics:
    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, Any]] = {}

    def keep(self, record: dict[str, Any]) -> None:
        self._by_step[int(record["step"])] = record
        for step in sorted(self._by_step)[:-_MOST]:
            del self._by_step[step]

    def clear(self) -> None:
        self._by_step.clear()

    @property
    def last(self) -> int:
        """The latest step; 0 where there is none."""
        return max(self._by_step, default=0)

    def after(self, step: int, last: int) -> Iterator[dict[str, Any]]:
        """Those of the steps behind `step` and up to `last` that are there, in order."""
        yield from (self._by_step[n] for n in sorted(self._by_step) if step < n <= last)
