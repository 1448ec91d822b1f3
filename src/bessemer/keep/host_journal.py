"""The records of a run on several hosts: one agent writes them, the others send it theirs.

The coordinator names the one that writes. An agent that has lost its coordinator doesn't know whether it still is: its
records wait until it knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bessemer.keep.journal import Journal
from bessemer.keep.progress import Printer
from bessemer.keep.run_folder import RunFolder

__all__ = ["HostJournal"]

_MOST_WAITING = 10_000


class HostJournal(Journal):
    """`send`: hands a record on to the coordinator; False where there is none. `writes`: this is the one that does;
    `wrote`: it was at some time."""

    def __init__(self, folder: RunFolder, printer: Printer) -> None:
        self.writes = self.wrote = False
        self.send: Callable[[Mapping[str, Any]], bool] = lambda record: False
        self._waiting: deque[tuple[Literal["metrics", "events"], Mapping[str, Any]]] = deque(maxlen=_MOST_WAITING)
        super().__init__(folder, printer)

    def begin(self, *, begun: bool) -> None:
        """Write from now on, after what is in the files. begun: steps of this attempt may be among it."""
        if not self.writes:
            self.writes = self.wrote = True
            self._open_files()
            self.step = max((int(r["step"]) for r in self.folder.metrics() if "step" in r), default=0)
            self.saved, self.loaded = self.folder.newest_saved(), self.loaded or begun
            self.hand_on()

    def cease(self) -> None:
        """Write no more until `begin`."""
        if self.writes:
            self.writes = False
            self._close_files()

    def hand_on(self) -> None:
        """What has waited for a coordinator, or for this agent to write."""
        while self._waiting:
            of, record = self._waiting[0]
            if self.writes:
                super()._write(of, record)
            elif not self.send({"kind": "record", "of": of, "record": dict(record)}):
                return
            self._waiting.popleft()

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def take(self, of: str, record: Mapping[str, Any]) -> None:
        """A record of another host."""
        fields = dict(record)
        if of == "metrics":
            if int(fields["step"]) > self.step:
                self.metric(fields)
        else:
            self.event(str(fields.pop("event")), **fields)

    def _open_files(self) -> None:
        if self.writes:
            super()._open_files()

    def _write(self, of: Literal["metrics", "events"], record: Mapping[str, Any]) -> None:
        if self.writes:
            super()._write(of, record)
        else:
            self._waiting.append((of, record))
            self.hand_on()

    def _go_on_from(self, step: int) -> None:
        if self.writes:
            super()._go_on_from(step)
