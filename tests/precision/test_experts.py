"""Models whose routed experts run the quantised recipe: what a step does, keeps and remembers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from parallel.precision_parity import job_of
from torch import Tensor
from train.toy import SEQ, VOCAB, run_steps, toy_batch, toy_parts

from bessemer import ops
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.presets import preset
from bessemer.models.moe import Experts
from bessemer.models.quantise import (
    Quantising,
    advance_amax,
    amax_names,
    choice,
    held_amax,
    histories,
    key_draws,
    start_amax,
)
from bessemer.models.quantised import QuantisedExperts
from bessemer.models.watched import held_troubles, refresh_fallen
from bessemer.parallel.recompute_budget import applied_recompute
from bessemer.precision import numerics
from bessemer.precision.outliers import relative_error
from bessemer.runtime.allocations import AllocationSample
from bessemer.train.assembly import Assembly, quantising

RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block128", "mxfp8", "nvfp4")
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "fine": {"recompute": "fine"},
    "dispatch": {"recompute": "fine", "recompute_modules": ["dispatch"]},
    "up": {"recompute": "fine", "recompute_modules": ["up"]},
    "mlp": {"recompute": "mlp"},
    "full": {"recompute": "full"},
}
native = pytest.mark.skipif(bool(ops.why_absent()), reason="without native kernels a CPU saves other tensors")


def _state(parts: Assembly) -> dict[str, Tensor]:
    moved = {f"history {name}": history for name, history in histories(parts.module)}
    return {n: t.detach().clone() for n, t in (dict(parts.module.named_parameters()) | moved).items()}


def _assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_experts_of_every_block_run_the_recipe_but_where_asked() -> None:
    """Those of multi-token prediction too. What the start-up table says is what the modules do."""
    parts = toy_parts(job_of("fp8-current", "deepseek_v3", precision={"high_first": 2}))
    ran = {
        name: (part.quantised_up is not None, part.quantised_down is not None)
        for name, part in parts.module.named_modules()
        if isinstance(part, Experts)
    }
    assert ran == {"blocks.1.mlp.experts": (False, False), "mtp.0.block.mlp.experts": (False, False)}
    parts = toy_parts(job_of("fp8-current", "deepseek_v3"))
    found = [m.names for m in parts.module.modules() if isinstance(m, QuantisedExperts)]
    assert ("mtp.0.mlp.experts.gate", "mtp.0.mlp.experts.up") in found and len(found) == 4
    how = quantising(parts.job)
    assert how is not None
    said = {row["layer"]: row["runs"] for row in choice(parts.spec, how)}
    assert [said[f"mlp.experts.{kind}"] for kind in ("gate", "up", "down")] == ["fp8-current"] * 3


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block128", "mxfp8"])
def test_published_experts_are_wide_enough(recipe: str) -> None:
    """However few tokens of one micro-batch an expert gets, since the choice must not depend on the layout."""
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "kimi-k2"):
        rows = choice(preset(name), Quantising(numerics(recipe)))
        assert {row["runs"] for row in rows if "experts" in str(row["layer"])} == {recipe}


def test_the_table_of_amaxes_has_a_row_an_expert() -> None:
    """DeepSeek-V3's: 59 layers (one of them of multi-token prediction) x 256 experts x 3 weights, and dense ones."""
    from bessemer.models.quantise import _places

    spec, how = preset("deepseek-v3"), Quantising(numerics("fp8-delayed"))
    names = amax_names(spec, how)
    places = _places(spec, names)
    rows = places["layers.7.mlp.experts.gate"]
    assert rows.stop - rows.start == 256 and places["layers.7.attn.o"].stop - places["layers.7.attn.o"].start == 1
    assert max(p.stop for p in places.values()) == sum(p.stop - p.start for p in places.values()) < 46_500


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputing_changes_no_bit(recipe: str) -> None:
    """Also where gradients are rounded stochastically."""
    states = []
    for fields in ({}, POLICIES["full"], POLICIES["up"]):
        parts = toy_parts(job_of(recipe, "mixtral", train=fields, precision={"stochastic": True}))
        list(run_steps(parts, 0, 2))
        states.append(_state(parts))
    for other in states[1:]:
        _assert_equal(states[0], other)


def test_an_evaluation_and_a_share_done_again_change_nothing() -> None:
    plain, busy = (toy_parts(job_of("fp8-delayed", "mixtral")) for _ in range(2))
    for parts in (plain, busy):
        list(run_steps(parts, 0, 1))
    busy.step.passes.run(iter([toy_batch([70, 71])]), 1)
    busy.optimizer.clear()
    busy.step.passes.forward(toy_batch([80, 81]))
    for parts in (plain, busy):
        list(run_steps(parts, 1, 3))
    _assert_equal(_state(plain), _state(busy))


COUNTS = torch.tensor([24, 0, 70, 2])


def _called(parts: Assembly, counts: Tensor) -> Tensor:
    """The result of a layer's experts, of rows made here; gradients are there afterwards."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(int(counts.sum()), parts.spec.hidden_size, generator=draw).bfloat16().requires_grad_()
    made: Tensor = parts.module.block(1).mlp.experts(x, counts)
    torch.autograd.backward(made.float().square().sum())
    return made.detach()


def test_an_expert_without_tokens_keeps_its_history() -> None:
    """Its weight's goes on; its rows' and gradients' stay as they were when it last had some."""
    parts = toy_parts(job_of("fp8-delayed", "mixtral"))
    list(run_steps(parts, 0, 2))
    names, before = parts.step.passes.amax_names, {n: h.clone() for n, h in histories(parts.module)}
    start_amax(parts.module)
    _called(parts, COUNTS)
    advance_amax(parts.module, names, held_amax(parts.module, names, torch.device("cpu")))
    after = dict(histories(parts.module))
    for kind in ("gate", "up", "down"):
        old, new = (found[f"layers.1.mlp.experts.{kind}"] for found in (before, after))
        assert torch.equal(new[1, [0, 2]], old[1, [0, 2]]) and (old[1, :, :2] > 0).all()
        moved = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0), (3, 2)]
        assert all(torch.equal(new[e, r, 1:], old[e, r, :-1]) and new[e, r, 0] > 0 for e, r in moved)
    experts = parts.module.block(1).mlp.experts
    assert all((w.grad[1] == 0).all() and w.grad.isfinite().all() for w in experts.parameters() if w.grad is not None)


def test_smooth_swiglu_has_channels_of_each_expert() -> None:
    """Two channels of each expert, others of each, 256 times as large at gate and up, the function unchanged."""

    def result(recipe: str, smooth: bool) -> Tensor:
        parts = toy_parts(job_of(recipe, "mixtral", precision={"smooth": True} if smooth else {}))
        experts = parts.module.block(1).mlp.experts
        with torch.no_grad():
            for expert in range(4):
                loud = slice(2 * expert, 2 * expert + 2)
                experts.gate.weight[expert, loud] *= 256.0
                experts.up.weight[expert, loud] = experts.gate.weight[expert, loud]
                experts.down.weight[expert, :, loud] /= 65536.0
        return _called(parts, COUNTS)

    wanted = result("bf16", False)
    smooth, plain = (relative_error(result("fp8-current", on), wanted) for on in (True, False))
    assert smooth < 0.08 and plain > 0.2, (smooth, plain)


def test_a_watch_changes_no_bit_and_counts_experts() -> None:
    plain, watched = (toy_parts(job_of("fp8-delayed", "mixtral", precision=more)) for more in ({}, {"watch_every": 1}))
    list(run_steps(plain, 0, 3))
    *_, last = run_steps(watched, 0, 3)
    _assert_equal(_state(plain), _state(watched))
    assert last.sample is not None
    figures = last.sample.figures
    place = figures.names.index("layers.1.mlp.experts.down")
    for role, error in (("x", 0.0265), ("weight", 0.0265), ("grad", 0.053)):
        found = figures.roles[role]
        assert 0.8 * error < found["error"][place] < 1.5 * error and found["amax"][place] > 0
    assert 0.03 < figures.results[place] < 0.06 and figures.roles["x"]["jump"][place] > 0


def test_experts_that_fell_back_run_as_without_a_recipe() -> None:
    plain, fallen = (
        toy_parts(job_of(recipe, "mixtral", precision=more))
        for recipe, more in (("bf16", {}), ("fp8-delayed", {"watch_every": 1, "fall_back": True}))
    )
    wanted = _called(plain, COUNTS)
    assert not torch.equal(_called(fallen, COUNTS), wanted)
    for name, trouble in held_troubles(fallen.module):
        trouble[1] = 1.0 if ".experts." in name else 0.0
    refresh_fallen(fallen.module)
    assert torch.equal(_called(fallen, COUNTS), wanted)


def _kept_bytes(job: Job) -> int:
    """Alive between forward and backward."""
    parts = toy_parts(job)
    key_draws(parts.module, 0, 0, torch.zeros(1, dtype=torch.int64))
    shape, draw = (job.train.micro_batch, SEQ), torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCAB, shape, generator=draw)
    sample = AllocationSample()
    sample.ignore(*parts.module.parameters(), *parts.module.buffers(), rows)
    with sample:
        loss, _ = parts.module(rows, rows)
    kept = sample.alive_bytes()
    assert loss.requires_grad
    return kept


@native
@pytest.mark.parametrize("saved", ["compute", "fp8"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block128", "mxfp8"])
def test_bytes_are_those_of_the_closed_forms(recipe: str, saved: str) -> None:
    """Against `full`, so that what the loss keeps falls away."""
    jobs = {n: job_of(recipe, "mixtral", train=f, precision={"saved": saved}) for n, f in POLICIES.items()}
    found = {name: _kept_bytes(job) for name, job in jobs.items()}
    modelled = {name: applied_recompute(job, resolve_model(job.model)) for name, job in jobs.items()}
    full = modelled["full"]
    assert full is not None
    for name, applied in modelled.items():
        assert applied is not None
        over = applied.kept_bytes - full.kept_bytes
        assert found[name] - found["full"] == pytest.approx(over, rel=2e-3, abs=64), name


def _chain(step: int, after: np.ndarray) -> dict[str, Tensor]:
    """Sequences in which each token has two likely successors."""
    draw = np.random.default_rng(step)
    tokens = np.empty((8, SEQ + 1), np.int64)
    tokens[:, 0] = draw.integers(0, VOCAB, 8)
    for at in range(SEQ):
        tokens[:, at + 1] = after[tokens[:, at], draw.integers(0, 2, 8)]
    return {"tokens_BS": torch.from_numpy(tokens[:, :-1]), "labels_BS": torch.from_numpy(tokens[:, 1:])}


@functools.lru_cache
def _learned(recipe: str, steps: int = 60) -> float:
    """Mean loss of the last ten steps."""
    after = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, 2))
    train = {"steps": steps, "global_batch": 8, "micro_batch": 8, "lr": 0.003, "seed": 1}
    parts = toy_parts(job_of(recipe, "mixtral", train=train, model={"initializer_range": 0.02}))
    return float(np.mean([parts.step.run(s, iter([_chain(s, after)]), 1).loss for s in range(steps)][-10:]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block128"])
def test_training_ends_where_bfloat16_does(recipe: str) -> None:
    """Within 1 % of its loss on a task that is learned, from ln 97 = 4.6 towards ln 2 = 0.7. Measured: bf16 0.8085,
    fp8-delayed 0.8114, fp8-current 0.8060, fp8-row 0.8137, fp8-block128 0.8101, mxfp8 0.8125, nvfp4 0.8145."""
    plain, found = _learned("bf16"), _learned(recipe)
    assert plain < 1.0
    assert abs(found / plain - 1) < 0.01, (plain, found)
