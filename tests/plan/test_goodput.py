"""Goodput: against published figures, against the Monte Carlo of the same process, and against what must hold."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.api._plan_goodput import goodput
from bessemer.core.errors import ConfigError
from bessemer.plan.faults import FLEETS, communicator_start, fault_row, fleet, mean_time_to_failure, parts
from bessemer.plan.goodput import MODES, GoodputInputs, Mode, capacity_by_missing, estimate, poisson
from bessemer.plan.goodput_advice import advise
from bessemer.plan.goodput_inputs import ask
from bessemer.plan.goodput_simulation import simulate
from bessemer.plan.intervals import best_interval_s, daly_interval_s, efficiency, young_interval_s
from bessemer.plan.stragglers import expected_maximum, pace

LLAMA = ask(16384, "llama-3").inputs


@pytest.mark.parametrize("gpus,hours", [(1024, 7.9), (16384, 1.8), (131072, 0.23)])
def test_published_mean_times_to_failure_by_job_size(gpus: int, hours: float) -> None:
    found = mean_time_to_failure(fleet("rsc-1"), gpus)
    assert found.value == pytest.approx(hours * 3600) and found.kind == "published"
    if gpus > 1024:  # what their 6.5 failures per 1,000 node-days project
        assert 24 * 1000 / (6.5 * gpus / 8) == pytest.approx(hours, rel=0.03)


def test_llama_3_was_interrupted_419_times_and_trained_more_than_90_percent_of_the_time() -> None:
    mttf_s = mean_time_to_failure(fleet("llama-3"), 16384).value
    assert 54 * 86400 / mttf_s == pytest.approx(419, rel=1e-3)
    assert sum(part.share for part in parts("Llama 3 Herd of Models")) == pytest.approx(1.0)
    for inspection in (True, False):
        inputs = ask(16384, "llama-3", inspection=inspection).inputs
        assert 0.90 < estimate(inputs, "disk").effective_time < 0.97
    assert fault_row("F006").value == 90


def test_ft_hsdp_brought_44_to_80_percent() -> None:
    """A failure every 18 minutes; stalls of 10 and of 3 minutes. The size of their replicas isn't known to us."""
    assert fleet("ft-hsdp").defaults["stall_s"].value == 180
    assert estimate(ask(98304, "ft-hsdp").inputs, "disk").effective_time == pytest.approx(0.44, abs=0.02)
    for unit, close in ((512, 0.04), (8192, 0.02)):
        after = estimate(ask(98304, "ft-hsdp", [f"unit={unit}"]).inputs, "zero").effective_time
        assert after == pytest.approx(0.80, abs=close)


def test_every_fleet_gives_a_time_at_every_size_that_falls_with_it() -> None:
    for of in FLEETS.values():
        times = [mean_time_to_failure(of, n).value for n in (1000, 1024, 4096, 16384, 100_000, 131_072, 1_000_000)]
        assert all(a > b > 0 for a, b in itertools.pairwise(times)), of.name
    assert communicator_start(98304).value == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize("stall_s,mttf_s", [(40.0, 11136.0), (2.8, 11136.0), (600.0, 1080.0), (0.05, 180.0)])
def test_the_best_interval_is_the_best_and_the_rules_come_near_it(stall_s: float, mttf_s: float) -> None:
    best = best_interval_s(stall_s, mttf_s)
    at_best = efficiency(best, stall_s, mttf_s)
    tries = [best * (1 + step / 400) for step in range(-300, 400)]
    assert at_best >= max(efficiency(t, stall_s, mttf_s) for t in tries)
    assert daly_interval_s(stall_s, mttf_s) == pytest.approx(best, rel=0.01)
    assert young_interval_s(stall_s, mttf_s) == pytest.approx(best, rel=math.sqrt(2 * stall_s / mttf_s))
    assert efficiency(best, stall_s, mttf_s, lag_s=mttf_s) == pytest.approx(at_best / math.e)


def test_stragglers() -> None:
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-4)
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-4)
    assert expected_maximum(1000) == pytest.approx(3.24144, abs=1e-4)
    assert pace(1, jitter=0.5, slow_share=0.0, slow_by=0.1) == 1.0
    # 10 % slower machines, half a per cent of them (arXiv 2402.15627): among thousands there is always one
    assert pace(4000, jitter=0.0, slow_share=0.005, slow_by=0.1) == pytest.approx(1 / 1.1, rel=1e-6)
    doubling = pace(512, jitter=0.01, slow_share=0, slow_by=0) / pace(256, jitter=0.01, slow_share=0, slow_by=0)
    assert 1 - doubling == pytest.approx(0.002, rel=0.15)


def test_poisson_sums_to_one_and_has_its_mean() -> None:
    for mean in (0.0, 0.3, 40.0, 3000.0):
        p = poisson(mean)
        assert p.sum() == pytest.approx(1.0) and (p * range(len(p))).sum() == pytest.approx(mean, abs=1e-6)


CASES: list[tuple[Mode, int | None, dict[str, float | int | None]]] = [
    ("disk", None, {}),
    ("disk", 4, {"checkpoint_s": 40.0, "mttf_s": 3000.0, "repair_s": 7200.0}),
    ("memory", None, {"fallback_share": 0.05}),
    ("memory", 4, {"mttf_s": 4000.0, "snapshot_s": 1.0, "repair_s": 9000.0}),
    ("zero", None, {"mttf_s": 1500.0}),
    ("zero", 0, {"unit": 1024}),
    ("zero", 3, {"unit": 2048, "mttf_s": 2500.0, "join_s": 900.0}),
    ("zero", 5, {"unit": 1024, "mttf_s": 4000.0, "micro_batches": 3}),
    ("zero", 1, {"unit": 4096, "min_replicas": 3, "mttf_s": 6000.0, "step_s": 60.0}),
    ("zero", None, {"fallback_share": 0.0}),
]


@pytest.mark.parametrize("mode,spares,changes", CASES, ids=str)
def test_closed_form_and_monte_carlo_agree(
    mode: Mode, spares: int | None, changes: dict[str, float | int | None]
) -> None:
    """Within four standard errors, plus 0.02 % for what the closed form leaves to second order."""
    inputs = replace(LLAMA, **changes)  # type: ignore[arg-type]
    closed = estimate(inputs, mode, spares)
    played = simulate(inputs, closed, failures=60_000, seed=7)
    assert played.standard_error < 0.004
    assert abs(played.effective_time - closed.effective_time) < 4 * played.standard_error + 2e-4
    assert sum(closed.losses.values()) + closed.effective_time == pytest.approx(1.0)
    assert min(closed.losses.values()) >= 0.0


def test_the_monte_carlo_is_repeatable_and_feels_each_part() -> None:
    closed = estimate(LLAMA, "zero", 2)
    first = simulate(LLAMA, closed, failures=5000, seed=1)
    assert first == simulate(LLAMA, closed, failures=5000, seed=1) != simulate(LLAMA, closed, failures=5000, seed=2)
    for field, value in (("detection_s", 600.0), ("join_s", 5000.0), ("repair_s", 9e5), ("step_s", 300.0)):
        worse = replace(LLAMA, **{field: value})
        assert simulate(worse, closed, failures=20_000).effective_time < first.effective_time - 0.003, field


WORSE = (
    "detection_s",
    "restart_disk_s",
    "restart_memory_s",
    "stall_s",
    "join_s",
    "checkpoint_s",
    "snapshot_s",
    "repair_s",
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODES),
    st.one_of(st.none(), st.integers(0, 12)),
    st.sampled_from(WORSE),
    st.floats(1.0, 4.0),
    st.floats(600.0, 50_000.0),
)
def test_nothing_improves_by_taking_longer(
    mode: Mode, spares: int | None, field: str, times: float, mttf_s: float
) -> None:
    inputs = replace(LLAMA, mttf_s=mttf_s)
    worse = replace(inputs, **{field: getattr(inputs, field) * times})
    base = estimate(inputs, mode, spares).effective_time
    assert 0.0 <= estimate(worse, mode, spares).effective_time <= base + 1e-9 <= 1.0 + 1e-9
    more = estimate(replace(inputs, mttf_s=mttf_s * times), mode, spares).effective_time
    assert more >= base - 1e-9
    if spares is not None:
        assert estimate(inputs, mode, spares + 1).effective_time >= base - 1e-12


def test_whole_micro_batches_make_a_missing_replica_dearer() -> None:
    ideal = replace(LLAMA, unit=1024)
    whole = replace(ideal, micro_batches=4)
    assert capacity_by_missing(ideal)[1] == pytest.approx(15 / 16)
    assert capacity_by_missing(whole)[:2].tolist() == [1.0, 4 / 5]
    assert capacity_by_missing(replace(ideal, min_replicas=15))[2] == 0.0


def test_advice_is_the_cheapest_that_reaches_the_target() -> None:
    advice = advise(LLAMA, 0.99)
    assert advice.choice == "zero"
    chosen = next(m for m in advice.modes if m.mode == "zero").estimate
    assert chosen.effective_time >= 0.99 and chosen.spares is not None
    assert estimate(LLAMA, "zero", chosen.spares - 1).effective_time < 0.99
    memory = next(m for m in advice.modes if m.mode == "memory")
    assert not memory.reaches and memory.overcome_limit_s is not None
    quick = replace(LLAMA, detection_s=0.0, restart_memory_s=memory.overcome_limit_s)
    # what falls back keeps its time, to which detection belonged
    quick = replace(quick, restart_disk_s=LLAMA.restart_disk_s + LLAMA.detection_s)
    assert estimate(quick, "memory").effective_time == pytest.approx(0.99, abs=1e-6)


def test_advice_where_nothing_reaches_the_target() -> None:
    advice = advise(ask(98304, "ft-hsdp").inputs, 0.995)
    assert advice.choice is None and not any(m.reaches for m in advice.modes)
    assert all(m.overcome_limit_s is None for m in advice.modes)


def test_without_fall_backs_nothing_in_mode_zero_is_lost_but_time() -> None:
    result = goodput(sets=["fallback_share=0"])
    text = json.dumps(result.as_json(), allow_nan=False)
    zero = json.loads(text)["modes"]["zero"]
    assert zero["losing_mttf_s"] is None and zero["young_interval_s"] is None and zero["losses"]["fallback"] == 0.0
    assert "99 % effective time: mode zero" in str(result)


def test_a_job_of_one_replica_cannot_go_on_without_it() -> None:
    inputs = ask(8, "llama-3").inputs
    assert inputs.replicas == 1 and [m.mode for m in advise(inputs, 0.9).modes] == ["disk", "memory"]
    with pytest.raises(ValueError, match="two replicas"):
        estimate(inputs, "zero")


@pytest.mark.parametrize("gpus", [1000, 16384, 100_000, 1_000_000])
def test_the_verb_answers_at_every_size(gpus: int) -> None:
    result = goodput(gpus=gpus, spares=8)
    data = json.loads(json.dumps(result.as_json()))
    assert data["gpus"] == gpus and 0 <= data["effective_time_all_devices"] <= data["effective_time"] <= 1
    assert {s["kind"] for s in data["inputs"].values()} <= {"published", "measured", "modelled", "given"}
    assert all(s["source"] for s in data["inputs"].values())
    assert f"{gpus:,} accelerators" in str(result)


def test_the_verb_says_which_spares_interval_and_mode_give_99_percent() -> None:
    result = goodput()
    data = result.as_json()
    assert data["reached"] and data["mode"] == "zero" and data["effective_time"] >= 0.99
    assert f"99 % effective time: mode zero, {data['spares']} spare nodes, a save every" in str(result)
    data = goodput(sets=["stall_s=2", "detection_s=2"], target=0.95).as_json()
    assert data["inputs"]["stall_s"] == {"value": 2.0, "kind": "given", "source": "--set stall_s"}


@pytest.mark.parametrize(
    "asked,where,fix",
    [
        ({"fleet": "lama-3"}, "fleet", "llama-3"),
        ({"gpus": 1023}, "gpus", "1016 or 1024"),
        ({"gpus": 4}, "gpus", "8"),
        ({"sets": ["stal_s=1"]}, "stal_s", "stall_s"),
        ({"sets": ["stall_s=soon"]}, "stall_s", "seconds"),
        ({"sets": ["stall_s=-1"]}, "stall_s", "zero or more"),
        ({"sets": ["drain_share=37"]}, "drain_share", "0.37"),
        ({"sets": ["unit=12"]}, "unit", "8, 16"),
        ({"sets": ["mttf_s=3.1"]}, "mttf_s", "seconds"),
        ({"sets": ["interval_s=2"]}, "interval_s", "6 or more"),
        ({"sets": ["min_replicas=33"]}, "min_replicas", "up to 32"),
        ({"target": 99.0}, "target", "0.99"),
        ({"spares": -1}, "spares", "0 or more"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_questions_are_refused(asked: dict[str, object], where: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        goodput(**asked)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.where == where and fix in problem.fix


def test_all_wrong_inputs_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ask(16384, "llama-3", ["stall_s=x", "nonsense=1", "slow_share=2"])
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError) as caught:
        goodput(gpus=4, fleet="none", target=2.0, spares=-1, sets=["stall_s=x"])
    assert [p.where for p in caught.value.problems] == ["target", "spares", "stall_s", "fleet", "gpus"]


DOCS = (Path(__file__).parents[2] / "docs" / "plan-goodput.md").read_text(encoding="utf-8")


def test_the_page_shows_what_is_printed() -> None:
    told = str(goodput()).partition("\ninputs")[0]
    assert told in DOCS


@pytest.mark.parametrize("gpus", [1024, 16384, 131_072])
def test_the_pages_table_by_size(gpus: int) -> None:
    data = goodput(gpus=gpus).as_json()
    shares = " | ".join(f"{100 * data['modes'][mode]['effective_time']:.1f} %" for mode in MODES)
    times = " / ".join(f"{data['mttf_by_fleet_s'][name] / 3600:.3g} h" for name in ("llama-3", "rsc-1"))
    assert f"| {gpus:,} | {times} | {shares} |" in DOCS


def test_the_pages_example_of_a_million() -> None:
    command = DOCS.partition("$ bessemer plan goodput --gpus 1000000 ")[2].partition("...")[0]
    sets = [word for word in command.replace("\\", " ").split() if "=" in word]
    assert len(sets) == 6
    answer = [line for line in str(goodput(gpus=1_000_000, sets=sets)).splitlines() if line.startswith("99 %")]
    assert answer[0] in DOCS


def test_inputs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        LLAMA.mttf_s = 1.0  # type: ignore[misc]
    assert isinstance(LLAMA, GoodputInputs)
