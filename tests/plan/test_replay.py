"""The replay of pipeline schedules: against published closed forms, and against what must hold of any schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES, rank_of_stage, schedule
from bessemer.plan.idle import rank_times
from bessemer.plan.pipeline import bubble_s
from bessemer.plan.replay import KINDS, Replay, StageTimes, num_stages, replay, settled_step_s

IDS = {name: i for i, name in enumerate(SCHEDULES)}
SHAPES = [
    ("gpipe", 2, 3, 1), ("gpipe", 4, 4, 1), ("gpipe", 8, 32, 1), ("1f1b", 1, 4, 1), ("1f1b", 2, 1, 1),
    ("1f1b", 4, 8, 1), ("1f1b", 8, 64, 1), ("1f1b", 16, 16, 1), ("1f1b", 2, 4, 2), ("1f1b", 4, 8, 2),
    ("1f1b", 4, 16, 5), ("1f1b", 8, 32, 4), ("zb-h1", 2, 4, 1), ("zb-h1", 4, 12, 1), ("zb-h1", 8, 32, 1),
    ("zb-h2", 2, 6, 1), ("zb-h2", 4, 16, 1), ("zb-h2", 8, 32, 1), ("zb-v", 2, 8, 1), ("zb-v", 4, 16, 1),
    ("zb-v", 8, 32, 1), ("dualpipe", 2, 8, 1), ("dualpipe", 4, 12, 1), ("dualpipe", 8, 32, 1),
    ("dualpipe", 16, 40, 1), ("dualpipev", 2, 6, 1), ("dualpipev", 4, 12, 1), ("dualpipev", 8, 32, 1),
]  # fmt: skip


def even(name: str, pp: int, virtual: int, f: float, i: float, w: float, **more: Any) -> StageTimes:
    """Whole-rank times f, i, w spread evenly over the chunks of a rank (two-way: each stage is a whole rank's)."""
    chunks = max(num_stages(name, pp, virtual) // pp, 1)
    return StageTimes(forward_s=f / chunks, input_s=i / chunks, weight_s=w / chunks, **more)


def run(shape: tuple[str, int, int, int], times: StageTimes) -> Replay:
    name, pp, micro, virtual = shape
    return replay(name, stages=pp, micro_batches=micro, virtual_stages=virtual, times=times)


def published_bubble(name: str, pp: int, virtual: int, f: float, i: float, w: float) -> float:
    """By hand from the papers: 2104.04473, 2401.10241 table 2 (an isolated step pays the staggered start), and
    2412.19437 table 2."""
    return {
        "gpipe": (pp - 1) * (f + i + w),
        "1f1b": (pp - 1) * (f + i + w) / virtual,
        "zb-h1": (pp - 1) * (f + i - w),
        "zb-h2": (pp - 1) * f,
        "zb-v": (pp - 1) * f / 2,
        "dualpipe": (pp / 2 - 1) * ((f + i + w) + (i + w) - 3 * w),
        "dualpipev": (pp - 1) * ((f + i + w) + (i + w) - 3 * w) / 2,
    }[name]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_even_stages_take_what_the_papers_say(shape: tuple[str, int, int, int]) -> None:
    name, pp, micro, virtual = shape
    step = run(shape, even(name, pp, virtual, 2.0, 2.0, 2.0))
    assert step.step_s == pytest.approx(micro * 6.0 + published_bubble(name, pp, virtual, 2.0, 2.0, 2.0), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_closed_forms_of_the_planner_agree(shape: tuple[str, int, int, int]) -> None:
    """Where passes are equally long, which zero-bubble and dual lists assume, and for the others at any lengths."""
    name, pp, micro, virtual = shape
    for f, i, w in [(1.0, 1.0, 1.0)] + ([(1.0, 1.3, 0.8)] if name in ("gpipe", "1f1b") else []):
        bubble = bubble_s(IDS[name], pp, virtual, f, i, w, isolated=name.startswith("zb"))
        step = run(shape, even(name, pp, virtual, f, i, w))
        assert step.step_s == pytest.approx(micro * (f + i + w) + float(bubble), rel=1e-9)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] in ("1f1b", "gpipe", "zb-h1", "zb-h2")], ids=str)
def test_a_run_of_steps_settles_at_the_closed_form(shape: tuple[str, int, int, int]) -> None:
    name, pp, micro, virtual = shape
    settled = settled_step_s(
        name, stages=pp, micro_batches=micro, virtual_stages=virtual, times=even(name, pp, virtual, 1.0, 1.0, 1.0)
    )
    assert settled == pytest.approx(micro * 3.0 + float(bubble_s(IDS[name], pp, virtual, 1.0, 1.0, 1.0)), rel=1e-9)


def test_zb_h2_has_no_bubble_in_a_run_and_holds_what_the_paper_says() -> None:
    """Its ranks are busy without a gap, with 2 pp - 1 activations each (arXiv 2401.10241, table 2)."""
    for pp, micro in ((2, 8), (4, 16), (8, 24)):
        times = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0)
        step = run(("zb-h2", pp, micro, 1), times)
        for rank, items in enumerate(step.items_of_rank):
            assert step.end_s[items[-1]] - step.start_s[items[0]] == pytest.approx(step.busy_s[rank])
        assert step.peak_bytes.tolist() == [2 * pp - 1] * pp


@pytest.mark.parametrize("pp,micro", [(2, 8), (4, 16), (8, 16)])
def test_activations_in_flight(pp: int, micro: int) -> None:
    one = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0)
    assert run(("1f1b", pp, micro, 1), one).peak_bytes.tolist() == [min(micro, pp - r) for r in range(pp)]
    assert run(("gpipe", pp, micro, 1), one).peak_bytes.tolist() == [micro] * pp
    assert run(("zb-h1", pp, micro, 1), one).peak_bytes.max() == min(pp, micro)
    half = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=0.5)
    assert run(("zb-v", pp, micro, 1), half).peak_bytes.max() <= pp
    # 2104.04473: rank 0 holds pp (1 + (pp-1) / (pp v)) whole-rank activations
    virtual = 2
    step = run(("1f1b", pp, 2 * micro, virtual), StageTimes(forward_s=1, input_s=1, weight_s=1, activation_bytes=0.5))
    assert step.peak_bytes[0] == pytest.approx(pp * (1 + (pp - 1) / (pp * virtual)))


def test_the_memory_curve_says_when() -> None:
    times = StageTimes(forward_s=1.0, input_s=2.0, weight_s=1.0, activation_bytes=8.0, kept_bytes=3.0, static_bytes=100)
    curve = run(("zb-h1", 2, 4, 1), times).memory(0)
    assert (curve.peak_bytes, curve.peak_at_s) == (116.0, 1.0)
    assert curve.bytes[0] == curve.bytes[-1] == 100.0
    assert np.all(np.diff(curve.time_s) >= 0) and curve.bytes.min() >= 100.0
    # rank 1 takes the first micro-batch 1-2 forward and 2-4 back, so rank 0 works 4-6 on its input gradient
    assert dict(zip(curve.time_s.tolist(), curve.bytes.tolist(), strict=True))[6.0] == 111.0


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], StageTimes]:
    name = draw(st.sampled_from(list(SCHEDULES)))
    pp = draw(st.integers(1, 6))
    virtual = draw(st.integers(1, 3)) if name == "1f1b" else 1
    micro = draw(st.integers(1, 9))
    if name == "dualpipe":
        pp, micro = 2 * max(pp // 2, 1), 2 * max(pp // 2, 1) * 2 + 2 * draw(st.integers(0, 3))
    if name == "dualpipev":
        micro += 2 * pp
    if virtual > 1:
        micro = pp * draw(st.integers(1, 4))
    stages = num_stages(name, pp, virtual)
    seconds = st.floats(0.01, 5.0)
    per_stage = st.lists(seconds, min_size=stages, max_size=stages)
    per_rank = st.lists(st.floats(0.0, 2.0), min_size=pp, max_size=pp)
    times = StageTimes(
        forward_s=draw(per_stage),
        input_s=draw(per_stage),
        weight_s=draw(per_stage),
        p2p_s=draw(st.lists(st.floats(0.0, 1.0), min_size=stages - 1, max_size=stages - 1)) if stages > 1 else 0.0,
        blocking_p2p=draw(st.booleans()),
        dp_s=draw(per_rank),
        optimizer_s=draw(per_rank),
        activation_bytes=draw(per_stage),
    )
    return (name, pp, micro, virtual), times


@settings(max_examples=60, deadline=None)
@given(cases())
def test_nothing_is_lost_and_no_dependency_broken(case: tuple[tuple[str, int, int, int], StageTimes]) -> None:
    shape, times = case
    name, pp, micro, virtual = shape
    step, stages = run(shape, times), num_stages(name, pp, virtual)
    seen = Counter(zip(step.kind.tolist(), step.stage.tolist(), step.micro.tolist(), strict=True))
    assert set(seen.values()) == {1}
    work = micro * np.sum([times.forward_s, times.input_s, times.weight_s])
    assert step.busy_s.sum() == pytest.approx(work)
    at = {k: i for i, k in enumerate(zip(step.kind, step.stage, step.micro, strict=True))}
    back = KINDS.index("I") if schedule(name).split_backward else KINDS.index("B")
    hop = np.broadcast_to(times.p2p_s, (max(stages - 1, 1),))
    for stage in range(stages):
        for m in range(micro):
            f, b = at[0, stage, m], at[back, stage, m]
            assert step.rank[f] == step.rank[b] == rank_of_stage(schedule(name), pp, stage, m, micro)
            assert step.start_s[b] >= step.end_s[f] - 1e-9
            if stage:
                before, behind = at[0, stage - 1, m], at[back, stage - 1, m]
                for first, then in ((before, f), (b, behind)):
                    cost = hop[stage - 1] if step.rank[first] != step.rank[then] else 0.0
                    assert step.start_s[then] >= step.end_s[first] + cost - 1e-9
            if schedule(name).split_backward:
                assert step.start_s[at[KINDS.index("W"), stage, m]] >= step.end_s[b] - 1e-9
    assert len(at) == stages * micro * (3 if schedule(name).split_backward else 2)
    for items in step.items_of_rank:
        assert np.all(step.start_s[items][1:] >= (step.end_s + step.sending_s)[items][:-1] - 1e-9)
    for channel in {(s, t) for s, t in zip(step.transfers.source, step.transfers.target, strict=True)}:
        own = (step.transfers.source == channel[0]) & (step.transfers.target == channel[1])
        starts, ends = np.sort(step.transfers.start_s[own]), np.sort(step.transfers.end_s[own])
        assert np.all(starts[1:] >= ends[:-1] - 1e-9), "messages on one channel overlap"


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_rank_accounts_for_the_whole_step(case: tuple[tuple[str, int, int, int], StageTimes]) -> None:
    step = run(*case)
    spent = rank_times(step)
    assert spent.total == pytest.approx(np.full(step.ranks, step.step_s))
    for values in vars(spent).values():
        assert np.all(values >= -1e-9)
    bubble = spent.warm_up + spent.neighbour + spent.transfer + spent.drain
    assert np.ptp(bubble) <= 1e-6 * step.step_s, "what imbalance leaves is the same on every rank"
    assert step.step_s >= spent.forward.max() and step.memory(0).bytes[-1] == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(["forward_s", "input_s", "weight_s", "p2p_s", "dp_s", "optimizer_s"]), st.data())
def test_nothing_gets_faster_when_something_takes_longer(
    case: tuple[tuple[str, int, int, int], StageTimes], field: str, data: st.DataObject
) -> None:
    shape, times = case
    values = np.atleast_1d(np.array(getattr(times, field), float))
    which = data.draw(st.integers(0, len(values) - 1))
    longer = values.copy()
    longer[which] += data.draw(st.floats(0.0, 3.0))
    slower = StageTimes(**{**vars(times), field: longer if np.ndim(getattr(times, field)) else float(longer[0])})
    assert run(shape, slower).step_s >= run(shape, times).step_s - 1e-9


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_run_is_never_slower_than_steps_with_a_barrier(case: tuple[tuple[str, int, int, int], StageTimes]) -> None:
    (name, pp, micro, virtual), times = case
    settled = settled_step_s(name, stages=pp, micro_batches=micro, virtual_stages=virtual, times=times)
    step = run((name, pp, micro, virtual), times)
    assert (step.busy_s + step.dp_s + step.optimizer_s).max() <= settled + 1e-9 <= step.step_s + 2e-9


def test_blocking_transfers_cost_every_micro_batch_on_a_middle_rank_two_messages() -> None:
    def step(micro: int, blocking: bool) -> float:
        times = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, p2p_s=0.25, blocking_p2p=blocking)
        return run(("1f1b", 4, micro, 1), times).step_s

    assert step(41, True) - step(40, True) == pytest.approx(3.0 + 2 * 0.25)
    assert step(40, True) > step(40, False) > 40 * 3.0


def test_transfers_that_run_beside_show_as_fill() -> None:
    """Each message of gpipe is on the way of the first forward or the last backward only."""
    times = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, p2p_s=0.1)
    step = run(("gpipe", 4, 8, 1), times)
    assert step.step_s == pytest.approx(8 * 3.0 + 3 * 3.0 + 2 * 3 * 0.1)
    assert len(step.transfers.item) == 2 * 3 * 8 and step.num_events == 2 * 4 * 8 + 48


def test_causes_of_waiting_by_hand() -> None:
    """One micro-batch over two ranks: 0 works 0-1, 1 from 1.5 (message) to 4.5, 0 again from 5 to 7."""
    spent = rank_times(run(("gpipe", 2, 1, 1), StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, p2p_s=0.5)))
    assert spent.neighbour.tolist() == [3.5, 0.0] and spent.transfer.tolist() == [0.5, 0.0]
    assert spent.warm_up.tolist() == [0.0, 1.5] and spent.drain.tolist() == [0.0, 2.5]
    assert spent.bubble_s == 4.0 and spent.imbalance.tolist() == [0.0, 0.0]


def test_a_slow_stage_shows_as_imbalance_of_the_others() -> None:
    times = StageTimes(forward_s=[1.0, 1.0, 2.0, 1.0], input_s=1.0, weight_s=1.0)
    spent = rank_times(run(("1f1b", 4, 16, 1), times))
    assert spent.imbalance == pytest.approx([16.0, 16.0, 0.0, 16.0])


def test_wrong_shapes_are_refused() -> None:
    times = StageTimes(forward_s=[1.0, 1.0], input_s=1.0, weight_s=1.0)
    with pytest.raises(ValueError, match="2"):
        replay("1f1b", stages=4, micro_batches=4, times=times)
    with pytest.raises(ValueError, match="not below zero"):
        replay("1f1b", stages=4, micro_batches=4, times=StageTimes(forward_s=-1.0, input_s=1.0, weight_s=1.0))
    with pytest.raises(ConfigError, match="1f1b"):
        replay("1f1", stages=4, micro_batches=4, times=times)
