"""Reading a black box while it is written, and what a step of a rank was, from it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from remains_builder import enqueue

from bessemer.inspect.flight_links import LinkMeter
from bessemer.inspect.flight_meter import RankMeter, processor_s
from bessemer.inspect.flight_tail import BoxTail, TailMark, TailOperation
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder


def recorder_at(path: Path, **sizes: int) -> Recorder:
    return Recorder(path, rank=0, world=2, job_hash="x", **sizes)


class Clock:
    """Phases read it; it stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_only_what_is_new_comes(tmp_path: Path) -> None:
    """Also where the ring has gone round between two polls."""
    recorder = recorder_at(tmp_path / "rank-0", num_marks=16)
    phases, tail = Phases(), BoxTail(tmp_path / "rank-0")
    phases.attach(recorder)
    assert tail.poll() == ([], [])
    for step in range(1, 4):
        phases.at(step=step)
        with phases("forward_s"):
            pass
        marks, _ = tail.poll()
        assert [(m.step, m.phase, m.begins) for m in marks] == [(step, "forward_s", True), (step, "forward_s", False)]
    for step in range(4, 40):
        phases.at(step=step)
        with phases("backward_s"):
            pass
    marks, _ = tail.poll()
    assert marks and marks[-1].step == 39 and {m.phase for m in marks} == {"backward_s"}
    assert tail.poll() == ([], [])
    recorder.close()


def test_operations_come_when_they_have_ended(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "rank-0")
    channel = recorder.channel("tensor", (0, 1), "gloo", blocks=True)
    stream = recorder.channel("data", (0, 1), "nccl", blocks=False)
    tail = BoxTail(tmp_path / "rank-0")
    enqueue(channel, finish=True)
    enqueue(channel, finish=False)
    enqueue(stream, finish=True)  # its end says nothing
    _, operations = tail.poll()
    assert [(o.group, o.operation, o.order) for o in operations] == [(("tensor", (0, 1)), "all_reduce", 1)]
    channel.finished(2)
    _, operations = tail.poll()
    assert [o.order for o in operations] == [2] and operations[0].wait_s <= operations[0].finish_s
    recorder.close()


def test_a_rank_that_is_started_again_has_a_new_box(tmp_path: Path) -> None:
    tail = BoxTail(tmp_path / "rank-0")
    for restarts in range(2):
        recorder = recorder_at(tmp_path / "rank-0")
        phases = Phases()
        phases.attach(recorder)
        phases.at(step=7)
        with phases("data_s"):
            pass
        marks, _ = tail.poll()
        assert [m.phase for m in marks] == ["data_s", "data_s"] and tail.restarts == restarts
        recorder.close()


def test_a_box_of_an_earlier_attempt_is_as_good_as_none(tmp_path: Path) -> None:
    """Until the rank that is started again has made its own, nothing may be said of it."""
    recorder = recorder_at(tmp_path / "rank-0")
    phases = Phases()
    phases.attach(recorder)
    with phases("data_s"):
        pass
    assert BoxTail(tmp_path / "rank-0", time.time() - 60).poll()[0]
    tail = BoxTail(tmp_path / "rank-0", time.time() + 1)
    assert tail.poll() == ([], []) and tail.own == {}
    recorder.close()


def test_what_a_step_was(tmp_path: Path) -> None:
    """Waiting inside a forward pass, as of tensor parallelism, is not computing."""
    clock = Clock()
    recorder = recorder_at(tmp_path / "rank-0")
    phases = Phases(clock=clock)
    phases.attach(recorder)
    meter = RankMeter(tmp_path / "rank-0")

    def spend(name: str, seconds: float) -> None:
        with phases(name):
            clock.now_s += seconds

    for step in (1, 2, 3):
        phases.at(step=step)
        spend("data_s", 0.5)
        with phases("forward_s"):
            clock.now_s += 1.0
        spend("data_s", 0.25)
        with phases("backward_s"):
            clock.now_s += 2.0
            spend("comm_s", 0.75)
        spend("optimizer_s", 0.1)
        spend("evaluate_s", 0.4 if step == 2 else 0.0)
        clock.now_s += 0.2
    meter._waits.append((1000.7, 1001.0))  # in the forward pass of step 1
    meter.poll(clock.now_s)
    first, second = meter.steps
    assert (first.step, first.batches, second.step) == (1, 2, 2)
    assert first.compute_s == pytest.approx(3.1 - 0.3) and first.wait_s == pytest.approx(0.75 + 0.3)
    assert second.compute_s == pytest.approx(3.1) and second.aside_s == pytest.approx(0.4)
    assert first.data_s == pytest.approx(0.75) and first.end_s - first.begin_s == pytest.approx(4.8)
    assert meter.newest == 2 and meter.doing == ()
    recorder.close()


def test_processor_time_grows_with_work_and_not_with_sleep() -> None:
    before_s = processor_s(os.getpid())
    time.sleep(0.2)
    idle_s = processor_s(os.getpid()) - before_s
    until_s = time.thread_time() + 0.2
    while time.thread_time() < until_s:
        pass
    busy_s = processor_s(os.getpid()) - before_s - idle_s
    assert idle_s < 0.1
    assert busy_s > 0.18
    assert processor_s(2**22 + 1) != processor_s(2**22 + 1)  # NaN: there is no such process


def test_a_transfer_begins_with_the_last_arrival() -> None:
    """Two hosts' clocks lie apart by what their black boxes say."""
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    links = LinkMeter()

    def told(rank: int, ranks: tuple[int, ...], come_s: float, over_s: float, ahead_s: float) -> None:
        operation = TailOperation(("tensor", ranks), "all_reduce", 1, -1, come_s, come_s, over_s)
        links.take(rank, operation, ahead_s, hosts)

    told(0, (0, 2), 1.0, 5.5, 100.0)
    assert links.samples(1, 0.0, 1) == []  # the other rank's word is missing
    told(2, (0, 2), 4.0, 4.5, 101.0)
    told(0, (0, 1), 1.0, 5.5, 100.0)
    told(1, (0, 1), 4.0, 4.5, 100.0)  # inside one host
    (sample,) = links.samples(1, 0.0, 2)
    assert (sample.kind, sample.groups) == ("tensor all_reduce", ((0, 2),))
    assert sample.transfer_s.tolist() == [pytest.approx((105.5 - 105.0) / 2)]


def test_the_two_ends_of_a_message_are_one_transfer() -> None:
    hosts = {0: "a", 1: "b"}
    links = LinkMeter()
    links.take(1, TailOperation(("pipeline", (0, 1)), "recv", 3, 0, 0.0, 0.0, 2.25), 0.0, hosts)
    links.take(0, TailOperation(("pipeline", (0, 1)), "send", 3, 1, 2.0, 2.0, 2.5), 0.0, hosts)
    (sample,) = links.samples(1, 0.0, 1)
    assert (sample.kind, sample.groups) == ("pipeline send", ((0, 1),))
    assert sample.transfer_s.tolist() == [pytest.approx(0.25)]


def test_a_phase_whose_end_was_overwritten_is_over(tmp_path: Path) -> None:
    meter = RankMeter(tmp_path / "rank-0")
    for at, (phase, begins) in enumerate([("evaluate_s", True), ("forward_s", True), ("forward_s", False)]):
        meter._take(TailMark(float(at), 3, phase, begins, depth=1))
    assert meter.doing == ()
