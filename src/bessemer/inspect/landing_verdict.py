"""From suspects and black boxes to one verdict: what came first, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bessemer.inspect.landing_causes import DISK_FULL, DIVERGED, cause_of_code
from bessemer.inspect.landing_findings import Told, cause_of_stack, corruptions, of_rank, standstill
from bessemer.inspect.landing_hang import Hang, find_hang
from bessemer.inspect.landing_remains import Event, Remains, Try, clock_text, last_sign_t
from bessemer.inspect.landing_suspects import Suspect, find_suspects, service_suspect

__all__ = ["NO_FAULT", "Verdict", "final_losses", "judge", "told"]

NO_FAULT = "no fault"
COMPETING = 0.45
"""The most that a verdict may have when another explanation fits as well."""
APART_S = 1.0
"""Two ends further apart than this are in a known order: what one rank's end does to others shows within it."""
HANG_S, HANG_STEPS = 30.0, 5.0
"""A wait is a hang when it is longer than both: seconds, and usual steps."""
SERVICES = ("coordinator", "vault", "template")
"""Whose logs may say why a run ended that recorded no end."""
NO_ROOM_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """kind: data, code, hardware, network, operator, unknown or "no fault". With "unknown" the confidence is of the
    rank alone."""

    rank: int | None = None
    host: str | None = None
    kind: str
    confidence: float
    evidence: tuple[str, ...]
    next: str
    victims: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "class": self.kind,
            "confidence": round(self.confidence, 2),
            "evidence": list(self.evidence),
            "next": self.next,
        }


def judge(remains: Remains, of: Try) -> Verdict:
    """The verdict on one attempt."""
    end = of.end
    if end is not None and end.name != "failed":
        return _no_fault(remains, of, end)
    report = end if end is not None and end.fields.get("code") not in ("ended", "rank-lost") else None
    suspects = find_suspects(remains, of, final_losses(of), report)
    hang, still = find_hang(remains.boxes_of(of)), standstill(remains, of)
    culprits = [s for s in suspects if s.weight == 2] or [s for s in suspects if s.weight == 1]
    victims = tuple(s.rank for s in suspects if s.weight == 0 and s.rank is not None)
    if culprits:
        verdict = _first_of(remains, of, culprits, end)
        verdict = _with_hang(remains, of, verdict, (hang, still), culprits[0].t)
        return replace(_as_found(remains, of, verdict, culprits[0].t), victims=victims)
    service = _service(report)
    if report is not None and service is not None:
        return replace(told(remains, of, service_suspect(remains, of, service, report)), victims=victims)
    if report is not None and report.fields.get("rank") is None and not victims:
        return _unranked(remains, of, report)
    return replace(_nobody(remains, of, (hang, still), suspects), victims=victims)


def final_losses(of: Try) -> list[Event]:
    """The losses that can have ended the attempt: where groups go on without each other, those after the last time
    that they did."""
    since = max((e.number for e in of.named("epoch")), default=0)
    lost = of.named("rank_lost")
    return [e for e in lost if e.number > since or "group" not in e.fields]


def told(remains: Remains, of: Try, suspect: Suspect) -> Verdict:
    """What one suspect's cause comes to. A run that diverged is no rank's fault, wherever it showed first, nor is the
    full disk of the run folder, whoever found it so."""
    full = suspect.cause is DISK_FULL and any(str(remains.folder.resolve()) in line for line in suspect.evidence)
    rank = None if full or suspect.cause is DIVERGED else suspect.rank
    return Verdict(
        rank=rank,
        host=remains.host(rank, of),
        kind=suspect.cause.kind,
        confidence=suspect.cause.confidence,
        evidence=suspect.evidence,
        next=suspect.cause.next,
    )


def _first_of(remains: Remains, of: Try, culprits: list[Suspect], end: Event | None) -> Verdict:
    """The earliest culprit. Others that failed differently, and not clearly later, compete with it."""
    named = end.fields.get("rank") if end is not None else None
    same = [s for s in culprits if s.signature == culprits[0].signature]
    if len(same) == len(culprits) and len(same) > 1:
        chosen = next((s for s in same if s.rank == named), same[0])
        ranks = ", ".join(str(s.rank) for s in same[:16])
        verdict = told(remains, of, chosen)
        verdict = replace(verdict, evidence=(*verdict.evidence, f"ranks {ranks} failed in the same way"))
        if len(same) == of.world_size:  # what all do alike is no rank's fault
            return replace(verdict, rank=None, host=None)
        return replace(verdict, confidence=min(verdict.confidence, 0.6))
    first = culprits[0]
    rivals = [s for s in culprits[1:] if s.signature != first.signature and not _clearly_before(first, s)]
    chosen = next((s for s in (first, *rivals) if s.rank == named), first)
    verdict = told(remains, of, chosen)
    if first.weight == 1:
        verdict = replace(verdict, confidence=min(verdict.confidence, COMPETING))
    if rivals:
        others = [s for s in (first, *rivals) if s is not chosen]
        more = [f"competes: {line}" for s in others[:3] for line in s.evidence[:2]]
        verdict = replace(
            verdict, confidence=min(verdict.confidence, COMPETING), evidence=(*verdict.evidence, *more)
        )  # fmt: skip
    return verdict


def _clearly_before(first: Suspect, other: Suspect) -> bool:
    return first.t is not None and other.t is not None and other.t - first.t > APART_S


def _hang_s(remains: Remains) -> float:
    return max(HANG_S, HANG_STEPS * remains.step_s())


def _as_found(remains: Remains, of: Try, verdict: Verdict, t: float | None) -> Verdict:
    """With what the watch beside the run had found before. A value that isn't finite, or an end that nothing explains,
    after a copy of the parameters was found to differ, goes back to that copy."""
    more = of_rank(of, verdict.rank, t)
    more = tuple(line for line in more if line not in verdict.evidence)
    verdict = replace(verdict, evidence=(*verdict.evidence, *more))
    bad_value = any("is not finite" in line for line in verdict.evidence)
    for event, rank, cause in corruptions(of):
        if bad_value or (rank == verdict.rank and verdict.kind == "unknown"):
            return replace(
                verdict, rank=rank, host=remains.host(rank, of), kind=cause.kind, confidence=cause.confidence,
                evidence=(event.text, *verdict.evidence), next=cause.next,
            )  # fmt: skip
    return verdict


def _with_hang(
    remains: Remains, of: Try, verdict: Verdict, seen: tuple[Hang | None, Told | None], t: float | None
) -> Verdict:  # fmt: skip
    """The verdict on a culprit, seen beside the black boxes: they confirm it, or show that others waited for another
    rank long before."""
    hang, still = seen
    if hang is None or hang.kind != "absent":
        return verdict
    if verdict.rank in hang.ranks:
        return replace(verdict, evidence=(*verdict.evidence, *hang.evidence[:4]))
    if t is None or (t - hang.since_t <= _hang_s(remains) and (still is None or still.event.t > t)):
        return verdict
    first = _hung(remains, of, seen, t)
    late = [f"only {t - hang.since_t:.0f} s later: {line}" for line in verdict.evidence[:2]]
    return replace(first, evidence=(*first.evidence, *late))


def _hung(remains: Remains, of: Try, seen: tuple[Hang | None, Told | None], until_t: float | None) -> Verdict:
    """The verdict where ranks waited for each other, as black boxes or the watch beside the run show."""
    hang, still = seen
    if hang is None:
        assert still is not None, "nobody waited, and nothing was told of it"
        return _stood_still(remains, of, still, ())
    waited_s = None if until_t is None else max(0.0, until_t - hang.since_t)
    long = still is not None or (waited_s is not None and waited_s > _hang_s(remains))
    said = f"for {waited_s:.0f} s" if waited_s is not None else "for an unknown time"
    ranks = ", ".join(map(str, hang.waiting[:16]))
    evidence = (f"ranks {ranks} waited {said} (a hang is more than {_hang_s(remains):.0f} s)", *hang.evidence)
    if hang.kind == "absent":
        if still is not None and set(still.finding.ranks) & set(hang.ranks):
            return _stood_still(remains, of, still, evidence)
        sure = len(hang.ranks) == 1 and hang.ranks[0] in {box.rank for box in remains.boxes_of(of)}
        return Verdict(
            rank=hang.ranks[0] if len(hang.ranks) == 1 else None,
            host=remains.host(hang.ranks[0], of) if len(hang.ranks) == 1 else None,
            kind="unknown",
            confidence=(0.75 if sure else COMPETING) if long else 0.4,
            evidence=evidence,
            next=f"look at what rank {', '.join(map(str, hang.ranks))} was doing (first lines of the evidence) and at "
            "its log; `py-spy dump` shows the stack of one that still lives; test its host if the stack is harmless",
        )
    kind, confidence, what = {
        "order": ("code", 0.6, "ranks call collectives in different orders: compare the calls that the evidence names"),
        "differs": ("code", 0.75, "ranks call the same collective with different kinds or sizes: compare the shapes"),
        "stuck": ("network", 0.4, "all ranks arrived and none got through: test the links between their hosts"),
    }[hang.kind]
    if hang.kind == "stuck" and len({box.host for box in remains.boxes_of(of)}) < 2:
        kind, confidence = "unknown", 0.3
    odd = hang.ranks[0] if len(hang.ranks) == 1 else None
    confidence = confidence if long else min(confidence, 0.4)
    host = remains.host(odd, of)
    return Verdict(rank=odd, host=host, kind=kind, confidence=confidence, evidence=evidence, next=what)


def _stood_still(remains: Remains, of: Try, still: Told, evidence: tuple[str, ...]) -> Verdict:
    """As the watch beside the run told it, with the stack of the rank that others waited for."""
    named = still.finding.ranks
    cause = cause_of_stack(still)
    rank = named[0] if len(named) == 1 else None
    lines = tuple(line for line in still.finding.evidence if line not in evidence)
    return Verdict(
        rank=rank,
        host=remains.host(rank, of),
        kind=cause.kind,
        confidence=cause.confidence if rank is not None else min(cause.confidence, COMPETING),
        evidence=(still.text, *lines, *evidence),
        next=cause.next,
    )


def _nobody(
    remains: Remains, of: Try, seen: tuple[Hang | None, Told | None], suspects: Sequence[Suspect]
) -> Verdict:  # fmt: skip
    """No rank failed by itself: a hang, a stop by force, ranks that only lost each other, or silence."""
    end = of.end
    hang, still = seen
    asked = of.named("stop_requested")
    words = tuple(line for s in suspects[:4] for line in s.evidence[:2])
    if end is None and remains.running and of is remains.tries[-1]:
        if still is not None or (hang is not None and remains.now - hang.since_t > _hang_s(remains)):
            return _hung(remains, of, seen, remains.now)
        last = of.events[-1].text if of.events else "no event yet"
        return Verdict(kind=NO_FAULT, confidence=0.5, evidence=(f"the run goes on; last: {last}",), next="")
    until_t = asked[0].t if asked else end.t if end is not None else None
    waited = hang is not None and until_t is not None and until_t - hang.since_t > _hang_s(remains)
    if still is not None or waited or (hang is not None and suspects):
        verdict = _hung(remains, of, seen, until_t)
        return replace(verdict, evidence=(*verdict.evidence, *words))
    if end is None:
        return _silence(remains, of, words)
    if suspects:
        hosts = {box.host for box in remains.boxes_of(of)}
        kind, confidence = ("network", 0.35) if len(hosts) > 1 else ("unknown", 0.2)
        evidence = ("every rank that left a word only lost a peer", *words)
        following = "look for the rank that left no word: its launcher's exit code, its host"
        return Verdict(kind=kind, confidence=confidence, evidence=evidence, next=following)
    evidence = tuple(e.text for e in (*asked[-2:], end))
    if "second signal" in str(end.fields.get("message")):
        return Verdict(kind="operator", confidence=0.85, evidence=evidence, next="start the same command again")
    if "vault" in str(end.fields.get("message")):
        return told(remains, of, service_suspect(remains, of, "vault", end))
    return Verdict(kind="unknown", confidence=0.2, evidence=evidence, next="read logs/ of the run folder")


def _silence(remains: Remains, of: Try, words: tuple[str, ...]) -> Verdict:
    """The records end without an end: whoever writes them ended with the ranks, or could write no more."""
    for service in SERVICES:
        found = service_suspect(remains, of, service, None)
        if found.evidence and found.cause.kind != "unknown":
            return told(remains, of, found)
    last = of.events[-1].text if of.events else "events.jsonl is empty or missing"
    if remains.free_bytes is not None and remains.free_bytes < NO_ROOM_BYTES:
        full = f"{remains.free_bytes} bytes are left on the disk of {remains.folder}: an end could not be recorded"
        following = DISK_FULL.next
        return Verdict(kind=DISK_FULL.kind, confidence=0.6, evidence=(full, f"last: {last}", *words), next=following)
    signs = [f"blackbox/rank-{b.rank}: last sign of life {clock_text(last_sign_t(b))}" for b in remains.boxes_of(of)]
    return Verdict(
        kind="unknown",
        confidence=0.3,
        evidence=(f"no end was recorded; last: {last}", *words, *signs[:8]),
        next="the agent ended with all ranks: `kill -9`, a host that went down, or the scheduler; ask `last -x reboot` "
        "and the scheduler's log; the same command goes on from what is saved",
    )


def _service(report: Event | None) -> str | None:
    code = str(report.fields.get("code")) if report is not None else ""
    return {"vault-lost": "vault", "coordinator-lost": "coordinator"}.get(code)


def _unranked(remains: Remains, of: Try, report: Event) -> Verdict:
    """A report that names no rank: of what comes before the ranks."""
    cause = cause_of_code(str(report.fields.get("code")), str(report.fields.get("message")), ())
    return Verdict(kind=cause.kind, confidence=cause.confidence, evidence=(report.text,), next=cause.next)


def _no_fault(remains: Remains, of: Try, end: Event) -> Verdict:
    asked = [e.text for e in of.named("stop_requested")[-1:]] if end.name == "stopped" else []
    warnings = [e.text for e in of.named("warning", "coordinator_lost")[-3:]]
    following = "the same command goes on from there" if end.name == "stopped" else ""
    lost = len(of.named("rank_lost"))
    more = [f"{lost} loss{'es' if lost > 1 else ''} of ranks on the way, listed below"] if lost else []
    return Verdict(
        kind=NO_FAULT, confidence=0.95, evidence=(end.text, *asked, *more, *warnings), next=following
    )  # fmt: skip
