"""Pictures and traces of a replayed step hold every pass, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bessemer.plan.replay import KINDS, Replay, StageTimes, replay
from bessemer.plan.timeline import memory_svg, timeline_svg, trace_events, write_trace

TIMES = StageTimes(
    forward_s=0.01, input_s=0.012, weight_s=0.009, p2p_s=0.001, dp_s=0.02, optimizer_s=0.01,
    activation_bytes=2e9, static_bytes=2e10,
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=[("1f1b", 4, 8, 2), ("zb-h1", 4, 8, 1), ("dualpipe", 4, 8, 1), ("1f1b", 1, 2, 1)], ids=str)
def step(request: pytest.FixtureRequest) -> Replay:
    name, stages, micro, virtual = request.param
    return replay(name, stages=stages, micro_batches=micro, virtual_stages=virtual, times=TIMES)


def test_the_trace_has_every_pass_and_transfer_once(step: Replay, tmp_path: Path) -> None:
    write_trace(step, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    passes = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["name"] not in ("dp", "optimizer")]
    seen = {(e["name"][0], e["args"]["stage"], e["args"]["micro_batch"]) for e in passes}
    assert len(passes) == len(seen) == len(step)
    assert sum(e["dur"] for e in passes) / 1e6 == pytest.approx(step.busy_s.sum())
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1e6 == pytest.approx(step.step_s)
    moves = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    starts, ends = ([e["id"] for e in events if e["ph"] == phase] for phase in "sf")
    assert len(moves) == len(step.transfers.item) == len(set(starts)) and starts == ends
    peaks = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(peaks) == pytest.approx(step.peak_bytes.max())
    assert not [e for e in trace_events(step, memory=False) if e["ph"] == "C"]


def test_the_timeline_draws_every_pass_where_it_is(step: Replay) -> None:
    root = ElementTree.fromstring(timeline_svg(step, width=1000))
    boxes = re.findall(r"M([\d.]+) ([\d.]+)h", " ".join(p.get("d", "") for p in root.iter(f"{SVG}path")))
    assert len(boxes) == len(step)
    scale = (1000 - 64 - 12) / step.step_s
    expected = sorted(round(64 + scale * t, 2) for t in step.start_s.tolist())
    assert sorted(float(x) for x, _ in boxes) == pytest.approx(expected, abs=0.02)
    assert len({y for _, y in boxes}) == step.ranks
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert sum(t.startswith("rank ") and "busy" in t for t in titles) == step.ranks


def test_pictures_are_complete_in_themselves(step: Replay) -> None:
    for text in (timeline_svg(step, title="<a & b>"), memory_svg(step, limit_bytes=8e10)):
        ElementTree.fromstring(text)
        assert "href" not in text and text.count("http") == 1  # the name of the format
    told = memory_svg(step)
    assert all(f"rank {rank}: " in told for rank in range(step.ranks))


def test_long_steps_stay_small() -> None:
    step = replay("1f1b", stages=8, micro_batches=200, times=TIMES)
    assert len(timeline_svg(step)) < 40 * len(step) + 20_000
    assert 'text-anchor="middle" dominant' not in timeline_svg(step)


def test_kinds_are_told_apart() -> None:
    step = replay("zb-v", stages=4, micro_batches=8, times=TIMES)
    assert {KINDS[k] for k in set(step.kind.tolist())} == {"F", "I", "W"}
    text = timeline_svg(step)
    assert "backward, weights" in text and "optimizer" in text and text.count('<path d="M') >= 6
