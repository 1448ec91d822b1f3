"""Which rows of which parameter hold which block of which logical tensor.

Logical ("canonical") tensors are unfused and unsharded, named as in checkpoints:
`layers.3.attn.q.weight`, `layers.3.mlp.gate.weight`, `embed.weight` ... The experts of a layer are stacked:
`layers.3.mlp.experts.gate.weight` is [experts, out, in]. The block of a prediction module lies beside its own parts:
`mtp.0.attn.kv_a.weight`, `mtp.0.join.weight`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bessemer.core.errors import CheckpointError
from bessemer.core.model import ModelSpec
from bessemer.models.moe import Stack
from bessemer.models.parts import HeadNorm, Projection
from bessemer.models.router import Router

__all__ = ["Held", "Piece", "held", "load_state", "local", "local_box", "local_rows", "pieces", "shapes", "state"]


@dataclass(frozen=True)
class Piece:
    """`param[row : row + rows]` is the block at `offset` of the logical tensor `name`, whose whole shape is `shape`.

    Rows that fill a parameter up to equal shares (of a vocabulary) belong to no piece.
    """

    param: str
    name: str
    row: int
    rows: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tail: tuple[int, ...]
    """The parameter's dims after the first."""
    expert: bool = False
    """Experts' weights: divided among the ranks of expert parallelism instead."""
    copies: int = 1
    """Tensor-parallel ranks that hold this same block (of an expert's: 1)."""
    partial: bool = False
    """Each of them computes only its own tokens' or heads' part of the gradient."""

    @property
    def extent(self) -> tuple[int, ...]:
        """The block's shape."""
        return (self.rows, *self.tail)

    def within(self, dims: int = 0) -> tuple[slice, ...]:
        """The index of the block in the whole tensor, from dim `dims` on."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset[dims:], self.extent[dims:], strict=True))


@dataclass(frozen=True)
class Held:
    """A block of a logical tensor that this rank holds: a view, contiguous, and the piece that it is (a part) of."""

    piece: Piece
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def within(self) -> tuple[slice, ...]:
        """The block's index in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds: itself unless FSDP has sharded it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of the part of `tensor` that this rank holds; a dim of 0 where that is nothing."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """(first row, rows) of the part of `tensor` that this rank holds."""
    offset, shape = local_box(tensor)
    return (offset[0], shape[0]) if shape[0] else (0, 0)


_known: weakref.WeakKeyDictionary[nn.Module, list[Piece]] = weakref.WeakKeyDictionary()


def pieces(model: nn.Module) -> list[Piece]:
    """The blocks of logical tensors that a `Decoder` holds, in the order of its parameters."""
    if model not in _known:  # every step asks, and the answer stays the same
        _known[model] = _pieces(model)
    return _known[model]


def _pieces(model: nn.Module) -> list[Piece]:
    found: list[Piece] = []
    for param, tensor in model.named_parameters():
        path = param.split(".")
        owner = model.get_submodule(".".join(path[:-1]))
        if path[0] == "blocks":
            path[0] = "layers"
        elif path[0] == "mtp" and path[2] == "block":
            del path[2]
        made = _Parameter(model, owner, param, path, tuple(tensor.shape))
        found += made.pieces()
    return [p for p in found if p.rows > 0]


@dataclass(frozen=True)
class _Parameter:
    """One parameter, and how its kind of module is divided."""

    model: nn.Module
    owner: nn.Module
    param: str
    path: list[str]
    shape: tuple[int, ...]

    def pieces(self) -> list[Piece]:
        spec: ModelSpec = self.model.spec
        tensor = self.model.split.tensor
        owner, name = self.owner, self.path[-2]
        if isinstance(owner, Stack):
            return [self._stack(name)]
        if name in ("embed", "head"):
            return [self._vocabulary(spec.vocab_size)]
        if isinstance(owner, Projection) and owner.part == "columns":
            if name == "qkv":
                return self._heads(spec)
            parts = ("gate", "up") if name == "gate_up" else (name,)
            rows = self.shape[0] // len(parts)
            return [self._rows(part, i * rows, rows, rows * tensor.degree) for i, part in enumerate(parts)]
        if isinstance(owner, Projection) and owner.part == "rows" and self.path[-1] == "weight":
            whole = (self.shape[0], self.shape[1] * tensor.degree)
            offset = (0, self.shape[1] * tensor.rank)
            return [Piece(self.param, ".".join(self.path), 0, self.shape[0], whole, offset, self.shape[1:])]
        # of the rest every rank has all; the router sees only its own tokens, and these norms only its own heads
        partial = tensor.sequence_parallel or isinstance(owner, HeadNorm | Router)
        partial = partial and tensor.degree > 1
        offset = (0,) * len(self.shape)
        name = ".".join(self.path)
        whole, tail, copies = self.shape, self.shape[1:], tensor.degree
        return [Piece(self.param, name, 0, whole[0], whole, offset, tail, copies=copies, partial=partial)]

    def _rows(self, part: str, row: int, rows: int, whole: int, first: int | None = None, copies: int = 1) -> Piece:
        """Rows `row`.. of the parameter: those from `first` on (by default this rank's equal share) of `whole`."""
        first = rows * self.model.split.tensor.rank if first is None else first
        tail = self.shape[1:]
        name = ".".join((*self.path[:-2], part, self.path[-1]))
        offset = (first, *(0 for _ in tail))
        return Piece(self.param, name, row, rows, (whole, *tail), offset, tail, copies=copies, partial=copies > 1)

    def _heads(self, spec: ModelSpec) -> list[Piece]:
        """Query, key and value rows; a key/value head may be held by several ranks, each for its own queries."""
        tensor, width = self.model.split.tensor, spec.head_dim
        q = spec.num_heads * width // tensor.degree
        copies = max(1, tensor.degree // spec.num_kv_heads)
        kv_heads = max(1, spec.num_kv_heads // tensor.degree)
        first, kv, whole = tensor.rank // copies * kv_heads * width, kv_heads * width, spec.num_kv_heads * width
        return [
            self._rows("q", 0, q, spec.num_heads * width),
            self._rows("k", q, kv, whole, first, copies),
            self._rows("v", q + kv, kv, whole, first, copies),
        ]

    def _vocabulary(self, whole: int) -> Piece:
        first = self.shape[0] * self.model.split.tensor.rank
        return self._rows(self.path[-2], 0, max(0, min(self.shape[0], whole - first)), whole, first)

    def _stack(self, name: str) -> Piece:
        split = self.model.split.experts
        experts, out, inner = self.shape
        cut = (2, inner) if name == "down" else (1, out)  # which dim the ranks of one expert divide
        shape, offset = [experts * split.degree, out, inner], [experts * split.rank, 0, 0]
        shape[cut[0]], offset[cut[0]] = cut[1] * split.width_degree, cut[1] * split.width_rank
        name = ".".join(self.path)
        return Piece(self.param, name, 0, experts, tuple(shape), tuple(offset), self.shape[1:], expert=True)


def held(model: nn.Module, named: Mapping[str, Tensor] | None = None) -> Iterator[Held]:
    """The blocks that this rank holds of the model's parameters, or of `named` tensors, each of the shape and the
    sharding of the parameter of that name."""
    named = dict(model.named_parameters()) if named is None else named
    for piece in pieces(model):
        tensor = named.get(piece.param)
        if tensor is None:
            continue
        at, shape = local_box(tensor)
        start, stop = max(at[0], piece.row), min(at[0] + shape[0], piece.row + piece.rows)
        if start < stop and all(shape[1:]):
            inner = (whole + own for whole, own in zip(piece.offset[1:], at[1:], strict=True))
            offset = (piece.offset[0] + start - piece.row, *inner)
            yield Held(piece, offset, local(tensor).detach()[start - at[0] : stop - at[0]])


@functools.lru_cache(maxsize=8)
def shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every logical tensor of a model, without building it."""
    from bessemer.models.decoder import Decoder

    return {p.name: p.shape for p in pieces(Decoder(spec, device="meta"))}


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, view of the parameter's rows) of every logical tensor of a model that is held whole."""
    for block in held(model):
        assert tuple(block.tensor.shape) == block.piece.shape, f"{block.piece.name} is not whole here"
        yield block.piece.name, block.tensor


@torch.no_grad()
def load_state(model: nn.Module, source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Copies what this rank holds out of whole logical tensors, one after another. Raises CheckpointError that lists
    every missing, unexpected, repeated and wrongly shaped name."""
    known = shapes(model.spec)
    into: dict[str, list[Held]] = {}
    for block in held(model):
        into.setdefault(block.piece.name, []).append(block)
    missing, wrong = set(known), []
    for name, tensor in source.items() if isinstance(source, Mapping) else source:
        if name not in known:
            wrong.append(f"{name} is unexpected")
        elif name not in missing:
            wrong.append(f"{name} comes twice")
        elif tuple(tensor.shape) != known[name]:
            missing.discard(name)
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, the model {known[name]}")
        else:
            missing.discard(name)
            for block in into.get(name, ()):
                block.tensor.copy_(tensor[block.within])
    wrong += [f"{name} is missing" for name in known if name in missing]
    if wrong:
        raise CheckpointError("the weights don't fit the model:\n  " + "\n  ".join(wrong), code="weights-mismatch")
