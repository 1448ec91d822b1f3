"""What is made again in the backward pass changes no bit, and saves and costs what the closed forms say."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from train.toy import MODELS, SEQ, VOCAB, run_steps, toy_batch, toy_job, toy_parts

from bessemer import ops
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.recompute import PARTS
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.models.moe import expert_load
from bessemer.parallel.recompute import Recomputing, apply_recompute
from bessemer.parallel.recompute_budget import applied_recompute
from bessemer.runtime.allocations import AllocationSample
from bessemer.runtime.kernels import KernelSample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "fine": {"recompute": "fine"},
    "ops": {"recompute": "ops"},
    "mlp": {"recompute": "mlp"},
    "block": {"recompute": "block", "recompute_layers": 1},
    "full": {"recompute": "full"},
}


def job_of(family: str, recipe: str = "fp32", layout: dict[str, Any] | None = None, **train: Any) -> Job:
    return toy_job(model=MODELS[family], precision={"recipe": recipe}, layout=layout or {}, train=train)


def model_of(job: Job) -> Decoder:
    return build(resolve_model(job.model), seed=3, compute_dtype=DTYPES[job.precision.recipe])


def differentiated(job: Job, parts: frozenset[str] | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """(loss, gradients, load of the experts) under the job's policy, or with `parts` made again in every layer."""
    model = model_of(job)
    if parts is None:
        apply_recompute(model, job)
    else:
        model.saving = Recomputing(dict.fromkeys(model.layers, parts))
    loss, _ = model(**toy_batch([1, 2, 3]))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expert_load(model)


def same_bits(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert [n for n, g in one[1].items() if not torch.equal(g, other[1][n])] == []
    assert one[2] is other[2] is None or torch.equal(one[2], other[2])


@pytest.mark.parametrize("recipe", DTYPES)
@pytest.mark.parametrize("family", MODELS)
def test_no_policy_and_no_part_changes_a_bit(family: str, recipe: str) -> None:
    """Balance and z-losses among them: they act in the backward pass, and would act twice."""
    plain = differentiated(job_of(family, recipe))
    for policy in POLICIES.values():
        same_bits(plain, differentiated(job_of(family, recipe, **policy)))
    for part in PARTS:
        same_bits(plain, differentiated(job_of(family, recipe), frozenset({part})))
    for part in PARTS:  # all but one: its inputs come from parts, and parts read its outputs
        same_bits(plain, differentiated(job_of(family, recipe), frozenset(PARTS) - {part}))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_operators_in_plain_torch_change_no_bit_either(family: str) -> None:
    with ops.use("reference"):
        plain = differentiated(job_of(family))
        for policy in POLICIES.values():
            same_bits(plain, differentiated(job_of(family, **policy)))


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 full": ("llama", {"dp": 2, "dp_shard": "full"}),
    "deepseek_v3 dp2 full": ("deepseek_v3", {"dp": 2, "dp_shard": "full"}),
    "deepseek_v3 tp2 sequence": ("deepseek_v3", {"tp": 2, "sequence_parallel": True}),
    "cp2 ring": ("llama", {"cp": 2}),
    "mixtral ep2": ("mixtral", {"dp": 2, "ep": 2}),
    "pp2 zb-h1": ("llama", {"pp": 2, "schedule": "zb-h1"}),
}


def trained(rank: int, world: int, jobs: dict[str, Job]) -> dict[str, Any]:
    """By policy the loss, the norm and this rank's parameters after one step."""
    found = {}
    for name, job in jobs.items():
        parts = toy_parts(job, rank)
        apply_recompute(parts.module, job, parts.mesh.at("pp"))
        (result,) = run_steps(parts, 0, 1)
        state = [getattr(p, "_local_tensor", p).detach().numpy().copy() for p in parts.module.parameters()]
        found[name] = (result.loss, result.grad_norm, state)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_exchanges_inside_of_parts_change_no_bit(name: str) -> None:
    """Under sharded parameters, and where parts hold exchanges: the same bits as the same layout without recompute."""
    family, layout = LAYOUTS[name]
    jobs = {policy: job_of(family, layout=layout, **POLICIES[policy]) for policy in ("none", "fine", "mlp", "full")}
    for found in run_ranks(2, trained, jobs):
        loss, norm, state = found["none"]
        for policy, (other_loss, other_norm, other_state) in found.items():
            assert (other_loss, other_norm) == (loss, norm), policy
            assert all(np.array_equal(a, b) for a, b in zip(state, other_state, strict=True)), policy


def measured(job: Job) -> tuple[int, float, float]:
    """(bytes alive between forward and backward, FLOPs of the forward pass, FLOPs of the backward pass)."""
    model = model_of(job)
    apply_recompute(model, job)
    rows = torch.randint(0, VOCAB, (job.train.micro_batch, SEQ), generator=torch.Generator().manual_seed(1))
    allocations, kernels = AllocationSample(), KernelSample()
    allocations.ignore(*model.parameters(), rows)
    with kernels, allocations:
        loss, _ = model(rows, rows)
    kept, forward = allocations.alive_bytes(), sum(kernels.flops.values())
    with kernels:
        loss.backward()
    return kept, forward, sum(kernels.flops.values()) - forward


@pytest.mark.parametrize("recipe", DTYPES)
@pytest.mark.parametrize("family", MODELS)
def test_bytes_and_flops_are_those_of_the_closed_forms(family: str, recipe: str) -> None:
    """Against `full`, so that what the loss keeps falls away."""
    spec = resolve_model(job_of(family).model)
    found = {name: measured(job_of(family, recipe, **policy)) for name, policy in POLICIES.items()}
    modelled = {name: applied_recompute(job_of(family, recipe, **policy), spec) for name, policy in POLICIES.items()}
    for name, (kept, forward, backward) in found.items():
        expected = modelled[name]
        assert expected is not None
        bytes_over_full = expected.kept_bytes - modelled["full"].kept_bytes
        # layer norms keep two statistics a token instead of one, experts a few sums of one number
        assert kept - found["full"][0] == pytest.approx(bytes_over_full, rel=0.01, abs=64), name
        assert forward == found["none"][1], name
        assert backward - found["none"][2] == pytest.approx(expected.again_flops, rel=1e-9), name
    assert found["none"][0] > found["selective"][0] > found["mlp"][0] > found["full"][0]
    assert found["none"][0] > found["ops"][0] >= found["fine"][0] > found["full"][0]
    again = [found[n][2] for n in ("none", "ops", "fine", "mlp", "full")]
    assert again == sorted(again) and again[-1] > again[0]


def test_full_keeps_the_inputs_of_blocks_and_nothing_else() -> None:
    job = job_of("mixtral", "bf16", recompute="full")
    spec, tokens = resolve_model(job.model), job.train.micro_batch * SEQ
    applied = applied_recompute(job, spec)
    assert applied is not None
    assert applied.kept_bytes == spec.num_layers * tokens * spec.hidden_size * 4
    dense = applied_recompute(job_of("llama", recompute="full"), resolve_model(job_of("llama").model))
    assert dense is not None
    llama = resolve_model(job_of("llama").model)
    down = tokens * llama.num_layers * 2 * llama.hidden_size * llama.ffn_size
    assert dense.again_flops == dense.forward_flops - down  # nothing needs what the last product gave


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_nothing_outlives_the_backward_pass(family: str) -> None:
    model = model_of(job_of(family))
    model.saving = Recomputing(dict.fromkeys(model.layers, frozenset(PARTS)))
    batch, sample = toy_batch([1, 2]), AllocationSample()
    sample.ignore(*model.parameters(), *batch.values())
    gc.disable()  # whoever needs the collector has made a cycle
    try:
        with sample:
            loss, weight = model(**batch)
            loss.backward()
            del loss, weight
        grads = {p.grad.untyped_storage().data_ptr(): p.grad.nbytes for p in model.parameters() if p.grad is not None}
        load = [r.load.nbytes for r in model.modules() if getattr(r, "load", None) is not None]
        rope = 2 * SEQ * 4 * (2 if family == "deepseek_v3" else 4)
        assert sample.alive_bytes() <= sum(grads.values()) + sum(load) + rope
    finally:
        gc.enable()


def test_the_peak_falls_with_what_is_kept() -> None:
    peaks = []
    for policy in ("none", "fine", "full"):
        job = job_of("llama", **POLICIES[policy])
        job = job.model_copy(update={"model": job.model.model_copy(update={"num_hidden_layers": 8})})
        model = model_of(job)
        apply_recompute(model, job)
        rows = torch.zeros(8, SEQ, dtype=torch.int64)
        sample = AllocationSample()
        sample.ignore(*model.parameters(), rows)
        with sample:
            model(rows, rows)[0].backward()
        peaks.append(sample.peak_bytes)
    assert peaks[0] > 1.2 * peaks[1] > 1.44 * peaks[2]


class Counting(Recomputing):
    """Counts the runs of each part."""

    def __init__(self, parts: dict[int, frozenset[str]]) -> None:
        super().__init__(parts)
        self.runs: dict[str, int] = {}

    def part(self, name: str, run: Any, *inputs: Any) -> Any:
        def counted(*given: Any) -> Any:
            self.runs[name] = self.runs.get(name, 0) + 1
            return run(*given)

        return super().part(name, counted, *inputs)


def test_a_part_runs_once_more_and_only_if_somebody_asks() -> None:
    model = model_of(job_of("llama"))
    model.saving = counting = Counting({0: frozenset({"norm", "activation", "out"})})
    loss, _ = model(**toy_batch([1]))
    blocks = model.spec.num_layers
    forward = {"norm": 2 * blocks + 1, "qkv": blocks, "attention": blocks, "out": blocks, "up": blocks}
    assert counting.runs == forward | {"activation": blocks}
    loss.backward()
    assert counting.runs == forward | {"norm": 2 * blocks + 3, "activation": blocks + 1, "out": blocks + 1}
    with torch.no_grad():
        model(**toy_batch([1]))
    assert counting.runs["norm"] == 4 * blocks + 4  # evaluation: plain


def test_a_part_that_saves_something_else_the_second_time_is_noticed() -> None:
    saving, calls = Recomputing({0: frozenset({"norm"})}), []

    def fickle(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp().sin() if len(calls) == 1 else x.exp()

    x = torch.ones(3, requires_grad=True)
    with saving.layer(0):
        y = saving.part("norm", fickle, x) * torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="'norm' saved 1 tensors where it had saved 2"):
        y.sum().backward()


def test_what_was_gathered_is_had_again_through_the_run_that_is_named() -> None:
    """`made`: the first run is over when the part begins, as where a transfer was started early."""
    saving, calls = Recomputing({0: frozenset({"norm", "gather"})}), []

    def gather(x: Tensor) -> Tensor:
        calls.append(x.clone())
        return torch.cat((x, x))

    x = torch.arange(3.0, requires_grad=True)
    with saving.layer(0):
        normed = saving.part("norm", torch.exp, x)
        gathered = saving.made("gather", torch.cat((normed.detach(), normed.detach())), gather, normed.detach())
        weight = torch.ones(6, requires_grad=True)
        y = (gathered * weight).sum() + normed.sum()
    del gathered
    y.backward()
    assert len(calls) == 1 and torch.equal(calls[0], x.detach().exp())
    assert torch.equal(weight.grad, x.detach().exp().repeat(2))
    assert torch.equal(x.grad, x.detach().exp())
