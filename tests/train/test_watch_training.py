"""The precision watch in training: it changes nothing, adds up over layouts, and layers that misbehave fall back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.parity import whole
from parallel.precision_parity import FAMILIES, job_of
from ranks import run_ranks
from torch import Tensor
from train import toy
from train.loops import rank_main, small_job, vault
from train.test_reshape import restored_state
from train.test_resume import assert_same_state, losses
from train.toy import run_steps, toy_parts

from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.data import prepare
from bessemer.models.parts import Projection
from bessemer.models.quantise import histories
from bessemer.models.watched import Watching
from bessemer.precision.watch import Limits
from bessemer.train.assembly import Assembly
from bessemer.train.state import FALL_BACK_PREFIX
from bessemer.train.step import Sample

RECIPES = ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block128", "mxfp8"]
ROLES = ("x", "weight", "grad")


def state(parts: Assembly) -> dict[str, Tensor]:
    moved = {f"history {name}": history for name, history in histories(parts.module)}
    return {n: t.detach().clone() for n, t in (dict(parts.module.named_parameters()) | moved).items()}


def sampled(job: Job, steps: int) -> tuple[dict[str, Tensor], list[Sample | None], list[float]]:
    parts = toy_parts(job)
    results = list(run_steps(parts, 0, steps))
    return state(parts), [r.sample for r in results], [r.loss for r in results]


@pytest.mark.parametrize("fields", [{}, {"train": {"recompute": "full"}, "precision": {"stochastic": True}}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_watching_changes_no_bit(recipe: str, fields: dict[str, Any]) -> None:
    precision = fields.get("precision", {})
    plain = sampled(job_of(recipe, train=fields.get("train"), precision=precision), 4)
    watched = sampled(job_of(recipe, train=fields.get("train"), precision=precision | {"watch_every": 2}), 4)
    assert plain[2] == watched[2]
    for name, tensor in plain[0].items():
        assert torch.equal(tensor, watched[0][name]), name
    assert [s is not None for s in watched[1]] == [False, True, False, True]
    assert plain[1] == [None] * 4


def test_recomputing_changes_no_figure() -> None:
    """A forward pass that is made again isn't counted again."""
    found = [
        sampled(job_of("fp8-row", train={"recompute": kind}, precision={"watch_every": 1}), 1)[1][0]
        for kind in ("none", "full")
    ]
    assert found[0] == found[1]


def first_sample(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Of the first step, with sums in float32: before anything could drift apart."""
    parts = toy_parts(job, rank)
    parts.module.compute_dtype = torch.float32
    [result] = run_steps(parts, 0, 1)
    assert result.sample is not None
    return result.sample.figures.as_json()


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"dp": 2},
    {"dp": 2, "dp_shard": "full"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block128"])
def test_figures_add_up_over_ranks(recipe: str, layout: dict[str, Any]) -> None:
    """All ranks have the same figures, of all tensors. What a rank holds whole counts exactly; a part of a result is
    an average over fewer terms, and a part of a row or block has a scale of its own."""
    precision = {"watch_every": 1}
    one = first_sample(0, 1, job_of(recipe, precision=precision))
    ranks = run_ranks(2, first_sample, job_of(recipe, precision=precision, **layout))
    assert ranks[0] == ranks[1]
    whole_here = "tp" not in layout and "cp" not in layout
    for role in ROLES:
        mine, theirs = one[role], ranks[0][role]
        assert mine.keys() == theirs.keys()
        assert None not in theirs["amax"] and None not in theirs["histogram"]
        assert theirs["amax"] == pytest.approx(mine["amax"], rel=2e-3)
        slack = 1e-3 if whole_here else 0.03
        assert theirs["error"] == pytest.approx(mine["error"], rel=slack)
        if recipe == "fp8-delayed":
            assert theirs["scale_high"] == mine["scale_high"]
            for a, b in zip(theirs["histogram"], mine["histogram"], strict=True):
                assert a[0] == pytest.approx(b[0], abs=1)
                assert a[-6:] == pytest.approx(b[-6:], abs=2)
    assert ranks[0]["result"] == pytest.approx(one["result"], rel=1e-3 if whole_here else 0.2)


def watching(parts: Assembly) -> Watching:
    found = parts.step.passes.watching
    assert found is not None
    return found


def layers_in_high(parts: Assembly) -> list[str]:
    return [
        n
        for n, m in parts.module.named_modules()
        if isinstance(m, Projection) and m.quantised is not None and m.quantised.fallen
    ]


def in_trouble(job: Job, rank: int = 0) -> Assembly:
    """With a layer whose result a scale per tensor spoils: an input channel 2^16 times smaller and its column as much
    larger, so that the function stays the same and the rest of the weight is flushed."""
    parts = toy_parts(job, rank)
    if 1 in parts.module.layers and parts.mesh.at("tp") == 0:
        mlp = parts.module.block(1).mlp
        with torch.no_grad():
            mlp.gate_up.weight[mlp.down.weight.shape[1]].mul_(2.0**-16)
            mlp.down.weight[:, 0].mul_(2.0**16)
    return parts


def falling(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Six steps."""
    parts = in_trouble(job, rank)
    results = list(run_steps(parts, 0, 6))
    return {
        "falls": [[(f.names, f.why) for f in r.sample.falls] if r.sample else [] for r in results],
        "high": layers_in_high(parts),
        "figures": [None if r.sample is None else r.sample.figures.as_json() for r in results],
        "losses": [r.loss for r in results],
    }


SABOTAGED = {"precision": {"watch_every": 1, "fall_back": True}, "train": {"lr": 1e-5}}


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_a_layer_that_misbehaves_in_two_samples_falls_back_on_all_ranks(layout: dict[str, Any]) -> None:
    job = job_of("fp8-current", **SABOTAGED, **layout)
    ranks = run_ranks(2, falling, job) if layout else [falling(0, 1, job)]
    for found in ranks:
        assert found["falls"] == ranks[0]["falls"]
        [[names, why]] = found["falls"][1]
        assert names == ("layers.1.mlp.down",)
        assert "error of the result" in why and "above 0.112, in 2 samples in a row" in why
        assert [len(falls) for falls in found["falls"]] == [0, 1, 0, 0, 0, 0]
        figures = found["figures"]
        place = 13
        assert figures[1]["result"][place] > 3 * 0.0375 and figures[2]["result"][place] is None
        assert figures[2]["x"]["amax"][place] is None and figures[2]["x"]["amax"][place - 1] is not None
        here = [] if "pp" in layout and found is ranks[0] else ["blocks.1.mlp.down"]
        assert found["high"] == here


def test_what_fell_back_runs_as_if_it_had_never_been_quantised() -> None:
    """And what only stumbled once goes on as it was."""
    job = job_of("fp8-current", **SABOTAGED)
    parts = toy_parts(job)
    for module in (parts.module.block(0).mlp.down, parts.module.block(0).attn.qkv):
        module.quantised.trouble[:, 1] = 1
        module.quantised.fallen = True
    plain = toy_parts(job)
    for module in (plain.module.block(0).mlp.down, plain.module.block(0).attn.qkv):
        module.quantised = None
    once = watching(parts)
    assert once.limits == Limits()
    a, b = ([r.loss for r in run_steps(p, 0, 2)] for p in (parts, plain))
    assert a == b
    for name, tensor in plain.module.named_parameters():
        assert torch.equal(tensor, parts.module.get_parameter(name)), name


def test_saturated_gradients_are_trouble() -> None:
    """A history that is 2^6 too small clips the gradient of one projection."""
    parts = toy_parts(job_of("fp8-delayed", **SABOTAGED))
    list(run_steps(parts, 0, 1))
    falls = []
    held = parts.module.block(0).attn.o.quantised
    for step in (1, 2):
        held.history[:, 2] /= 2**6
        held.past[:, 2] /= 2**6
        [result] = run_steps(parts, step, step + 1)
        falls += result.sample.falls
    assert [f.names for f in falls] == [("layers.0.attn.o",)]
    assert "of grad saturated, above 1%" in falls[0].why


def spoiled_main(rank: int, world: int, job: Job, socket: str, stop_at: int | None) -> dict[str, Any]:
    """`train.loops.rank_main` of a run that starts, if it does, with a layer in trouble."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "toy_parts", in_trouble)
        return rank_main(rank, world, job, socket, stop_at)


def train_spoiled(job: Job, stop_at: int | None = None) -> list[dict[str, Any]]:
    prepare(job)
    with vault(job.run.folder) as socket:
        return run_ranks(job.layout.world_size, spoiled_main, job, str(socket), stop_at)


def falls_of(ranks: list[dict[str, Any]]) -> list[tuple[int, tuple[str, ...]]]:
    return [(e["step"], e["fall_back"]) for e in ranks[0]["events"] if e["event"] == "warning" and "fall_back" in e]


FALLING: dict[str, Any] = {
    "model": FAMILIES["llama"] | {"vocab_size": 257},
    "precision": {"recipe": "fp8-delayed", "watch_every": 2, "fall_back": True},
    "train": {"steps": 8, "lr": 1e-9},  # or the small channel would soon be as large as the others
    "keep": {"every": 3},
}


@pytest.mark.slow
def test_trouble_so_far_goes_on_bitwise(tmp_path: Path) -> None:
    """Cut between the two samples that make layers fall: the same falls, records and states as without a cut."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    straight = train_spoiled(small_job(tmp_path / "straight", **FALLING))
    falls = falls_of(straight)
    assert falls == [(4, ("layers.1.mlp.down",))]
    said = next(e["message"] for e in straight[0]["events"] if "fall_back" in e)
    assert said.startswith("from step 5 on layers.1.mlp.down run in bfloat16: "), said
    cut = small_job(tmp_path / "cut", **FALLING)
    begun = train_spoiled(cut, stop_at=3)
    finished = train_spoiled(cut)
    assert falls_of(begun) == [] and falls_of(finished) == falls
    assert losses(begun) | losses(finished) == losses(straight)
    assert_same_state(finished, straight)
    samples = [m["precision"] for r in (begun, finished) for m in r[0]["metrics"] if "precision" in m]
    assert samples == [m["precision"] for m in straight[0]["metrics"] if "precision" in m]


@pytest.mark.slow
def test_what_fell_back_stays_so_under_another_layout(tmp_path: Path) -> None:
    """Saved by one process after the first falls: two tensor-parallel ranks and two stages read the same state, say so
    at the start, and go on in the same type."""
    alone = small_job(tmp_path, **FALLING)
    begun = train_spoiled(alone, stop_at=5)
    assert falls_of(begun) == [(4, ("layers.1.mlp.down",))]
    saved = whole([[(n, s, at, t.numpy()) for (n, s, at), t in r["state"].items()] for r in begun])
    names = [n for n in saved if n.startswith(FALL_BACK_PREFIX)]
    fallen = {n.removeprefix(FALL_BACK_PREFIX): int(saved[n][1]) for n in names if saved[n][1]}
    assert len(names) == 14 and fallen == {"layers.1.mlp.down": 4}
    for layout in ({"tp": 2}, {"pp": 2}):
        job = small_job(tmp_path, layout=layout, **FALLING)
        read = whole(run_ranks(2, restored_state, job))
        assert all((read[n] == saved[n]).all() for n in names)
    finished = train_spoiled(job)
    assert next(e for e in finished[0]["events"] if e["event"] == "watch")["fallen"] == fallen
    [sample] = [m["precision"] for m in finished[0]["metrics"] if m["step"] == 6]
    said = next(e for e in finished[0]["events"] if e["event"] == "watch")["names"]
    assert {n for n, error in zip(said, sample["result"], strict=True) if error is None} == fallen.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_zero_gradients_are_no_trouble(recipe: str) -> None:
    """Nothing is divided by a scale of 0: figures of gradients are missing, and the step is committed."""
    parts = toy_parts(job_of(recipe, **SABOTAGED))
    parts.module.norm.register_forward_hook(lambda _m, _a, out: (out[0], out[1] * 0.0))
    results = list(run_steps(parts, 0, 3))
    for result in results:
        assert result.grad_norm == 0.0 and result.sample.falls == ()
        grad = result.sample.figures.roles["grad"]
        assert "error" not in grad and "saturated" not in grad and grad["histogram"] == [None] * 14
        assert grad["amax"] == [0.0] * 14
        assert None not in result.sample.figures.roles["x"]["error"]


class Spoil(torch.autograd.Function):
    """The identity, whose gradient has one element that isn't finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        grad.view(-1)[7] = ctx.value
        return grad, None


def spoiled(rank: int, world: int, job: Job, where: str, value: float) -> dict[str, Any]:
    """Two clean steps, then one with a number that isn't finite at layer 1's down projection."""
    parts = toy_parts(job, rank)
    list(run_steps(parts, 0, 2))
    before = {n: p.detach().clone() for n, p in parts.module.named_parameters()}
    down = parts.module.block(1).mlp.down if 1 in parts.module.layers else None
    if down is not None and where == "x":

        def spoil(_module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            x = args[0].clone()
            x.view(-1)[7] = value
            return (x,)

        down.register_forward_pre_hook(spoil)
    elif down is not None:
        down.register_forward_hook(lambda _m, _a, y: Spoil.apply(y, value))
    try:
        list(run_steps(parts, 2, 3))
    except NonFinite as error:
        same = all(torch.equal(p, before[n]) for n, p in parts.module.named_parameters())
        return {"step": error.step, "text": error.message, "same": same}
    return {"step": None, "text": "nothing was raised", "same": False}


BAD = [("x", "input of blocks.1.mlp.down"), ("grad", "gradient of blocks.1.mlp.down.weight")]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("where", "named"), [("x", "input of blocks.1.mlp.down"), ("grad", "blocks.1.mlp.down.weight")]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stops_with_layer_role_and_step(recipe: str, where: str, named: str, value: float) -> None:
    found = spoiled(0, 1, job_of(recipe, precision={"watch_every": 3, "fall_back": True}), where, value)
    assert found["step"] == 3 and found["same"], found
    assert named in found["text"] and f"role {where}" in found["text"], found


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize(
    ("where", "named"), [("x", "input of blocks.1.mlp.down"), ("grad", "blocks.1.mlp.down.weight")]
)
def test_every_rank_names_the_same_layer(where: str, named: str, layout: dict[str, Any]) -> None:
    """Of a pipeline the stage where it began, though the one before it has nothing but bad gradients."""
    for found in run_ranks(2, spoiled, job_of("fp8-delayed", **layout), where, float("nan")):
        assert found["step"] == 3 and found["same"], found
        assert named in found["text"] and f"role {where}" in found["text"], found
