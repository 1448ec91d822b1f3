"""The mesh of a run's ranks.

    world  = replicas x pp x shard x cp x tp        the last axis varies fastest
    stage  = shard x cp x tp = edp x ep x etp       the same ranks, seen by the experts of a pipeline stage

dp = replicas x shard. A replica, the unit of failure, is a run of consecutive ranks that together hold the model once;
gradients cross replicas in groups of their own, so that their reduction stays one function (`data.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bessemer.comm import collectives as comm
from bessemer.core.schedules import SCHEDULES

if TYPE_CHECKING:
    from bessemer.core.job import Job
    from bessemer.core.model import ModelSpec

__all__ = ["GROUPS", "Mesh", "build_mesh"]

GROUPS: dict[str, tuple[str, ...]] = {
    "replica": ("replica",),  # the same share of the model in the other replicas
    "pipeline": ("pp",),
    "tensor": ("tp",),
    "context": ("cp",),
    "data": ("shard", "cp"),  # inside a replica, the ranks that see other tokens with the same weights
    "sequence": ("cp", "tp"),  # the ranks of one sequence
    "block": ("pp", "shard", "cp", "tp"),  # a replica
    "experts": ("ep", "etp"),  # the ranks that together hold all experts of a stage
    "expert_data": ("edp",),  # inside a replica, the ranks that hold the same experts
}
"""Name -> the axes along which the ranks of a group differ."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. `groups` holds what this rank belongs to, but for groups of one; a one-process run has
    none and needs no process group."""

    rank: int
    sizes: Mapping[str, int]
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    ends: dist.ProcessGroup | None = None
    """The first and the last pipeline rank, where they differ and both hold the embedding."""
    heads: dist.ProcessGroup | None = None
    """The tensor-parallel ranks that hold the same key/value heads, where there are several."""

    @classmethod
    def alone(cls, device: torch.device) -> Mesh:
        """One process with the whole model."""
        return cls(0, dict.fromkeys(("replica", "pp", "shard", "cp", "tp", "edp", "ep", "etp"), 1), device)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes[axis] for axis in ("replica", "pp", "shard", "cp", "tp"))

    def at(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        sizes = self.sizes
        inner = sizes["shard"] * sizes["cp"] * sizes["tp"]
        in_stage = self.rank % inner
        if axis == "replica":
            return self.rank // (inner * sizes["pp"])
        if axis == "pp":
            return self.rank // inner % sizes["pp"]
        below = {"shard": ("cp", "tp"), "cp": ("tp",), "tp": (), "edp": ("ep", "etp"), "ep": ("etp",), "etp": ()}
        return in_stage // math.prod(sizes[a] for a in below[axis]) % sizes[axis]

    def size(self, group: str) -> int:
        """The ranks of a named group."""
        return math.prod(self.sizes[axis] for axis in GROUPS[group])

    def index(self, group: str) -> int:
        """This rank's place in a named group."""
        place = 0
        for axis in GROUPS[group]:
            place = place * self.sizes[axis] + self.at(axis)
        return place

    def group(self, name: str) -> dist.ProcessGroup | None:
        """None where this rank would be alone in it."""
        return self.groups.get(name)

    def device_mesh(self, name: str) -> DeviceMesh:
        """A named group of several ranks as torch's one-dimensional mesh, for FSDP2."""
        return DeviceMesh.from_group(self.groups[name], self.device.type, mesh_dim_names=(name,))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank speaks for its tokens: tensor-parallel ranks all know the same loss."""
        return self.at("tp") == 0

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place; every rank gets the same bits."""
        if self.world_size > 1:
            comm.all_reduce(values)
        return values

    def max_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum of `values` over all ranks, in place."""
        if self.world_size > 1:
            comm.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """Rank `source`'s `text` on every rank, as bytes (nothing is pickled)."""
        if self.world_size == 1:
            return text
        data = text.encode()
        size = torch.tensor([len(data)], device=self.device)
        comm.broadcast(size, source)
        buffer = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        comm.broadcast(buffer, source)
        return bytes(buffer.tolist()).decode()


def build_mesh(job: Job, rank: int, device: torch.device, spec: ModelSpec | None = None) -> Mesh:
    """The mesh of `job` for `rank`; the default process group must exist when the job has more than one rank.

    spec: of the model that is to be trained on it. Some of its weights may be held more than once.
    """
    layout = job.layout
    stage = job.shard * layout.cp * layout.tp
    sizes = {"replica": job.replicas, "pp": layout.pp, "shard": job.shard, "cp": layout.cp, "tp": layout.tp}
    sizes |= {"edp": stage // (layout.ep * layout.etp), "ep": layout.ep, "etp": layout.etp}
    mesh = Mesh(rank, sizes, device)
    if mesh.world_size == 1:
        return mesh
    comm.name_group(dist.group.WORLD, "world")
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(name: str, ranks: list[int]) -> dist.ProcessGroup | None:
        """Made by its members alone: one rank's groups are few, those of all ranks many."""
        if len(ranks) == 1:
            return None
        key = tuple(ranks)
        if key not in made:
            made[key] = dist.new_group(ranks, use_local_synchronization=True)
        comm.name_group(made[key], name)
        return made[key]

    groups = {name: found for name in GROUPS if (found := group(name, _members(mesh, name))) is not None}
    if spec is None:
        return Mesh(rank, sizes, device, groups)
    heads = group("heads", _same_heads(spec, mesh))
    return Mesh(rank, sizes, device, groups, group("ends", _ends(job, spec, mesh)), heads)


def _ends(job: Job, spec: ModelSpec, mesh: Mesh) -> list[int]:
    """This rank alone, or the two ends of its pipeline if it is one of them and both need the embedding."""
    pipeline = _members(mesh, "pipeline")
    ends = [pipeline[0], pipeline[-1]]
    apart = len(pipeline) > 1 and SCHEDULES[job.layout.schedule].shape == "loop"
    shared = apart and (spec.tied_embeddings or spec.mtp_layers > 0)
    return ends if shared and mesh.rank in ends else [mesh.rank]


def _same_heads(spec: ModelSpec, mesh: Mesh) -> list[int]:
    """The tensor-parallel ranks with this rank's key/value heads: several where there are more ranks than heads."""
    copies = mesh.sizes["tp"] // spec.num_kv_heads if spec.mla is None else 1
    if copies <= 1:
        return [mesh.rank]
    first = mesh.at("tp") // copies * copies
    return _members(mesh, "tensor")[first : first + copies]


def _members(mesh: Mesh, name: str) -> list[int]:
    """The ranks of this rank's group `name`, ascending."""
    experts = {"experts", "expert_data"} & {name}
    axes = ("replica", "pp", "edp", "ep", "etp") if experts else ("replica", "pp", "shard", "cp", "tp")
    grid = torch.arange(mesh.world_size).view(*(mesh.sizes[a] for a in axes))
    where = tuple(slice(None) if a in GROUPS[name] else mesh.at(a) for a in axes)
    return grid[where].flatten().tolist()
