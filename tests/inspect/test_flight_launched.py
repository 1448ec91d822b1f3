"""The watch beside ranks that another launcher started: torchrun, Slurm, MPI."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from crash_scenarios import free_port
from flight_runs import events_of, first_finding, launched_run

from bessemer.inspect.landing import read_landing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GUILTY = 1


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    with launched_run(tmp_path, "stop", GUILTY, 8, free_port(), layout={"dp": 2}) as ranks:
        finding = first_finding(tmp_path, ranks[0], "stopped")
        assert finding["ranks"] == [GUILTY]
        assert "others wait for it at all_reduce number" in finding["text"]
        assert ranks[0].poll() is None, "nobody is ended for it"
    assert not events_of(tmp_path, "evicted")


def test_a_hang_is_named_with_its_stack_and_evicted(tmp_path: Path) -> None:
    """What follows its end is the launcher's to decide; here the other rank finds that its peer has gone."""
    with launched_run(
        tmp_path, "hang", GUILTY, 30, free_port(),
        layout={"dp": 2}, train={"steps": 34}, inspect={"flight": "evict"},
    ) as ranks:  # fmt: skip
        finding = first_finding(tmp_path, ranks[0], "hang")
        assert ranks[GUILTY].wait(60) == -signal.SIGKILL
        assert ranks[0].wait(120) not in (0, None)
    assert finding["ranks"] == [GUILTY] and f"rank {GUILTY} did not come to all_reduce number" in finding["text"]
    assert any("rank-1.log: stack" in line and "hang_here" in line for line in finding["evidence"]), finding["evidence"]
    assert [event["rank"] for event in events_of(tmp_path, "evicted")] == [GUILTY]
    verdict = read_landing(tmp_path / "runs" / "small").verdict
    assert verdict.rank == GUILTY, verdict
