"""The run's state as canonical slices: what the checkpoint room saves and fills.

A parameter may pack several logical tensors and may be sharded by rows; each rank turns the rows it holds into
slices of the logical tensors (`models/canonical.py`). Replicas hold the same rows, so each slice has one owner
among them and all ranks write in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bessemer.keep.slices import Slice
from bessemer.models.canonical import pieces
from bessemer.parallel.mesh import Mesh
from bessemer.train.optim import Optimizer, local, local_rows

__all__ = ["OPTIMIZER_PREFIX", "owned", "slices_of", "state_names", "state_slices"]

OPTIMIZER_PREFIX = "optim."


def state_slices(module: nn.Module, optimizer: Optimizer | None) -> list[Slice]:
    """Every slice of parameters and optimizer state that this rank holds; the tensors are views, not copies."""
    # the optimizer's parameters are the sharded ones, whatever a forward pass has left gathered in the module
    slices = slices_of(module, dict(module.named_parameters()) if optimizer is None else optimizer.params)
    for kind, named in optimizer.state_tensors().items() if optimizer is not None else ():
        slices += slices_of(module, named, f"{OPTIMIZER_PREFIX}{kind}/")
    return slices


def state_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The canonical names of the whole state over all ranks, however little of it this rank holds."""
    names = {"": set(dict(module.named_parameters()))}
    names |= {f"{OPTIMIZER_PREFIX}{kind}/": set(named) for kind, named in optimizer.state_tensors().items()}
    known = pieces(module)
    return [prefix + piece.name for prefix, params in names.items() for piece in known if piece.param in params]


def slices_of(module: nn.Module, named: Mapping[str, torch.Tensor], prefix: str = "") -> list[Slice]:
    """`named` tensors, each of the shape and sharding of the parameter of that name, as canonical slices."""
    slices: list[Slice] = []
    for piece in pieces(module):
        tensor = named.get(piece.param)
        if tensor is None:
            continue
        first, count = local_rows(tensor)
        start, stop = max(first, piece.row), min(first + count, piece.row + piece.rows)
        if start >= stop:
            continue
        offset = (start - piece.row, *(0 for _ in piece.shape[1:]))
        rows = local(tensor).detach()[start - first : stop - first]
        slices.append(Slice(prefix + piece.name, tuple(piece.shape), offset, rows))
    return slices


def owned(slices: list[Slice], mesh: Mesh) -> list[Slice]:
    """The slices that this rank writes: replicas share them out by size, largest first, the same way on each."""
    loads = [0] * mesh.replicas
    owner: dict[int, int] = {}
    by_size = sorted(range(len(slices)), key=lambda i: (-slices[i].tensor.nbytes, slices[i].name))
    for i in by_size:
        least = loads.index(min(loads))
        owner[i] = least
        loads[least] += slices[i].tensor.nbytes
    return [s for i, s in enumerate(slices) if owner[i] == mesh.replica_index]
