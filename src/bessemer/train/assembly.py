"""What a rank trains with: model, data parallelism, optimizer and step, put together from a job and a mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from bessemer.core.job import Job
from bessemer.core.machine import load_machine
from bessemer.core.model import ModelSpec
from bessemer.core.paths import user_path
from bessemer.core.recipes import RECIPES
from bessemer.core.resolve import resolve_model
from bessemer.models.build import initialise
from bessemer.models.decoder import Decoder
from bessemer.models.hf import import_hf
from bessemer.models.quantise import Quantising, amax_names, quantise
from bessemer.models.watched import watching_of
from bessemer.parallel.axes import held_layers, split_of
from bessemer.parallel.compile import compile_blocks
from bessemer.parallel.data import DataParallel, shard
from bessemer.parallel.mesh import Mesh
from bessemer.parallel.recompute import apply_recompute
from bessemer.plan.gains import slow_layers
from bessemer.precision import numerics
from bessemer.precision.gpu import path_for, unit_of
from bessemer.train.diagnosis import stop_non_finite
from bessemer.train.optim import Optimizer
from bessemer.train.step import Step

__all__ = ["COMPUTE_DTYPES", "Assembly", "assemble", "quantising"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMPUTE_DTYPES = {r.name: _DTYPES[r.compute] for r in RECIPES.values() if r.runnable}
"""Per runnable recipe the type in which matrices are multiplied that it doesn't quantise; parameters and sums stay
float32."""


def quantising(job: Job, device: torch.device | None = None) -> Quantising | None:
    """What the job's recipe quantises and how, emulated or, with a device, on its path (RequestError where it has
    none); None for a recipe that quantises nothing. What the machine of the job would be slower at stays high, by the
    planner's word, on a CPU nothing."""
    section = job.precision
    if not RECIPES[section.recipe].quantised:
        return None
    found = numerics(section.recipe)
    if found.delayed:
        found = replace(
            found,
            history=section.history or found.history,
            choice=section.amax or found.choice,
            margin=section.margin or 0,
        )
    found = replace(found, stochastic=found.stochastic or section.stochastic)
    path = "emulated" if device is None else path_for(found, unit_of(device), emulate=section.emulate)
    return Quantising(
        found,
        section.high_first,
        section.high_last,
        smooth=section.smooth,
        narrow=section.saved == "fp8",
        fall_back=section.fall_back,
        path=path,
        slow=slow_layers(job, resolve_model(job.model), load_machine(job.machine.name)),
    )


@dataclass
class Assembly:
    """The parts of one rank. `module` is the model under data parallelism, with float32 master parameters."""

    job: Job
    spec: ModelSpec
    mesh: Mesh
    module: nn.Module
    parallel: DataParallel
    optimizer: Optimizer
    step: Step


def assemble(job: Job, spec: ModelSpec, mesh: Mesh, how: Quantising | None = None) -> Assembly:
    """What this rank holds of the job's model, laid over `mesh` and with an optimizer. No rank ever holds the model
    whole: each makes its own share from the seed, or reads it from `model.weights`. `how`: what is quantised, if not
    what the job's recipe says (experiments with formats that no recipe has)."""
    module = Decoder(spec, device="meta", split=split_of(job, spec, mesh), layers=held_layers(job, spec, mesh))
    module.compute_dtype = COMPUTE_DTYPES[job.precision.recipe]
    apply_recompute(module, job, mesh.at("pp"))
    compile_blocks(module, job)
    shard(module, mesh, job.layout.dp_shard, job.precision.gather)
    module.to_empty(device=mesh.device)
    initialise(module, job.train.seed)
    if job.model.weights is not None:
        import_hf(module, user_path(job.model.weights))  # a checkpoint replaces it later
    how = how or quantising(job, mesh.device)
    if how is not None:
        quantise(module, how)
    parallel = DataParallel(module, mesh, job.layout.dp_shard)
    optimizer = Optimizer(module, job, mesh)
    on_bad = partial(stop_non_finite, job, mesh, parallel)
    names = () if how is None else amax_names(spec, how)
    watching = None if how is None else watching_of(spec, how, every=job.precision.watch_every)
    step = Step(job, spec, mesh, parallel, optimizer, on_bad=on_bad, amax_names=names, watching=watching)
    return Assembly(job, spec, mesh, module, parallel, optimizer, step)
