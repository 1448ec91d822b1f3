"""What a run outlived: groups that were lost while others went on, attempts that were started again, and copies of the
parameters that were found to differ. Each has a verdict of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from bessemer.inspect.landing_causes import Cause
from bessemer.inspect.landing_findings import cause_of_stack, corruptions, of_rank, standstill_of
from bessemer.inspect.landing_remains import Event, Remains, Try
from bessemer.inspect.landing_suspects import find_suspects
from bessemer.inspect.landing_verdict import Verdict, final_losses, judge, told

__all__ = ["Loss", "losses"]

HOST_GONE = Cause(
    "unknown",
    0.6,
    "its agent left no word: ask what became of that host (`last -x reboot`, its console, the scheduler), and whether "
    "the others reach it",
)


@dataclass(frozen=True)
class Loss:
    """A rank that a run lost and went on without, or started again after. t: unix seconds."""

    t: float
    step: int | None
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return {"t": self.t, "step": self.step, **self.verdict.as_json()}


def losses(remains: Remains) -> list[Loss]:
    """Oldest first."""
    found: list[Loss] = []
    for of in remains.tries:
        failed = of.end is None or of.end.name == "failed"
        final = {e.number for e in final_losses(of)} if failed else set()
        lost = [e for e in of.named("rank_lost") if e.number not in final]
        for event in lost:
            found += _loss(remains, of, event)
        known = {e.fields.get("rank") for e in of.named("rank_lost")}
        found += [loss for event in _unsaid(of) for loss in _group(remains, of, event)]
        if not failed:
            found += [_verdict(remains, of, *each) for each in corruptions(of) if each[1] not in known]
        if of is not remains.tries[-1] and failed:
            verdict = judge(remains, of)
            steps = [e.fields.get("step") for e in of.events if e.fields.get("step") is not None]
            found.append(Loss(of.events[-1].t, steps[-1] if steps else None, verdict))
    return sorted(found, key=lambda loss: loss.t)


def _loss(remains: Remains, of: Try, event: Event) -> list[Loss]:
    suspects = [s for s in find_suspects(remains, of, [event], None) if s.rank == event.fields.get("rank")]
    if not suspects:
        return []
    verdict = told(remains, of, suspects[0])
    more = tuple(line for line in of_rank(of, verdict.rank, event.t) if line not in verdict.evidence)
    return [Loss(event.t, event.fields.get("step"), replace(verdict, evidence=(*verdict.evidence, *more)))]


def _unsaid(of: Try) -> list[Event]:
    """Groups of which only the coordinator has told that they are lost, so that their agent went with them, and that
    the others went on without. Lines of several hosts need not stand in the order of time. After a wish to stop all
    end, one after the other."""
    said = {e.fields.get("group") for e in of.named("rank_lost")}
    epochs, stop_t = of.named("epoch"), min((e.t for e in of.named("stop_requested")), default=math.inf)

    def outlived(lost: Event) -> bool:
        return any(e.t >= lost.t and lost.fields["group"] not in (e.fields.get("active") or ()) for e in epochs)

    lost = [e for e in of.named("group_lost") if e.t < stop_t and e.fields.get("group") not in said]
    return [e for e in lost if outlived(e)]


def _group(remains: Remains, of: Try, event: Event) -> list[Loss]:
    ranks = [int(e.fields["rank"]) for e in of.named("rank_started") if e.fields.get("group") == event.fields["group"]]
    if not ranks:
        return []
    still = standstill_of(of, ranks[0], event.t)
    loss = _verdict(remains, of, event, ranks[0], HOST_GONE if still is None else cause_of_stack(still))
    if still is None:
        return [loss]
    return [replace(loss, verdict=replace(loss.verdict, evidence=(event.text, still.text)))]


def _verdict(remains: Remains, of: Try, event: Event, rank: int, cause: Cause) -> Loss:
    verdict = Verdict(
        rank=rank, host=remains.host(rank, of), kind=cause.kind, confidence=cause.confidence, evidence=(event.text,),
        next=cause.next,
    )  # fmt: skip
    return Loss(event.t, event.fields.get("step"), verdict)
