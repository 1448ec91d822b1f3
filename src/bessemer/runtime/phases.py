"""Seconds by phase of a step, cheap enough to stay on.

    phases = Phases()
    with phases("forward_s"):
        ...
        with phases("comm_s"):       # nested: its time counts as comm_s, not as forward_s
            ...
    record = phases.take()           # {"forward_s": 0.81, "comm_s": 0.02}; starts the next step

The clock is the host's. On a GPU, whose work runs behind the host, a phase holds the time to launch its work unless
`synchronize` is given, which waits for the device at every mark; use that on sampled steps only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Phases"]


class _Phase:
    """The context of one name; made once per name, so that a mark allocates nothing."""

    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._phases._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases._leave()


class Phases:
    """Accumulates exclusive seconds by phase name; every second belongs to the innermost open phase."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], None] | None = None
    ) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._contexts: dict[str, _Phase] = {}
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def __call__(self, name: str) -> _Phase:
        """A context in which time counts for `name`."""
        context = self._contexts.get(name)
        if context is None:
            context = self._contexts[name] = _Phase(self, name)
            self._seconds.setdefault(name, 0.0)
        return context

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last take; every name seen so far is there, 0.0 where it did not run.

        RuntimeError while a phase is open: its time would be torn between two steps.
        """
        if self._open:
            raise RuntimeError(f"phase {self._open[-1]!r} is still open")
        taken = dict(self._seconds)
        for name in self._seconds:
            self._seconds[name] = 0.0
        return taken

    def _enter(self, name: str) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._open.append(name)
        self._since = now

    def _leave(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        self._seconds[self._open.pop()] += now - self._since
        self._since = now
