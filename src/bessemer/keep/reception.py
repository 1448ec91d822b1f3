"""Receives what the ranks of one host say, and remembers where each of them is. Shared by agent and host services."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bessemer.keep.hub import Heard, Link
from bessemer.keep.journal import Journal
from bessemer.keep.process import Child

__all__ = ["RankState", "Reception"]


@dataclass(eq=False)
class RankState:
    """What is known of a rank: its process when we started it, its latest mark, how it failed and ended."""

    rank: int
    child: Child | None = None
    link: Link | None = None
    step: int = 0
    phase: str = "starting"
    report: dict[str, Any] | None = None  # its own {"kind": "failed"} record
    failed_at: float | None = None  # when we first knew of it (monotonic)
    said: int | None = None  # the exit code that it announced
    exit_code: int | None = None  # its real one, where it is our child
    told_to_end: bool = False  # by our signal: its end then says nothing about it
    gone: bool = False


class Reception:
    """Takes records off the hub's links. `journal` is None on hosts that don't hold global rank 0: there, records of
    the files are not ours to write. `on_failed` hears of each rank's own report of a failure, `on_stop` of the first
    rank that was itself told to stop, with the signal's name. With `places`, so many ranks may come, of any number."""

    def __init__(
        self,
        ranks: dict[int, RankState],
        journal: Journal | None,
        *,
        on_failed: Callable[[RankState], None],
        on_stop: Callable[[str], None],
        places: int = 0,
    ) -> None:
        self.ranks = ranks
        self.journal = journal
        self.stopping = False
        self.welcome: dict[str, Any] = {"kind": "welcome"}  # or {"kind": "refused", code, message, fix}
        self._on_failed, self._on_stop = on_failed, on_stop
        self._places = places

    def take(self, heard: Heard) -> None:
        """One record of a link. What can't be understood is said once and does no harm."""
        link, record = heard.link, heard.record
        if link is None or record is None:
            if heard.problem:
                self._warn(f"a connection was closed: {heard.problem}", link.rank if link else None)
            return
        try:
            self._take(link, record)
        except (KeyError, TypeError, ValueError) as error:
            kind = record.get("kind")
            self._warn(f"a record of kind {kind!r} is not understood ({type(error).__name__}: {error})", link.rank)

    def ask_to_stop(self) -> list[RankState]:
        """Tells every connected rank to finish its step, save and end; later ones hear it at their hello. Returns the
        ranks that heard it now."""
        self.stopping = True
        told = [state for state in self.ranks.values() if state.link is not None and not state.gone]
        for state in told:
            if state.link is not None:
                state.link.send({"kind": "stop"})
        return told

    def _take(self, link: Link, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "hello":
            self._hello(link, record)
        elif kind == "metric":
            if self.journal is not None:
                self.journal.metric(record["record"])
        elif kind == "event":
            if self.journal is not None:
                self.journal.event(str(record["event"]), **record["fields"])
        elif kind == "bye":
            if link.rank is not None:
                self.ranks[link.rank].said = int(record.get("exit_code") or 0)
            link.send({"kind": "bye"})
        elif kind == "stopping":
            if not self.stopping:
                self._on_stop(str(record["signal"]))
        elif kind in ("phase", "failed"):
            self._note(self.ranks[link.rank if link.rank is not None else -1], record)
        else:
            raise ValueError("unknown kind")

    def _note(self, state: RankState, record: dict[str, Any]) -> None:
        if record["kind"] == "phase":
            state.step, state.phase = int(record["step"]), str(record["name"])
            if self.journal is not None and state.rank == min(self.ranks):
                self.journal.printer.phase(state.phase)
            return
        if state.report is None:
            state.report = {
                "code": str(record["code"]),
                "message": str(record["message"]),
                "fix": str(record.get("fix") or ""),
                "rank": record.get("rank"),
                "step": record.get("step"),
                "exit_code": int(record.get("exit_code") or 1),
            }
            if state.failed_at is None:
                state.failed_at = time.monotonic()
            self._on_failed(state)

    def _hello(self, link: Link, record: dict[str, Any]) -> None:
        rank = int(record["rank"])
        if rank not in self.ranks and len(self.ranks) < self._places:
            self.ranks[rank] = RankState(rank)
        state = self.ranks.get(rank)
        if state is None or state.link is not None:
            why = "is here already" if state is not None else "does not belong to this host"
            fix = "give each process of a host its own RANK and LOCAL_RANK"
            link.send({"kind": "refused", "message": f"rank {rank} {why}", "fix": fix})
            return
        state.link, link.rank = link, rank
        link.send(self.welcome)
        if self.stopping:
            link.send({"kind": "stop"})

    def _warn(self, message: str, rank: int | None) -> None:
        if self.journal is not None:
            self.journal.event("warning", message=message, rank=rank)
