"""What travels narrower than it is computed with: weights that FSDP gathers, and rows on their way to experts.

Weights: a narrow gather gives the same bits as a whole one wherever `parallel.gathering` says so: losses, an
evaluation, and parameters, moments and histories after two updates. Half of each matrix is made 2^14 times smaller and
lies on other ranks, so that a scale of a rank's own part would round otherwise than the whole tensor's.

Rows: two passes through the layer of `expert_layer` against one process that rounds the same rows and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parallel.expert_layer import CASES, D, Layer, X, noise
from parallel.parity import first_gradients, plain, whole
from parallel.parity import job_of as toy_family
from parallel.precision_parity import _make_uneven, job_of
from parallel.test_expert import LAYOUTS, events_of, excess, put_together, run, split_of
from ranks import run_ranks
from torch import Tensor
from train.toy import run_steps, toy_batch, toy_parts

from bessemer.core.job import Job
from bessemer.models.split import ExpertSplit, Sent
from bessemer.parallel import gathering
from bessemer.parallel.data import drop_gathered
from bessemer.parallel.wire import ROWS, coded_rows, decoded_rows, to_odd
from bessemer.precision import decode, numerics, quantise
from bessemer.precision.formats import E4M3
from bessemer.train.state import state_slices

FULL = {"dp_shard": "full"}
EIGHT = {"train": {"global_batch": 8}}
Found = dict[str, dict[str, Any]]


def with_precision(job: Job, **fields: Any) -> Job:
    return job.model_copy(update={"precision": job.precision.model_copy(update=fields)})


def gathers(gather: str, recipe: str, family: str = "llama", **layout: Any) -> Job:
    precision = {"gather": gather} | layout.pop("precision", {})
    return job_of(recipe, family, precision=precision, **layout)


def bf16(family: str, **layout: Any) -> Job:
    return with_precision(toy_family(family, **layout), recipe="bf16", gather="bf16")


SAME: dict[str, Job] = {
    "layer norms, biases, a tied head": bf16("gpt2", dp=2, **FULL),
    "head norms": bf16("qwen3", dp=2, dp_shard="optimizer"),
    "experts and routers": bf16("mixtral", dp=2, **FULL),
    "latents and rows that don't come out even": bf16("deepseek_v3", dp=2, dp_shard="gradient"),
    "bf16, delayed, recomputed": gathers("bf16", "fp8-delayed", dp=2, **FULL, train={"recompute": "full"}),
    "bf16, rows": gathers("bf16", "fp8-row", dp=2, **FULL),
    "bf16, blocks of 128": gathers("bf16", "fp8-block128", dp=2, **FULL),
    "bf16, blocks of 32": gathers("bf16", "mxfp8", dp=2, dp_shard="gradient"),
    "delayed": gathers("fp8", "fp8-delayed", dp=2, **FULL),
    "delayed, recomputed": gathers("fp8", "fp8-delayed", dp=2, **FULL, train={"recompute": "full"}),
    "delayed, cp": gathers("fp8", "fp8-delayed", cp=2, **FULL),
    "delayed, smooth": gathers("fp8", "fp8-delayed", dp=2, **FULL, precision={"smooth": True}),
    "delayed, latents, experts and predictions": gathers("fp8", "fp8-delayed", "deepseek_v3", dp=2, **FULL),
    "bf16, experts": gathers("bf16", "mxfp8", "deepseek_v3", dp=2, **FULL),
    "current": gathers("fp8", "fp8-current", dp=2, dp_shard="optimizer"),
    "current, first block high": gathers("fp8", "fp8-current", dp=2, **FULL, precision={"high_first": 1}),
    "delayed, pp": gathers("fp8", "fp8-delayed", dp=2, pp=2, **FULL),
    "delayed, two copies": gathers("fp8", "fp8-delayed", dp=4, keep={"replicas": 2}, **FULL, **EIGHT),
    "current, tp": gathers("fp8", "fp8-current", dp=2, tp=2, sequence_parallel=True, **FULL),
    "current, parts of experts": gathers("fp8", "fp8-current", "deepseek_v3", dp=4, **FULL, **EIGHT),
    "delayed, ranks of experts": gathers("fp8", "fp8-delayed", "deepseek_v3", dp=4, ep=2, **FULL, **EIGHT),
    "current, parts of widths": gathers("fp8", "fp8-current", "deepseek_v3", dp=4, etp=2, dp_shard="gradient", **EIGHT),
    "current, cp and dp": gathers("fp8", "fp8-current", dp=2, cp=2, dp_shard="gradient"),
}
CLOSE = {recipe: gathers("fp8", recipe, dp=2, **FULL) for recipe in ("fp8-row", "fp8-block128", "mxfp8")}


def trained(job: Job, rank: int, *, uneven: bool = True) -> dict[str, Any]:
    """Two steps and an evaluation between them."""
    parts = toy_parts(job, rank)
    if uneven and job.model.family == "llama":
        _make_uneven(parts.module)
    first = list(run_steps(parts, 0, 1))
    evaluated = [float(x) for x in parts.step.passes.forward(toy_batch([90, 91]))]
    drop_gathered(parts.module)
    losses = [r.loss for r in (*first, *run_steps(parts, 1, 2))]
    return {"losses": losses, "evaluated": evaluated, "state": plain(state_slices(parts.module, parts.optimizer))}


def both_ways(rank: int, world: int, jobs: dict[str, Job], uneven: bool) -> dict[str, list[dict[str, Any]]]:
    """Of each job: as it is, and with a whole gather."""
    del world
    return {
        name: [trained(j, rank, uneven=uneven) for j in (job, with_precision(job, gather="fp32"))]
        for name, job in jobs.items()
    }


@functools.cache
def same(world: int) -> list[dict[str, list[dict[str, Any]]]]:
    jobs = {name: job for name, job in SAME.items() if job.layout.world_size == world}
    return run_ranks(world, both_ways, jobs, True, timeout_s=110)


def differing(ranks: list[list[dict[str, Any]]]) -> list[str]:
    """What isn't the same bits with a narrow gather (first) and a whole one."""
    (narrow, wide) = ([rank[i] for rank in ranks] for i in (0, 1))
    found = [k for k in ("losses", "evaluated") if any(a[k] != b[k] for a, b in zip(narrow, wide, strict=True))]
    states = [whole([rank["state"] for rank in side]) for side in (narrow, wide)]
    assert states[0].keys() == states[1].keys()
    return found + [name for name, tensor in states[0].items() if not np.array_equal(tensor, states[1][name])]


def smooth_history(name: str) -> bool:
    """Whether it is one of a smooth projection, whose weight's amax no scale follows from."""
    return name.startswith("precision.history/") and name.endswith(".down")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_narrow_gather_changes_no_bit(name: str) -> None:
    found = differing([rank[name] for rank in same(SAME[name].layout.world_size)])
    assert [what for what in found if not (SAME[name].precision.smooth and smooth_history(what))] == []


@pytest.mark.slow
def test_one_process_makes_the_same_step() -> None:
    """Two ranks' sums of gradients have one order."""
    job = SAME["delayed"]
    alone = trained(job.model_copy(update={"layout": type(job.layout)()}), 0)
    ranks = [rank["delayed"][0] for rank in same(2)]
    assert alone["losses"] == ranks[0]["losses"]
    wanted, found = whole([alone["state"]]), whole([rank["state"] for rank in ranks])
    assert sum(name.startswith("precision.history/") for name in wanted) == 14
    for name, tensor in wanted.items():
        assert np.array_equal(found[name], tensor), name


def _no_agreement() -> None:
    gathering.NarrowGather._agreed = lambda self, amax_N, group: amax_N  # type: ignore[method-assign]


def _one_axis_only() -> None:
    agreed = gathering.NarrowGather._agreed

    def without_tensor(self: Any, amax_N: Tensor, group: Any) -> Tensor:
        self._tensor = None
        return agreed(self, amax_N, group)

    gathering.NarrowGather._agreed = without_tensor  # type: ignore[method-assign]


def _nearest() -> None:
    gathering.to_odd = lambda x: x.to(torch.bfloat16)


def _of_what_arrived() -> None:
    gathering.NarrowGather._correct = lambda *_: None  # type: ignore[method-assign]


def sabotaged(rank: int, world: int, name: str, sabotage: Callable[[], None]) -> list[dict[str, Any]]:
    sabotage()
    return both_ways(rank, world, {name: SAME[name]}, True)[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sabotage", "seen_in"),
    [
        ("delayed", _no_agreement, "losses"),
        ("current", _no_agreement, "losses"),
        ("current, tp", _one_axis_only, "layers.0.attn.q.weight"),
        ("bf16, rows", _nearest, "losses"),
        ("delayed", _of_what_arrived, "precision.history/layers.0.attn.q"),
    ],
)
def test_a_missing_part_is_noticed(name: str, sabotage: Callable[[], None], seen_in: str) -> None:
    """The test above must be able to fail."""
    found = differing(run_ranks(SAME[name].layout.world_size, sabotaged, name, sabotage))
    assert seen_in in found, found


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
def test_blocks_on_the_wire_are_rounded_once_more_where_the_recipe_has_others(uneven: bool) -> None:
    """With initial weights what is below the normal numbers of one block is so of any other: no bit changes. Where half
    of a row is 2^14 times smaller it does, but for blocks of 32, which never hold both halves."""
    ranks = run_ranks(2, both_ways, CLOSE, uneven)
    for recipe in CLOSE:
        assert bool(differing([rank[recipe] for rank in ranks])) == (uneven and recipe != "mxfp8"), recipe
        narrow, wide = (ranks[0][recipe][i]["losses"] for i in (0, 1))
        assert narrow[0] == wide[0] and abs(narrow[1] / wide[1] - 1) < 1e-3, (recipe, narrow, wide)


def test_torch_widens_every_code_exactly() -> None:
    codes = torch.arange(256).to(torch.uint8).view(E4M3.dtype)
    assert torch.equal(torch.empty(256).copy_(codes).nan_to_num(1e9), decode(codes, E4M3).nan_to_num(1e9))


def test_rounding_to_odd_first_changes_no_code() -> None:
    """Rounding to nearest first would change 2 % of these."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(256, 256, generator=generator) * torch.logspace(-4, 4, 256)[:, None]
    ties = torch.tensor([1.0625, 1.0625 + 2.0**-20, 1.0625 - 2.0**-20, -1.1875 - 2.0**-20])  # beside midpoints of e4m3
    weight[0, :4] = ties
    for recipe in ("fp8-current", "fp8-row", "fp8-block128", "mxfp8"):
        for rows in (weight, weight.t().contiguous()):
            scheme = numerics(recipe).weight
            direct, twice = quantise(rows, scheme), quantise(to_odd(rows).float(), scheme)
            assert torch.equal(direct.codes.view(torch.uint8), twice.codes.view(torch.uint8))
            assert torch.equal(direct.scales(), twice.scales())
            nearest = quantise(rows.to(torch.bfloat16).float(), scheme)
            assert (direct.codes.view(torch.uint8) != nearest.codes.view(torch.uint8)).float().mean() > 0.01
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0])
    assert to_odd(special).isnan().tolist() == [True, False, False, False, False]
    assert torch.equal(to_odd(special)[1:].float(), special[1:])
    assert to_odd(torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)).isnan()


@pytest.mark.parametrize("columns", [7, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_within_the_rounding_of_their_blocks(columns: int, dtype: torch.dtype) -> None:
    x = noise(6, columns, seed=1) * torch.logspace(-12, 12, 6)[:, None]
    x[4, 3], x[5, 1] = torch.inf, torch.nan
    packed = coded_rows(x.to(dtype), ROWS)
    assert packed.shape == (6, columns + -(-columns // 128)) and packed.dtype == torch.uint8
    back = decoded_rows(packed, columns, ROWS, dtype)
    assert back.dtype == dtype
    for block in range(0, columns, 128):
        part, made = x[:4, block : block + 128].to(dtype).float(), back[:4, block : block + 128].float()
        assert ((made - part).abs() <= part.abs().amax(1, keepdim=True) * 2.0**-4).all()
    assert torch.equal(decoded_rows(coded_rows(back[:4], ROWS), columns, ROWS, dtype), back[:4])
    assert back[4:, :128].isnan().all() and back[4:, 128:].isfinite().all()
    assert coded_rows(x[:0].to(dtype), ROWS).shape[0] == 0


class _Round(torch.autograd.Function):
    """Rounds as the wire does, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, backward: bool) -> Tensor:
        ctx.back = backward
        return x_TD.clone() if backward else _round(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        return (_round(grad_TD) if ctx.back else grad_TD), None


def _round(x_TD: Tensor) -> Tensor:
    return decoded_rows(coded_rows(x_TD, ROWS), x_TD.shape[1], ROWS, x_TD.dtype)


class Rounded(ExpertSplit):
    """One process that rounds what would travel: rows out, and results' gradients out."""

    def dispatch(self, rows_TD: Tensor, counts_X: Tensor) -> Sent:
        return super().dispatch(_Round.apply(rows_TD, False), counts_X)  # type: ignore[no-untyped-call]

    def combine(self, out_TD: Tensor, sent: Sent) -> Tensor:
        made: Tensor = _Round.apply(super().combine(out_TD, sent), True)  # type: ignore[no-untyped-call]
        return made


def on_rank(rank: int, ranks: int) -> dict[tuple[int, int], dict[str, Any]]:
    """By layout and case what `run` finds; and of a pass the bytes that each exchange sends."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for layout in LAYOUTS[ranks]:
        layer = Layer(split_of(rank, layout, coded=True), [])
        found[layout] = {case: run(layer, [rank], case) for case in CASES}
        found[layout]["recompute"] = run(layer, [rank], "spread", recompute=True)
        found[layout]["events"] = events_of(layer, rank)
    return found


@functools.cache
def dispatched(ranks: int) -> list[dict[tuple[int, int], dict[str, Any]]]:
    return run_ranks(ranks, on_rank)


EACH_LAYOUT = pytest.mark.parametrize("layout", [layout for several in LAYOUTS.values() for layout in several], ids=str)


@EACH_LAYOUT
@pytest.mark.parametrize("case", CASES)
def test_dispatch_rounds_the_way_out_and_nothing_else(layout: tuple[int, int], case: str) -> None:
    ranks = list(range(layout[0] * layout[1]))
    expected = run(Layer(Rounded(), []), ranks, case)
    found = put_together(layout, [part[layout][case] for part in dispatched(len(ranks))])
    assert excess(expected, found) <= 1
    if expected["out"].size:
        assert excess(run(Layer(ExpertSplit(), []), ranks, case), found) > 1e3


@EACH_LAYOUT
def test_a_recomputed_dispatch_gives_the_same_bits(layout: tuple[int, int]) -> None:
    for part in dispatched(layout[0] * layout[1]):
        for name, value in part[layout]["spread"].items():
            assert np.array_equal(value, part[layout]["recompute"][name])


@EACH_LAYOUT
def test_bytes_of_the_ways_out_and_home(layout: tuple[int, int]) -> None:
    for part in dispatched(layout[0] * layout[1]):
        events = part[layout]["events"]
        counts, out, home, gradients_out, gradients_home = events["sent"]
        assert counts == 8 * layout[1] * X
        assert out == gradients_out == layout[1] * events["rows"] * (D + 1)
        assert home == gradients_home and home % (4 * D) == 0


@pytest.mark.slow
def test_training_with_coded_rows_doesn_t_depend_on_how_experts_are_divided() -> None:
    """Rows are rounded alike wherever they go. Two layouts then differ in the order of sums, and by a code where a sum
    is at the border of its rounding; the rounding itself shows a hundred times as much."""
    whole_rows = toy_family("mixtral", dp=4, ep=4)
    coded = [with_precision(toy_family("mixtral", dp=4, ep=ep, etp=4 // ep), dispatch="fp8") for ep in (4, 2)]
    found = run_ranks(4, first_steps, [coded[0], coded[1], whole_rows])
    losses = found[0]["losses"]
    assert abs(losses[1] / losses[0] - 1) < 1e-6 < abs(losses[2] / losses[0] - 1) < 2e-3, losses
    wanted, other, unrounded = (whole([rank["gradients"][i] for rank in found]) for i in range(3))
    apart = {
        n: [float(np.linalg.norm(t[n] - g) / np.linalg.norm(g)) for t in (other, unrounded)] for n, g in wanted.items()
    }
    assert max(near for near, _ in apart.values()) < 1e-3, apart
    assert max(far for _, far in apart.values()) > 1e-2, apart


def first_steps(rank: int, world: int, jobs: list[Job]) -> dict[str, list[Any]]:
    del world
    found: dict[str, list[Any]] = {"losses": [], "gradients": []}
    for job in jobs:
        parts = toy_parts(job, rank)
        first = first_gradients(parts)
        found["losses"] += [result.loss for result in run_steps(parts, 0, 1)]
        found["gradients"] += first
    return found


def _fallen_step(rank: int, world: int, gather: str) -> float:
    """The loss of a step in which every layer goes on without quantising."""
    from bessemer.models.watched import held_troubles, refresh_fallen

    precision = {"gather": gather, "watch_every": 1, "fall_back": True}
    parts = toy_parts(job_of("fp8-current", "mixtral", dp=world, ep=1, dp_shard="full", precision=precision), rank)
    for _, trouble in held_troubles(parts.module):
        trouble[..., 1] = 1
    refresh_fallen(parts.module)
    return next(iter(run_steps(parts, 0, 1))).loss


def test_layers_that_have_fallen_back_travel_unquantised() -> None:
    """Experts too: what is computed in bfloat16 is gathered without loss for it."""
    assert run_ranks(2, _fallen_step, "fp8") == run_ranks(2, _fallen_step, "fp32")
