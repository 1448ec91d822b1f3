"""The axes of a run put together: what of the model this rank holds, and how the shares of other ranks take part."""

from __future__ import annotations

from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.core.schedules import SCHEDULES, stages_of_rank
from bessemer.core.stages import num_stages, stage_ranges
from bessemer.models.split import ContextSplit, ExpertSplit, SequenceSplit, Split, TensorSplit
from bessemer.parallel.context import ContextParallel
from bessemer.parallel.expert import ExpertParallel
from bessemer.parallel.mesh import Mesh
from bessemer.parallel.sequence import SequenceRanks
from bessemer.parallel.tensor import TensorParallel

__all__ = ["held_layers", "split_of"]


def split_of(job: Job, spec: ModelSpec, mesh: Mesh, experts: type[ExpertParallel] = ExpertParallel) -> Split:
    """Tensor, context and expert parallelism of the job on this rank, the last by `experts`."""
    return Split(_tensor(job, spec, mesh), _context(job, mesh), _experts(job, mesh, experts), _sequence(mesh))


def _tensor(job: Job, spec: ModelSpec, mesh: Mesh) -> TensorSplit:
    group = mesh.group("tensor")
    if group is None:
        return TensorSplit()
    return TensorParallel(
        group,
        mesh.sizes["tp"],
        mesh.at("tp"),
        sequence_parallel=job.layout.sequence_parallel,
        vocab_size=spec.vocab_size,
        chunks=job.layout.tp_chunks,
    )


def _context(job: Job, mesh: Mesh) -> ContextSplit:
    group = mesh.group("context")
    if group is None:
        return ContextSplit()
    return ContextParallel(group, mesh.sizes["cp"], mesh.at("cp"), job.layout.cp_kind)


def _experts(job: Job, mesh: Mesh, kind: type[ExpertParallel]) -> ExpertSplit:
    if mesh.group("experts") is None and mesh.group("sequence") is None:
        return ExpertSplit()
    return kind(
        mesh.group("experts"),
        degree=mesh.sizes["ep"],
        rank=mesh.at("ep"),
        width_degree=mesh.sizes["etp"],
        width_rank=mesh.at("etp"),
        sequence_group=mesh.group("sequence"),
        token_ranks=mesh.size("sequence"),
        coded=job.precision.dispatch == "fp8",
    )


def _sequence(mesh: Mesh) -> SequenceSplit:
    group = mesh.group("sequence")
    return SequenceSplit() if group is None else SequenceRanks(group, mesh.size("sequence"), mesh.index("sequence"))


def held_layers(job: Job, spec: ModelSpec, mesh: Mesh) -> tuple[int, ...]:
    """The layers of this rank's pipeline stages, ascending."""
    layout = job.layout
    if layout.pp == 1:
        return tuple(range(spec.num_layers))
    chunks = num_stages(layout) // layout.pp
    stages = stages_of_rank(SCHEDULES[layout.schedule], layout.pp, chunks, mesh.at("pp"))
    ranges = stage_ranges(spec, layout, job.data.seq_len)
    return tuple(sorted(layer for stage in stages for layer in ranges[stage]))
