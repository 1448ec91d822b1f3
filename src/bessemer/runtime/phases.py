"""The phases of a step: seconds by name, and marks in the black box where one is attached. Cheap enough to stay on.

    phases = Phases()
    phases.attach(recorder)
    phases.at(step=12, micro_batch=3)
    with phases("forward_s"):
        ...
        with phases("comm_s"):       # nested: its time counts as comm_s, not as forward_s
            ...
    record = phases.take()           # {"forward_s": 0.81, "comm_s": 0.02}; starts the next step

The clock is the host's. On a GPU, whose work runs behind the host, a phase holds the time to launch its work unless
`synchronize` is given, which waits for the device at every mark; use that on sampled steps only. An object belongs to
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from bessemer.runtime.recorder import UNLISTED, Lane, Recorder
from bessemer.runtime.ring import BEGIN, END, NONE
from bessemer.runtime.tracing import PHASES, Activity, tell_begin, tell_end

__all__ = ["Phases"]


class _Phase:
    """The context of one name; made once per name, so that a mark allocates nothing that stays."""

    __slots__ = ("_phases", "name", "number", "seconds")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self.name = name
        self.number = UNLISTED
        self.seconds = 0.0

    def __enter__(self) -> None:
        phases = self._phases
        if phases.synchronize is not None:
            phases.synchronize()
        now = phases.clock()
        stack = phases.open
        outer = UNLISTED
        if stack:
            stack[-1].seconds += now - phases.since
            outer = stack[-1].number
        stack.append(self)
        phases.since = now
        if phases.lane is not None:
            phases.lane.mark(BEGIN, self.number, outer, len(stack), now)
        if PHASES:
            phases.told[len(stack)] = tell_begin(phases.activity(self.name, now))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        phases = self._phases
        if phases.synchronize is not None:
            phases.synchronize()
        now = phases.clock()
        self.seconds += now - phases.since
        stack = phases.open
        stack.pop()
        phases.since = now
        if phases.lane is not None:
            phases.lane.mark(END, self.number, stack[-1].number if stack else UNLISTED, len(stack) + 1, now)
        if phases.told:
            activity = phases.told.pop(len(stack) + 1, None)  # None where nobody had subscribed when it began
            if activity is not None:
                tell_end(activity, now)


class Phases:
    """Accumulates exclusive seconds by phase name; every second belongs to the innermost open phase."""

    __slots__ = ("_contexts", "_whole", "clock", "lane", "open", "since", "synchronize", "told")

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], None] | None = None
    ) -> None:
        self.clock = clock
        self.synchronize = synchronize
        self.lane: Lane | None = None
        self.open: list[_Phase] = []
        self.since = 0.0
        self.told: dict[int, Activity] = {}  # by depth, of the open phases those that somebody was told of
        self._contexts: dict[str, _Phase] = {}
        self._whole = ""

    @contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """Time counts for `name`, that of the phases inside too: what they do is no part of the step."""
        with self(name):
            self._whole = name
            try:
                yield
            finally:
                self._whole = ""

    def attach(self, recorder: Recorder, lane: str = "step") -> None:
        """Write every mark from now on to `recorder` too, as those of the thread called `lane`.

        RuntimeError while a phase is open: the black box would see it end and not begin.
        """
        self._refuse_open()
        self.lane = recorder.lane(lane)
        for context in self._contexts.values():
            context.number = recorder.phase(context.name)

    def at(
        self,
        *,
        step: int | None = None,
        micro_batch: int | None = None,
        stage: int | None = None,
        layer: int | None = None,
    ) -> None:
        """Say where the marks that follow belong; what isn't given stays, and a new step forgets the finer places."""
        lane = self.lane
        if lane is None:
            return
        if step is not None:
            lane.step = step
            lane.micro_batch = lane.stage = lane.layer = NONE
            lane.clocks()
        if micro_batch is not None:
            lane.micro_batch = micro_batch
        if stage is not None:
            lane.stage = stage
        if layer is not None:
            lane.layer = layer

    def __call__(self, name: str) -> _Phase:
        """A context in which time counts for `name`."""
        name = self._whole or name
        context = self._contexts.get(name)
        if context is None:
            context = self._contexts[name] = _Phase(self, name)
            if self.lane is not None:
                context.number = self.lane.recorder.phase(name)
        return context

    def activity(self, name: str, at_s: float) -> Activity:
        """A phase that begins, and where."""
        lane = self.lane
        if lane is None:
            return Activity("phase", name, at_s)
        return Activity("phase", name, at_s, step=lane.step, micro_batch=lane.micro_batch, stage=lane.stage)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last take; every name seen so far is there, 0.0 where it did not run.

        RuntimeError while a phase is open: its time would be torn between two steps.
        """
        self._refuse_open()
        taken = {name: context.seconds for name, context in self._contexts.items()}
        for context in self._contexts.values():
            context.seconds = 0.0
        return taken

    def _refuse_open(self) -> None:
        if self.open:
            raise RuntimeError(f"phase {self.open[-1].name!r} is still open")
