"""Bytes of one rank of a job, line by line: a modelled estimate, made before anything is allocated.

    lines = memory_lines(job, spec)          # {"parameters": ..., "gradients": ..., ...}
    problem = memory_problem(job, spec, machine)

What the trainer holds is counted tensor by tensor; activations are those that its operators save for backward,
nothing recomputed and attention fused (no S x S scores). Left out: the allocator's slack, and communication buffers
of the library: the measured peak of a CPU process was 3 to 41 % above the estimate (docs/log.md). For a pipeline the
fullest stage is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bessemer.core.counts import LayerCounts, layer_parameters, parameter_counts
from bessemer.core.job import Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem
from bessemer.core.recipes import RECIPES
from bessemer.core.units import format_bytes

__all__ = ["job_bytes", "memory_lines", "memory_problem"]

MASTER_BYTES = 4
"""Master parameters, gradients and optimizer state are fp32 under every recipe."""
LOGIT_CHUNK_BYTES = 16 << 20
"""The loss holds logits of at most this size at a time (`ops.cross_entropy`)."""
PROCESS_BYTES = 264 << 20
"""Resident memory of a process that has imported torch 2.13 with its distributed part (CPU wheel, Linux; measured)."""


def memory_lines(job: Job, spec: ModelSpec) -> dict[str, int]:
    """Bytes by line on the fullest rank. Modelled.

    process: the interpreter with torch.  parameters: fp32 masters.  gradients.  gradient_sum: the copy that is summed
    over replicas.  optimizer.  gathered_parameters: what sharded data parallelism holds whole besides its shard.
    activations: saved for backward.  working: the largest matrix in the compute type and the gradients of one layer's
    activations.  logits: a chunk of them, and the head's gradient, which waits for backward.  checkpoint_copy: this
    rank's part of the state, copied for writing; it lies in the host's memory.
    """
    stage = max(_stages(job, spec), key=lambda s: s.parameters)
    params, shard = stage.parameters, job.shard
    kind = job.layout.dp_shard if shard > 1 else "none"
    replicated_sum = job.replicas > 1 and kind == "none"
    state = _optimizer_bytes(job, stage)
    gathered = 0
    if kind in ("optimizer", "gradient"):
        gathered = params
    elif kind == "full":
        gathered = min(2 * stage.largest_block, params)  # the block at work, and the next one on its way
    lines = {
        "process": PROCESS_BYTES,
        "parameters": MASTER_BYTES * params // (1 if kind == "none" else shard),
        "gradients": MASTER_BYTES * params // (shard if kind in ("gradient", "full") else 1),
        "gradient_sum": MASTER_BYTES * params if replicated_sum else 0,
        "optimizer": state // (1 if kind == "none" else shard),
        "gathered_parameters": MASTER_BYTES * gathered,
        "activations": stage.activation_bytes,
        "working": stage.working_bytes,
        "logits": stage.logit_bytes,
        "checkpoint_copy": math.ceil((MASTER_BYTES * params + state) / job.layout.dp),
    }
    return {name: size for name, size in lines.items() if size}


def job_bytes(job: Job, spec: ModelSpec, machine: Machine) -> int:
    """Bytes that must fit in one memory of `machine`: of one rank on its device, or of all ranks on one CPU host."""
    lines = memory_lines(job, spec)
    if machine.device != "cpu":
        return sum(size for name, size in lines.items() if name not in ("process", "checkpoint_copy"))
    ranks = job.layout.world_size if machine.name == "cpu-local" else machine.gpus_per_node
    return sum(lines.values()) * min(ranks, job.layout.world_size)


def memory_problem(job: Job, spec: ModelSpec, machine: Machine) -> Problem | None:
    """The problem `memory` where the estimate is above the machine's memory; None where it fits or isn't known."""
    limit = machine.limit_bytes
    if limit is None or job.precision.recipe not in RECIPES or job.layout.dp % job.replicas:
        return None
    needed = job_bytes(job, spec, machine)
    if needed <= limit:
        return None
    lines = memory_lines(job, spec)
    largest = sorted(lines, key=lambda name: -lines[name])[:3]
    fixes = _fixes(job, spec, machine, limit)
    many = machine.device == "cpu" and job.layout.world_size > 1
    return Problem(
        code="memory",
        where=fixes[0].split(" ")[0] if fixes else "machine.name",
        what=f"the job needs about {format_bytes(needed)} and {machine.name} has {format_bytes(limit)}",
        why=f"modelled{', all ranks share one memory' if many else ''}; the largest parts of a rank: "
        + ", ".join(f"{name} {format_bytes(lines[name])}" for name in largest),
        fix=" or ".join(fixes) or "a smaller model, more devices to share it (layout), or a machine with more memory",
    )


class _Stage:
    """One pipeline stage on one rank: whole (unsharded) sizes of what it holds, in elements unless named bytes."""

    def __init__(self, job: Job, spec: ModelSpec, layers: range, first: bool, last: bool) -> None:
        layout = job.layout
        counts = [layer_parameters(spec, layer) for layer in layers]
        table = spec.vocab_size * spec.hidden_size // layout.tp
        ends = (table if first else 0) + (table if last and not (spec.tied_embeddings and first) else 0)
        if first and spec.positions == "learned":
            ends += spec.max_positions * spec.hidden_size
        blocks = [_block(c, job) for c in counts]
        self.largest_block = max([*blocks, ends], default=ends)
        final_norm = spec.hidden_size * (2 if spec.norm == "layernorm" else 1)
        self.parameters = sum(blocks) + ends + (final_norm if last else 0)
        if last and spec.mtp_layers:
            self.parameters += parameter_counts(spec).mtp // layout.tp
        self.hidden_matrices = sum(blocks) - sum(c.norms for c in counts)
        compute = _compute_bytes(job)
        tokens = math.ceil(job.train.micro_batch * job.data.seq_len / layout.cp)
        in_flight = min(layout.pp, max(job.train.global_batch // (job.train.micro_batch * layout.dp), 1))
        per_layer = [_saved_bytes(spec, layer, job) for layer in layers]
        final = spec.hidden_size * (MASTER_BYTES + 2 * compute) if last else 0  # the sum, its norm, and its gradient
        self.activation_bytes = math.ceil(in_flight * tokens * (sum(per_layer) + final))
        widest = max(table if last else 0, _widest_matrix(spec) // layout.tp)
        cast = compute * widest if compute < MASTER_BYTES else 0
        self.working_bytes = math.ceil(cast + tokens * max(per_layer, default=0))
        chunk = min(LOGIT_CHUNK_BYTES, compute * tokens * spec.vocab_size)
        self.logit_bytes = chunk // layout.tp + MASTER_BYTES * table if last else 0


def _stages(job: Job, spec: ModelSpec) -> Iterator[_Stage]:
    pp = job.layout.pp
    sizes = list(job.layout.stage_layers) or [math.ceil(spec.num_layers / pp)] * pp
    start = 0
    for index, size in enumerate(sizes):
        layers = range(min(start, spec.num_layers), min(start + size, spec.num_layers))
        yield _Stage(job, spec, layers, first=index == 0, last=index == len(sizes) - 1)
        start += size


def _block(counts: LayerCounts, job: Job) -> int:
    layout = job.layout
    dense = (counts.attention + counts.dense_ffn) // layout.tp
    return dense + counts.experts // (layout.ep * layout.etp) + counts.router + counts.norms


def _optimizer_bytes(job: Job, stage: _Stage) -> int:
    """AdamW: two moments. Muon: one momentum for the hidden matrices, AdamW's two for the rest."""
    muon = stage.hidden_matrices if job.train.optimizer == "muon" else 0
    return MASTER_BYTES * (2 * (stage.parameters - muon) + muon)


def _compute_bytes(job: Job) -> int:
    return 4 if RECIPES[job.precision.recipe].compute == "fp32" else 2


def _widest_matrix(spec: ModelSpec) -> int:
    """Elements of the largest packed projection of a layer: gate and up, or query, key and value."""
    if spec.mla is not None:
        return spec.hidden_size * 2 * spec.ffn_size
    packed = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return spec.hidden_size * max(packed, (2 if spec.gated else 1) * spec.ffn_size)


def _saved_bytes(spec: ModelSpec, layer: int, job: Job) -> float:
    """Bytes that one layer saves for backward, per token.

    The residual stream is fp32 and is saved by both norms; their outputs, q, k, v (once more before the qk-norm),
    the attention output, gate and up and their product are in the compute type; log-sum-exp is fp32 for each head.
    """
    hidden, heads, mla, moe, tp = spec.hidden_size, spec.num_heads, spec.mla, spec.moe, job.layout.tp
    value_dim = spec.head_dim if mla is None else mla.v_head_dim
    qkv = heads * spec.head_dim + spec.num_kv_heads * (spec.head_dim + value_dim)
    inner = qkv * (2 if spec.qk_norm else 1) + heads * value_dim
    if mla is not None:
        inner += 2 * (mla.kv_lora_rank + (mla.q_lora_rank or 0))
    per_width = 3 if spec.gated else 2
    if moe is not None and spec.is_moe_layer(layer):
        inner += moe.top_k * (hidden + per_width * moe.expert_ffn_size) + per_width * moe.shared_ffn_size
    else:
        inner += per_width * spec.ffn_size
    compute = _compute_bytes(job)
    outer = 2 * hidden * (MASTER_BYTES + compute)
    return outer / (tp if job.layout.sequence_parallel else 1) + (compute * inner + 4 * heads) / tp


def _fixes(job: Job, spec: ModelSpec, machine: Machine, limit: int) -> list[str]:
    """Changes that would make the job fit, by trying them: one alone where that is enough, else both together."""
    micro, layout = job.train.micro_batch, job.layout
    micros = [m for m in range(micro - 1, 0, -1) if micro % m == 0]
    sharded = layout.dp > 1 and layout.dp_shard == "none" and job.keep.replicas is None
    kinds = ["optimizer", "gradient", "full"] if sharded else []

    def fits(micro_batch: int, dp_shard: str) -> bool:
        changed = job.model_copy(
            update={
                "train": job.train.model_copy(update={"micro_batch": micro_batch}),
                "layout": layout.model_copy(update={"dp_shard": dp_shard}),
            }
        )
        return job_bytes(changed, spec, machine) <= limit

    fixes = [f"train.micro_batch = {m}" for m in micros if fits(m, layout.dp_shard)][:1]
    fixes += [f'layout.dp_shard = "{kind}"' for kind in kinds if fits(micro, kind)][:1]
    if not fixes:
        both = ((m, kind) for kind in kinds for m in micros if fits(m, kind))
        fixes += [f'layout.dp_shard = "{kind}" and train.micro_batch = {m}' for m, kind in both][:1]
    return fixes
