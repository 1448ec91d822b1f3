"""What each rank's end says about it: a culprit that failed by itself, or a victim that lost a peer.

All that one rank left (the event of its death, its report, its log, the kernel's line about its process) makes one
suspect, so that the best of it decides and the rest is evidence.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bessemer.inspect.landing_causes import (
    CORRUPT,
    IN_NATIVE_CODE,
    SUMMED,
    UNEXPLAINED,
    VICTIM_CODES,
    Cause,
    cause_of_code,
    cause_of_kernel,
    cause_of_signal,
    cause_of_trace,
    is_victim,
)
from bessemer.inspect.landing_findings import cause_of_stack, corruptions, standstill_of
from bessemer.inspect.landing_remains import Event, Remains, Try, about_process
from bessemer.inspect.landing_traces import Trace

__all__ = ["Suspect", "find_suspects", "service_suspect"]

WEAK_SIGNALS = ("SIGABRT", "SIGTERM")
"""With which libraries and schedulers also end what another rank's death has left without a use."""
EVICTED = Cause(
    "unknown",
    0.8,
    "the watch beside the run ended it: the finding says what it did; test that host before it comes back",
)
_BLAMED = re.compile(r"\(rank (\d+)[,)]")
_KILLED = re.compile(r"killed by (SIG\w+)")


@dataclass(frozen=True)
class Suspect:
    """rank: None for a service. weight: 2 failed by itself, 1 may have, 0 a victim. t: unix seconds of the first sign,
    None if unknown. signature: equal where ranks failed in the same way."""

    rank: int | None
    weight: int
    t: float | None
    cause: Cause
    evidence: tuple[str, ...]
    signature: tuple[str, ...]


def find_suspects(remains: Remains, of: Try, lost: Sequence[Event], report: Event | None) -> list[Suspect]:
    """One for each rank that left something; culprits first, in order of time.

    lost: the events rank_lost to judge; report: the event `failed`, if a rank's own words are in it.
    """
    deaths = {int(e.fields["rank"]): e for e in reversed(lost) if e.fields.get("rank") is not None}
    reporter = report.fields.get("rank") if report is not None else None
    traces = _traces(remains, of, only=None if of is remains.tries[-1] else report)
    ranks = sorted({*deaths, *traces, *([int(reporter)] if reporter is not None else [])})
    found = [
        _suspect(
            remains, of, rank, (deaths.get(rank), traces.get(rank), report if reporter == rank else None)
        )
        for rank in ranks
    ]  # fmt: skip
    found = _with_copies(found, traces)
    named = report.fields.get("rank") if report is not None else None
    return sorted(found, key=lambda s: (-s.weight, s.t if s.t is not None else float("inf"), s.rank != named))


def _with_copies(found: Sequence[Suspect], traces: dict[int, Trace]) -> list[Suspect]:
    """Groups hold the same parameters. Where one isn't finite in some and others only have a bad sum, it is memory."""
    only_sum = any(trace.message.startswith(SUMMED) for trace in traces.values())
    return [
        replace(s, cause=CORRUPT)
        if only_sum and s.rank in traces and traces[s.rank].message.startswith("parameter ")
        else s
        for s in found
    ]


def service_suspect(remains: Remains, of: Try, name: str, report: Event | None) -> Suspect:
    """The vault or a coordinator, whose logs say why it ended; else the agent may have told of the signal."""
    logs = sorted(log for log in remains.traces if log.partition("-")[0] == name)
    trace = next((t for log in logs if (t := remains.trace(log, of)) is not None and not t.victim), None)
    told = [e for e in of.named("warning") if f"the {name} was killed by" in str(e.fields.get("message"))][-1:]
    evidence = [e.text for e in ([] if report is None else [report]) + told]
    evidence += [] if trace is None else trace.evidence
    if trace is not None:
        cause, log = cause_of_trace(trace, ()), trace.log
    else:
        how = [m for e in told + ([] if report is None else [report]) if (m := _KILLED.search(e.text)) is not None]
        cause, log = cause_of_signal(how[0].group(1)) if how else UNEXPLAINED, f"logs/{name}.log"
    cause = Cause(cause.kind, min(cause.confidence, 0.7), f"{cause.next} (of the {name}: {log})")
    return Suspect(None, 2, None if report is None else report.t, cause, tuple(evidence), (name,))


def _traces(remains: Remains, of: Try, only: Event | None) -> dict[int, Trace]:
    """By the rank that each error blames, which for most is the one that left it. Of an earlier attempt only those
    whose words the event repeats, since log lines carry no time."""
    found: dict[int, Trace] = {}
    own: set[int] = set()
    for log in sorted(remains.traces):
        number = re.fullmatch(r"rank-(\d+)", log)
        trace = remains.traces[log] if only is not None else remains.trace(log, of)
        if number is None or trace is None:
            continue
        if only is not None and trace.message.split(" | ")[0] not in str(only.fields.get("message")):
            continue
        rank = int(number.group(1))
        blamed = _BLAMED.search(trace.message) if trace.kind.startswith("bessemer.") and not trace.victim else None
        guilty = int(blamed.group(1)) if blamed is not None else rank
        if guilty not in found or (guilty == rank and guilty not in own):
            found[guilty] = trace
        if guilty == rank:
            own.add(rank)
    return found


def _suspect(
    remains: Remains, of: Try, rank: int, left: tuple[Event | None, Trace | None, Event | None]
) -> Suspect:  # fmt: skip
    death, trace, report = left
    kernel = about_process(remains, rank, of)
    evidence = [e.text for e in (death, report) if e is not None]
    evidence += [] if trace is None else trace.evidence
    evidence += [f"kernel: {line.text}" for line in kernel[-3:]]
    norms = [m["grad_norm"] for m in remains.metrics[-20:] if m.get("grad_norm") is not None]
    weight, cause = _judged(death, trace, report, norms)
    weight, cause, more = _as_watched(of, rank, death, (weight, cause))
    evidence += more
    evicted = next((e for e in of.named("evicted") if e.fields.get("rank") == rank), None)
    if evicted is not None:
        evidence.append(evicted.text)
        still = standstill_of(of, rank, evicted.t)
        weight, cause = 2, EVICTED if still is None else cause_of_stack(still)
    told = next((c for line in reversed(kernel) if (c := cause_of_kernel(line.text)) is not None), None)
    if told is not None:
        weight, cause = 2, told
    log = trace.log.rpartition("/")[2].removesuffix(".log") if trace is not None else ""
    times = [death.t if death is not None else None, remains.written.get(log)]
    t = min((x for x in times if x is not None and remains.may_be_of(x, of)), default=None)
    if death is not None and t is not None and death.fields.get("silent_s"):
        t = min(t, death.t - float(death.fields["silent_s"]))
    how = _how(death.fields)[0] if death is not None else ""
    if trace is not None and not trace.victim:
        signature = trace.signature
    else:
        signature = (how, str(report.fields.get("message")) if report is not None else "")
    return Suspect(rank, weight, t, cause, tuple(evidence), signature)


def _as_watched(of: Try, rank: int, death: Event | None, judged: tuple[int, Cause]) -> tuple[int, Cause, list[str]]:
    """(weight, cause, evidence) of a lost rank, with what the vote or the watch beside the run knew of it."""
    if death is not None and "group" in death.fields:
        for event, whose, cause in corruptions(of):
            if whose == rank and event.name == "group_ended":
                return 2, cause, [event.text]
    still = standstill_of(of, rank, death.t) if death is not None and death.fields.get("silent_s") else None
    if still is None:
        return *judged, []
    found = cause_of_stack(still)
    return 2, found if judged[1].kind == "unknown" else judged[1], [still.text, *still.finding.evidence[:3]]


def _judged(
    death: Event | None, trace: Trace | None, report: Event | None, norms: Sequence[float]
) -> tuple[int, Cause]:
    """(weight, cause) of what one rank left."""
    by_itself = trace is not None and not trace.victim
    if death is not None:
        how, cause = _how(death.fields)
        if how.startswith("SIG"):
            if trace is not None and by_itself:
                said = cause_of_trace(trace, norms)
                return 2, said if said.kind != "unknown" and said is not IN_NATIVE_CODE else cause
            if how == "SIGABRT" and trace is not None and trace.victim:
                return 0, cause
            return (1 if how in WEAK_SIGNALS else 2), cause
        if trace is None:
            return (1 if how == "gone" else 2), cause
        if by_itself and "group" in death.fields and "which is not saved" in trace.message:
            return 2, CORRUPT  # the other groups hold the same state, and go on with it
        return (_weight(trace), cause_of_trace(trace, norms)) if by_itself else (0, cause)
    code, message = ("", "") if report is None else (str(report.fields.get(key) or "") for key in ("code", "message"))
    if trace is not None and by_itself:
        if code in VICTIM_CODES:
            return 0, UNEXPLAINED
        cause, weight = cause_of_trace(trace, norms), 1 if trace.kind == "words" else _weight(trace)
        return weight, cause_of_code(code, message, norms) if cause.kind == "unknown" and code else cause
    if report is not None:
        return (0 if is_victim(code, message) else 2), cause_of_code(code, message, norms)
    return 0, UNEXPLAINED


def _weight(trace: Trace) -> int:
    """Of a rank where only a sum went wrong, not its part in it, another one may be the culprit."""
    return 1 if trace.message.startswith(SUMMED) and ", made by" not in trace.message else 2


def _how(fields: dict[str, Any] | Any) -> tuple[str, Cause]:
    """(signal's name, "stopped", "silent", "gone" or "exit", what that says) of an event rank_lost."""
    code, why = fields.get("exit_code"), str(fields.get("why") or "")
    name = fields.get("signal") or (signal.Signals(-code).name if isinstance(code, int) and code < 0 else None)
    if "is stopped" in why:
        return "stopped", cause_of_signal("SIGSTOP")
    if "no progress" in why:
        return "silent", Cause("unknown", 0.6, "look at what its black box says it was doing; test that host")
    if name is not None:
        return str(name), cause_of_signal(str(name))
    if code is None:
        return "gone", Cause("unknown", 0.4, "ask the launcher of that host for the rank's exit code, and its log")
    return "exit", Cause("unknown", 0.5, "read the log of that rank")
