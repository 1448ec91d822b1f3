"""Being told of what a rank does while it does it: phases, collectives and launches of operators.

    seen = subscribe(lambda point, activity: ..., ("phase", "collective"))     # called at each begin and end
    seen.close()

    with Recording(handle, ("launch",), capacity=4096) as recording:           # handle(list of ended activities)
        ...

A callback is called on the thread that does the work, and must be quick. A recording collects what has ended in a
buffer and hands it over when it is full, when it is flushed and when it is closed. Both may be of any thread; there may
be several. Where nobody subscribes nothing is made, and the cost is one look at an empty list for each mark. A callback
that raises is not called again: its subscription has the error.

Launches are told of within `launches()` only, which the step loop enters once a step, so that a subscription to them
takes effect with the next step. Each operator then costs some microseconds more.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "COLLECTIVES",
    "DOMAINS",
    "LAUNCHES",
    "PHASES",
    "Activity",
    "Domain",
    "Recording",
    "Subscription",
    "launched",
    "launches",
    "subscribe",
    "tell_begin",
    "tell_end",
]

Domain = Literal["phase", "collective", "launch"]
DOMAINS: tuple[Domain, ...] = ("phase", "collective", "launch")
Callback = Callable[[str, "Activity"], None]
_clock = time.perf_counter


@dataclass(slots=True)
class Activity:
    """Something that began at begin_s and ended at end_s (NaN before), seconds of this process's monotonic clock.

    name: of the phase, of the collective ("all_reduce"), or of torch's operator. step, micro_batch, stage: where it
    belongs, as far as the black box was told, -1 otherwise; of phases. detail: of a collective its group, bytes and
    peer.
    """

    domain: Domain
    name: str
    begin_s: float
    end_s: float = math.nan
    step: int = -1
    micro_batch: int = -1
    stage: int = -1
    detail: dict[str, Any] = field(default_factory=dict)


class Subscription:
    """A callback and the domains that it is told of, until it is closed or raises; then `error` is what it raised."""

    def __init__(self, callback: Callback, domains: Collection[Domain]) -> None:
        """ValueError for a domain that there isn't."""
        unknown = set(domains) - set(DOMAINS)
        if unknown or not domains:
            raise ValueError(f"no such domain: {', '.join(sorted(unknown)) or 'none was named'}; there are {DOMAINS}")
        self.callback = callback
        self.error: Exception | None = None
        self._domains = tuple(domains)
        with _lock:
            for domain in self._domains:
                _subscribed[domain].append(self)

    def close(self) -> None:
        """Hear nothing more. What runs on another thread may still come once."""
        with _lock:
            for domain in self._domains:
                with contextlib.suppress(ValueError):
                    _subscribed[domain].remove(self)

    def tell(self, point: str, activity: Activity) -> None:
        """Call the callback; point is "begin" or "end"."""
        try:
            self.callback(point, activity)
        except Exception as error:
            self.error = error
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Recording(Subscription):
    """Activities that have ended, in buffers of `capacity`, which `deliver` gets whole: it may keep them."""

    def __init__(
        self, deliver: Callable[[list[Activity]], None], domains: Collection[Domain], *, capacity: int = 4096
    ) -> None:
        self._deliver, self._capacity = deliver, capacity
        self._buffer: list[Activity] = []
        self._guard = threading.Lock()
        super().__init__(self._take, domains)

    def _take(self, point: str, activity: Activity) -> None:
        if point != "end":
            return
        with self._guard:
            self._buffer.append(activity)
            full = len(self._buffer) >= self._capacity
        if full:
            self.flush()

    def flush(self) -> None:
        """Hand over what there is, if anything."""
        with self._guard:
            taken, self._buffer = self._buffer, []
        if taken:
            self._deliver(taken)

    def close(self) -> None:
        super().close()
        if self.error is None:
            self.flush()


PHASES: list[Subscription] = []
COLLECTIVES: list[Subscription] = []
LAUNCHES: list[Subscription] = []
"""Who is told of what. Sites look whether these are empty before they do anything else."""
_subscribed: dict[Domain, list[Subscription]] = {"phase": PHASES, "collective": COLLECTIVES, "launch": LAUNCHES}
_lock = threading.Lock()


def subscribe(callback: Callback, domains: Collection[Domain] = DOMAINS) -> Subscription:
    """Have `callback("begin" | "end", activity)` called for these domains. ValueError for one that there isn't."""
    return Subscription(callback, domains)


def tell_begin(activity: Activity) -> Activity:
    """For sites: `activity` has begun."""
    for subscription in tuple(_subscribed[activity.domain]):
        subscription.tell("begin", activity)
    return activity


def tell_end(activity: Activity, at_s: float) -> None:
    """For sites: it has ended."""
    activity.end_s = at_s
    for subscription in tuple(_subscribed[activity.domain]):
        subscription.tell("end", activity)


def launches() -> AbstractContextManager[object]:
    """A context in which torch's operators are told of as launches; does nothing where nobody asked for them."""
    if not LAUNCHES:
        return contextlib.nullcontext()
    from bessemer.runtime.launches import LaunchWatch

    return LaunchWatch()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def launched(name: str, inner: AbstractContextManager[object]) -> Iterator[None]:
    """For kernels that torch doesn't dispatch: told of as a launch around `inner`."""
    activity = tell_begin(Activity("launch", name, _clock()))
    try:
        with inner:
            yield
    finally:
        tell_end(activity, _clock())
