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

_MOST_WAITING = 100_000
"""As many as a file's writer lets wait for room on the disk, which may come to wait here."""


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
            self.step = self.folder.last_step()
            self.saved, self.loaded = self.folder.newest_saved(), self.loaded or begun
            self.hand_on()

    def cease(self) -> None:
        """Write no more until `begin`. What the disk had no room for is now for whoever writes."""
        if self.writes:
            self.writes = False
            for of, writer in self._files.items():
                self._waiting.extend((of, record) for record in writer.withdraw())
            self._close_files()

    def hand_on(self) -> None:
        """What has waited for a coordinator, or for this agent to write."""
        while self._waiting:
            of, record = self._waiting[0]
            if not self.writes:
                if not self.send({"kind": "record", "of": of, "record": dict(record)}):
                    return
            elif of == "events":
                super()._write(of, record)
            elif int(record["step"]) > self.step:  # else another host has written it meanwhile
                self.step = int(record["step"])
                super()._write(of, record)
            self._waiting.popleft()

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def take(self, of: str, record: Mapping[str, Any]) -> None:
        """A record of another host. One of an earlier step than was told last has waited there for room on the disk:
        where later ones still wait here it comes before them."""
        fields = dict(record)
        if of == "metrics":
            if int(fields["step"]) > self.step:
                self.metric(fields)
            elif self.writes and self._files["metrics"].waiting and int(fields["step"]) > self.folder.last_step():
                self._files["metrics"].slip_in(fields, by="step")
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
