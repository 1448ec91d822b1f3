"""What each recompute policy keeps and what it makes again, counted and measured on a Llama and on two MoE shapes.

    python bench/recompute.py [--json]

bf16 products around float32 masters, one process, one thread. *Kept*: bytes of all storages that are alive between
forward and backward, parameters left out. *Peak of a step*: parameters, the moments of AdamW and the most that forward
and backward had alive at a time, gradients among them. *Extra FLOPs*: of matrix products and attention in the backward
pass, over those without recompute. The bars of `fine` are a quarter of what `full` makes again, at 1.3 times its
memory. Of what is kept no choice of parts meets both, since the outputs of the products that don't run again take
more than that: so the least that any choice keeps at a quarter of the FLOPs is measured beside it. Seconds: CPU time of
a forward and a backward pass, the fastest of three.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from table import Row, main

from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.parallel.recompute import apply_recompute
from bessemer.parallel.recompute_budget import Applied, applied_recompute
from bessemer.runtime.allocations import AllocationSample
from bessemer.runtime.kernels import KernelSample

BATCH, SEQ, ROUNDS = 4, 512, 3
LLAMA: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA | {
    "family": "mixtral",
    "intermediate_size": 768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
}
DEEPSEEK = LLAMA | {
    "family": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
SHAPES = {"llama": LLAMA, "mixtral": MIXTRAL, "deepseek": DEEPSEEK}
POLICIES = ("none", "selective", "ops", "fine", "mlp", "full")
QUARTER, MEMORY = 0.25, 1.3


@dataclass(frozen=True)
class Measured:
    kept: int
    peak: int
    forward: float
    backward: float


def job_of(model: dict[str, Any], policy: str, **train: Any) -> Job:
    fields = {"micro_batch": BATCH, "global_batch": BATCH, "recompute": policy, **train}
    return Job.model_validate({"model": model, "data": {"seq_len": SEQ}, "train": fields})


class Runner:
    """A model of a shape under a policy, and one batch."""

    def __init__(self, job: Job) -> None:
        self.model: Decoder = build(resolve_model(job.model), seed=1, compute_dtype=torch.bfloat16)
        self.applied: Applied = apply_recompute(self.model, job)
        vocab, made = self.model.spec.vocab_size, torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, vocab, (BATCH, SEQ), generator=made)

    def seconds(self) -> float:
        self.model.zero_grad(set_to_none=True)
        start = time.process_time()
        self.model(self.rows, self.rows)[0].backward()
        return time.process_time() - start

    def measure(self) -> Measured:
        params = list(self.model.parameters())
        allocations, kernels = AllocationSample(), KernelSample()
        allocations.ignore(*params, self.rows)
        with kernels, allocations:
            loss, _ = self.model(self.rows, self.rows)
            kept, forward = allocations.alive_bytes(), sum(kernels.flops.values())
            loss.backward()
        optimizer = torch.optim.AdamW(params, fused=True)
        optimizer.step()
        moments = [t for state in optimizer.state.values() for t in state.values()]
        peak = allocations.peak_bytes + sum(t.nbytes for t in (*params, *moments))
        return Measured(kept, peak, forward, sum(kernels.flops.values()) - forward)


def least(model: dict[str, Any], **train: Any) -> Job:
    """The budget with the fewest bytes whose choice makes a quarter of `full`'s FLOPs again, or less."""
    full = applied(job_of(model, "full", **train))
    most = QUARTER * full.again_flops
    size, plain = full.kept_bytes, full.plain_bytes
    while size < plain:
        job = job_of(model, "budget", recompute_gb=size / 1e9, **train)
        if applied(job).again_flops <= most:
            return job
        size = int(size * 1.02) + 1
    return job_of(model, "none", **train)


def applied(job: Job) -> Applied:
    found = applied_recompute(job, _spec(job))
    assert found is not None
    return found


def _spec(job: Job) -> ModelSpec:
    return resolve_model(job.model)


def rows() -> list[Row]:
    """Bytes, FLOPs and seconds by policy."""
    torch.set_num_threads(1)
    found: list[Row] = []
    for name, model in SHAPES.items():
        found += _shape(name, model)
    for preset in ("llama-3-8b", "deepseek-v3"):
        job, full = least({"preset": preset}, micro_batch=1), applied(job_of({"preset": preset}, "full", micro_batch=1))
        value = applied(job).kept_bytes / full.kept_bytes
        found.append(
            Row(f"{preset} modelled, least kept by blocks at a quarter of full's FLOPs, over full", value, "x", "lower")
        )
    return found


def _shape(name: str, model: dict[str, Any]) -> list[Row]:
    jobs = {p: job_of(model, p) for p in POLICIES} | {"least": least(model)}
    runners = {p: Runner(job) for p, job in jobs.items()}
    measured = {p: runner.measure() for p, runner in runners.items()}
    none, full = measured["none"], measured["full"]
    timed = {p: min(runners[p].seconds() for _ in range(ROUNDS)) for p in ("none", "fine", "full")}

    def extra(policy: str) -> float:
        return measured[policy].backward - none.backward

    found = []
    for policy, m in measured.items():
        label = "budget at a quarter of full's FLOPs" if policy == "least" else policy
        note = (
            f"extra FLOPs {extra(policy) / none.forward:.1%} of a forward pass, peak of a step {m.peak / 2**20:.0f} MiB"
        )
        found.append(Row(f"{name}, {label}: kept", m.kept / 2**20, "MiB", "lower", note=note))
    for policy, label in (("fine", "fine"), ("least", "budget")):
        m, blocks = measured[policy], runners[policy].applied.kept_bytes / runners["full"].applied.kept_bytes
        found += [
            Row(f"{name}, {label}: extra FLOPs over full's", extra(policy) / extra("full"), "x", "lower", QUARTER),
            Row(f"{name}, {label}: peak of a step over full's", m.peak / full.peak, "x", "lower", MEMORY),
            Row(
                f"{name}, {label}: kept over full's", m.kept / full.kept, "x", "lower", MEMORY, f"blocks {blocks:.1f} x"
            ),
        ]
    for policy in ("fine", "full"):
        found.append(Row(f"{name}, {policy}: CPU seconds over none", timed[policy] / timed["none"], "x", "lower"))
    return found


if __name__ == "__main__":
    main(rows)
