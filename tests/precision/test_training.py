"""The trainer's steps under each quantised recipe."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel.parity import whole
from parallel.precision_parity import FAMILIES, job_of
from ranks import run_ranks
from torch import Tensor
from train.loops import small_job, train
from train.test_reshape import restored_state
from train.test_resume import assert_same_state, losses
from train.toy import SEQ, VOCAB, run_steps, toy_batch, toy_parts

from bessemer.core.recipes import RECIPES
from bessemer.models.canonical import pieces
from bessemer.models.parts import Projection
from bessemer.models.quantise import choice, histories
from bessemer.precision import Scheme, quantise
from bessemer.precision.outliers import relative_error
from bessemer.precision.product import hadamard
from bessemer.train.assembly import Assembly, quantising

NAMES = [n for n, r in RECIPES.items() if r.quantised and r.runnable]
WIDE = {"model": FAMILIES["llama"] | {"vocab_size": 257}}


def test_these_recipes_train() -> None:
    assert NAMES == ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block128", "mxfp8", "nvfp4"]


def _wide(
    x: Tensor, scheme: Scheme, sizes: list[int], dim: int, *, turned: bool = False, rotated: bool = False
) -> Tensor:
    """float64 of what the codes of each logical tensor say; `turned`: scales run along the first dimension, `rotated`
    by a Hadamard matrix first."""
    parts = []
    for part in x.detach().split(sizes, dim):
        rows = part.t().contiguous() if turned else part.contiguous()
        rows = hadamard(rows) if rotated else rows
        read = quantise(rows, scheme).dequantise(torch.float64)
        parts.append(read.t() if turned else read)
    return torch.cat(parts, dim)


@pytest.mark.parametrize("recipe", NAMES)
def test_a_steps_products_are_those_of_the_dequantised_operands(recipe: str) -> None:
    """Every quantised projection of a model in its first step: result, gradients of input and of weight, against
    float64 products of operands quantised here, each logical tensor by itself. (Draws of stochastic rounding are left
    out: `test_linear` looks at them.)"""
    parts = toy_parts(job_of(recipe))
    seen: dict[str, dict[str, Tensor]] = {}

    def watch(name: str, module: Projection) -> None:
        def hook(_module: Any, args: tuple[Tensor], y: Tensor) -> None:
            mine = seen[name] = {"x": args[0].flatten(0, 1), "y": y.flatten(0, 1)}
            args[0].register_hook(lambda g: mine.__setitem__("dx", g.flatten(0, 1)))
            y.register_hook(lambda g: mine.__setitem__("g", g.flatten(0, 1)))

        module.register_forward_hook(hook)

    found = {n: m for n, m in parts.module.named_modules() if isinstance(m, Projection) and m.quantised is not None}
    assert len(found) == 8
    for name, module in found.items():
        watch(name, module)
        module.quantised.numerics = replace(module.quantised.numerics, stochastic=False)
    parts.step.passes.run(iter([toy_batch([0, 1])]), 1)
    for name, module in found.items():
        n, t, w = module.quantised.numerics, seen[name], module.weight
        sizes = [p.rows for p in pieces(parts.module) if p.param == f"{name}.weight"]
        tokens, inputs = list(t["x"].shape)
        y = _wide(t["x"], n.x, [inputs], 1) @ _wide(w, n.weight, sizes, 0).t()
        sideways = not n.weight.grain.symmetric
        dx = _wide(t["g"], n.grad, sizes, 1) @ _wide(w, n.weight, sizes, 0, turned=sideways)
        across = not n.grad.grain.symmetric
        how = {"turned": across, "rotated": n.hadamard}
        dw = _wide(t["g"], n.grad, sizes, 1, **how).t() @ _wide(t["x"], n.x, [inputs], 1, **how)
        for kind, got, want in (("y", t["y"].detach(), y), ("dx", t["dx"], dx), ("dw", w.grad, dw)):
            rounding = relative_error(want.bfloat16(), want)  # docs/precision.md: 1.66e-3 of normal data
            assert relative_error(got, want) < 1.02 * rounding < 2.3e-3, f"{kind} of {name}"
        assert tokens == 2 * SEQ


def test_the_rest_stays_high() -> None:
    """Head, norms and embedding have no codes; nor have the blocks that the job leaves alone."""
    parts = toy_parts(
        job_of("fp8-current", model={"num_hidden_layers": 4}, precision={"high_first": 1, "high_last": 2})
    )
    found = {n for n, m in parts.module.named_modules() if isinstance(m, Projection) and m.quantised is not None}
    assert found == {f"blocks.1.{name}" for name in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
    said = choice(parts.spec, quantising(parts.job))
    assert [(s["layer"], s["blocks"]) for s in said if s["runs"] == "fp8-current"] == [
        (name, 1) for name in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")
    ]
    assert {s["why"] for s in said if s["layer"] == "mlp.down"} == {
        "", "precision.high_first = 1", "precision.high_last = 2"
    }  # fmt: skip
    assert [s["why"] for s in said if s["layer"] == "head"] == ["it is outside of the blocks"]


def test_small_matrices_stay_high_under_recipes_with_large_blocks() -> None:
    """32 wide: zeros would be three quarters of each block's work."""
    parts = toy_parts(job_of("fp8-block128", model={"hidden_size": 32, "intermediate_size": 64}))
    assert not [m for m in parts.module.modules() if isinstance(m, Projection) and m.quantised is not None]


def _state(parts: Assembly) -> dict[str, Tensor]:
    moved = {f"history {name}": history for name, history in histories(parts.module)}
    return {n: t.detach().clone() for n, t in (dict(parts.module.named_parameters()) | moved).items()}


def _assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_recomputing_changes_no_bit(recipe: str, stochastic: bool) -> None:
    states = []
    for train_fields in ({}, {"recompute": "full"}):
        parts = toy_parts(job_of(recipe, train=train_fields, precision={"stochastic": stochastic}))
        list(run_steps(parts, 0, 2))
        states.append(_state(parts))
    _assert_equal(*states)


def test_an_evaluation_and_a_share_done_again_change_nothing() -> None:
    """Amaxes are noted by what a step commits, not by what merely ran."""
    plain, busy = (toy_parts(job_of("fp8-delayed")) for _ in range(2))
    for parts in (plain, busy):
        list(run_steps(parts, 0, 1))
    busy.step.passes.run(iter([toy_batch([70, 71])]), 1)  # lost, for instance with a failed rank
    busy.optimizer.clear()
    busy.step.passes.forward(toy_batch([80, 81]))
    for parts in (plain, busy):
        list(run_steps(parts, 1, 3))
    _assert_equal(_state(plain), _state(busy))


def test_stochastic_rounding_draws_by_seed_step_and_micro_batch() -> None:
    """The same draws for the same key only; without being asked for, none."""

    def gradient(step: int, samples: list[int], *, seed: int = 1, stochastic: bool = True) -> Tensor:
        parts = toy_parts(job_of("fp8-current", train={"seed": seed}, precision={"stochastic": stochastic}))
        parts.module.load_state_dict(weights)
        parts.step.passes.run(iter([toy_batch(samples)]), 1, step)
        return parts.module.block(1).mlp.down.weight.grad

    weights = toy_parts(job_of("fp8-current")).module.state_dict()
    first = gradient(0, [0, 1])
    assert torch.equal(first, gradient(0, [0, 1]))
    nearest = gradient(0, [0, 1], stochastic=False)
    for other in (gradient(1, [0, 1]), gradient(0, [0, 1], seed=2), nearest):
        assert 0.01 < relative_error(first, other) < 0.2
    mean = torch.stack([gradient(step, [0, 1]) for step in range(16)]).mean(0)
    assert relative_error(mean, nearest) < relative_error(first, nearest)


@pytest.mark.parametrize("asked", [{}, {"stochastic": True}])
def test_a_recipe_that_is_stochastic_by_itself_draws_anew_in_each_step(asked: dict[str, bool]) -> None:
    def gradient(step: int) -> Tensor:
        parts = toy_parts(job_of("nvfp4", precision=asked))
        parts.step.passes.run(iter([toy_batch([0, 1])]), 1, step)
        return parts.module.block(1).mlp.down.weight.grad

    first = gradient(0)
    assert torch.equal(first, gradient(0)) and relative_error(first, gradient(5)) > 0.05


def test_the_history_is_that_of_the_job() -> None:
    """Length, choice and margin: the latest amax counts, with a bit of room."""
    precision = {"history": 4, "amax": "most_recent", "margin": 1}
    parts = toy_parts(job_of("fp8-delayed", precision=precision))
    list(run_steps(parts, 0, 2))
    held = parts.module.block(0).mlp.down.quantised
    assert held.history.shape == (1, 3, 4) and held.history[:, :, :2].all() and not held.history[:, :, 2:].any()
    assert torch.equal(held.past, 2 * held.history[:, :, 0]) and held.known


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
def test_a_run_that_was_cut_goes_on_bitwise(tmp_path: Path, recipe: str) -> None:
    fields: dict[str, Any] = WIDE | {"precision": {"recipe": recipe}, "train": {"steps": 6}, "keep": {"every": 3}}
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    straight = train(small_job(tmp_path / "straight", **fields))
    cut = small_job(tmp_path / "cut", **fields)
    begun = train(cut, stop_at=3)
    finished = train(cut)
    assert losses(begun) | losses(finished) == losses(straight)
    assert_same_state(finished, straight)
    saved = sum(name.startswith("precision.history/") for name, *_ in straight[0]["state"])
    assert saved == (14 if recipe == "fp8-delayed" else 0)


@pytest.mark.slow
def test_histories_go_from_layout_to_layout_bitwise(tmp_path: Path) -> None:
    """Saved by two tensor-parallel ranks, read by one process, two pipeline ranks, and four of both."""
    fields: dict[str, Any] = WIDE | {"precision": {"recipe": "fp8-delayed"}, "train": {"steps": 6}}
    first = small_job(tmp_path, layout={"tp": 2}, **fields)
    saved = whole(
        [[(n, shape, at, t.numpy()) for (n, shape, at), t in r["state"].items()] for r in train(first, stop_at=3)]
    )
    names = [n for n in saved if n.startswith("precision.history/")]
    assert len(names) == 14 and all(saved[n][:, :3].all() and not saved[n][:, 3:].any() for n in names)
    for layout in ({}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "dp_shard": "full"}):
        job = small_job(tmp_path, layout=layout, **fields)
        ranks = run_ranks(job.layout.world_size, restored_state, job)
        read = whole(ranks)
        assert read.keys() == saved.keys()
        for name, tensor in saved.items():
            assert (read[name] == tensor).all(), name


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
    job = job_of(recipe, train={"steps": steps, "global_batch": 8, "micro_batch": 8, "lr": 0.003})
    parts = toy_parts(job)

    def run() -> Iterator[float]:
        for step in range(steps):
            yield parts.step.run(step, iter([_chain(step, after)]), 1).loss

    return float(np.mean(list(run())[-10:]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block128"])
def test_training_ends_where_bfloat16_does(recipe: str) -> None:
    """Within 0.5 % of its loss on a task that is learned, from ln 97 = 4.6 towards ln 2 = 0.7. Measured: bf16 0.8212
    (0.8204 and 0.8170 with other seeds), fp8-delayed 0.8232, fp8-current 0.8226, fp8-row 0.8222, fp8-block128 0.8225,
    mxfp8 0.8215."""
    plain, found = _learned("bf16"), _learned(recipe)
    assert plain < 0.9
    assert abs(found / plain - 1) < 0.005, (plain, found)
