"""Blocks of the model that several ranks of a replica hold: how many copies there are, which is whose, and the sum of
gradients of which each copy has only a part.

Copies arise along the tensor axis (norms, routers, key/value heads that outnumbered ranks share), at both ends of the
pipeline (the embedding) and, where FSDP doesn't shard, along the data axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bessemer.comm import collectives as comm
from bessemer.models.canonical import Held, Piece, held, local, local_rows, pieces
from bessemer.parallel.mesh import Mesh

__all__ = ["Copies", "copies_of", "squared_norm", "sum_partial_gradients", "whole_block"]


@dataclass(frozen=True)
class Copies:
    """Along each kind of axis (copies, this rank's place among them)."""

    replica: tuple[int, int]
    data: tuple[int, int]
    tensor: tuple[int, int]
    ends: tuple[int, int]

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        return (self.replica, self.data, self.tensor, self.ends)

    @property
    def count(self) -> int:
        """Over the whole world."""
        return math.prod(n for n, _ in self.axes)

    @property
    def place(self) -> int:
        """This rank's among them."""
        place = 0
        for n, at in self.axes:
            place = place * n + at
        return place

    @property
    def in_replica(self) -> int:
        return self.count // self.replica[0]


def copies_of(piece: Piece, tensor: Tensor, mesh: Mesh) -> Copies:
    """Who else holds what this rank holds of `piece`, of a parameter like `tensor`."""
    group = "expert_data" if piece.expert else "data"
    data = (1, 0) if isinstance(tensor, DTensor) else (mesh.size(group), mesh.index(group))
    ends = (1, 0) if mesh.ends is None or piece.name != "embed.weight" else (2, int(mesh.at("pp") > 0))
    # neighbours hold the same key/value heads; of everything else either one rank holds a block, or all do
    tensor_copies = (piece.copies, mesh.at("tp") % piece.copies)
    return Copies((mesh.sizes["replica"], mesh.at("replica")), data, tensor_copies, ends)


@torch.no_grad()
def sum_partial_gradients(module: nn.Module, gradients: Mapping[str, Tensor | None], mesh: Mesh) -> None:
    """Sum, in place, the gradients of which this rank has only the part of its own tokens, heads or pipeline stage.

    gradients: by parameter, after the sum over the data ranks; those of other ranks that share a block have the same
    shape and sharding.
    """
    found = [p for p in pieces(module) if gradients.get(p.param) is not None]
    rows = {"tensor": [p for p in found if p.partial and p.copies == mesh.sizes["tp"]]}
    rows["heads"] = [p for p in found if p.partial and p.copies < mesh.sizes["tp"]]
    rows["ends"] = [p for p in found if p.name == "embed.weight"]
    groups = {"tensor": mesh.group("tensor"), "heads": mesh.heads, "ends": mesh.ends}
    for kind, chosen in rows.items():
        group = groups[kind]
        if group is not None and chosen:
            _sum_over([b for p in chosen for b in _block(p, gradients[p.param])], group)


def _block(piece: Piece, gradient: Tensor | None) -> Iterable[Tensor]:
    """The rows of `piece` that this rank holds of a gradient: a view; none where sharding left it none."""
    assert gradient is not None
    first, count = local_rows(gradient)
    start, stop = max(first, piece.row), min(first + count, piece.row + piece.rows)
    return [local(gradient)[start - first : stop - first]] if start < stop else []


def _sum_over(blocks: list[Tensor], group: dist.ProcessGroup) -> None:
    """One reduction for all of them."""
    if not blocks:
        return
    flat = torch.cat([b.reshape(-1) for b in blocks])
    comm.all_reduce(flat, group=group)
    for block, summed in zip(blocks, flat.split([b.numel() for b in blocks]), strict=True):
        block.copy_(summed.view_as(block))


@torch.no_grad()
def squared_norm(module: nn.Module, gradients: Mapping[str, Tensor], mesh: Mesh) -> Tensor:
    """The squared 2-norm of the whole model's gradient, float64: each element once, however many ranks hold it.

    Squares are summed in float64, so that no grouping shows; the same bits on every rank.
    """
    by_copies: dict[int, list[Tensor]] = {}
    blocks: Iterable[Held] = held(module, gradients)
    for block in blocks:
        copies = copies_of(block.piece, gradients[block.piece.param], mesh).in_replica
        by_copies.setdefault(copies, []).append(block.tensor)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for copies, tensors in by_copies.items():
        total += torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum() / copies
    if mesh.group("block") is not None:
        comm.all_reduce(total, group=mesh.group("block"))
    if mesh.group("replica") is not None:  # whatever order each replica summed in
        comm.all_reduce(total, op=dist.ReduceOp.MAX, group=mesh.group("replica"))
    return total


def whole_block(piece: Piece, block: Tensor, mesh: Mesh) -> Tensor:
    """The logical matrix (of experts: those that this rank holds, each whole) of which `block` is this rank's part.
    Collective over the ranks that divide it."""
    group = mesh.group("experts") if piece.expert else mesh.group("tensor")
    first = 1 if piece.expert else 0
    cut = [d for d in range(first, len(piece.shape)) if block.shape[d] != piece.shape[d]]
    if group is None or not cut:
        return block
    gathered = block.new_empty(group.size() * block.shape[0], *block.shape[1:])
    comm.all_gather_single(gathered, block.contiguous(), group=group)
    parts = list(gathered.split(block.shape[0]))
    if piece.expert:  # the ranks of one expert are neighbours
        start = mesh.at("ep") * mesh.sizes["etp"]
        parts = parts[start : start + mesh.sizes["etp"]]
    return torch.cat(parts[:: piece.copies], cut[0])
