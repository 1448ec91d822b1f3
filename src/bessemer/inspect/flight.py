"""The flight inspection: records of a run that goes on in, findings out. Live runs and the simulator feed the same.

    flight = Flight(placement)
    for record in records:
        for finding in flight.take(record): ...

A finding is told once, and again after it hasn't been seen for 200 steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from bessemer.inspect.flight_detectors import (
    ExpertLoad,
    LinkScore,
    MemoryGrowth,
    Spikes,
    StallScore,
    corrupt_ranks,
)
from bessemer.inspect.flight_records import (
    Finding,
    FlightRecord,
    HashSample,
    LinkSample,
    MetricSample,
    Placement,
    Standstill,
    StepSample,
)
from bessemer.inspect.flight_stragglers import Slow, StragglerScore
from bessemer.inspect.landing_hang import Hang, doing_text, find_hang

__all__ = ["EVICT_EXCESS", "Flight"]

TOLD_AGAIN_STEPS = 200
EVICT_EXCESS = 0.1
"""All ranks wait for a slow one, so it costs what it is slower; from here on that is more than the loss of a group and
its return cost within a few hundred steps (docs/keep.md)."""
NAMED = 16
"""So many ranks are listed in a text."""


class Flight:
    """The detectors of one run, with what they know of its last steps."""

    def __init__(self, placement: Placement) -> None:
        self._links = LinkScore()
        self._spikes, self._experts = Spikes(), ExpertLoad()
        self._told: dict[tuple[object, ...], int] = {}  # the step at which it was last seen
        self._step = 0
        self.board(placement)

    def board(self, placement: Placement) -> None:
        """Other ranks are the fleet from now on: what was known of the former ones is forgotten."""
        self.placement = placement
        self.stragglers = StragglerScore(placement)
        self._stalls, self._memory = StallScore(len(placement)), MemoryGrowth(len(placement))
        self._hosts = dict(zip(placement.ranks.tolist(), placement.hosts, strict=True))

    def take(self, record: FlightRecord) -> list[Finding]:
        """What a record shows that hasn't been told."""
        if isinstance(record, StepSample):
            self._step = max(self._step, record.step)
            return [*self._slow(record), *self._stalled(record), *self._grown(record)]
        if isinstance(record, LinkSample):
            return self._slow_links(record)
        if isinstance(record, MetricSample):
            self._step = max(self._step, record.step)
            return [*self._spiked(record), *self._collapsed(record)]
        if isinstance(record, HashSample):
            return self._corrupt(record)
        return self._standstill(record)

    def _is_new(self, step: int, *key: object) -> bool:
        before = self._told.get(key)
        self._told[key] = step
        return before is None or step - before > TOLD_AGAIN_STEPS

    def _hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host for r in ranks if (host := self._hosts.get(r, ""))))

    # ---- by rank

    def _slow(self, sample: StepSample) -> list[Finding]:
        """One finding for each host, so that a hot one isn't told eight times."""
        self.stragglers.update(sample)
        new: dict[object, list[Slow]] = defaultdict(list)
        for slow in self.stragglers.slow():
            rank = int(self.placement.ranks[slow.index])
            if self._is_new(sample.step, "slow_rank", rank, slow.excess >= EVICT_EXCESS):
                new[self.placement.hosts[slow.index] or rank].append(slow)
        return [self._slow_finding(sample, of_host) for of_host in new.values()]

    def _slow_finding(self, sample: StepSample, of_host: Sequence[Slow]) -> Finding:
        ranks = tuple(int(self.placement.ranks[slow.index]) for slow in of_host)
        worst = of_host[0]
        text = (
            f"{_ranks_text(ranks)} compute{'s' if len(ranks) == 1 else ''} {worst.excess:.1%} longer for a token than "
            f"the other ranks of the stage ({worst.steps} steps, z = {worst.z:.1f})"
        )
        waits = [
            f"rank {self.placement.ranks[s.index]}: computes for {sample.compute_s[s.index]:.3f} s of "
            f"{sample.step_s:.3f} s, waits for {sample.wait_s[s.index]:.3f} s in step {sample.step}"
            for s in of_host[:NAMED]
        ]
        return Finding(
            kind="slow_rank", t=sample.t, step=sample.step, ranks=ranks, hosts=self._hosts_of(ranks), score=worst.z,
            excess=worst.excess, text=text, advice="evict" if worst.excess >= EVICT_EXCESS else "watch",
            evidence=tuple(waits),
        )  # fmt: skip

    def _stalled(self, sample: StepSample) -> list[Finding]:
        stalls = [
            (int(self.placement.ranks[index]), part)
            for index, part in self._stalls.update(sample)
        ]  # fmt: skip
        new = [(rank, part) for rank, part in stalls if self._is_new(sample.step, "data_stall", rank)]
        if not new:
            return []
        ranks = tuple(rank for rank, _ in new)
        text = f"{_ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} for data for {new[0][1]:.0%} of a step"
        return [
            Finding(
                kind="data_stall", t=sample.t, step=sample.step, ranks=ranks, hosts=self._hosts_of(ranks),
                score=new[0][1], excess=new[0][1], text=text,
            )
        ]  # fmt: skip

    def _grown(self, sample: StepSample) -> list[Finding]:
        found = []
        for index, part, per_step in self._memory.update(sample):
            rank = int(self.placement.ranks[index])
            if not self._is_new(sample.step, "memory_growth", rank):
                continue
            text = f"the memory of rank {rank} grows by {per_step / 1e6:.2f} MB a step, so far by {part:.1%}"
            found.append(
                Finding(
                    kind="memory_growth", t=sample.t, step=sample.step, ranks=(rank,), hosts=self._hosts_of((rank,)),
                    score=per_step, excess=part, text=text,
                )
            )  # fmt: skip
        return found

    # ---- links, metrics, hashes

    def _slow_links(self, sample: LinkSample) -> list[Finding]:
        found = []
        for index, score, excess in self._links.update(sample):
            ranks = sample.groups[index]
            if not self._is_new(sample.step, "slow_link", sample.kind, ranks):
                continue
            text = (
                f"{sample.kind} between {_ranks_text(ranks)} takes {excess:.0%} longer after the last arrival than "
                "those like it"
            )
            found.append(
                Finding(
                    kind="slow_link", t=sample.t, step=sample.step, ranks=ranks, hosts=self._hosts_of(ranks),
                    score=score, excess=excess, text=text,
                    evidence=(f"{sample.transfer_s[index] * 1e3:.2f} ms in step {sample.step}",),
                )
            )  # fmt: skip
        return found

    def _spiked(self, sample: MetricSample) -> list[Finding]:
        found = []
        for kind, z, excess in self._spikes.update(sample):
            value, name = (sample.loss, "loss") if kind == "loss_spike" else (sample.grad_norm, "gradient norm")
            if not self._is_new(sample.step, kind, sample.step):
                continue
            above = "is not finite" if excess == float("inf") else f"is {excess:.0%} above its trend (z = {z:.1f})"
            text = f"the {name} of step {sample.step}, {value:.4g}, {above}"
            found.append(Finding(kind=kind, t=sample.t, step=sample.step, score=z, excess=excess, text=text))
        return found

    def _collapsed(self, sample: MetricSample) -> list[Finding]:
        return [
            Finding(
                kind="expert_imbalance", t=sample.t, step=sample.step, score=load, excess=load / best - 1,
                text=f"MoE layer {layer}: the fullest expert has {load:.1f} times the mean load, at best {best:.1f}",
            )
            for layer, load, best in self._experts.update(sample)
            if self._is_new(sample.step, "expert_imbalance", layer)
        ]  # fmt: skip

    def _corrupt(self, sample: HashSample) -> list[Finding]:
        found = []
        for corrupt in corrupt_ranks(sample):
            if not self._is_new(sample.step, "corruption", sample.of, corrupt.ranks, corrupt.wrong):
                continue
            of = {"parameters": "the parameters of", "gradients": "the gradients of the same samples on"}[sample.of]
            if corrupt.wrong:
                text = f"{of} {_ranks_text(corrupt.wrong)} differ from the majority of their copies"
            else:
                text = f"{of} {_ranks_text(corrupt.ranks)} differ, and no majority says whose are right"
            named, when = corrupt.wrong or corrupt.ranks, "after" if sample.of == "parameters" else "in"
            found.append(
                Finding(
                    kind="corruption", t=sample.t, step=sample.step, ranks=named, hosts=self._hosts_of(named),
                    score=len(named), text=f"{text} ({when} step {sample.step})",
                    advice="evict" if corrupt.wrong else "watch",
                    evidence=(f"compared with {_ranks_text(corrupt.ranks)}",),
                )
            )  # fmt: skip
        return found

    # ---- standing still

    def _standstill(self, record: Standstill) -> list[Finding]:
        """A process that is stopped is named once others wait for it, or after twice the lease; else who others wait
        for. Where all have come to their operations and nothing moves, they wait for whoever is stopped: a process
        that is has often handed over what it doesn't send."""
        hangs = record.quiet_s > record.longest_s
        if not hangs and max(record.stopped.values(), default=0.0) <= record.lease_s:
            return []
        hang = find_hang(record.boxes)
        waited_for: Collection[int] = () if hang is None else hang.ranks
        if hang is not None and hang.kind != "absent" and set(hang.waiting) - record.stopped.keys():
            waited_for = record.stopped.keys()
        lease_s = {r: record.lease_s * (1 if r in waited_for else 2) for r in record.stopped}
        stopped = tuple(r for r, since_s in sorted(record.stopped.items()) if since_s > lease_s[r])
        if not stopped and not hangs:
            return []
        step = self._step + 1
        if stopped:
            return self._stopped(record, stopped, hang) if self._is_new(step, "stopped", stopped, step) else []
        if hang is None or not self._is_new(step, "hang", hang.kind, hang.ranks, step):
            return []
        return [self._hang(record, hang)]

    def _stopped(self, record: Standstill, stopped: tuple[int, ...], hang: Hang | None) -> list[Finding]:
        boxes = {box.rank: box for box in record.boxes}
        at = ""
        if hang is not None and set(hang.ranks) & set(stopped):
            at = f"; others wait for it at {hang.at}"
        elif hang is not None and hang.kind == "stuck" and set(hang.waiting) - set(stopped):
            at = "; others wait in operations to which all have come"
        text = f"{_ranks_text(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped (state T){at}"
        longest_s = max(record.stopped[r] for r in stopped)
        doing = [doing_text(boxes.get(r), r) for r in stopped[:NAMED]]
        evidence = tuple(dict.fromkeys((*doing, *(hang.evidence if hang else ()))))
        return [
            Finding(
                kind="stopped", t=record.t, step=self._step + 1, ranks=stopped, hosts=self._hosts_of(stopped),
                score=longest_s, text=text, advice="evict", evidence=evidence,
            )
        ]  # fmt: skip

    def _hang(self, record: Standstill, hang: Hang) -> Finding:
        named = hang.ranks if hang.kind == "absent" else ()
        since_s = record.t - hang.since_t
        what = {
            "absent": f"{_ranks_text(hang.ranks)} did not come to {hang.at}",
            "order": f"{_ranks_text(hang.waiting)} wait for each other in different operations",
            "differs": f"{_ranks_text(hang.waiting)} call the same operation with different sizes",
            "stuck": f"{_ranks_text(hang.waiting)} have all come to their operation, and nothing moves",
        }[hang.kind]
        return Finding(
            kind="hang", t=record.t, step=self._step + 1, ranks=named, hosts=self._hosts_of(named), score=since_s,
            text=f"no step for {record.quiet_s:.0f} s: {what}", advice="evict" if named else "watch",
            evidence=hang.evidence,
        )  # fmt: skip


def _ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 to 7", "ranks 1, 5, 9 and 40 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return f"ranks {', '.join(map(str, ordered[:NAMED]))}{more}"
