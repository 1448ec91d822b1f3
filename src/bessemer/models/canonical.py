"""Which rows of which parameter hold which logical tensor.

Logical ("canonical") tensors are unfused and unsharded, named as in checkpoints:
`layers.3.attn.q.weight`, `layers.3.mlp.gate.weight`, `embed.weight` ... The experts of a layer are stacked:
`layers.3.mlp.experts.gate.weight` is [experts, out, in]. The block of a prediction module lies beside its own parts:
`mtp.0.attn.kv_a.weight`, `mtp.0.join.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.core.errors import CheckpointError
from bessemer.core.model import ModelSpec

__all__ = ["Piece", "load_state", "pieces", "shapes", "state"]


@dataclass(frozen=True)
class Piece:
    """`param[row : row + rows]` is the logical tensor `name`, of the same shape as that slice."""

    param: str
    name: str
    row: int
    rows: int
    shape: tuple[int, ...]


def pieces(model: nn.Module) -> list[Piece]:
    """All logical tensors of a `Decoder`, in the order of its parameters; every row of every parameter once."""
    spec: ModelSpec = model.spec
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    found = []
    for param, tensor in model.named_parameters():
        path = param.split(".")
        if path[0] == "blocks":
            path[0] = "layers"
        elif path[0] == "mtp" and path[2] == "block":
            del path[2]
        tail = tuple(tensor.shape[1:])
        parts: tuple[tuple[str, int], ...] = ((path[-2], tensor.shape[0]),)
        if path[-2] == "qkv":
            parts = (("q", q), ("k", kv), ("v", kv))
        elif path[-2] == "gate_up":
            parts = (("gate", tensor.shape[0] // 2), ("up", tensor.shape[0] // 2))
        row = 0
        for part, rows in parts:
            found.append(Piece(param, ".".join((*path[:-2], part, path[-1])), row, rows, (rows, *tail)))
            row += rows
    return found


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every logical tensor of a model, without building it."""
    from bessemer.models.decoder import Decoder

    return {p.name: p.shape for p in pieces(Decoder(spec, device="meta"))}


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, view of the parameter's rows) of every logical tensor of an unsharded model."""
    parameters = dict(model.named_parameters())
    for piece in pieces(model):
        yield piece.name, parameters[piece.param].detach()[piece.row : piece.row + piece.rows]


@torch.no_grad()
def load_state(model: nn.Module, source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Copies logical tensors into an unsharded model, one after another. Raises CheckpointError that lists every
    missing, unexpected, repeated and wrongly shaped name."""
    into = dict(state(model))
    missing, wrong = set(into), []
    for name, tensor in source.items() if isinstance(source, Mapping) else source:
        if name not in into:
            wrong.append(f"{name} is unexpected")
        elif name not in missing:
            wrong.append(f"{name} comes twice")
        elif tuple(tensor.shape) != tuple(into[name].shape):
            missing.discard(name)
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, the model {tuple(into[name].shape)}")
        else:
            missing.discard(name)
            into[name].copy_(tensor)
    wrong += [f"{name} is missing" for name in into if name in missing]
    if wrong:
        raise CheckpointError("the weights don't fit the model:\n  " + "\n  ".join(wrong), code="weights-mismatch")
