"""Verdicts on runs that hang: which rank did not come to which operation, and when the code itself is at fault."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from remains_builder import RemainsBuilder, ended, enqueue, land, lost, traceback

SURE = 0.5


@pytest.fixture
def remains(tmp_path: Path) -> RemainsBuilder:
    builder = RemainsBuilder(tmp_path / "run")
    builder.start()
    return builder


def hang(b: RemainsBuilder, absent: int = 2) -> None:
    """All but one rank wait in the second all-reduce; that one is in its backward pass."""
    from bessemer.runtime.phases import Phases

    for rank in range(4):
        recorder = b.box(rank)
        phases = Phases()
        phases.attach(recorder)
        channel = recorder.channel("data", range(4), "gloo", blocks=True)
        phases.at(step=7)
        enqueue(channel, finish=True)
        phases("backward_s").__enter__()
        if rank != absent:
            enqueue(channel, finish=False)


def test_a_hang_that_was_stopped_names_the_rank_that_did_not_arrive(remains: RemainsBuilder) -> None:
    hang(remains)
    remains.now = time.time() + 300
    remains.event("stop_requested", signal="SIGINT")
    remains.now += 120
    ended(remains, None, "ended", "the ranks did not finish and save within 120 s of the stop")
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind, verdict.host) == (2, "unknown", socket.gethostname())
    assert verdict.confidence > SURE
    text = "\n".join(verdict.evidence)
    assert "doing backward_s, step 7" in text and "not arrived: 2" in text and "number 2 of group 'data'" in text


def test_a_timeout_that_only_victims_report_is_a_hang(remains: RemainsBuilder) -> None:
    hang(remains, absent=0)
    remains.now = time.time() + 1800
    for rank in (1, 2, 3):
        remains.log(f"rank-{rank}", traceback("RuntimeError: Timed out waiting 1800000ms for recv operation"))
    ended(remains, 1, "peer-lost", "RuntimeError: Timed out waiting 1800000ms for recv operation")
    verdict = land(remains).verdict
    assert verdict.rank == 0 and verdict.confidence > SURE and verdict.victims == (1, 2, 3)


def test_a_rank_that_is_killed_long_after_it_hangs_the_others_is_not_the_first_fault(remains: RemainsBuilder) -> None:
    hang(remains, absent=2)
    remains.now = time.time() + 300
    lost(remains, 0, signal="SIGKILL")
    ended(remains, 0)
    verdict = land(remains).verdict
    assert verdict.rank == 2
    assert any("only 300 s later" in line for line in verdict.evidence)


def test_a_run_that_hangs_may_be_asked(remains: RemainsBuilder) -> None:
    hang(remains)
    remains.now = time.time() + 5
    assert land(remains, running=True).verdict.kind == "no fault"
    remains.now += 300
    verdict = land(remains, running=True).verdict
    assert (verdict.rank, verdict.kind) == (2, "unknown")


def test_ranks_that_wait_for_each_other_are_a_fault_of_the_code(remains: RemainsBuilder) -> None:
    for rank, first in ((0, "tensor"), (1, "data")):
        recorder = remains.box(rank)
        channels = {name: recorder.channel(name, (0, 1), "gloo", blocks=True) for name in ("tensor", "data")}
        enqueue(channels[first], finish=False)
    remains.now = time.time() + 300
    verdict = land(remains, running=True).verdict
    assert (verdict.rank, verdict.kind) == (None, "code") and "different orders" in verdict.next


def test_one_collective_of_two_sizes_is_a_fault_of_the_code(remains: RemainsBuilder) -> None:
    for rank in (0, 1):
        channel = remains.box(rank).channel("data", (0, 1), "gloo", blocks=True)
        enqueue(channel, finish=False, elements=8 + rank)
    remains.now = time.time() + 300
    verdict = land(remains, running=True).verdict
    assert verdict.kind == "code" and "sizes" in verdict.next


def test_the_sender_that_a_pipeline_waits_for_is_named(remains: RemainsBuilder) -> None:
    """Rank 2 waits for 1, which waits for 0, which waits for nobody."""
    for rank in range(3):
        recorder = remains.box(rank)
        channel = recorder.channel("pipeline", (0, 1, 2), "gloo", blocks=True)
        if rank:
            enqueue(channel, finish=False, operation="recv", peer=rank - 1)
        else:
            enqueue(channel, finish=True, operation="send", peer=2)
    remains.now = time.time() + 300
    assert land(remains, running=True).verdict.rank == 0
