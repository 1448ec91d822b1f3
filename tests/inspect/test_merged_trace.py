"""The merged trace is a valid trace-event file, on one clock."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from box_writer import write_box

from bessemer.core.errors import RequestError
from bessemer.inspect.merged_trace import merge_traces


def check_form(trace: dict[str, Any]) -> None:
    """What the trace-event format asks of the kinds of events that are used."""
    assert isinstance(trace["traceEvents"], list)
    named: set[tuple[int, int]] = set()
    last = 0.0
    open_until: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert isinstance(event["args"], dict) and "ts" not in event
            named.add(track)
            continue
        assert event["ts"] >= last, "events are in the order of their begins"
        last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event.get("args", {}), dict)
            stack = open_until[track]
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1] + 1e-6, f"{event} isn't inside of what is open on its thread"
            stack.append(end)
        elif event["ph"] in "sf":
            assert "id" in event
        else:
            assert event["ph"] == "i"
    assert {(pid, tid) for pid, tid in open_until} <= named, "each thread has a name"


def merged(folder: Path) -> dict[str, Any]:
    merge_traces(folder, folder / "out.json")
    trace = json.loads((folder / "out.json").read_text(), parse_constant=pytest.fail)
    check_form(trace)
    return dict(trace)


def named(trace: dict[str, Any], name: str, pid: int) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["name"] == name and e["pid"] == pid and e["ph"] == "X"]


def test_phases_and_operations_of_all_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_box(tmp_path, rank, "node-a", ahead_s=1e9, at_s=10.0 + 0.1 * rank)
    trace = merged(tmp_path)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 (node-a)", "rank 1 (node-a)"]
    (outer,), (inner,) = named(trace, "backward_s", 1), named(trace, "comm_s", 1)
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert outer["args"]["step"] == 12 and outer["args"]["micro_batch"] == 3
    early, late = named(trace, "backward_s", 0)[0], outer
    assert late["ts"] - early["ts"] == pytest.approx(1e5, abs=1), "microseconds, on one clock"
    (reduced,) = named(trace, "all_reduce data", 0)
    assert reduced["args"]["bytes"] == 4096 and reduced["args"]["ranks"] == 3
    (unfinished,) = named(trace, "optimizer_s", 0)
    assert unfinished["args"]["unfinished"] is True
    assert trace["otherData"]["base_unix_s"] == pytest.approx(1e9 + 10.0, abs=1)


def test_overlapping_operations_get_threads_of_their_own(tmp_path: Path) -> None:
    write_box(tmp_path, 0, "node-a", ahead_s=0.0, at_s=10.0, overlapping=3)
    trace = merged(tmp_path)
    assert len({e["tid"] for e in named(trace, "all_gather data", 0)}) == 3


def test_hosts_are_moved_only_as_far_as_cause_and_effect_ask(tmp_path: Path) -> None:
    write_box(tmp_path, 0, "node-a", ahead_s=1000.0, at_s=10.0)
    write_box(tmp_path, 1, "node-b", ahead_s=5.0, at_s=1005.0 + 0.5)  # its wall clock is half a second late
    write_box(tmp_path, 2, "node-c", ahead_s=0.0, at_s=1010.001)  # within what the operations allow
    found = merge_traces(tmp_path, tmp_path / "out.json")
    assert found.clocks.moved_s["node-a"] == 0.0 and found.clocks.moved_s["node-c"] == 0.0
    moved = found.clocks.moved_s["node-b"]
    assert -0.5 <= moved < -0.4, "until no rank sees the sum before the other has come"
    check_form(json.loads((tmp_path / "out.json").read_text()))
    assert "node-b moved by -" in str(found)


def test_profiled_steps_lie_beside_the_phases(tmp_path: Path) -> None:
    write_box(tmp_path, 1, "node-a", ahead_s=1e9, at_s=10.0)
    (tmp_path / "traces").mkdir()
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 5e6, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "ts": 5e6, "args": {"name": "thread 77"}},
        {"ph": "X", "name": "bessemer step 12", "pid": 77, "tid": 77, "ts": 5e6, "dur": 900.0},
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 5e6 + 100, "dur": 50.0},
        {"ph": "s", "name": "fwdbwd", "pid": 77, "tid": 77, "ts": 5e6 + 110, "id": 2, "cat": "fwdbwd"},
    ]
    anchor = {"rank": 1, "step": 12, "name": "bessemer step 12", "clock_s": 10.002, "wall_s": 1e9 + 10.002}
    with gzip.open(tmp_path / "traces" / "step-12-rank-1.json.gz", "wt") as file:
        json.dump({"bessemer": anchor, "traceEvents": events}, file)
    (tmp_path / "traces" / "step-13-rank-1.json.gz").write_bytes(b"torn")
    found = merge_traces(tmp_path, tmp_path / "out.json")
    assert found.profiles == ["step-12-rank-1.json.gz"] and "step-13" in found.left_out[0]
    trace = json.loads((tmp_path / "out.json").read_text())
    check_form(trace)
    (product,), (phase,) = named(trace, "aten::mm", 1), named(trace, "backward_s", 1)
    assert product["ts"] - phase["ts"] == pytest.approx(2100, abs=1) and product["tid"] >= 1000


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        merge_traces(tmp_path, tmp_path / "out.json")
    assert refused.value.code == "no-trace"
    write_box(tmp_path, 0, "node-a", ahead_s=0.0, at_s=10.0)
    with pytest.raises(RequestError) as refused:
        merge_traces(tmp_path, tmp_path / "missing" / "out.json")
    assert refused.value.code == "trace-unwritable"


def test_a_box_that_lost_its_oldest_marks(tmp_path: Path) -> None:
    write_box(tmp_path, 0, "node-a", ahead_s=0.0, at_s=10.0, num_marks=4)
    trace = merged(tmp_path)
    assert named(trace, "comm_s", 0) and named(trace, "optimizer_s", 0) and not named(trace, "backward_s", 0)
