"""What the watch beside a run found while it went on, as evidence of its end: events `finding`, and groups that a vote
has put out.

A finding about the guilty rank from shortly before the end is quoted. One that says which copy of the parameters, or of
a sum, differs from the majority names hardware; one of a rank that stands still says what it was doing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bessemer.inspect.flight_records import EVENT, Finding
from bessemer.inspect.landing_causes import CORRUPT, Cause, cause_of_signal
from bessemer.inspect.landing_remains import Event, Remains, Try

__all__ = ["Told", "cause_of_stack", "corruptions", "findings", "of_rank", "standstill", "standstill_of"]

SHORTLY_S = 120.0
"""A finding that is older when a rank fails says nothing of that."""
MOST = 3
_STACK = "stack, innermost first: "
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in ([^<]+)')
_DATA_ROOM = "/bessemer/data/"
_LIBRARIES = ("/bessemer/", "/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


@dataclass(frozen=True)
class Told:
    """A finding and the event that told of it."""

    event: Event
    finding: Finding

    @property
    def text(self) -> str:
        return f"events.jsonl:{self.event.number}: finding {self.finding.kind}: {self.finding.text}"


def findings(of: Try) -> list[Told]:
    """Those of an attempt, oldest first."""
    return list(_read(of))


def _read(of: Try) -> Iterator[Told]:
    for event in of.named(EVENT):
        try:
            yield Told(event, Finding.of_event(event.fields))
        except (KeyError, TypeError, ValueError):  # of another version
            continue


def of_rank(of: Try, rank: int | None, until_t: float | None) -> tuple[str, ...]:
    """The latest findings that name the rank, or the whole run, in the two minutes up to `until_t` (unix seconds)."""
    last_t = until_t if until_t is not None else of.events[-1].t if of.events else 0.0
    near = [
        told
        for told in findings(of)
        if (rank in told.finding.ranks or not told.finding.ranks) and last_t - SHORTLY_S <= told.event.t <= last_t + 1.0
    ]
    return tuple(told.text for told in near[-MOST:])


def corruptions(of: Try) -> list[tuple[Event, int, Cause]]:
    """(event, rank, cause) of each rank whose copy of something differed from that of the majority, oldest first. Where
    groups vote, the group that was put out says so itself; elsewhere the watch tells."""
    found: dict[int, tuple[Event, int, Cause]] = {}
    for event in of.named("group_ended"):
        if "majority" in str(event.fields.get("message")):
            for rank in _ranks_of_group(of, event.fields.get("group"))[:1]:
                found.setdefault(rank, (event, rank, CORRUPT))
    for told in findings(of):
        if told.finding.kind == "corruption" and told.finding.advice == "evict":
            for rank in told.finding.ranks:
                found.setdefault(rank, (told.event, rank, CORRUPT))
    return sorted(found.values(), key=lambda each: each[0].number)


def _ranks_of_group(of: Try, group: object) -> list[int]:
    return sorted(int(e.fields["rank"]) for e in of.named("rank_started") if e.fields.get("group") == group)


def standstill(remains: Remains, of: Try) -> Told | None:
    """The last finding that the run stands still, if no step came true after it."""
    still = [told for told in findings(of) if told.finding.kind in ("hang", "stopped")]
    moved_t = max((float(m["t"]) for m in remains.metrics if m.get("t")), default=0.0)
    return still[-1] if still and still[-1].event.t > moved_t else None


def standstill_of(of: Try, rank: int, until_t: float) -> Told | None:
    """The last finding before `until_t` that the run stands still because of this rank."""
    still = [
        told
        for told in findings(of)
        if told.finding.kind in ("hang", "stopped") and rank in told.finding.ranks
        and until_t - SHORTLY_S <= told.event.t <= until_t
    ]  # fmt: skip
    return still[-1] if still else None


def cause_of_stack(told: Told) -> Cause:
    """Of a rank that others wait for: by what it was doing, and the innermost line of its stack."""
    if told.finding.kind == "stopped":
        return cause_of_signal("SIGSTOP")
    unknown = Cause(
        "unknown",
        0.75,
        "look at what that rank was doing (the evidence says it) and at its log; test its host if that is harmless",
    )
    stack = next((line.partition(_STACK)[2] for line in told.finding.evidence if _STACK in line), "")
    frames = _FRAME.findall(stack)
    doing_data = any("doing data_s" in line for line in told.finding.evidence[:1])
    if doing_data or any(_DATA_ROOM in file for file, *_ in frames):
        following = (
            "its data doesn't come: look at the storage behind data.paths and data.cache, and at what its reading "
            "threads do (`py-spy dump`)"
        )
        return replace(unknown, kind="data", confidence=0.6, next=following)
    if frames and not any(part in frames[0][0] for part in _LIBRARIES):
        file, line, name = frames[0]
        where = f"{Path(file).name}:{line} {name.strip()}"
        return replace(unknown, kind="code", confidence=0.55, next=f"it is at {where} and doesn't come out: mend that")
    return unknown
