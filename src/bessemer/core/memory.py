"""Bytes of one rank of a job, line by line: a modelled estimate, made before anything is allocated.

    lines = memory_lines(job, spec)          # {"parameters": ..., "gradients": ..., ...}
    problem = memory_problem(job, spec, machine)

What the trainer holds is counted in closed form, as `bessemer train --dry-run` counts it tensor by tensor. Left out:
the allocator's slack, and communication buffers of the library: the measured peak of a CPU process was 3 to 41 % above
the estimate (docs/log.md). For a pipeline the fullest rank is given.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from bessemer.core.errors import ConfigError
from bessemer.core.held import (
    Elements,
    HeldLayers,
    block_elements,
    end_elements,
    layers_by_stage,
    prediction_elements,
    rank_elements,
)
from bessemer.core.job import Job
from bessemer.core.layout import Layout
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem
from bessemer.core.rank_memory import (
    MASTER_BYTES,
    Copies,
    Passing,
    Sharing,
    final_norm_elements,
    held_bytes,
    rotation_bytes,
    scattered_bytes,
    sharing_of,
    state_lines,
    vector_elements,
    working_bytes,
)
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import RECOMPUTE
from bessemer.core.saved import layer_bytes, waiting_bytes
from bessemer.core.schedules import SCHEDULES, Action, check_shape, schedule_actions
from bessemer.core.sizes import Sizes
from bessemer.core.units import format_bytes

__all__ = ["job_bytes", "memory_lines", "memory_problem", "most_held", "rank_lines"]

PROCESS_BYTES = 264 << 20
"""Resident memory of a process that has imported torch 2.13 with its distributed part (CPU wheel, Linux; measured)."""


def memory_lines(job: Job, spec: ModelSpec) -> dict[str, int]:
    """Bytes by line on the fullest rank. Modelled.

    process: the interpreter with torch.  parameters: fp32 masters.  gradients: whole ones too, where sharding scatters
    them only at the end of a step.  gradient_sum: the copy that is summed over ranks.  optimizer.
    gathered_parameters: what sharded data parallelism holds whole besides its shard.  activations: held for backward,
    with the gradients that the loss makes early.  working: what a pass needs for a moment.  checkpoint_copy: this
    rank's part of the state, copied for writing; it lies in the host's memory.
    """
    lines = max(rank_lines(job, spec), key=lambda lines: sum(lines.values()))
    names = {"weights": "parameters", "gathered": "gathered_parameters"}
    found = {"process": PROCESS_BYTES, **{names.get(name, name): size for name, size in lines.items()}}
    found["checkpoint_copy"] = _checkpoint_copy(job, spec)
    return {name: size for name, size in found.items() if size}


def job_bytes(job: Job, spec: ModelSpec, machine: Machine) -> int:
    """Bytes that must fit in one memory of `machine`: of one rank on its device, or of all ranks on one CPU host."""
    lines, world_size = memory_lines(job, spec), job.layout.world_size
    if machine.device != "cpu":
        return sum(size for name, size in lines.items() if name not in ("process", "checkpoint_copy"))
    hosted = lines["process"] + lines["checkpoint_copy"]
    if machine.name == "cpu-local" or machine.gpus_per_node >= world_size:
        every = sum(sum(rank.values()) for rank in rank_lines(job, spec)) * (world_size // job.layout.pp)
        return every + hosted * world_size
    return sum(lines.values()) * machine.gpus_per_node


def memory_problem(job: Job, spec: ModelSpec, machine: Machine) -> Problem | None:
    """The problem `memory` where the estimate is above the machine's memory; None where it fits or isn't known."""
    limit = machine.limit_bytes
    if limit is None or not _fits_together(job, spec):
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


def rank_lines(job: Job, spec: ModelSpec) -> list[dict[str, int]]:
    """Bytes by line of the fullest rank of each pipeline rank: weights, gradients, gradient_sum, optimizer, gathered,
    activations, working."""
    layout, sharing = job.layout, _sharing(job, spec)
    kinds = {moe: block_elements(spec, layout, moe=moe) for moe in (False, True)}
    found = []
    for rank, stages in enumerate(layers_by_stage(spec, layout, job.data.seq_len)):
        held = HeldLayers.of(spec, itertools.chain(*stages.values()))
        blocks = [kinds[spec.is_moe_layer(layer)] for layer in itertools.chain(*stages.values())]
        if held.ends:
            blocks += [prediction_elements(spec, layout)] * spec.mtp_layers
        sizes = sorted(blocks, key=lambda b: sharing.sharded_dense * b.dense + sharing.sharded_experts * b.experts)
        largest = functools.reduce(Elements.plus, sizes[-2:])
        ends = end_elements(spec, layout, begins=held.begins, ends=held.ends).dense
        lines = state_lines(
            rank_elements(spec, layout, held),
            sharing,
            ends=ends,
            blocks=largest,
            final_norm=held.ends * final_norm_elements(spec),
            moments=job.precision.moments,
        )
        lines |= _passing_lines(job, spec, rank, stages)
        lines["working"] += scattered_bytes(sizes[-1], sharing)
        found.append({name: math.ceil(size) for name, size in lines.items()})
    return found


def _sharing(job: Job, spec: ModelSpec) -> Sharing:
    layout = job.layout
    data = job.shard * layout.cp
    local = spec.moe.num_experts // layout.ep if spec.moe is not None else 1
    width = spec.moe.expert_ffn_size // layout.etp if spec.moe is not None else 1
    experts = data * layout.tp // (layout.ep * layout.etp)
    several = job.train.global_batch > job.unit * job.replicas
    return sharing_of(
        Copies(data=data, experts=experts, replicas=job.replicas, local_experts=local, width=width),
        spec.hidden_size,
        sharded=int(layout.dp_shard != "none"),
        full=int(layout.dp_shard == "full"),
        accumulates=int(layout.pp > 1 or (layout.dp_shard == "optimizer" and several)),
        muon=int(job.train.optimizer == "muon"),
    )


def _passing_lines(job: Job, spec: ModelSpec, rank: int, stages: Mapping[int, range]) -> dict[str, float]:
    layout, wide = job.layout, compute_bytes(job)
    how = RECIPES[job.precision.recipe]
    narrow = how if job.precision.saved == "fp8" else None
    sizes = Sizes.of(layout, wide, job.train.micro_batch, coded=how.keeps_codes, narrow=narrow)
    table = math.ceil(spec.vocab_size / layout.tp) * spec.hidden_size
    tokens = job.train.micro_batch * job.data.seq_len / layout.cp
    passing = Passing(
        tokens=tokens,
        stream=sizes.sequence,
        wide=wide,
        hidden=spec.hidden_size,
        table=table,
        rotations=rotation_bytes(spec, layout.cp),
    )
    parts = _made_again(job, spec, sorted(itertools.chain(*stages.values())))
    last = spec.num_layers - 1

    def saved(layer: int) -> float:
        return layer_bytes(spec, layer, parts.get(layer, frozenset()), sizes)

    def waiting(layer: int) -> float:
        return waiting_bytes(spec, layer, sizes)

    held, loss, put_off = {}, {}, {}
    for stage, layers in stages.items():
        predictions = spec.mtp_layers if last in layers else 0
        held[stage], loss[stage] = held_bytes(
            passing, sum(map(saved, layers)), ends=int(last in layers), predictions=predictions, prediction=saved(last)
        )
        joined = predictions * (waiting(last) + 3 * wide * spec.hidden_size / sizes.sequence)
        put_off[stage] = tokens * (sum(map(waiting, layers)) + joined)
    whole = HeldLayers.of(spec, parts)
    rows = tokens / layout.tp * spec.moe.top_k if spec.moe is not None and whole.moe else 0.0
    matrix = widest_matrix(spec, layout, moe=whole.moe > 0)
    again = max(layer_bytes(spec, layer, (), sizes) - saved(layer) for layer in parts)
    working = working_bytes(passing, matrix=matrix, rows=rows, again=again, ends=int(whole.ends))
    activations = most_held(job, rank, held, put_off)
    if job.train.recompute_gb is not None:  # what is chosen fills the budget as far as it goes
        activations = min(activations, job.train.recompute_gb * 1e9 + max(loss.values()))
    return {"activations": activations, "working": working}


def _made_again(job: Job, spec: ModelSpec, layers: Sequence[int]) -> dict[int, frozenset[str]]:
    """The parts of each layer of a rank that its policy makes again; none for a budget, which chooses by itself."""
    train = job.train
    policy = RECOMPUTE.get(train.recompute, RECOMPUTE["none"])
    wanted = policy.parts if train.recompute_modules is None else train.recompute_modules
    count = (train.recompute_layers or 0) if policy.by_layer else len(layers)
    return {layer: frozenset(wanted if i < count else ()) for i, layer in enumerate(layers)}


def most_held(job: Job, rank: int, held: Mapping[int, float], put_off: Mapping[int, float]) -> float:
    """The most that a pipeline rank holds at a time of its micro-batches: each stage `held` from F to B, or to I where
    the backward pass is split, and `put_off` from I to W."""
    layout = job.layout
    if layout.pp == 1:
        return held[0]
    count = job.micro_batches
    if layout.schedule != "gpipe":
        count = min(count, 4 * layout.pp)  # by then a pipeline runs as it will go on
    now = most = 0.0
    for action in _actions(layout.schedule, layout.pp, count, layout.virtual_stages)[rank]:
        stage = action.stage
        if action.kind == "F":
            now += held[stage]
        elif action.kind == "B":
            now -= held[stage]
        elif action.kind == "I":
            now += put_off[stage] - held[stage]
        elif action.kind == "W":
            now -= put_off[stage]
        most = max(most, now)
    return most


@functools.lru_cache(maxsize=8)
def _actions(name: str, pp: int, num_micro: int, virtual_stages: int) -> list[list[Action]]:
    return schedule_actions(name, pp, num_micro, virtual_stages)


def compute_bytes(job: Job) -> int:
    """Of an element of the compute type."""
    return 4 if RECIPES[job.precision.recipe].compute == "fp32" else 2


def widest_matrix(spec: ModelSpec, layout: Layout, *, moe: bool) -> int:
    """Elements of the largest weight of a rank's blocks: gate and up together, or of experts either of them."""
    hidden, mla, tp = spec.hidden_size, spec.mla, layout.tp
    widest = hidden * ((2 if spec.gated else 1) * spec.ffn_size // tp)
    if mla is None:
        widest = max(widest, hidden * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim // tp)
    else:
        widest = max(widest, (mla.q_lora_rank or hidden) * spec.num_heads * spec.head_dim // tp)
    if spec.moe is not None and moe:
        width = spec.moe.expert_ffn_size // layout.etp
        return max(widest, spec.moe.num_experts // layout.ep * width * hidden)
    return widest


def _checkpoint_copy(job: Job, spec: ModelSpec) -> int:
    """This rank's part of a checkpoint: ranks that hold the same write different parts of it. Narrow moments are
    written in bfloat16."""
    layout, largest = job.layout, 0
    for stages in layers_by_stage(spec, layout, job.data.seq_len):
        held = HeldLayers.of(spec, itertools.chain(*stages.values()))
        e = rank_elements(spec, layout, held)
        ends = end_elements(spec, layout, begins=held.begins, ends=held.ends).dense
        vectors = vector_elements(e, ends, held.ends * final_norm_elements(spec))
        one_moment = e.matrices + e.experts if job.train.optimizer == "muon" else 0
        narrow = e.dense + e.experts - e.untrained - vectors if job.precision.moments != "fp32" else 0
        largest = max(largest, 3 * (e.dense + e.experts) - one_moment - narrow)  # two halves of float32
    return math.ceil(MASTER_BYTES * largest / layout.dp)


def _fits_together(job: Job, spec: ModelSpec) -> bool:
    """Whether the job's sizes divide as they must; otherwise other problems say so, and nothing can be counted."""
    layout, moe = job.layout, spec.moe
    if job.precision.recipe not in RECIPES or layout.dp % job.replicas or layout.schedule not in SCHEDULES:
        return False
    if job.shard * layout.cp * layout.tp % (layout.ep * layout.etp) or (moe and moe.num_experts % layout.ep):
        return False
    try:
        layers_by_stage(spec, layout, job.data.seq_len)
        if layout.pp > 1:
            check_shape(layout.schedule, layout.pp, job.micro_batches, layout.virtual_stages)
    except (ValueError, ConfigError):
        return False
    return job.micro_batches > 0


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
