"""Reading a black box while it is written, and what a step of a rank was, from it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from remains_builder import enqueue

from bessemer.inspect.flight_links import LinkMeter
from bessemer.inspect.flight_meter import RankMeter, processor_s
from bessemer.runtime import ring
from bessemer.runtime.box_tail import BoxTail, TailMark, TailOperation
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


def news(tail: BoxTail) -> tuple[list[TailMark], list[TailOperation]]:
    """What a reader that asks every second gets."""
    tail.look()
    return tail.marks(), tail.operations()


def test_only_what_is_new_comes(tmp_path: Path) -> None:
    """Also where the ring has gone round between two polls."""
    recorder = recorder_at(tmp_path / "rank-0", num_marks=16)
    phases, tail = Phases(), BoxTail(tmp_path / "rank-0")
    phases.attach(recorder)
    assert news(tail) == ([], [])
    for step in range(1, 4):
        phases.at(step=step)
        with phases("forward_s"):
            pass
        marks, _ = news(tail)
        assert [(m.step, m.phase, m.begins) for m in marks] == [(step, "forward_s", True), (step, "forward_s", False)]
    for step in range(4, 40):
        phases.at(step=step)
        with phases("backward_s"):
            pass
    marks, _ = news(tail)
    assert marks and marks[-1].step == 39 and {m.phase for m in marks} == {"backward_s"}
    assert [m.gap for m in marks] == [True] + [False] * (len(marks) - 1), "what came before the first was overwritten"
    assert news(tail) == ([], [])
    recorder.close()


def test_operations_come_when_they_have_ended(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "rank-0")
    channel = recorder.channel("tensor", (0, 1), "gloo", blocks=True)
    stream = recorder.channel("data", (0, 1), "nccl", blocks=False)
    tail = BoxTail(tmp_path / "rank-0")
    enqueue(channel, finish=True)
    enqueue(channel, finish=False)
    enqueue(stream, finish=True)  # its end says nothing
    _, operations = news(tail)
    assert [(o.group, o.operation, o.order) for o in operations] == [(("tensor", (0, 1)), "all_reduce", 1)]
    channel.finished(2)
    _, operations = news(tail)
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
        marks, _ = news(tail)
        assert [m.phase for m in marks] == ["data_s", "data_s"] and tail.restarts == restarts
        recorder.close()


def test_a_box_of_an_earlier_attempt_is_as_good_as_none(tmp_path: Path) -> None:
    """Until the rank that is started again has made its own, or somebody writes to it: its clock may be wrong."""
    recorder = recorder_at(tmp_path / "rank-0")
    phases = Phases()
    phases.attach(recorder)
    with phases("data_s"):
        pass
    assert len(news(BoxTail(tmp_path / "rank-0", time.time() - 60))[0]) == 2
    tail = BoxTail(tmp_path / "rank-0", time.time() + 60)
    assert news(tail) == ([], []) and tail.stale and not tail.is_live
    assert news(tail) == ([], []) and not tail.is_live
    with phases("forward_s"):
        pass
    assert [m.phase for m in news(tail)[0]] == ["data_s"] * 2 + ["forward_s"] * 2 and tail.is_live
    recorder.close()


def test_what_is_no_black_box_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    tail = BoxTail(path)
    for content in (b"", b"no box", b"\0" * ring.HEAD_BYTES):
        path.write_bytes(content)
        assert news(tail) == ([], []) and tail.own == {} and not tail.is_live
    recorder_at(tmp_path / "whole").close()
    path.write_bytes((tmp_path / "whole").read_bytes()[:70_000])  # cut off within its ring
    assert not tail.look() and tail.own == {}
    (tmp_path / "whole").replace(path)
    assert tail.look() and tail.own["rank"] == 0 and tail.restarts == 0


def test_a_torn_mark_is_waited_for_and_then_passed_over(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "rank-0")
    phases, tail = Phases(), BoxTail(tmp_path / "rank-0")
    phases.attach(recorder)
    with phases("data_s"):
        pass
    assert len(news(tail)[0]) == 2
    recorder._claim_mark()  # a thread that died before it stored its mark, but for the number
    at = recorder._marks_at + 3 * ring.MARK_BYTES
    recorder._map[at : at + 8] = (3).to_bytes(8, "little")
    assert news(tail) == ([], [])
    with phases("forward_s"):
        pass
    assert [(m.phase, m.gap) for m in news(tail)[0]] == [("forward_s", True), ("forward_s", False)]
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


def test_a_message_is_over_when_the_receiver_has_it() -> None:
    """The sender's part ends when it lies in a buffer. What comes while the receiver computes costs nothing."""
    hosts = {0: "a", 1: "b"}
    links = LinkMeter()

    def told(order: int, sent_s: float, asked_s: float, waits_s: float, has_s: float) -> None:
        links.take(0, TailOperation(("pipeline", (0, 1)), "send", order, 1, sent_s, sent_s, sent_s), 0.0, hosts)
        receive = TailOperation(("pipeline", (0, 1)), "recv", order, 0, asked_s, waits_s, has_s)
        links.take(1, receive, 0.0, hosts)

    told(1, sent_s=2.0, asked_s=0.0, waits_s=1.0, has_s=2.5)
    assert links.samples(1, 0.0, 1)[0].transfer_s.tolist() == [pytest.approx(0.5)]
    told(2, sent_s=2.0, asked_s=0.0, waits_s=4.0, has_s=4.0)
    assert links.samples(2, 0.0, 1)[0].transfer_s.tolist() == [pytest.approx(0.0)]


def test_a_sum_that_is_hidden_behind_work_costs_what_is_waited_for() -> None:
    hosts = {0: "a", 1: "b"}
    links = LinkMeter()
    for rank, wait_s in ((0, 3.0), (1, 3.5)):
        operation = TailOperation(("replica", (0, 1)), "all_reduce", 1, -1, 1.0, wait_s, 4.0 + rank)
        links.take(rank, operation, 0.0, hosts)
    assert links.samples(1, 0.0, 1)[0].transfer_s.tolist() == [pytest.approx(1.0)]


def test_a_phase_whose_end_was_overwritten_is_over(tmp_path: Path) -> None:
    meter = RankMeter(tmp_path / "rank-0")
    for at, (phase, begins) in enumerate([("evaluate_s", True), ("forward_s", True), ("forward_s", False)]):
        meter._take(TailMark(float(at), 3, phase, begins, depth=1))
    assert meter.doing == ()


def test_a_step_whose_begin_was_overwritten_is_not_told(tmp_path: Path) -> None:
    meter = RankMeter(tmp_path / "rank-0")
    marks = [("backward_s", True, 5, True), ("backward_s", False, 5, False), ("data_s", True, 6, False),
             ("data_s", False, 6, False), ("data_s", True, 7, False)]  # fmt: skip
    for at, (phase, begins, step, gap) in enumerate(marks):
        meter._take(TailMark(float(at), step, phase, begins, depth=1, gap=gap))
    assert [step.step for step in meter.steps] == [6] and meter.doing == ("data_s",)
    meter._take(TailMark(9.0, 9, "comm_s", True, depth=2, gap=True))
    assert meter.doing == ("unknown", "comm_s")


def test_a_rank_that_profiles_is_seen_to_do_so(tmp_path: Path) -> None:
    clock = Clock()
    recorder = recorder_at(tmp_path / "rank-0")
    phases = Phases(clock=clock)
    phases.attach(recorder)
    meter = RankMeter(tmp_path / "rank-0")
    for step in (1, 2, 3, 4):
        if step == 3:
            with phases("profile_s"):  # what comes before the step is told with the number of the last one
                clock.now_s += 2.0
        phases.at(step=step)
        with phases("forward_s"):
            clock.now_s += 1.0
        if step == 3:
            phases("profile_s").__enter__()
            meter.poll(50.0)
            assert meter.is_aside and meter.aside_s == 50.0 and meter.doing == ("profile_s",)
            phases("profile_s").__exit__(None, None, None)
    meter.poll(60.0)
    assert not meter.is_aside and meter.aside_s == 60.0, "it had ended by then, and not before the last look"
    meter.poll(70.0)
    assert meter.aside_s == 60.0
    assert [(step.step, step.profiled) for step in meter.steps] == [(1, False), (2, True), (3, True)]
    recorder.close()
