"""Bytes of one rank of a job, line by line: a modelled estimate, made before anything is allocated.

    lines = memory_lines(job, spec)          # {"parameters": ..., "gradients": ..., ...}
    problem = memory_problem(job, spec, machine)

What the trainer holds is counted tensor by tensor; activations are those that backward reads when nothing is
recomputed and attention is fused (no S x S scores). Left out: the allocator's slack, and communication buffers of
the library. For a pipeline the fullest stage is given.
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
LOGIT_CHUNK_TOKENS = 1024
"""The loss takes logits of at most this many tokens at a time."""
PROCESS_BYTES = 264 << 20
"""Resident memory of a process that has imported torch 2.13 with its distributed part (CPU wheel, Linux; measured)."""


def memory_lines(job: Job, spec: ModelSpec) -> dict[str, int]:
    """Bytes by line on the fullest rank. Modelled.

    process: the interpreter with torch.  parameters: fp32 masters.  gradients.  gradient_sum: the copy that is summed
    over replicas.  optimizer.  gathered_parameters: what sharded data parallelism holds whole besides its shard.
    low_precision_weights: the matrices cast for the matrix products.  activations.  logits.  checkpoint_copy: this
    rank's part of the state, copied for writing; it lies in the host's memory.
    """
    stage = max(_stages(job, spec), key=lambda s: s.parameters)
    params, matrices, shard = stage.parameters, stage.matrices, job.shard
    kind = job.layout.dp_shard if shard > 1 else "none"
    replicated_sum = job.replicas > 1 and kind == "none"
    state = _optimizer_bytes(job, stage)
    gathered = 0
    if kind in ("optimizer", "gradient"):
        gathered = params
    elif kind == "full":
        gathered = min(2 * stage.largest_block, params)  # the block at work, and the next one on its way
    compute_bytes = 4 if RECIPES[job.precision.recipe].compute == "fp32" else 2
    lines = {
        "process": PROCESS_BYTES,
        "parameters": MASTER_BYTES * params // (1 if kind == "none" else shard),
        "gradients": MASTER_BYTES * params // (shard if kind in ("gradient", "full") else 1),
        "gradient_sum": MASTER_BYTES * params if replicated_sum else 0,
        "optimizer": state // (1 if kind == "none" else shard),
        "gathered_parameters": MASTER_BYTES * gathered,
        "low_precision_weights": 0 if compute_bytes == 4 else compute_bytes * matrices,
        "activations": stage.activation_elements * compute_bytes + stage.activation_bytes,
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
        # The embedding is looked up, not multiplied; a head is multiplied whether it is tied or not.
        self.matrices = self.hidden_matrices + (table if last else 0)
        tokens = math.ceil(job.train.micro_batch * job.data.seq_len / layout.cp)
        in_flight = min(layout.pp, max(job.train.global_batch // (job.train.micro_batch * layout.dp), 1))
        per_token = sum(_layer_activations(spec, layer, job) for layer in layers)
        self.activation_elements = math.ceil(in_flight * tokens * (per_token + (2 * spec.hidden_size if last else 0)))
        self.activation_bytes = in_flight * tokens * len(layers) * 4 * spec.num_heads // layout.tp  # log-sum-exp, fp32
        chunk = min(tokens, LOGIT_CHUNK_TOKENS)
        self.logit_bytes = 2 * 4 * chunk * spec.vocab_size // layout.tp if last else 0  # logits and their gradient


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


def _layer_activations(spec: ModelSpec, layer: int, job: Job) -> float:
    """Elements that backward reads, per token: inputs of norms and matrices, q, k, v, attention output, gate and up."""
    hidden, mla, moe = spec.hidden_size, spec.mla, spec.moe
    value_dim = spec.head_dim if mla is None else mla.v_head_dim
    kv = spec.num_kv_heads * (spec.head_dim + value_dim)
    inner = spec.num_heads * (spec.head_dim + value_dim) + kv
    if mla is not None:
        inner += 2 * (mla.kv_lora_rank + (mla.q_lora_rank or 0))
    per_width = 3 if spec.gated else 2
    if moe is not None and spec.is_moe_layer(layer):
        inner += moe.top_k * (hidden + per_width * moe.expert_ffn_size) + per_width * moe.shared_ffn_size
    else:
        inner += per_width * spec.ffn_size
    outer = 4 * hidden  # inputs and outputs of both norms
    return outer / (job.layout.tp if job.layout.sequence_parallel else 1) + inner / job.layout.tp


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
