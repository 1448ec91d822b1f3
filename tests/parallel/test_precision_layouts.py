"""Quantised recipes under layouts: what all ranks must agree on, and what equals one process."""

from __future__ import annotations

import numpy as np
import pytest
from parallel.parity import whole
from parallel.precision_parity import Case, both, excess, job_of, one_history

RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block128", "mxfp8", "nvfp4")
SP = {"sequence_parallel": True}
FLIPPED = 2e-3
"""One code that differs, see `precision_parity`; without one errors are below 1e-6."""


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *((recipe, {"dp": 2}) for recipe in RECIPES),
        *((recipe, {"pp": 2}) for recipe in ("fp8-delayed", "mxfp8")),
        *((recipe, {"pp": 2, "schedule": "zb-h1"}) for recipe in ("fp8-delayed", "fp8-block128", "nvfp4")),
        ("fp8-row", {"dp": 2, "precision": {"stochastic": True}}),
        ("fp8-block128", {"pp": 2, "schedule": "zb-h1", "precision": {"stochastic": True}}),
    ],
    ids=str,
)
def test_data_and_pipeline_ranks_equal_one_process_bitwise(recipe: str, layout: dict[str, object]) -> None:
    """Parameters, moments and histories after three steps: micro-batches are the same tensors wherever they run, also
    with weight gradients put off. (Two micro-batches a step, so that their sum has one order.)"""
    one, ranks = both(Case(job_of(recipe, **layout)))
    assert [r["losses"] for r in ranks] == [one["losses"]] * 2
    wanted, found = whole([one["state"]]), whole([r["state"] for r in ranks])
    assert wanted.keys() == found.keys()
    assert sum(name.startswith("precision.history/") for name in wanted) == (14 if recipe == "fp8-delayed" else 0)
    for name, tensor in wanted.items():
        assert (found[name] == tensor).all(), name


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"tp": 2, **SP}, {"cp": 2}, {"tp": 2, "cp": 2, **SP}, {"tp": 2, "pp": 2}], ids=str
)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_tensor_and_context_ranks_scale_whole_tensors(recipe: str, layout: dict[str, object]) -> None:
    """Halves of very different size, one on each tensor-parallel rank: the scale must be that of the whole. The order
    of sums over features or tokens differs, and nothing else, so histories agree but for that."""
    one, ranks = both(Case(job_of(recipe, **layout), steps=1, uneven=True))
    found = excess(one, ranks)
    assert found["first loss"] < 1e-6 and found["gradient"] < FLIPPED, found
    for name, history in one_history(ranks).items():
        np.testing.assert_allclose(history, one["histories"][name], rtol=1e-5)


@pytest.mark.parametrize("layout", [{"tp": 2, **SP}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block128", "mxfp8"])
def test_rows_and_blocks_differ_by_what_their_grouping_flushes(recipe: str, layout: dict[str, object]) -> None:
    """A rank's part of a row, and its tokens in the blocks of wgrad, are scaled by themselves: other groups of numbers
    than in one process. With scales that are powers of two only what falls out of the normal numbers differs, here
    nothing."""
    found = excess(*both(Case(job_of(recipe, **layout), steps=1)))
    assert found["first loss"] < 1e-6 and found["gradient"] < FLIPPED, found


@pytest.mark.parametrize("layout", [{"tp": 2, **SP}, {"cp": 2}], ids=str)
def test_draws_of_a_rank_are_its_own(layout: dict[str, object]) -> None:
    """NVFP4 rounds gradients stochastically, each rank its part by draws of its own: forward equals one process, and
    gradients differ by about what one draw differs from another (0.2 to 0.4 of their norm here)."""
    found = excess(*both(Case(job_of("nvfp4", **layout), steps=1)))
    assert found["first loss"] < 1e-6 and 0.05 < found["gradient"] < 0.6, found


def test_shared_key_value_heads_quantise_partial_gradients() -> None:
    """Four ranks, two key/value heads: each rank has the gradient of its own queries' part of a head, which is
    quantised before it is summed, so that gradients differ by e5m2's own rounding (3 bits: 2^-4 to 2^-3). With as many
    heads as ranks nothing is partial."""
    one, ranks = both(Case(job_of("fp8-delayed", tp=4), steps=1))
    found = excess(one, ranks)
    assert found["first loss"] < 1e-6 and FLIPPED < found["gradient"] < 0.15, found
    one_history(ranks)
    apart = excess(*both(Case(job_of("fp8-delayed", tp=4, model={"num_key_value_heads": 4}), steps=1)))
    assert apart["gradient"] < FLIPPED, apart


def _no_agreement() -> None:
    from bessemer.parallel.sequence import SequenceRanks

    SequenceRanks.largest = lambda self, values: values  # type: ignore[method-assign]


def _no_maximum() -> None:
    from bessemer.parallel.mesh import Mesh

    Mesh.max_over_world = lambda self, values: values  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_without_the_agreement_on_scales_the_test_above_fails(recipe: str, layout: dict[str, object]) -> None:
    """(Of delayed scaling: of its first step, which has no history.)"""
    found = excess(*both(Case(job_of(recipe, **layout), steps=1, uneven=True, sabotage=_no_agreement)))
    assert found["gradient"] > 10 * FLIPPED, found


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}], ids=str)
def test_without_the_maximum_over_all_ranks_their_histories_differ(layout: dict[str, object]) -> None:
    _, ranks = both(Case(job_of("fp8-delayed", **layout), sabotage=_no_maximum))
    with pytest.raises(AssertionError, match="ranks differ in the history"):
        one_history(ranks)


@pytest.mark.parametrize(
    "layout", [{"tp": 2, **SP}, {"cp": 2}, {"dp": 2, "ep": 2}, {"pp": 2, "model": {"num_hidden_layers": 3}}], ids=str
)
def test_latents_shared_experts_and_predictions_have_their_own_scales(layout: dict[str, object]) -> None:
    """DeepSeek's latent attention, shared expert and block of multi-token prediction."""
    one, ranks = both(Case(job_of("fp8-delayed", "deepseek_v3", train={"seed": 3}, **layout), steps=1))
    found = excess(one, ranks)
    assert found["first loss"] < 1e-6 and found["gradient"] < FLIPPED, found
    histories = one_history(ranks)
    assert histories.keys() == one["histories"].keys()
    assert {"mtp.0.attn.q_a", "layers.1.mlp.shared.up"} <= histories.keys()
    for name, history in histories.items():
        np.testing.assert_allclose(history, one["histories"][name], rtol=1e-5)
