"""What the live page knows of each rank: from black boxes that are being written, and from samples of a fleet."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from run_builder import make_job
from watch_builder import SECONDS, RankWriter

from bessemer.inspect.fleet_simulator import FleetSimulator, SimulatedFault
from bessemer.inspect.flight_records import StepSample
from bessemer.inspect.watch_boxes import BEHIND_STEPS, PHASES, Boxes, RankBox
from bessemer.inspect.watch_ranks import ENDED, LOST, STALE, STATES, BoxFeed, Ranks, SampleFeed
from bessemer.runtime.box_tail import TailMark

pytestmark = pytest.mark.timeout(60)
USUAL = [SECONDS["forward_s"], SECONDS["backward_s"], SECONDS["comm_s"], SECONDS["data_s"], SECONDS["optimizer_s"]]


def box_of(writer: RankWriter) -> RankBox:
    box = RankBox(writer.recorder.path)
    assert box.look()
    return box


def test_a_box_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0)
    box = box_of(writer)
    box.read()
    assert list(box.steps) == [] and box.doing == ""
    writer.step(1)
    writer.step(2, forward_s=0.4)
    box.read()
    assert [step for step, _ in box.steps] == [1, 2]
    assert box.steps[0][1] == pytest.approx(USUAL)
    assert box.steps[1][1][0] == pytest.approx(0.4)
    writer.step(3, until="comm_s")
    box.read()
    assert box.doing == "comm_s" and box.num_steps == 2


def test_a_mark_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RankWriter(tmp_path, 0)
    for step in range(1, 20):
        writer.step(step)
    box = box_of(writer)
    box.read()
    taken: list[TailMark] = []
    monkeypatch.setattr(box, "_take", taken.append)
    writer.step(20)
    box.read()
    assert len(taken) == 2 * len(SECONDS)
    box.read()
    assert len(taken) == 2 * len(SECONDS)


def test_what_comes_after_the_optimizer_belongs_to_the_step(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0)
    writer.step(1)
    writer.between("evaluate_s", 2.0)
    writer.step(2)
    box = box_of(writer)
    box.read()
    assert box.steps[0][1][4] == pytest.approx(SECONDS["optimizer_s"] + 2.0)
    assert box.steps[1][1] == pytest.approx(USUAL)


def test_steps_are_told_apart_where_the_rank_does_not_number_them(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, says_step=False)
    for step in range(1, 4):
        writer.step(step)
    box = box_of(writer)
    box.read()
    assert len(box.steps) == 3 and all(seconds == pytest.approx(USUAL) for _, seconds in box.steps)


def test_a_reader_that_was_overtaken_goes_on_with_whole_steps(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, num_marks=64)
    writer.step(1)
    box = box_of(writer)
    box.read()
    for step in range(2, 40):
        writer.step(step)
    box.read()
    assert box.steps[-1][0] == 39
    assert all(seconds == pytest.approx(USUAL) for _, seconds in box.steps)


def test_a_box_that_was_begun_in_the_middle_gives_no_torn_step(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, num_marks=40)
    for step in range(1, 11):
        writer.step(step)
    box = box_of(writer)
    box.read()
    assert box.steps and all(seconds == pytest.approx(USUAL) for _, seconds in box.steps)


def test_new_and_replaced_boxes_are_found_and_others_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.inspect.watch_boxes.LOOK_AGAIN_S", 0.0)
    boxes = Boxes(tmp_path / "blackbox")
    assert boxes.read() == []
    RankWriter(tmp_path, 1).step(1)
    (tmp_path / "blackbox" / "rank-7").write_bytes(b"no box")
    (tmp_path / "blackbox" / "rank-8").write_bytes(b"")
    assert [box.rank for box in boxes.read()] == [1] and boxes.generation == 1
    again = RankWriter(tmp_path, 1)
    again.step(1, forward_s=0.9)
    (box,) = boxes.read()
    assert boxes.generation == 2 and box.steps[-1][1][0] == pytest.approx(0.9)


def ranks_of(tmp_path: Path, count: int = 4) -> tuple[list[RankWriter], Ranks]:
    writers = [RankWriter(tmp_path, rank, world=count) for rank in range(count)]
    job = make_job(dp=count // 2, layout={"dp": count // 2, "pp": 2})
    return writers, Ranks(BoxFeed(Boxes(tmp_path / "blackbox"), job))


def test_states_come_from_boxes_and_events(tmp_path: Path) -> None:
    writers, ranks = ranks_of(tmp_path)
    for writer in writers[:3]:
        writer.step(1)
    ranks.read({2: LOST}, hung=False, ended=False)
    assert [STATES[s] for s in ranks.states] == ["running", "running", "lost", "unknown"]
    writers[0].step(2, until="comm_s")
    writers[1].step(2, until="forward_s")
    ranks.read({}, hung=True, ended=False)
    assert [STATES[s] for s in ranks.states][:2] == ["waiting", "stalled"]
    assert [row["rank"] for row in ranks.worst(2)] == [1, 2]  # outside of a collective; no rank that waits is first
    ranks.read({}, hung=False, ended=True)
    assert ranks.states[0] == ENDED


def test_what_an_earlier_attempt_left_is_stale_until_somebody_writes_to_it(tmp_path: Path) -> None:
    writers = [RankWriter(tmp_path, rank) for rank in range(2)]
    boxes = Boxes(tmp_path / "blackbox")
    ranks = Ranks(BoxFeed(boxes, make_job(dp=2)))
    for writer in writers:
        writer.step(1)
    ranks.read({}, hung=False, ended=False)
    assert [STATES[s] for s in ranks.states] == ["running", "running"]
    boxes.begin(time.time() + 60.0)  # a host whose clock is a minute behind writes the second one
    ranks.read({}, hung=True, ended=False)
    assert [STATES[s] for s in ranks.states] == ["stale", "stale"]
    writers[1].step(2)
    ranks.read({}, hung=False, ended=False)
    assert [STATES[s] for s in ranks.states] == ["stale", "running"]
    assert ranks.summary()["counts"] == {"stale": 1, "running": 1}
    ranks.read({0: LOST}, hung=False, ended=True)
    assert [STATES[s] for s in ranks.states] == ["lost", "ended"], "what events say of a rank goes before"


def test_a_box_that_stands_while_the_run_goes_on_is_stale(tmp_path: Path) -> None:
    """Whatever the clocks say: all ranks take a step together."""
    writers = [RankWriter(tmp_path, rank) for rank in range(2)]
    boxes = Boxes(tmp_path / "blackbox")
    ranks = Ranks(BoxFeed(boxes, make_job(dp=2)))
    for writer in writers:
        writer.step(1)
    ranks.read({}, hung=False, ended=False)
    for step in range(2, BEHIND_STEPS + 3):
        writers[0].step(step)
    boxes.step = BEHIND_STEPS + 1
    ranks.read({}, hung=False, ended=False)
    assert ranks.states[1] != STALE, "as far as a page that is asked seldom may be behind"
    boxes.step = BEHIND_STEPS + 2
    ranks.read({}, hung=False, ended=False)
    assert [STATES[s] for s in ranks.states] == ["running", "stale"]
    writers[1].step(2)  # a file system that shows late what is written
    ranks.read({}, hung=False, ended=False)
    assert [STATES[s] for s in ranks.states] == ["running", "running"]


def test_a_comparison_or_a_trace_between_two_steps_is_no_step(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0)
    for step in range(1, 4):
        writer.step(step)
        for name in ("compare_s", "profile_s", "evaluate_s"):
            writer.between(name, 1.0)
    box = box_of(writer)
    box.read()
    assert [step for step, _ in box.steps] == [1, 2, 3]
    assert all(seconds == pytest.approx([*USUAL[:4], USUAL[4] + 3.0]) for _, seconds in box.steps)


def test_a_slow_rank_is_found_by_the_rule_of_the_flight_inspection(tmp_path: Path) -> None:
    writers, ranks = ranks_of(tmp_path, 8)
    for step in range(1, 26):
        for writer in writers:
            writer.step(step, forward_s=0.2 if writer.rank == 4 else 0.1)
    ranks.read({}, hung=False, ended=False)
    assert [STATES[s] for s in ranks.states] == ["running"] * 4 + ["slow"] + ["running"] * 3
    worst = ranks.worst(3)[0]
    assert worst["rank"] == 4 and worst["score"] == pytest.approx(0.4 / 0.3, rel=1e-3)
    assert worst["stage"] == 0 and worst["copy"] == 2
    for step in range(26, 47):  # well again: the window forgets
        for writer in writers:
            writer.step(step)
        ranks.read({}, hung=False, ended=False)
    assert STATES[ranks.states[4]] == "running" and ranks.scores[4] == pytest.approx(1.0, abs=1e-3)


def test_a_frame_has_what_it_says(tmp_path: Path) -> None:
    writers, ranks = ranks_of(tmp_path)
    for writer in writers[:3]:
        writer.step(1, forward_s=0.1 * (writer.rank + 1))
    ranks.read({1: LOST}, hung=False, ended=False)
    unit_s, frame = ranks.frame()
    counts = np.frombuffer(frame, "<u2", 4 * 4).reshape(4, 4)
    assert len(frame) == 4 * (2 * 4 + 2)
    assert counts[0, :3] * unit_s == pytest.approx([0.1, 0.2, 0.3], abs=2 * unit_s)
    assert counts[:, 3].tolist() == [0xFFFF] * 4  # the rank that left nothing
    assert frame[-8:-4] == b"\xff" * 4  # no score after one step
    assert [STATES[s] for s in frame[-4:]] == ["running", "lost", "running", "unknown"]
    assert ranks.summary()["framed"] == 4 and len(ranks.summary()["phases"]) == len(PHASES)


def test_ten_thousand_ranks_fit_in_a_frame_of_100_kib() -> None:
    fleet = FleetSimulator(faults=[SimulatedFault(kind="slow_rank", step=1, rank=4711, amount=0.12)], hash_every=0)
    feed = SampleFeed(fleet.placement)
    ranks = Ranks(feed)
    for record in fleet.records(22):
        if isinstance(record, StepSample):
            feed.take(record)
    ranks.read({}, hung=False, ended=False)
    assert len(ranks.frame()[1]) == 10_240 * 8
    assert 10_240 * (2 * 4 + 2) == 100 * 1024  # what black boxes would need
    worst = ranks.worst(20)
    assert worst[0]["rank"] == 4711 and worst[0]["state"] == "slow" and worst[0]["host"] == "node-588"
    assert ranks.summary()["counts"] == {"running": 10_239, "slow": 1}
    place = ranks.place()
    assert place is not None and place["ranks"] == [[0, 1, 10_240]] and len(place["hosts"]) == 1280
    assert len(feed.history(4711)) == 20
