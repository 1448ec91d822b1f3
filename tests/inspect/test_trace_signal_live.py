"""Ranks of real runs that are asked for a trace as early as can be: they live, and give it when they can."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from flight_runs import events_of, watched_run

from bessemer.keep.process import exit_text
from bessemer.runtime.trace_signal import TRACE_SIGNAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WORLD, STEPS = 2, 40


def ranks_below(pid: int) -> list[int]:
    """The children of an agent that are ranks, neither vault nor watch."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == pid and b"rank.py" in words:
                found.append(int(entry.name))
    return found


def test_a_trace_that_is_asked_for_at_once(tmp_path: Path) -> None:
    """Both ranks wait for each other while one loads the profiler: nobody is called slow or hung for that."""
    train, inspect = {"steps": STEPS, "global_batch": 8}, {"trace_on": "signal"}
    with watched_run(tmp_path, "nothing", -1, 0, layout={"dp": WORLD}, train=train, inspect=inspect) as agent:
        asked: set[int] = set()
        while agent.poll() is None:
            started = set(ranks_below(agent.pid))
            for pid in started - asked:
                os.kill(pid, TRACE_SIGNAL)
            asked |= started
            time.sleep(0.02)
        assert agent.returncode == 0, exit_text(agent.returncode) + (tmp_path / "agent.log").read_text()[-2000:]
    assert len(asked) >= WORLD
    traces = sorted(path.name for path in (tmp_path / "runs" / "small" / "traces").iterdir())
    assert [name.partition("-rank-")[2] for name in traces] == [f"{rank}.json.gz" for rank in range(WORLD)], traces
    found = [event["kind"] for event in events_of(tmp_path, "finding")]
    assert not set(found) & {"hang", "stopped", "slow_rank"}, found
