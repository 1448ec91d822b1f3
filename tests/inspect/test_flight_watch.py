"""The watch of a run, on what a run writes, without one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remains_builder import RemainsBuilder, enqueue

from bessemer.core.job import Job
from bessemer.inspect.flight import Flight
from bessemer.inspect.flight_meter import RankMeter, RankStep
from bessemer.inspect.flight_records import Finding, Placement, Standstill
from bessemer.inspect.flight_standstill import across_groups, is_stopped, log_of, python_stack
from bessemer.inspect.flight_watch import FlightWatch, _row
from bessemer.inspect.landing import read_landing
from bessemer.inspect.landing_hang import find_hang
from bessemer.inspect.problems import problems
from bessemer.keep.progress import event_line
from bessemer.runtime.blackbox import read_blackboxes
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
from bessemer.runtime.ring import OPERATIONS


class Run:
    """A run folder, and what the watch of it says."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        self.folder = folder
        self.told: list[Finding] = []
        self.evicted: list[int] = []
        base = {"layout": {"dp": 4}, "train": {"steps": 1000, "global_batch": 32}}
        self.job = Job.model_validate(base | sections)
        self.event("start", world_size=4)
        self.watch = FlightWatch(folder, self.job, self.told.append, lambda rank, why: self.evicted.append(rank))

    def write(self, name: str, record: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def event(self, name: str, **fields: Any) -> None:
        self.write("events.jsonl", {"t": time.time(), "event": name, **fields})

    def turn(self) -> list[Finding]:
        self.told.clear()
        self.watch.turn(time.monotonic())
        return list(self.told)


def test_metrics_and_hashes_become_findings(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write("metrics.jsonl", {"step": 1, "loss": None, "grad_norm": 1.0, "t": 1.0})  # null: it wasn't finite
    run.event("parameters", step=50, ranks=[0, 1, 2, 3], hashes=["0f", "0f", "ff", "0f"])
    assert [(f.kind, f.ranks) for f in run.turn()] == [("corruption", (2,)), ("loss_spike", ())]
    assert run.turn() == [] and run.evicted == []


def test_what_earlier_attempts_left_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null, "grad_norm": 1.0, "t": 1.0}\n')
    differ = {"t": 1.0, "event": "parameters", "step": 5, "ranks": [0, 1, 2], "hashes": ["1", "1", "2"]}
    (tmp_path / "events.jsonl").write_text(json.dumps(differ) + "\n")
    run = Run(tmp_path)
    assert run.turn() == []


@pytest.mark.parametrize(
    ("keep", "evicted"), [({"mode": "zero-interruption"}, 3), ({"restarts": 1}, 0)], ids=["elastic", "restarting"]
)
def test_evictions_are_few_and_only_where_they_help(tmp_path: Path, keep: dict[str, Any], evicted: int) -> None:
    """All ranks starting again in place could load what a bad copy has saved."""
    run = Run(tmp_path, inspect={"flight": "evict"}, keep=keep)
    run.event("epoch", active=[0, 1, 2, 3])
    for step in range(1, 6):
        hashes = ["1"] * 4
        hashes[step % 4] = "2"
        run.event("parameters", step=step, ranks=[0, 1, 2, 3], hashes=hashes)
    assert len(run.turn()) >= 4
    assert len(run.evicted) == evicted


def test_full_experts_are_no_reason_to_evict(tmp_path: Path) -> None:
    run = Run(tmp_path, inspect={"flight": "evict"}, keep={"mode": "zero-interruption"})
    run.job = run.watch.job = run.job.model_copy(update={"layout": run.job.layout.model_copy(update={"ep": 2})})
    slow = Finding(kind="slow_rank", t=1.0, step=20, ranks=(2,), hosts=("h",), score=9.0, excess=0.35, text="slow",
                   advice="evict", evidence=())  # fmt: skip
    run.watch._pass_on(slow)
    assert [f.advice for f in run.told] == ["watch"] and run.evicted == [] and "experts" in run.told[0].text


def test_a_watch_that_was_paused_itself_blames_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.watch._stopped_since = {2: 0.0}
    run.watch.resumed(100.0)
    assert run.watch._stopped_since == {} and run.watch._times.last == 100.0


def test_a_rank_that_profiles_or_dumps_is_no_hang(tmp_path: Path) -> None:
    """The others wait for it; a step has its time from the end of the trace on. After 600 s it is one all the same."""
    run = Run(tmp_path)
    open_phases = {}
    for rank in range(4):
        recorder = Recorder(tmp_path / "blackbox" / f"rank-{rank}", rank=rank, world=4, job_hash="x")
        phases = Phases()
        phases.attach(recorder)
        phases.at(step=7)
        channel = recorder.channel("replica", (0, 1, 2, 3), "gloo", blocks=True)
        open_phases[rank] = phases("profile_s" if rank == 2 else "comm_s")
        open_phases[rank].__enter__()
        if rank != 2:
            enqueue(channel, finish=False)
    times = run.watch._times
    times.lengths, times.last = [0.1] * 20, time.monotonic() - 60.0
    assert run.turn() == []
    times.last = time.monotonic() - 601.0
    (finding,) = run.turn()
    assert finding.kind == "hang" and finding.ranks == (2,) and "profile_s" in finding.evidence[0]
    run.watch._told_hang, times.last = -1, time.monotonic() - 60.0
    open_phases[2].__exit__(None, None, None)
    assert run.turn() == [], "it has just ended"
    run.watch._meters[2].aside_s = time.monotonic() - 9.0
    run.watch.flight._told.clear()
    (finding,) = run.turn()
    assert finding.ranks == (2,) and finding.text.startswith("no step for 9 s: rank 2 did not come to all_reduce")


def test_what_a_profiler_slows_down_makes_no_slow_rank() -> None:
    meter = RankMeter(Path("no-such-box"))
    step = RankStep(3, 0.0, 1.0, compute_s=0.7, data_s=0.1, wait_s=0.2, aside_s=0.0, batches=2)
    assert _row(step, meter, False)[:4] == (0.7, 0.1, 0.2, 2.0)
    compute_s, data_s, wait_s, batches, _ = _row(replace(step, profiled=True), meter, False)
    assert math.isnan(compute_s) and math.isnan(data_s) and (wait_s, batches) == (0.2, 2.0)


def test_what_copies_make_of_the_same_samples_is_compared(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.event("gradients", step=51, ranks=[0, 1, 2, 3], hashes=["0f", "0f", "ff", "0f"])
    run.event("parameters", step=51, ranks=[0, 1, 2, 3], hashes=["0f", "0f", "ff", "0f"])
    work, held = run.turn()
    assert work.kind == held.kind == "corruption" and work.ranks == (2,) and work.advice == "evict"
    whose = "rank 2 differ from the majority of their copies"
    assert work.text == f"the gradients of the same samples on {whose} (in step 51)"
    assert held.text == f"the parameters of {whose} (after step 51)"


def test_a_group_that_the_vote_put_out_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, keep={"mode": "zero-interruption"})
    why = "its sum, its parameters or its rerun of step 6 differ from the majority's"
    run.event("epoch", active=[0, 1, 2, 3])
    run.event("group_ended", group=3, code="fenced", message=why)
    (finding,) = run.turn()
    assert finding.kind == "corruption" and finding.ranks == (3,) and finding.advice == "ignore"


def test_the_sum_across_groups_is_where_a_group_is_missed(tmp_path: Path) -> None:
    """Three groups of two ranks; the second rank of group 4 doesn't come to the sum, and its peer waits for it."""
    numbers = {0: (0, 1), 2: (4, 5), 4: (8, 9)}
    recorders = []
    for group, members in numbers.items():
        for place, number in enumerate(members):
            recorder = Recorder(tmp_path / f"rank-{number}", rank=number, world=2, job_hash="x")
            recorders.append(recorder)
            phases = Phases()
            phases.attach(recorder)
            phases.at(step=7)
            tensor = recorder.channel("tensor", (0, 1), "gloo", blocks=True)
            if (group, place) == (4, 1):
                phases("forward_s").__enter__()
            elif group == 4:
                phases("forward_s").__enter__()
                enqueue(tensor, finish=False)
            else:
                phases("comm_s").__enter__()
    hang = find_hang(across_groups(read_blackboxes(tmp_path), 2, (0, 2, 4)))
    assert hang is not None and (hang.kind, hang.ranks) == ("absent", (9,))
    assert "group 'replica' (ranks 1, 5, 9)" in hang.at or "group 'tensor' (ranks 8, 9)" in hang.at
    assert set(hang.waiting) == {0, 1, 4, 5, 8}
    for recorder in recorders:
        recorder.close()


def test_a_rank_that_is_stopped_within_an_operation_is_waited_for(tmp_path: Path) -> None:
    """All have come to it, so that no black box says for whom the others wait."""
    for rank in range(3):
        recorder = Recorder(tmp_path / f"rank-{rank}", rank=rank, world=3, job_hash="x")
        enqueue(recorder.channel("replica", (0, 1, 2), "gloo", blocks=True), finish=False)
        recorder.close()
    boxes = read_blackboxes(tmp_path)
    flight = Flight(Placement.of_sizes(replicas=3, pp=1, inner=1))
    assert flight.take(Standstill(1.0, 2.0, 8.0, 1.2, boxes, {1: 1.1})) == []
    (finding,) = flight.take(Standstill(1.0, 2.0, 8.0, 1.2, boxes, {1: 1.3}))
    assert (finding.kind, finding.ranks) == ("stopped", (1,))
    assert finding.text == "rank 1 is stopped (state T); others wait in operations to which all have come"


def test_a_rank_that_is_stopped_before_its_message_has_left_is_waited_for(tmp_path: Path) -> None:
    """It has handed it over, and computes; the receiver waits."""
    for rank, operation in enumerate(("send", "recv")):
        recorder = Recorder(tmp_path / f"rank-{rank}", rank=rank, world=2, job_hash="x")
        channel = recorder.channel("pipeline", (0, 1), "gloo", blocks=True)
        number = channel.enqueued(OPERATIONS.index(operation), recorder.dtype("float32", 4), 8, 8, 1 - rank, False)
        if operation == "recv":
            channel.waiting(number)
        recorder.close()
    flight = Flight(Placement.of_sizes(replicas=1, pp=2, inner=1))
    (finding,) = flight.take(Standstill(1.0, 2.0, 8.0, 1.2, read_blackboxes(tmp_path), {0: 1.3}))
    assert (finding.kind, finding.ranks) == ("stopped", (0,)) and "all have come" in finding.text
    both = Standstill(1.0, 2.0, 8.0, 1.2, read_blackboxes(tmp_path), {0: 1.3, 1: 1.3})
    assert flight.take(both) == [], "nobody waits"


SLEEPER = """
import faulthandler, signal, sys, time

def asleep():
    print("ready", flush=True)
    time.sleep(60)

if len(sys.argv) > 1:
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
asleep()
"""


def test_a_stack_is_asked_for_and_the_process_goes_on(tmp_path: Path) -> None:
    for registered in (True, False):
        log = tmp_path / f"log-{registered}"
        with log.open("wb") as file:
            command = [sys.executable, "-c", SLEEPER, *(["x"] if registered else [])]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert log_of(process.pid) == log
            frames = python_stack(process.pid, log, within_s=10.0)
            assert process.poll() is None  # also where nobody answers the signal, which would end it
            assert bool(frames) is registered
            assert not registered or "asleep" in frames[0]
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while not is_stopped(process.pid):
                assert time.monotonic() < deadline
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert not is_stopped(os.getpid())


@pytest.mark.parametrize(("keep", "codes"), [({}, ["flight-evict"]), ({"restarts": 1}, [])])
def test_an_eviction_needs_something_that_goes_on(keep: dict[str, Any], codes: list[str]) -> None:
    job = Job.model_validate({"inspect": {"flight": "evict"}, "keep": keep})
    assert [problem.code for problem in problems(job, None, None)] == codes


def test_hashes_of_one_copy_compare_nothing() -> None:
    job = Job.model_validate({"inspect": {"hash_every": 10}})
    assert [problem.code for problem in problems(job, None, None)] == ["ignored-setting"]


def test_a_finding_has_a_line_on_the_screen() -> None:
    event = Finding(kind="hang", t=1.0, step=2, ranks=(3,), text="no step for 10 s").as_event()
    assert event_line({"event": "finding", **event}) == ("flight", "no step for 10 s", "yellow")


def test_the_landing_report_knows_who_was_evicted(tmp_path: Path) -> None:
    remains = RemainsBuilder(tmp_path / "run", world=2)
    remains.start()
    why = "no step for 9 s: rank 1 did not come to all_reduce number 61"
    remains.event("evicted", rank=1, why=why)
    remains.event("rank_lost", rank=1, signal="SIGKILL", step=31, phase="training")
    remains.event("failed", code="rank-lost", message="rank 1 was killed by SIGKILL", rank=1, step=31)
    verdict = read_landing(remains.write(), kernel=(), running=False).verdict
    assert (verdict.rank, verdict.kind) == (1, "unknown") and "the watch" in verdict.next
    assert any(why in line for line in verdict.evidence), verdict.evidence
