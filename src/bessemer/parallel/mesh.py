"""The mesh of a run's ranks: dp = replicas x shard, the shard axis inside.

FSDP2 acts only over the shard axis; replicas are separate groups, one for each shard coordinate, so that the
reduction across them stays one function of our own (`data.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from bessemer.core.job import Job

__all__ = ["Mesh", "build_mesh"]


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. `axes` is None in a one-process run, which then needs no process group."""

    rank: int
    world_size: int
    replicas: int
    shard: int
    device: torch.device
    axes: DeviceMesh | None = None

    @property
    def replica_index(self) -> int:
        return self.rank // self.shard

    @property
    def shard_index(self) -> int:
        return self.rank % self.shard

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard in the other replicas; None where there is just one replica."""
        return self.axes.get_group("replica") if self.axes is not None and self.replicas > 1 else None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self.axes.get_group("shard") if self.axes is not None and self.shard > 1 else None

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place; every rank gets the same bits."""
        if self.axes is not None:
            dist.all_reduce(values)
        return values

    def max_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum of `values` over all ranks, in place."""
        if self.axes is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """Rank `source`'s `text` on every rank, as bytes (nothing is pickled)."""
        if self.axes is None:
            return text
        data = text.encode()
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, source)
        buffer = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, source)
        return bytes(buffer.tolist()).decode()


def build_mesh(job: Job, rank: int, device: torch.device) -> Mesh:
    """The mesh of `job` for `rank`; the default process group must exist when the job has more than one rank."""
    world = job.layout.world_size
    axes = None
    if world > 1:
        axes = init_device_mesh(device.type, (job.replicas, job.shard), mesh_dim_names=("replica", "shard"))
    return Mesh(rank, world, job.replicas, job.shard, device, axes)
