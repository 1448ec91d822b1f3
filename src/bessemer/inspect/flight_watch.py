"""Watches a run while it goes on, from one of its hosts: reads what it writes, and tells the agent what it finds.

    python -m bessemer.inspect.flight_watch --run runs/NAME --agent SOCKET

A process of its own beside the agent, so that its arithmetic never delays the one that judges who is alive; the agent
writes what it tells into events.jsonl. It reads black boxes, metrics.jsonl, events.jsonl and /proc once a second, looks
at the ranks' states five times, and ends with the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.inspect.flight import Flight
from bessemer.inspect.flight_links import LinkMeter
from bessemer.inspect.flight_meter import RankMeter, RankStep
from bessemer.inspect.flight_records import (
    EVENT,
    Finding,
    FlightRecord,
    HashSample,
    MetricSample,
    Placement,
    Standstill,
    StepSample,
)
from bessemer.inspect.flight_standstill import across_groups, is_stopped, log_of, python_stack
from bessemer.keep.process import usable_cores
from bessemer.keep.record_tail import Tail
from bessemer.keep.step_times import StepTimes
from bessemer.keep.wire import pack
from bessemer.runtime.blackbox import read_blackboxes

__all__ = ["FlightWatch", "main"]

LOOK_S, TURN_S = 0.2, 1.0
LEASE_S = 1.5
EARLIER = 0.8
"""What stands still is told after this part of the time that it has: its stack must be read before it's ended."""
ASIDE_S = 600.0
"""What one rank does alone, such as an evaluation, a trace or a dump, may keep the others waiting for this long."""
EVICTIONS = 3
"""No more are asked for in one attempt: what goes on after that isn't a rank's fault."""
PAUSE_S = 5.0
CONNECT_S = 30.0
KEPT_LENGTHS = 200


class FlightWatch:
    """The watch of one run. `tell` hears each finding, `evict` each rank that policy and finding say should go."""

    def __init__(
        self, folder: Path, job: Job, tell: Callable[[Finding], None], evict: Callable[[int, str], None]
    ) -> None:
        self.folder, self.job = folder, job
        self._tell, self._evict = tell, evict
        self._elastic = job.keep.mode == "zero-interruption"
        self._block = job.layout.world_size // job.replicas
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
        self._lease_s = EARLIER * (job.keep.lease_s or LEASE_S) / (2 if self._elastic else 1)  # there it's ended then
        _, events = self._events.read()
        start = max((at for at, event in enumerate(events) if event.get("event") == "start"), default=0)
        self._catches_up = True
        self._begin(float(events[start]["t"]) if events else time.time())
        for event in events[start + 1 :]:
            self._on_event(event)
        self._catches_up = False

    def _begin(self, start_t: float) -> None:
        """A new attempt, from `start_t` (unix seconds) on: nothing of the last one counts."""
        self._start_t = start_t
        self._meters: dict[int, RankMeter] = {}
        self._links, self._times = LinkMeter(), StepTimes()
        self._stopped_since: dict[int, float] = {}
        self._told_stopped: set[int] = set()
        self._told_hang = -1  # after which step
        self._done, self._last_metric, self._evicted, self._over = 0, 0, 0, False
        self._active = [] if self._elastic else list(range(self.job.replicas))
        self.flight = Flight(self._placement())
        for sample in self._metric_samples():  # of earlier attempts: nobody needs to hear of them now
            self.flight.take(sample)

    def look(self, now_s: float) -> None:
        """Whose process is stopped. now_s: of the monotonic clock."""
        stopped = {r for r, meter in self._meters.items() if meter.pid and is_stopped(meter.pid)}
        self._stopped_since = {r: self._stopped_since.get(r, now_s) for r in stopped}
        self._told_stopped &= stopped
        for rank, since_s in self._stopped_since.items():
            if rank not in self._told_stopped and now_s - since_s > self._lease_s:
                self._stand_still(now_s)
                return

    def resumed(self, now_s: float) -> None:
        """The watch itself stood still, so that what it saw before says nothing of the ranks."""
        self._times.last = now_s
        self._stopped_since.clear()

    def turn(self, now_s: float) -> None:
        """Take in what is new everywhere."""
        for event in self._events.read()[1]:
            self._on_event(event)
        for number in self.flight.placement.ranks.tolist():
            path = self.folder / "blackbox" / f"rank-{number}"
            if number not in self._meters:
                self._meters[number] = RankMeter(path, self._start_t)
            self._meters[number].poll(now_s)
        self._take_operations()
        for record in (*self._metric_samples(), *self._step_samples()):
            self._take(record)
        quiet_s, longest_s = self._quiet(now_s)
        if self._told_hang != self._done and quiet_s > longest_s:
            self._stand_still(now_s)

    # ---- records

    def _take(self, record: FlightRecord) -> None:
        for finding in self.flight.take(record):
            self._pass_on(finding)

    def _pass_on(self, finding: Finding) -> None:
        if self._catches_up:  # another watch has told it, on a host that wrote before
            return
        if finding.kind == "slow_rank" and self.job.layout.ep > 1:
            finding = replace(finding, advice="watch", text=f"{finding.text}; its experts may just be fuller")
        self._tell(finding)
        # all ranks starting again in place would find a slow rank where it was, and load what a bad copy has saved
        helps = self._elastic or finding.kind in ("hang", "stopped")
        if self.job.inspect.flight == "evict" and finding.advice == "evict" and helps and not self._over:
            for rank in finding.ranks[: EVICTIONS - self._evicted]:
                self._evicted += 1
                self._evict(rank, finding.text)

    def _on_event(self, event: dict[str, Any]) -> None:
        name = event.get("event")
        if name == "start":
            self._begin(float(event["t"]))
        elif name == "loaded":
            self._last_metric = int(event.get("step") or 0)  # what comes after it is done again
        elif name == "epoch":
            self._active = [int(group) for group in event["active"]]
            self._times.last = time.monotonic()
            self.flight.board(self._placement())
        elif name == "evicted" and self._catches_up:
            self._evicted += 1
        elif name in ("finished", "stopped", "failed", "stop_requested"):
            self._over = True
        elif name in ("parameters", "gradients"):
            hash_PC = np.asarray([[int(h, 16) for h in event["hashes"]]], dtype=np.uint64)
            ranks_PC = np.asarray([event["ranks"]])
            self._take(HashSample(int(event["step"]), float(event["t"]), hash_PC, ranks_PC, of=name))
        elif name == "group_ended" and "majority" in str(event.get("message")):
            self._pass_on(self._fenced(event))

    def _fenced(self, event: dict[str, Any]) -> Finding:
        """The coordinator has compared what all groups must have alike, and put a group out of the run."""
        first = int(event["group"]) * self._block
        ranks = tuple(range(first, first + self._block))
        text = f"group {event['group']} was put out: {event['message']}"
        return Finding(
            kind="corruption", t=float(event["t"]), step=self._done + 1, ranks=ranks, hosts=(os.uname().nodename,),
            score=1.0, text=text, advice="ignore", evidence=("the vote of all groups at the commit",),
        )  # fmt: skip

    def _metric_samples(self) -> Iterator[MetricSample]:
        for record in self._metrics.read()[1]:
            step = int(record.get("step") or 0)
            if step > self._last_metric:
                self._last_metric = step
                loss, norm = (math.nan if record.get(k) is None else float(record[k]) for k in ("loss", "grad_norm"))
                imbalance = tuple((record.get("experts") or {}).get("imbalance") or ())
                yield MetricSample(step, float(record.get("t") or 0.0), loss, norm, imbalance)

    def _take_operations(self) -> None:
        placement = self.flight.placement
        hosts = dict(zip(placement.ranks.tolist(), placement.hosts, strict=True))
        for number, meter in self._meters.items():
            first = number // self._block * self._block if self._elastic else 0
            for o in meter.operations:
                ranks = tuple(first + r for r in o.group[1])
                peer = first + o.peer if o.peer >= 0 else -1
                self._links.take(number, o._replace(group=(o.group[0], ranks), peer=peer), meter.tail.ahead_s, hosts)

    def _step_samples(self) -> list[FlightRecord]:
        """The steps that are over on all ranks, in order, and the links' share of them."""
        numbers = self.flight.placement.ranks.tolist()
        meters = [self._meters[number] for number in numbers]
        ready = min((meter.newest for meter in meters), default=0)
        if ready <= self._done:
            return []
        if self._done == 0:
            self.flight.board(self._placement())  # by now the hosts are known
        self._over = self._over or ready >= self.job.train.steps - 1  # the last one is closed by none after it
        of_step: dict[int, list[RankStep | None]] = {}
        for index, meter in enumerate(meters):
            while meter.steps and meter.steps[0].step <= ready:
                step = meter.steps.popleft()
                of_step.setdefault(step.step, [None] * len(meters))[index] = step
        samples = [self._sample(step, of_step[step], meters) for step in sorted(of_step) if step > self._done]
        lengths = [*self._times.lengths, *(sample.step_s for sample in samples)]
        self._times = StepTimes(ready, time.monotonic(), lengths[-KEPT_LENGTHS:])
        done, self._done = self._done, ready
        step_s = float(np.mean([sample.step_s for sample in samples])) if samples else 0.0
        return [*samples, *self._links.samples(ready, time.time(), ready - done, step_s)]

    def _sample(self, step: int, ranks: Sequence[RankStep | None], meters: Sequence[RankMeter]) -> StepSample:
        share_cores = len(meters) > usable_cores() and all(meter.pid for meter in meters)
        rows = [_row(r, m, share_cores) for r, m in zip(ranks, meters, strict=True)]
        compute_R, data_R, wait_R, batches_R, memory_R = np.asarray(rows, dtype=np.float64).T
        known = [(r, m.tail.ahead_s) for r, m in zip(ranks, meters, strict=True) if r is not None]
        begin_t, end_t = min(r.begin_s + at for r, at in known), max(r.end_s + at for r, at in known)
        tokens = self.job.train.micro_batch * self.job.data.seq_len
        if self.job.layout.pp > 1:
            tokens *= self.job.micro_batches
        return StepSample(step, end_t, end_t - begin_t, compute_R, data_R, wait_R, tokens * batches_R, memory_R)

    def _placement(self) -> Placement:
        """Of the groups that are active; hosts from their black boxes."""
        layout, block = self.job.layout, self._block
        numbers = [group * block + place for group in self._active for place in range(block)]
        of_rank = self._hosts()
        hosts = [of_rank.get(number, "") for number in numbers]
        if not numbers:
            return Placement.of_sizes(replicas=0, pp=1, inner=1)
        inner = block // layout.pp
        return Placement.of_sizes(replicas=len(self._active), pp=layout.pp, inner=inner, hosts=hosts, ranks=numbers)

    def _hosts(self) -> dict[int, str]:
        """Of the ranks that have a black box of this attempt."""
        return {n: str(meter.tail.own["host"]) for n, meter in self._meters.items() if meter.tail.is_live}

    # ---- standing still

    def _quiet(self, now_s: float) -> tuple[float, float]:
        """(for how long no step has come true, for how long that may be). A step has its time from the end of what one
        rank does alone while the others wait for it."""
        if any(meter.is_aside for meter in self._meters.values()):
            return now_s - self._times.last, max(ASIDE_S, EARLIER * self._times.longest_s)
        since_s = max((meter.aside_s for meter in self._meters.values()), default=0.0)
        return now_s - max(self._times.last, since_s), EARLIER * self._times.longest_s

    def _stand_still(self, now_s: float) -> None:
        if self._over or not (self.folder / "blackbox").is_dir():
            return
        numbers = set(self.flight.placement.ranks.tolist()) & self._hosts().keys()
        boxes = [box for box in read_blackboxes(self.folder / "blackbox") if box.rank in numbers]
        if self._elastic:
            boxes = across_groups(boxes, self._block, self._active)
        stopped = {r: now_s - since_s for r, since_s in self._stopped_since.items() if r in numbers}
        quiet_s, longest_s = self._quiet(now_s)
        for finding in self.flight.take(Standstill(time.time(), quiet_s, longest_s, self._lease_s, boxes, stopped)):
            self._pass_on(self._with_stacks(finding))
            if finding.kind == "stopped":
                self._told_stopped |= set(finding.ranks)
            else:
                self._told_hang = self._done

    def _with_stacks(self, finding: Finding) -> Finding:
        """What the interpreter of a rank that hangs is at, which its black box doesn't say."""
        stacks = []
        for rank in finding.ranks[:4] if finding.kind == "hang" else ():
            log = log_of(self._meters[rank].pid)
            frames: list[str] = []
            with contextlib.suppress(OSError):  # the file has gone, or isn't ours to read
                frames = [] if log is None else python_stack(self._meters[rank].pid, log)
            named = log.relative_to(self.folder) if log is not None and log.is_relative_to(self.folder) else log
            stacks += [f"{named}: stack, innermost first: {' <- '.join(frames)}"] if frames else []
        return replace(finding, evidence=(*finding.evidence, *stacks))


def _row(step: RankStep | None, meter: RankMeter, share_cores: bool) -> tuple[float, ...]:
    """Computing, data, waiting, batches, memory of one rank in one step. What a profiler slows down is not known."""
    nan = float("nan")
    if step is None:
        return nan, nan, nan, nan, meter.memory_bytes
    if step.profiled:
        return nan, nan, step.wait_s, float(step.batches), meter.memory_bytes
    compute_s = meter.processor_s(step) if share_cores else step.compute_s
    return compute_s, step.data_s, step.wait_s, float(step.batches), meter.memory_bytes


def main() -> int:
    """The process that `bessemer train` starts beside its agent."""
    parser = argparse.ArgumentParser(prog="python -m bessemer.inspect.flight_watch")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--agent", type=Path, required=True)
    options = parser.parse_args()
    os.nice(5)
    link = _connected(options.agent)
    if link is None:
        return 1

    def tell(finding: Finding) -> None:
        link.sendall(pack({"kind": "event", "event": EVENT, "fields": finding.as_event()}))

    def evict(rank: int, why: str) -> None:
        link.sendall(pack({"kind": "evict", "rank": rank, "why": why}))

    watch = FlightWatch(options.run, load_job(options.run / "job.toml"), tell, evict)
    with contextlib.suppress(OSError):  # the agent has ended
        _run(watch, link)
    return 0


def _run(watch: FlightWatch, link: socket.socket) -> None:
    turned_s, done_s = 0.0, time.monotonic()
    while True:
        readable, _, _ = select.select([link], [], [], LOOK_S)
        if readable and not link.recv(1 << 16):
            return
        now_s = time.monotonic()
        if now_s - done_s > PAUSE_S:  # a container or machine that was paused: its clock goes on
            watch.resumed(now_s)
        watch.look(now_s)
        if now_s - turned_s >= TURN_S:
            watch.turn(now_s)
            turned_s = now_s
        done_s = time.monotonic()


def _connected(path: Path) -> socket.socket | None:
    """A connection with the agent, once it listens."""
    deadline = time.monotonic() + CONNECT_S
    while time.monotonic() < deadline:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(str(path))
        except OSError:
            link.close()
            time.sleep(0.1)
            continue
        return link
    return None


if __name__ == "__main__":
    raise SystemExit(main())
