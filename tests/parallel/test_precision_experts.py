"""Quantised experts under layouts: whose scales are whose, what equals one process, and what a checkpoint carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel.parity import whole
from parallel.precision_parity import FAMILIES, Case, both, excess, job_of, one_history
from ranks import run_ranks
from train.loops import small_job, train
from train.test_reshape import restored_state
from train.test_resume import assert_same_state, losses

SP = {"sequence_parallel": True}
SEED = {"seed": 1}  # no token is near a tie between experts
MARGIN = 1e-4
"""From a tie, in scores: other scales move them by less."""
FLIPPED = 2e-3
"""One code that differs, see `precision_parity`; without one errors are below 1e-6."""
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block128")
Ranks = list[dict[str, Any]]


def _case(recipe: str, steps: int = 1, *, uneven: bool = False, sabotage: Any = None, **layout: Any) -> Case:
    return Case(job_of(recipe, "mixtral", train=SEED, **layout), steps, uneven, sabotage)


def _compared(case: Case) -> tuple[dict[str, Any], Ranks, dict[str, float]]:
    """One process, ranks, and how far apart they are."""
    one, ranks = both(case)
    assert one["margin"] > MARGIN, f"a tie ({one['margin']}): choose another seed"
    return one, ranks, excess(one, ranks)


def _same_scales(ranks: Ranks) -> int:
    """Whatever of an expert several ranks have is scaled by the same bits in every call. How many are shared."""
    shared = 0
    keys = {key for rank in ranks for key in rank["scales"]}
    for key in sorted(keys):
        calls = [rank["scales"][key] for rank in ranks if key in rank["scales"]]
        shared += len(calls) > 1
        for other in calls[1:]:
            assert [len(c) for c in other] == [len(c) for c in calls[0]]
            assert all(np.array_equal(a, b) for a, b in zip(other, calls[0], strict=True)), f"ranks differ in {key}"
    return shared


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block128", "nvfp4"])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
def test_data_and_pipeline_ranks_equal_one_process_bitwise(recipe: str, layout: dict[str, Any]) -> None:
    """Also with weight gradients put off, and with gradients rounded stochastically (nvfp4)."""
    one, ranks = both(_case(recipe, 3, **layout))
    assert [r["losses"] for r in ranks] == [one["losses"]] * 2
    wanted, found = whole([one["state"]]), whole([r["state"] for r in ranks])
    assert wanted.keys() == found.keys()
    histories = {name: t.shape for name, t in wanted.items() if name.startswith("precision.history/")}
    assert len(histories) == (14 if recipe == "fp8-delayed" else 0)
    if histories:
        assert histories["precision.history/layers.1.mlp.experts.down"] == (4, 3, 16)
    for name, tensor in wanted.items():
        assert (found[name] == tensor).all(), name


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        ({"tp": 2, **SP}, 24),  # both ranks run all experts, each on its own tokens
        ({"tp": 2, **SP, "ep": 2}, 0),  # each expert gets all tokens of the sequence
        ({"tp": 2, "etp": 2}, 24),
        ({"tp": 4, **SP, "ep": 2, "etp": 2}, 24),
        ({"cp": 2, "tp": 2, "ep": 2}, 24),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_ranks_of_a_sequence_scale_whole_tensors_of_an_expert(recipe: str, layout: dict[str, Any], shared: int) -> None:
    """Halves of very different size of every expert's width: the scale must be that of the whole."""
    more: dict[str, Any] = {"model": {"num_key_value_heads": 4}} if layout.get("tp") == 4 else {}
    one, ranks, found = _compared(_case(recipe, uneven=True, **layout, **more))
    assert found["first loss"] < 1e-6 and found["gradient"] < FLIPPED, found
    assert _same_scales(ranks) == shared
    for name, history in one_history(ranks).items():
        np.testing.assert_allclose(history, one["histories"][name], rtol=1e-5)


@pytest.mark.parametrize("layout", [{"tp": 2, **SP, "ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2}], ids=str)
def test_blocks_within_a_sequence(layout: dict[str, Any]) -> None:
    """A rank's tokens in the blocks of wgrad, and its part of a row, have scales of their own."""
    *_, found = _compared(_case("fp8-block128", **layout))
    assert found["first loss"] < 1e-6 and found["gradient"] < FLIPPED, found


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        ({"dp": 2, "ep": 2}, 0),
        ({"dp": 2, "pp": 2, "ep": 2}, 0),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, 24),
        ({"dp": 2, "tp": 2, **SP, "ep": 4}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_that_see_several_micro_batches_at_once(recipe: str, layout: dict[str, Any], shared: int) -> None:
    """Experts shared out over data-parallel ranks scale the rows of all their micro-batches together, where one process
    scales them one after the other. With scales that are powers of two only what leaves the normal numbers differs.
    Histories take the maximum over micro-batches either way."""
    one, ranks, found = _compared(_case(recipe, **layout))
    assert found["first loss"] < 1e-5 and found["gradient"] < FLIPPED, found
    assert _same_scales(ranks) == (0 if recipe == "fp8-block128" else shared)
    for name, history in one_history(ranks).items():
        np.testing.assert_allclose(history, one["histories"][name], rtol=1e-3)


def _no_agreement() -> None:
    from bessemer.parallel.expert import ExpertParallel

    ExpertParallel.largest = lambda self, values, *, divided=False: values  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", [{"tp": 2, "etp": 2}, {"tp": 2, **SP}], ids=str)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_without_the_agreement_on_scales_the_tests_above_fail(recipe: str, layout: dict[str, Any]) -> None:
    one, ranks = both(_case(recipe, uneven=True, sabotage=_no_agreement, **layout))
    with pytest.raises(AssertionError, match="ranks differ"):
        _same_scales(ranks)
    assert "tp" in layout and ("etp" not in layout or excess(one, ranks)["gradient"] > 10 * FLIPPED)


def _largest(rank: int, world: int, degrees: tuple[int, int]) -> list[list[float]]:
    """Each rank of a stage says a power of two; sequences and experts lie across each other."""
    import torch.distributed as dist

    from bessemer.parallel.expert import ExpertParallel

    sequence, experts = degrees
    groups = {
        size: [dist.new_group(list(range(at, at + size))) for at in range(0, world, size)] for size in set(degrees)
    }
    split = ExpertParallel(
        groups[experts][rank // experts],
        degree=experts,
        rank=rank % experts,
        width_degree=1,
        width_rank=0,
        sequence_group=groups[sequence][rank // sequence],
        token_ranks=sequence,
    )
    return split.largest(torch.full((1, 2), 2.0**rank)).tolist() if split.shares else []


@pytest.mark.parametrize(("sequence", "experts"), [(2, 3), (3, 2)])
def test_where_sequences_and_experts_lie_across_each_other(sequence: int, experts: int) -> None:
    found = run_ranks(6, _largest, (sequence, experts))
    for expert in range(experts):
        most = max(rank for rank in range(6) if rank % experts == expert)
        assert [found[r] for r in range(6) if r % experts == expert] == [[[2.0**most] * 2]] * (6 // experts)


FIELDS: dict[str, Any] = {
    "model": FAMILIES["mixtral"] | {"vocab_size": 257},
    "precision": {"recipe": "fp8-delayed"},
    "train": {"steps": 6},
    "keep": {"every": 3},
}


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_bitwise(tmp_path: Path) -> None:
    """Experts on two ranks, which see two micro-batches at once."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    straight = train(small_job(tmp_path / "straight", layout={"dp": 2, "ep": 2}, **FIELDS))
    cut = small_job(tmp_path / "cut", layout={"dp": 2, "ep": 2}, **FIELDS)
    begun = train(cut, stop_at=3)
    finished = train(cut)
    assert losses(begun) | losses(finished) == losses(straight)
    assert_same_state(finished, straight)


@pytest.mark.slow
def test_histories_of_experts_go_from_layout_to_layout_bitwise(tmp_path: Path) -> None:
    """Saved by one process, read by ranks that share the experts out, and the other way round."""
    for name, first, others in (
        ("one", {}, ({"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "pp": 2})),
        ("two", {"dp": 2, "ep": 2}, ({}, {"tp": 2, "etp": 2}, {"dp": 4, "ep": 4})),
    ):
        (tmp_path / name).mkdir()
        made = train(small_job(tmp_path / name, layout=first, **FIELDS), stop_at=3)
        saved = whole([[(n, shape, at, t.numpy()) for (n, shape, at), t in r["state"].items()] for r in made])
        names = [n for n in saved if n.startswith("precision.history/") and ".experts." in n]
        assert len(names) == 6 and all(saved[n].shape == (4, 3, 16) and saved[n][:, 1, :3].all() for n in names)
        for layout in others:
            job = small_job(tmp_path / name, layout=layout, **FIELDS)
            read = whole(run_ranks(job.layout.world_size, restored_state, job))
            assert read.keys() == saved.keys()
            for key, tensor in saved.items():
                assert (read[key] == tensor).all(), key
