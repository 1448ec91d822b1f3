"""A job built and run in shapes only: each kind of rank of any number of them, in one process, without data.

    for rank in dry_run(job, spec): print(rank.pipeline_rank, rank.lines)

The mesh, the share of the model, its sharding and the optimizer are those of the run; process groups are torch's "fake"
ones, and tensors lie on the meta device. Operators tell what their CPU kernels save and allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.core.schedules import SCHEDULES, schedule_actions, stages_of_rank
from bessemer.core.stages import num_stages, stage_ranges
from bessemer.models.decoder import Decoder
from bessemer.parallel.axes import held_layers, split_of
from bessemer.parallel.data import shard
from bessemer.parallel.expert import ExpertParallel
from bessemer.parallel.mesh import Mesh, build_mesh
from bessemer.parallel.program import Step, rank_program, transfer_order
from bessemer.train.assembly import COMPUTE_DTYPES
from bessemer.train.dry_memory import StageBytes, peak_bytes, stage_bytes, state_bytes

__all__ = ["RankMemory", "dry_run"]


@dataclass(frozen=True)
class RankMemory:
    """The fullest rank of a pipeline rank. `parameters`: elements that it keeps. `lines`: bytes."""

    pipeline_rank: int
    layers: tuple[int, ...]
    parameters: int
    lines: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.lines.values())


def dry_run(job: Job, spec: ModelSpec) -> list[RankMemory]:
    """What a rank of each pipeline rank holds; along the other axes the first rank has the largest share.

    Experts get equal loads. No process group may exist. AssertionError and shape errors are bugs.
    """
    layout = job.layout
    inner = job.shard * layout.cp * layout.tp
    known: dict[object, StageBytes] = {}
    found = []
    for pipeline_rank in range(layout.pp):
        with _fake_ranks(pipeline_rank * inner, layout.world_size):
            mesh = build_mesh(job, pipeline_rank * inner, torch.device("cpu"), spec)
            found.append(_rank(job, spec, mesh, known))
    return found


@contextmanager
def _fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(job: Job, spec: ModelSpec, mesh: Mesh, known: dict[object, StageBytes]) -> RankMemory:
    layers = held_layers(job, spec, mesh)
    whole, sharded = (_share(job, spec, mesh, layers) for _ in range(2))
    shard(sharded, mesh, job.layout.dp_shard)
    lines = state_bytes(job, sharded, mesh)
    held, most = peak_bytes(*_passes(job, spec, mesh, whole, known))
    lines |= {"activations": held, "working": most - held}
    parameters = lines["weights"] // torch.float32.itemsize
    return RankMemory(mesh.at("pp"), layers, parameters, lines)


def _share(job: Job, spec: ModelSpec, mesh: Mesh, layers: tuple[int, ...]) -> Decoder:
    """What this rank holds of the model before sharding, on the meta device."""
    module = Decoder(spec, device="meta", split=split_of(job, spec, mesh, _EvenExperts), layers=layers)
    module.compute_dtype = COMPUTE_DTYPES[job.precision.recipe]
    return module


def _passes(
    job: Job, spec: ModelSpec, mesh: Mesh, module: Decoder, known: dict[object, StageBytes]
) -> tuple[list[Step], dict[int, StageBytes]]:
    """What the rank does for a unit, and the bytes of each of its stages; like stages are run once."""
    layout = job.layout
    tokens_BS = torch.empty(job.train.micro_batch, job.data.seq_len, dtype=torch.int64, device="meta")
    if layout.pp == 1:
        stage = stage_bytes(module, range(spec.num_layers), tokens_BS, split_backward=False)
        return [Step("F", 0, 0), Step("B", 0, 0)], {0: stage}
    kind, ranges = SCHEDULES[layout.schedule], stage_ranges(spec, layout, job.data.seq_len)
    chunks, stages = num_stages(layout) // layout.pp, {}
    for stage in stages_of_rank(kind, layout.pp, chunks, mesh.at("pp")):
        layers = ranges[stage]
        alike = (
            stage == 0,
            layers.stop == spec.num_layers,
            tuple((spec.is_moe_layer(i), spec.window(i)) for i in layers),
        )
        if alike not in known:
            known[alike] = stage_bytes(module, layers, tokens_BS, split_backward=kind.split_backward)
        stages[stage] = known[alike]
    ranks = schedule_actions(layout.schedule, layout.pp, job.micro_batches, layout.virtual_stages)
    return rank_program(mesh.at("pp"), ranks[mesh.at("pp")], transfer_order(ranks)), stages


class _EvenExperts(ExpertParallel):
    """Every expert gets as many rows: how many they are would be read from the device."""

    def _sizes(self, rows_TD: Tensor, counts_EL: Tensor, received_GL: Tensor) -> tuple[list[int], list[int]]:
        rows, ranks = rows_TD.shape[0], self.degree
        even = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
        return even, [even[self.rank]] * len(received_GL)
