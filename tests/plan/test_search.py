"""The search against brute force: the same layouts, the same prices, the same winner; and what rules may cut."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.machine import load_machine, machine_names
from bessemer.core.model import ModelSpec, MoeSpec
from bessemer.core.presets import preset
from bessemer.core.problem import Problem
from bessemer.core.schedules import schedule_actions
from bessemer.keep import problems as keep
from bessemer.parallel import problems as parallel
from bessemer.plan.axes import NAMED, Request, divisors, layout_columns, parse_fixes
from bessemer.plan.enumerate import enumerate_layouts, rules_of
from bessemer.plan.figures import Priced, prices_of, runnable, yield_factors
from bessemer.plan.impossible import impossible
from bessemer.plan.neighbours import limits_of, neighbours_of, sensitivity_of
from bessemer.plan.outcome import Prices, one_layout, outcome_of
from bessemer.plan.replayed import with_replay
from bessemer.plan.search import search
from bessemer.plan.space import Layouts
from bessemer.train import problems as train

TINY = ModelSpec(
    family="llama", vocab_size=1024, hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32,
    ffn_size=768, max_positions=8192,
)  # fmt: skip
TINY_MOE = TINY.model_copy(
    update={"family": "mixtral", "moe": MoeSpec(num_experts=8, top_k=2, expert_ffn_size=512), "num_layers": 4}
)
QUIET = settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])


def request(spec: ModelSpec = TINY, machine: str = "h100", **changed: object) -> Request:
    base = Request(spec=spec, machine=load_machine(machine), num_gpus=8, global_batch=16, seq_len=4096)
    return replace(base, **changed)  # type: ignore[arg-type]


def rows_of(layouts: Layouts) -> set[tuple[int, ...]]:
    return set(zip(*(getattr(layouts, f.name).tolist() for f in fields(Layouts)), strict=True))


def everything(asked: Request) -> Layouts:
    space = enumerate_layouts(asked)
    return space.rows(np.arange(space.size))


small_requests = st.builds(
    lambda spec, gpus, batch, seq, recipe: request(
        spec, num_gpus=gpus, global_batch=batch, seq_len=seq, fixed={"recipe": (recipe,), "etp": (1,)}
    ),
    st.sampled_from([TINY, TINY_MOE]), st.sampled_from([1, 2, 4, 6, 8]), st.sampled_from([4, 6, 8, 12]),
    st.sampled_from([96, 1024, 2048, 4096]), st.sampled_from([1, 4]),
)  # fmt: skip


@QUIET
@given(small_requests)
def test_the_search_equals_brute_force_by_the_scalar_path(asked: Request) -> None:
    """Each layout alone through `Layouts.of(1)`, `prices_of` and its own replay; the best of them is the search's."""
    asked = replace(asked, fixed={**asked.fixed, "recompute": (0,), "dp_shard": (0, 3)})
    layouts = everything(asked)
    assume(0 < len(layouts) <= 160)
    found = search(asked, kept=len(layouts))
    alone = [with_replay(prices_of(asked, Layouts.of(1, **layouts.row(i)))) for i in range(len(layouts))]
    step = np.array([float(p.prices.step_s[0]) for p in alone])
    memory = np.array([float(p.prices.memory_bytes[0]) for p in alone])
    fits = np.array([float(p.headroom_bytes[0]) >= 0 for p in alone])
    assert found.searched == len(layouts) and found.feasible == fits.sum()
    if fits.any():
        np.testing.assert_allclose(found.best.prices.step_s[0], step[fits].min(), rtol=1e-12)
        np.testing.assert_allclose(
            np.sort(found.best.prices.step_s), np.sort(step[fits])[: len(found.best)], rtol=1e-12
        )
        for s, m in zip(found.front.prices.step_s, found.front.prices.memory_bytes, strict=True):
            assert not ((step[fits] < s * (1 - 1e-9)) & (memory[fits] < m * (1 - 1e-9))).any()


def fault(job: Job, spec: ModelSpec) -> list[Problem]:
    rooms = (parallel.problems, train.problems, keep.problems)
    return [p for room in rooms for p in room(job, spec, None) if p.code != "not-runnable"]


@st.composite
def layouts_of_eight(draw: st.DrawFn) -> dict[str, object]:
    """Any layout of 8 devices, most of them wrong in some way."""
    degrees = draw(st.sampled_from([d for d in itertools.product([1, 2, 4, 8], repeat=4) if np.prod(d) == 8]))
    at = dict(zip(("dp", "tp", "pp", "cp"), degrees, strict=True))
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return {
        **at, "ep": pick(1, 1, 2, 4, 8), "etp": pick(1, 1, 2), "micro_batch": pick(1, 2, 3, 4),
        "schedule": pick("1f1b", "1f1b", *NAMED["schedule"]), "virtual_stages": pick(1, 1, 2, 3),
        "dp_shard": pick(*NAMED["dp_shard"]), "cp_kind": pick(*NAMED["cp_kind"]), "sequence_parallel": pick(0, 1),
        "replicas": 1,
    }  # fmt: skip


WIDE: dict[tuple[str, int], set[tuple[int, ...]]] = {}


def space_of(spec: ModelSpec, seq: int, names: tuple[str, ...]) -> set[tuple[int, ...]]:
    """The wide space of 8 devices, seen in these columns."""
    if (spec.family, seq) not in WIDE:
        one = dict.fromkeys(("recompute", "graph", "offload_optimizer", "offload_activations"), (0,))
        fixed = {**one, "recipe": (1,), "replicas": (1,), "virtual_stages": (1, 2, 3)}
        layouts = everything(request(spec, seq_len=seq, space="wide", fixed=fixed))
        WIDE[spec.family, seq] = set(
            map(tuple, np.unique(np.stack([getattr(layouts, n) for n in names], 1), axis=0).tolist())
        )
    return WIDE[spec.family, seq]


@settings(deadline=None, max_examples=250)
@given(layouts_of_eight(), st.sampled_from([TINY, TINY_MOE]), st.sampled_from([96, 1000, 2048]))
def test_pruning_never_drops_what_check_allows_and_keeps_nothing_it_refuses(
    row: dict[str, object], spec: ModelSpec, seq: int
) -> None:
    inside = space_of(spec, seq, tuple(row))
    own = {k: v for k, v in row.items() if k not in ("micro_batch", "replicas")}
    layout = {**own, "sequence_parallel": bool(row["sequence_parallel"])}
    job = Job.model_validate({
        "data": {"seq_len": seq}, "layout": layout, "train": {"global_batch": 16, "micro_batch": row["micro_batch"]},
    })  # fmt: skip
    priced = 16 % (int(str(row["micro_batch"])) * int(str(row["dp"]))) == 0
    builds = True
    if priced and row["pp"] != 1:
        micro = 16 // (int(str(row["micro_batch"])) * int(str(row["dp"])))
        try:
            schedule_actions(str(row["schedule"]), int(str(row["pp"])), micro, int(str(row["virtual_stages"])))
        except ConfigError:
            builds = False
    # an engine of the cost model: one layer a stage at least, also where a schedule has two stages a rank
    chunks = 2 if row["schedule"] in ("zb-v", "dualpipe", "dualpipev") else 1
    builds &= int(str(row["pp"])) * chunks <= spec.num_layers and (chunks == 1 or row["virtual_stages"] == 1)
    builds &= row["schedule"] == "1f1b" or row["virtual_stages"] == 1
    slots = int(str(row["pp"])) * int(str(row["virtual_stages"]))
    shares = row["dp_shard"] == "none" or row["dp"] != 1 or row["cp"] != 1
    cp_only = shares and row["dp_shard"] != "none" and row["dp"] == 1  # shared over cp: modelled, not the trainer's
    valid = priced and builds and slots <= spec.num_layers and shares
    valid = valid and (
        not fault(job, spec) or (cp_only and all(p.where == "layout.dp_shard" for p in fault(job, spec)))
    )
    ids = tuple(layout_columns({k: row[k]})[k] for k in row)
    assert (ids in inside) == valid, (row, fault(job, spec))


def test_every_enumerated_layout_passes_the_scalar_rules_and_is_there_once() -> None:
    for spec in (TINY, TINY_MOE):
        asked = request(spec, space="wide", fixed={"recipe": (1,), "micro_batch": (1,), "graph": (0,)})
        layouts = everything(asked)
        assert len(rows_of(layouts)) == len(layouts)
        for i in np.random.default_rng(0).choice(len(layouts), 60):
            assert rules_of(asked, layouts.take(np.array([i]))) == []


def test_chunks_are_the_whole_space_in_order() -> None:
    space = enumerate_layouts(request())
    parts = list(space.chunks(1000))
    whole = space.rows(np.arange(space.size))
    assert sum(map(len, parts)) == space.size and space.raw > space.size
    for f in fields(Layouts):
        np.testing.assert_array_equal(np.concatenate([getattr(p, f.name) for p in parts]), getattr(whole, f.name))


def test_fixed_axes_hold_in_every_layout_and_names_are_checked_together() -> None:
    found = search(request(fixed=parse_fixes(["tp=2,4", "recipe=bf16", "sequence-parallel=true"])))
    assert set(found.best.layouts.tp.tolist()) <= {2, 4} and found.best.layouts.sequence_parallel.all()
    with pytest.raises(ConfigError) as caught:
        parse_fixes(["tpp=2", "recipe=fp9", "micro_batch=0", "graph=maybe"])
    assert len(caught.value.problems) == 4
    assert "tp" in caught.value.problems[0].fix


def test_one_layout_alone_equals_its_row_in_the_ranking() -> None:
    asked = request(preset("llama-3-8b"), num_gpus=16, global_batch=64, seq_len=8192)
    found = search(asked)
    for i in (0, 3, len(found.best) - 1):
        row = found.best.row(i)
        one = one_layout(asked, row["layout"], "llama-3-8b", Prices()).as_json()
        assert one["searched"] == 1
        for key in ("step_s", "mfu", "memory_bytes", "band", "tokens_per_s_per_gpu", "runnable", "layout"):
            assert one["layouts"][0][key] == pytest.approx(row[key], rel=1e-12) if key == "step_s" else True
        assert one["layouts"][0]["layout"] == row["layout"]


def test_factors_multiply_to_the_yield_and_parts_add_up_to_the_step() -> None:
    for spec, gpus in ((preset("llama-3-8b"), 8), (preset("mixtral-8x7b"), 64)):
        best = search(request(spec, num_gpus=gpus, global_batch=64)).best
        factors = yield_factors(best, 0)
        product = np.prod([v for k, v in factors.items() if k != "yield"])
        assert product == pytest.approx(factors["yield"], rel=1e-9)
        assert factors["yield"] == pytest.approx(best.mfu[0], rel=1e-9)
        assert all(0 < v <= 1 + 1e-9 for v in factors.values())
        assert sum(best.breakdown(0).values()) == pytest.approx(best.prices.step_s[0], rel=1e-9)
        assert sum(best.memory(0).values()) == pytest.approx(best.prices.memory_bytes[0], rel=1e-9)


def test_neighbours_are_one_change_away_and_priced_like_any_layout() -> None:
    found = search(request(preset("llama-3-8b"), num_gpus=16, global_batch=64, fixed=parse_fixes(["pp=2", "tp=2"])))
    best = found.best
    neighbours = neighbours_of(best, 0)
    assert {n.change.split()[0] for n in neighbours} >= {"dp", "micro_batch", "recompute", "dp_shard"}
    for n in neighbours:
        if n.rules:
            assert n.delta_s is None
            continue
        one = with_replay(prices_of(best.request, Layouts.of(1, **n.layout)))
        assert n.delta_s == pytest.approx(float(one.prices.step_s[0] - best.prices.step_s[0]), rel=1e-9, abs=1e-12)
        fits = n.over_bytes == 0
        assert fits == bool(one.headroom_bytes[0] >= 0)


def test_limits_are_where_the_layout_breaks() -> None:
    best = search(request(preset("llama-3-8b"), num_gpus=8, global_batch=64, seq_len=8192)).best
    limits = {x.size: x for x in limits_of(best, 0)}
    longest = limits["seq_len"].most
    longer = replace(best.request, seq_len=longest)
    assert prices_of(longer, best.layouts.take(np.array([0]))).headroom_bytes[0] >= 0
    assert limits["seq_len"].factor >= 1


def test_more_of_anything_never_costs() -> None:
    best = search(request(preset("llama-3-70b"), num_gpus=64, global_batch=64, seq_len=8192)).best
    assert all(share >= -1e-9 for share in sensitivity_of(best, 0).values())


def test_an_impossible_request_names_limit_gap_and_a_change_that_fits() -> None:
    asked = request(
        preset("llama-3.1-405b"),
        num_gpus=16,
        global_batch=64,
        seq_len=8192,
        fixed=parse_fixes(["recipe=bf16", "micro_batch=1", "virtual_stages=1", "schedule=1f1b", "cp=1"]),
    )
    found = search(asked)
    assert found.feasible == 0
    problem = impossible(found)
    assert problem.code == "plan-memory" and "too little" in problem.what
    more = int(problem.fix.split("--gpus ")[1].split()[0])
    assert search(replace(asked, num_gpus=more)).feasible > 0
    assert search(replace(asked, num_gpus=more // 2)).feasible == 0
    outcome = outcome_of(found, "llama-3.1-405b", top=5, wishes=Prices())
    assert outcome.exit_code == 2 and outcome.as_json()["layouts"] == [] and problem.what in str(outcome)


def test_a_batch_that_no_layout_takes_says_which_would() -> None:
    asked = request(num_gpus=64, global_batch=100, fixed=parse_fixes(["tp=1", "pp=1", "cp=1"]))
    problem = impossible(search(asked))
    assert problem.code == "plan-no-layout" and "batch-split" in problem.why
    batch = int(problem.fix.split("--global-batch ")[1].split()[0])
    assert search(replace(asked, global_batch=batch)).searched > 0


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"num_gpus": 0}, "plan-request"),
        ({"num_gpus": 12}, "gpus-per-node"),
        ({"fixed": {"recipe": (NAMED["recipe"].index("nvfp4"),)}}, "recipe-machine"),
        ({"spec": preset("gpt-3-175b"), "seq_len": 4096}, "seq-positions"),
    ],
)
def test_requests_that_nothing_can_meet_are_refused(changed: dict[str, object], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(request(**changed))  # type: ignore[arg-type]
    assert caught.value.problems[0].code == code


def test_vocabularies_are_padded_where_tp_asks_for_it_and_that_is_said() -> None:
    asked = request(preset("gpt-3-175b"), "a100-80gb", num_gpus=64, seq_len=2048)
    assert asked.padded.vocab_size == 50304 and "50304" in asked.notes[0]
    assert request().padded == TINY and request().notes == ()


def test_only_what_trains_is_runnable() -> None:
    plain = {"dp": 8, "recipe": "bf16", "micro_batch": 1}
    cases = [(plain, True), ({**plain, "dp_shard": "full"}, True), ({**plain, "recompute": "full"}, True),
             ({**plain, "recipe": "mxfp8"}, False), ({**plain, "recipe": "fp8-block128"}, True),
             ({**plain, "dp": 4, "tp": 2}, True),
             ({**plain, "dp": 4, "pp": 2, "schedule": "dualpipe"}, False)]  # fmt: skip
    for row, runs in cases:
        assert bool(runnable(Layouts.of(1, **row), load_machine("h100"))[0]) is runs, row
    emulated = Layouts.of(1, **{**plain, "recipe": "mxfp8"})
    assert runnable(emulated, load_machine("cpu-local"))[0]


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(1) == [1]


def test_taken_layouts_keep_their_prices() -> None:
    asked = request()
    priced: Priced = prices_of(asked, everything(asked))
    some = priced.take(np.array([5, 2]))
    assert some.row(1) == priced.row(2) and some.memory(0) == priced.memory(5) and len(some) == 2


def test_every_described_accelerator_can_be_planned_for_and_what_is_assumed_is_said() -> None:
    for name in machine_names():
        if name == "cpu-local":
            continue
        asked = request(preset("llama-3-8b"), name, num_gpus=64, global_batch=64, seq_len=2048)
        asked = replace(
            asked, fixed=parse_fixes(["schedule=1f1b", "virtual_stages=1", "cp=1", "tp=4", "micro_batch=1"])
        )
        found = search(asked, kept=5)
        assert found.feasible, name
        assert np.isfinite(found.best.mfu).all() and (found.best.mfu < 1).all(), name
        assert {str(found.best.layouts.row(i)["recipe"]) for i in range(len(found.best))} - {"fp32"}, name
    h800 = request(preset("llama-3-8b"), "h800")
    assert any("assumed" in note and "h100" in note for note in h800.notes)
