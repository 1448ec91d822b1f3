"""A job built and run in shapes only: each kind of rank of any number of them, in one process, without data.

    for rank in dry_run(job, spec): print(rank.pipeline_rank, rank.lines)

The mesh, the share of the model, its sharding and the optimizer are those of the run; process groups are torch's "fake"
ones, and tensors lie on the meta device. Operators tell what their CPU kernels save and allocate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from bessemer.core.held import layers_by_stage
from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.core.schedules import SCHEDULES, schedule_actions
from bessemer.models.decoder import Decoder
from bessemer.models.quantise import quantise
from bessemer.parallel.axes import split_of
from bessemer.parallel.data import shard
from bessemer.parallel.expert import ExpertParallel
from bessemer.parallel.mesh import Mesh, build_mesh
from bessemer.parallel.program import Step, rank_program, transfer_order
from bessemer.parallel.recompute import apply_recompute
from bessemer.train.assembly import COMPUTE_DTYPES, quantising
from bessemer.train.dry_memory import StageBytes, peak_bytes, scattered_bytes, stage_bytes, state_bytes

__all__ = ["RankMemory", "dry_run"]


_BACKEND = "shapes"


def _fake_group(common: Any, options: Any) -> FakeProcessGroup:
    """What torch's backend "fake" is made of. That one doesn't know the meta device."""
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # type: ignore[call-arg]


dist.Backend.register_backend(_BACKEND, _fake_group, extended_api=True, devices=["cpu", "meta"])


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
    for rank, (program, stages) in enumerate(
        zip(_programs(job), layers_by_stage(spec, layout, job.data.seq_len), strict=True)
    ):
        with _fake_ranks(rank * inner, layout.world_size):
            mesh = build_mesh(job, rank * inner, torch.device("cpu"), spec)
            found.append(_rank(job, spec, mesh, program, stages, known))
    return found


@contextmanager
def _fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    if world_size == 1:
        yield
        return
    hook = sys.excepthook  # torch puts one in its place that names the rank
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _programs(job: Job) -> list[list[Step]]:
    """What each pipeline rank does for a unit."""
    layout = job.layout
    if layout.pp == 1:
        return [[Step("F", 0, 0), Step("B", 0, 0)]]
    ranks = schedule_actions(layout.schedule, layout.pp, job.micro_batches, layout.virtual_stages)
    order = transfer_order(ranks)
    return [rank_program(rank, actions, order) for rank, actions in enumerate(ranks)]


def _rank(
    job: Job,
    spec: ModelSpec,
    mesh: Mesh,
    program: list[Step],
    stages: Mapping[int, range],
    known: dict[object, StageBytes],
) -> RankMemory:
    """`known`: stages that were run for other ranks; those that are alike aren't run again."""
    layers = tuple(sorted(layer for own in stages.values() for layer in own))
    whole, sharded = (_share(job, spec, mesh, layers) for _ in range(2))
    shard(sharded, mesh, job.layout.dp_shard)
    lines = state_bytes(job, sharded, mesh)
    applied = apply_recompute(whole, job, mesh.at("pp"))
    split = job.layout.pp > 1 and SCHEDULES[job.layout.schedule].split_backward
    tokens_BS = torch.empty(job.train.micro_batch, job.data.seq_len, dtype=torch.int64, device="meta")
    passed = {}
    for stage, own in stages.items():
        kinds = tuple((spec.is_moe_layer(i), spec.window(i), applied.parts[i]) for i in own)
        alike = (own.start == 0, own.stop == spec.num_layers, kinds)
        if alike not in known:
            known[alike] = stage_bytes(whole, own, tokens_BS, split_backward=split)
        passed[stage] = known[alike]
    held, most = peak_bytes(program, passed)
    lines |= {"activations": held, "working": most - held + scattered_bytes(job, sharded, mesh)}
    return RankMemory(mesh.at("pp"), layers, lines["weights"] // torch.float32.itemsize, lines)


def _share(job: Job, spec: ModelSpec, mesh: Mesh, layers: tuple[int, ...]) -> Decoder:
    """What this rank holds of the model before sharding, on the meta device."""
    module = Decoder(spec, device="meta", split=split_of(job, spec, mesh, _EvenExperts), layers=layers)
    module.compute_dtype = COMPUTE_DTYPES[job.precision.recipe]
    how = quantising(job)
    if how is not None:
        quantise(module, how)
    return module


class _EvenExperts(ExpertParallel):
    """Every expert gets as many rows: how many they are would be read from the device."""

    def _sizes(self, rows_TD: Tensor, counts_EL: Tensor, received_GL: Tensor) -> tuple[list[int], list[int]]:
        rows, ranks = rows_TD.shape[0], self.degree
        even = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
        return even, [even[self.rank]] * len(received_GL)
