"""AdamW's moments in float32, bfloat16 and FP8: the update, what rounding does to it, layouts, and going on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel.parity import Slices, job_of, whole
from ranks import run_ranks
from train.loops import small_job
from train.loops import train as train_loop
from train.toy import DEEPSEEK, GPT2, MIXTRAL, MODEL, run_steps, toy_batch, toy_job, toy_parts

from bessemer.core.job import Job
from bessemer.keep.checkpoint import write_checkpoint
from bessemer.models.canonical import local
from bessemer.precision.expanded import decode_expanded, encode_expanded
from bessemer.precision.formats import E4M3
from bessemer.train.assembly import Assembly
from bessemer.train.moments import _Block, draws
from bessemer.train.passes import Batch
from bessemer.train.restore import checkpoint_meta, restore
from bessemer.train.state import owned_slices, state_slices

NARROW = ["bf16", "fp8"]
GROUP = 128


def job(kind: str, **sections: dict[str, Any]) -> Job:
    return toy_job(**{**sections, "precision": {"recipe": "fp32", "moments": kind}})


def state_of(parts: Assembly) -> dict[str, torch.Tensor]:
    return {s.name: s.tensor.clone() for s in state_slices(parts.module, parts.optimizer)}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ---- the update


def gradients(parts: Assembly, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in parts.module.parameters():
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3


def test_in_float32_the_update_is_torchs_fused_one() -> None:
    parts, twin = toy_parts(job("fp32")), toy_parts(job("fp32"))
    train = parts.job.train
    plain = [p for p in twin.module.parameters() if p.ndim < 2]
    matrices = [p for p in twin.module.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    torch_s = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)
    for step in range(3):
        gradients(parts, step)
        gradients(twin, step)
        parts.optimizer.step(1.0)
        torch_s.step()
    for name, param in parts.module.named_parameters():
        other = twin.module.get_parameter(name)
        assert torch.equal(param, other), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(parts.optimizer.state_tensors()[kind][name], torch_s.state[other][kind]), name


@pytest.mark.parametrize("model", [MODEL, MIXTRAL, DEEPSEEK, GPT2], ids=lambda m: str(m["family"]))
@pytest.mark.parametrize("kind", NARROW)
def test_a_step_is_torchs_step_from_the_decoded_moments(kind: str, model: dict[str, Any]) -> None:
    """The parameters' update comes from moments in float32; these are then rounded. Norms and biases are bitwise what
    they are with float32 moments."""
    wide, narrow = toy_parts(job("fp32", model=model)), toy_parts(job(kind, model=model))
    for step in range(2):
        gradients(narrow, step)
        narrow.optimizer.step(1.0)
    wide.module.load_state_dict(narrow.module.state_dict())
    for kind_of, tensors in wide.optimizer.state_tensors().items():
        for name, tensor in tensors.items():
            tensor.copy_(narrow.optimizer.state_tensors()[kind_of][name])
    wide.optimizer.set_steps(2)
    for parts in (wide, narrow):
        gradients(parts, 9)
        parts.optimizer.step(0.5)
    for name, param in wide.module.named_parameters():
        found = narrow.module.get_parameter(name)
        if param.ndim < 2:
            assert torch.equal(found, param), name
        elif "embed" not in name and "head" not in name:  # rows beyond the vocabulary are left alone
            torch.testing.assert_close(found, param, rtol=0, atol=2e-9 + 1e-6 * float(param.detach().abs().max()))
    second = narrow.optimizer.state_tensors()["exp_avg_sq"]
    for name, tensor in wide.optimizer.state_tensors()["exp_avg_sq"].items():
        step_of_e4m3 = 1.4 if kind == "fp8" else 1 + 2**-7
        off = (second[name].float() / tensor.clamp_min(1e-30)).flatten()
        assert off.max() < step_of_e4m3 and off.min() > 1 / step_of_e4m3, name


# ---- what rounding does


def moments_of(scales: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in float32 after so many normal gradients of these scales."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.zeros_like(scales), torch.zeros_like(scales)
    for _ in range(steps):
        grad = torch.randn(scales.shape, generator=generator) * scales
        first.lerp_(grad, 0.1)
        second.mul_(0.95).addcmul_(grad, grad, value=0.05)
    return first, second


def naive(x: torch.Tensor) -> torch.Tensor:
    """e4m3 under a scale for each group, that maps its largest onto 448."""
    groups = x.view(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True) / 448
    return ((groups / scale).to(E4M3.dtype).float() * scale).view(-1)


def test_no_second_moment_becomes_zero_where_naive_e4m3_loses_it() -> None:
    """Gradients of a group over four decades: plain e4m3 makes second moments 0 whose first moment it keeps, so that an
    update is the first moment over eps. With ranges it stays within the bound of the two roundings."""
    scales = torch.logspace(-6, -2, GROUP).repeat(16)
    first, second = moments_of(scales, 60)
    wanted = first / (second.sqrt() + 1e-8)
    plain = naive(first) / (naive(second).sqrt() + 1e-8)
    lost = (naive(second) == 0) & (naive(first) != 0)
    assert lost.float().mean() > 0.1 and plain.abs().max() > 100 > 30 * wanted.abs().max()
    codes, ranges = encode_expanded(first)
    codes_sq, ranges_sq = encode_expanded(second)
    found = decode_expanded(codes, ranges) / (decode_expanded(codes_sq, ranges_sq).sqrt() + 1e-8)
    bound = torch.ones(len(ranges), 1)
    for ends, power in ((ranges, 1.0), (ranges_sq, 0.5)):
        octaves = torch.log2(ends[:, :1].float() / ends[:, 1:].float())
        bound = bound * ((1 + 2**-4) ** (octaves / math.log2(448 * 64)) * (1 + 2**-8)) ** power
    off = (found / wanted).view(-1, GROUP)
    assert (off < bound).all() and (off > 1 / bound).all() and bound.max() < 1.25


def followed(beta2: float, kind: str, *, by_chance: bool) -> float:
    """By what narrow second moments are too large, as a root, in the mean over the second half of a run in which
    gradients shrink tenfold."""
    steps = 400 if beta2 < 0.99 else 2000
    generator = torch.Generator().manual_seed(3)
    scales = torch.exp(torch.randn(8 * GROUP, generator=generator)) * 1e-3
    wide, kept, off = torch.zeros_like(scales), torch.zeros_like(scales), []
    index = torch.arange(len(scales))
    for step in range(steps):
        grad = torch.randn(scales.shape, generator=generator) * scales * 0.1 ** (step / steps)
        wide.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        kept.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if step > steps // 2:
            off.append(float((kept / wide).mean()))
        noise = draws(step * 0x51AB3C9E7743, index) if by_chance else None
        if kind == "fp8":
            kept = decode_expanded(*encode_expanded(kept, noise))
        elif noise is None:
            kept = kept.to(torch.bfloat16).float()
        else:
            kept = ((kept.view(torch.int32) + noise) & -0x10000).view(torch.float32)
    return math.sqrt(sum(off) / len(off)) - 1


@pytest.mark.parametrize("kind", NARROW)
def test_second_moments_that_round_to_nearest_stand_still(kind: str) -> None:
    """With beta2 = 0.999 a step is a tenth of half a bfloat16 step: too large by over a quarter, and updates as much
    too small. Rounded by chance they follow."""
    assert followed(0.999, kind, by_chance=False) > 0.25
    assert abs(followed(0.999, kind, by_chance=True)) < 0.02
    assert abs(followed(0.95, kind, by_chance=True)) < 0.015


def test_draws_are_even_and_keyed_by_place() -> None:
    index = torch.arange(1 << 18)
    one, other = draws(0x51AB3C9E7742D065, index), draws(-0x2E0C4F8816BB7A93, index)
    for found in (one, other):
        assert int(found.min()) >= 0 and int(found.max()) < 1 << 16
        counts = torch.bincount(found >> 8, minlength=256).double()
        assert ((counts - 1024) ** 2 / 1024).sum() < 256 + 6 * math.sqrt(512)  # chi squared, 255 degrees of freedom
    joint = torch.stack((one, other, one.roll(1), one.roll(128), one.roll(4096))).double()
    assert (torch.corrcoef(joint) - torch.eye(5)).abs().max() < 0.01
    assert torch.equal(draws(0x51AB3C9E7742D065, index[1000:1100]), one[1000:1100])


@pytest.mark.parametrize("cut", [(slice(2, 5), slice(0, 6), slice(0, 4)), (slice(1, 4), slice(2, 5), slice(1, 3))])
def test_a_block_knows_its_elements_places(cut: tuple[slice, ...]) -> None:
    places = torch.arange(5 * 6 * 4).view(5, 6, 4)
    wanted = places[cut]
    block = _Block("x", (5, 6, 4), tuple(s.start for s in cut), tuple(wanted.shape), 0, 0)
    found = torch.cat([block.index(first, 3, torch.device("cpu")) for first in range(0, block.count, 3)])
    assert torch.equal(found, wanted.reshape(-1))


# ---- layouts


def after_steps(rank: int, _world: int, text: str) -> tuple[list[float], Slices]:
    """Losses and state after three steps, as float32."""
    parts = toy_parts(Job.model_validate_json(text), rank)
    losses = [result.loss for result in run_steps(parts, 0, 3)]
    slices = state_slices(parts.module, parts.optimizer)
    return losses, [(s.name, s.global_shape, s.global_offset, s.tensor.float().numpy()) for s in slices]


WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Rows that are whole groups."""


def both(kind: str, family: str, model: dict[str, Any], **layout: Any) -> tuple[float, dict[str, float]]:
    """(largest difference of a loss to one process; by moment the share of numbers that differ by a step of bfloat16 or
    half a step of e4m3). The ranks' copies agree bitwise, or `whole` fails."""
    narrow = {"precision": job(kind).precision}
    many = job_of(family, model=model, **layout).model_copy(update=narrow)
    one_losses, one = after_steps(0, 1, job_of(family, model=model).model_copy(update=narrow).model_dump_json())
    ranks = run_ranks(many.layout.world_size, after_steps, many.model_dump_json())
    wanted, found = whole([one]), whole([state for _, state in ranks])
    assert wanted.keys() == found.keys()
    least = 2**-8 if kind == "bf16" else 2**-5
    apart = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
    for state in apart:
        names = [n for n in wanted if n.startswith(f"optim.{state}/") and wanted[n].ndim > 1]
        differ = [np.abs(found[n] - wanted[n]) > least * np.abs(wanted[n]) for n in names]
        apart[state] = float(np.concatenate([d.ravel() for d in differ]).mean())
    return max(abs(a - b) for a, b in zip(one_losses, ranks[0][0], strict=True)), apart


@pytest.mark.parametrize(
    ("kind", "family", "model", "layout"),
    [
        ("bf16", "llama", {}, {"dp": 2}),
        ("bf16", "llama", {}, {"tp": 2, "sequence_parallel": True}),
        ("bf16", "mixtral", {}, {"dp": 2, "ep": 2, "dp_shard": "full"}),
        ("bf16", "mixtral", {}, {"dp": 2, "etp": 2}),
        ("fp8", "llama", WIDE, {"dp": 2, "dp_shard": "full"}),
        ("fp8", "llama", WIDE, {"pp": 2}),
        ("fp8", "llama", {}, {"dp": 2}),
        ("fp8", "mixtral", WIDE, {"dp": 2, "ep": 2, "dp_shard": "full"}),
    ],
    ids=str,
)
def test_layouts_round_alike(kind: str, family: str, model: dict[str, Any], layout: dict[str, Any]) -> None:
    """Where groups are the same (bfloat16 has none): gradients differ in their last bits, which moves few numbers over
    a border. In FP8 it also moves the floor of ranges, which is a first moment of almost nothing, and so more numbers
    over a border. Had any rank other draws, a large part of the second moments would differ."""
    loss, apart = both(kind, family, model, **layout)
    assert loss < 5e-6
    assert apart["exp_avg"] < (0.005 if kind == "bf16" else 0.12), apart
    assert apart["exp_avg_sq"] < (0.001 if kind == "bf16" else 0.02), apart


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "dp_shard": "full"}], ids=str)
def test_other_groups_differ_by_the_rounding_of_fp8(layout: dict[str, Any]) -> None:
    """Blocks that don't begin where a group does: many codes differ, and losses by what FP8 is coarse."""
    loss, apart = both("fp8", "llama", {}, **layout)
    assert loss < 1e-3 and apart["exp_avg"] > 0.12 and apart["exp_avg_sq"] > 0.02


# ---- going on


def resumed(kind: str, folder: Path) -> Assembly:
    parts = toy_parts(job(kind))
    assert restore(parts, folder, "data").step == 3
    return parts


def saved(kind: str, folder: Path) -> Assembly:
    """A run after three steps, which are saved."""
    parts = toy_parts(job(kind))
    list(run_steps(parts, 0, 3))
    slices = owned_slices(parts.module, parts.optimizer, parts.mesh)
    write_checkpoint(folder / "checkpoints", 3, slices, checkpoint_meta(parts.job, 3, "data"))
    return parts


@pytest.mark.parametrize("kind", NARROW)
def test_a_resumed_run_goes_on_bitwise(kind: str, tmp_path: Path) -> None:
    straight = saved(kind, tmp_path)
    again = resumed(kind, tmp_path)
    same(state_of(again), state_of(straight))
    kept = [t.view(torch.uint8) for t in again.optimizer.kept()]
    if kind == "bf16":
        assert all(map(torch.equal, kept, (t.view(torch.uint8) for t in straight.optimizer.kept())))
    for parts in (straight, again):
        list(run_steps(parts, 3, 6))
    same(state_of(again), state_of(straight))


@pytest.mark.parametrize("before", ["fp32", *NARROW])
@pytest.mark.parametrize("after", ["fp32", *NARROW])
def test_any_moments_go_on_from_any_other(before: str, after: str, tmp_path: Path) -> None:
    """Rounded once, or not at all from narrow to wide."""
    wanted, again = state_of(saved(before, tmp_path)), resumed(after, tmp_path)
    found = state_of(again)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        moved = name.startswith("optim.") and tensor.ndim > 1
        assert found[name].dtype == (torch.bfloat16 if moved and after != "fp32" else torch.float32)
        off = (found[name].float() - tensor.float()).abs()
        exact = not moved or after in ("fp32", before) or (before, after) == ("fp8", "bf16")
        coarse = 0.0 if exact else 2**-8 if after == "bf16" else 0.2
        assert (off <= coarse * tensor.float().abs() + (1e-30 if coarse else 0)).all(), name
        assert torch.equal(found[name] == 0, tensor == 0), name
    list(run_steps(again, 3, 4))


def restored(rank: int, _world: int, text: str) -> Slices:
    one = Job.model_validate_json(text)
    parts = toy_parts(one, rank)
    restore(parts, one.run.folder, "data")
    return [
        (s.name, s.global_shape, s.global_offset, s.tensor.float().numpy())
        for s in state_slices(parts.module, parts.optimizer)
    ]


@pytest.mark.parametrize("layout", [{"dp": 2, "dp_shard": "full"}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("kind", NARROW)
def test_a_checkpoint_loads_under_another_layout(kind: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """bfloat16 bitwise; FP8 too where groups are the same, else within its own rounding."""
    run = {"name": "r", "dir": str(tmp_path)}
    parts = saved(kind, tmp_path / "r")
    wanted = {s.name: s.tensor.float().numpy() for s in state_slices(parts.module, parts.optimizer)}
    many = job(kind, layout=layout, run=run)
    found = whole(run_ranks(2, restored, many.model_dump_json()))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if kind == "bf16" or not name.startswith("optim.") or layout == {"pp": 2}:
            assert np.array_equal(found[name], tensor), name
        else:
            assert (np.abs(found[name] - tensor) <= 0.25 * np.abs(tensor) + 1e-30).all(), name


@pytest.mark.slow
def test_a_sharded_run_in_fp8_that_was_cut_equals_one_that_was_not(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "layout": {"dp": 2, "dp_shard": "full"},
        "precision": {"moments": "fp8"},
        "train": {"steps": 6},
    }
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    straight = train_loop(small_job(tmp_path / "straight", **fields))
    cut = small_job(tmp_path / "cut", **fields)
    train_loop(cut, stop_at=3)
    again = train_loop(cut)
    assert [m["step"] for m in again[0]["metrics"]] == [4, 5, 6]
    for found, wanted in zip(again, straight, strict=True):
        for name, tensor in wanted["state"].items():
            assert torch.equal(found["state"][name], tensor), name


# ---- bytes and losses


@pytest.mark.parametrize("model", [MODEL, MIXTRAL, DEEPSEEK, GPT2], ids=lambda m: str(m["family"]))
def test_what_is_kept_is_counted_by_hand(model: dict[str, Any]) -> None:
    parts = {kind: toy_parts(job(kind, model=model)) for kind in ("fp32", *NARROW)}
    kept = {kind: sum(t.nbytes for t in p.optimizer.kept()) for kind, p in parts.items()}
    trained = [p for p in parts["fp32"].module.parameters() if p.requires_grad]
    matrices = sum(p.numel() for p in trained if p.ndim >= 2)
    vectors = sum(local(p).numel() for p in trained if p.ndim < 2)
    assert kept["fp32"] == 8 * (matrices + vectors)
    assert kept["bf16"] == 4 * matrices + 8 * vectors
    short = kept["fp8"] - 2 * matrices * (1 + 4 / GROUP) - 8 * vectors  # groups that a tensor's end cuts
    assert 0 <= short < 8 * 3 * len(trained)


def few_batches(steps: int) -> Iterator[tuple[int, list[Batch]]]:
    """For each step the same eight samples, in micro-batches of two."""
    batches = [toy_batch([i, i + 1]) for i in range(0, 8, 2)]
    return ((step, batches) for step in range(steps))


def test_toy_losses_end_alike() -> None:
    """Forty steps over the same few samples; of the last ten losses the mean."""
    ends = {}
    for kind in ("fp32", *NARROW):
        parts = toy_parts(job(kind, train={"steps": 40, "lr": 3e-3, "global_batch": 8}))
        losses = [parts.step.run(step, iter(batches), len(batches)).loss for step, batches in few_batches(40)]
        ends[kind] = sum(losses[-10:]) / 10
        assert losses[0] - ends[kind] > 0.3
    assert abs(ends["bf16"] - ends["fp32"]) < 0.005 * ends["fp32"], ends
    assert abs(ends["fp8"] - ends["fp32"]) < 0.02 * ends["fp32"], ends
