"""Runs of the product with the watch beside them: what it names while they go on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from flight_runs import events_of, first_finding, watched_run

from bessemer.inspect.flight_records import Finding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
GUILTY = 2


def test_a_slow_rank_is_named_by_its_processor_time(tmp_path: Path) -> None:
    """Four ranks; one computes half as long again. They may share cores, so that elapsed times say little, and
    processor time grows by what others do to the caches: who is named is certain, by how much it is slower is not."""
    with watched_run(tmp_path, "slow", GUILTY, 0, layout={"dp": 4}, train={"steps": 5000}) as agent:
        finding = first_finding(tmp_path, agent, "slow_rank")
    assert finding["ranks"] == [GUILTY], finding
    assert 0.1 < finding["excess"] < 1.0
    assert Finding.of_event(finding).ranks == (GUILTY,)


def test_a_stopped_rank_is_named_with_its_collective(tmp_path: Path) -> None:
    with watched_run(tmp_path, "stop", GUILTY, 8, layout={"dp": 4}) as agent:
        finding = first_finding(tmp_path, agent, "stopped")
        told_after_s = time.time() - (tmp_path / "struck").stat().st_mtime
    assert finding["ranks"] == [GUILTY] and finding["advice"] == "evict"
    assert "others wait for it at all_reduce number" in finding["text"]
    assert "of group 'replica' (ranks 0, 1, 2, 3)" in finding["text"]
    assert finding["score"] < 2.5, "seconds for which it was seen stopped: lease + 1 s"
    assert told_after_s < 30  # on a machine with as much other load as there may be


def test_a_hang_is_named_with_its_stack_and_evicted(tmp_path: Path) -> None:
    """The rank sleeps; nothing else would notice before the timeout of the communication library."""
    with watched_run(
        tmp_path, "hang", GUILTY, 30,
        layout={"dp": 4}, train={"steps": 34}, keep={"restarts": 1}, inspect={"flight": "evict"},
    ) as agent:  # fmt: skip
        finding = first_finding(tmp_path, agent, "hang")
        assert agent.wait(500) == 0, (tmp_path / "agent.log").read_text()[-2000:]
    assert finding["ranks"] == [GUILTY] and finding["step"] in (30, 31)
    assert f"rank {GUILTY} did not come to all_reduce number" in finding["text"]
    assert any("hang_here" in line and "stack" in line for line in finding["evidence"]), finding["evidence"]
    assert [event["rank"] for event in events_of(tmp_path, "evicted")] == [GUILTY]
    lines = (tmp_path / "runs" / "small" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 34


def test_a_flipped_replica_is_named(tmp_path: Path) -> None:
    with watched_run(
        tmp_path, "flip", GUILTY, 8, layout={"dp": 4}, train={"steps": 2000}, inspect={"hash_every": 5}
    ) as agent:
        finding = first_finding(tmp_path, agent, "corruption")
    assert finding["ranks"] == [GUILTY] and finding["advice"] == "evict"
    assert finding["step"] == 10  # the first comparison after it


def test_a_flipped_group_is_put_out_and_the_run_goes_on(tmp_path: Path) -> None:
    """Where groups may be lost the comparison is part of the vote: the majority goes on without who differs."""
    with watched_run(
        tmp_path, "flip", GUILTY, 8,
        layout={"dp": 3}, train={"steps": 30, "global_batch": 12}, inspect={"hash_every": 5},
        keep={"mode": "zero-interruption", "min_replicas": 1},
    ) as agent:  # fmt: skip
        finding = first_finding(tmp_path, agent, "corruption")
        assert agent.wait(500) == 0, (tmp_path / "agent.log").read_text()[-2000:]
    assert finding["ranks"] == [GUILTY]
    assert "majority" in finding["text"]


def test_a_stopped_rank_of_a_group_that_may_be_lost(tmp_path: Path) -> None:
    with watched_run(
        tmp_path, "stop", GUILTY, 8, layout={"dp": 3}, train={"steps": 5000, "global_batch": 12},
        keep={"mode": "zero-interruption", "min_replicas": 1},
    ) as agent:  # fmt: skip
        finding = first_finding(tmp_path, agent, "stopped")
    assert finding["ranks"] == [GUILTY]
    assert "of group 'replica' (ranks 0, 1, 2)" in finding["text"], finding["text"]
