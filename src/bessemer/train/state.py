"""The run's state as canonical slices: what the checkpoint room saves and fills.

A parameter may pack several logical tensors, may be a share of them and may be sharded by rows; each rank turns what
it holds into slices of the logical tensors (`models/canonical.py`). Ranks that hold the same slice agree on one of
them that writes it, so that all write in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from bessemer.core.job import TrainSection
from bessemer.core.model import ModelSpec
from bessemer.keep.slices import Slice
from bessemer.models.canonical import held, shapes
from bessemer.models.quantise import histories
from bessemer.models.watched import held_troubles
from bessemer.parallel.copies import Copies, copies_of
from bessemer.parallel.mesh import Mesh
from bessemer.train.optim import Optimizer, moments

__all__ = [
    "FALL_BACK_PREFIX",
    "HISTORY_PREFIX",
    "OPTIMIZER_PREFIX",
    "filled_slices",
    "owned_slices",
    "slices_of",
    "state_names",
    "state_slices",
]

OPTIMIZER_PREFIX = "optim."
HISTORY_PREFIX = "precision.history/"
"""The amaxes of delayed scaling, float32 [3, steps] of each logical tensor, for x, weight and gradient."""
FALL_BACK_PREFIX = "precision.fall_back/"
"""Float32 [2] of each logical tensor that may go on without quantising: samples in a row with trouble, and the step
after which it did or 0."""


def state_slices(module: nn.Module, optimizer: Optimizer | None) -> list[Slice]:
    """Every slice of parameters, optimizer state and states of quantising that this rank holds; the tensors are views,
    but moments in FP8 copies in bfloat16."""
    return _slices(module, _named(module, optimizer))


@contextmanager
def filled_slices(module: nn.Module, optimizer: Optimizer) -> Iterator[list[Slice]]:
    """`state_slices` to write into: at the end the rank holds what was written."""
    found = _named(module, optimizer)
    yield _slices(module, found)
    optimizer.take({prefix[len(OPTIMIZER_PREFIX) : -1]: named for prefix, named in found.items() if prefix})


def _slices(module: nn.Module, found: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Slice]:
    return [s for prefix, named in found.items() for s in slices_of(module, named, prefix)] + _precision_slices(module)


def _precision_slices(module: nn.Module) -> list[Slice]:
    found = [Slice.whole(HISTORY_PREFIX + name, history) for name, history in histories(module)]
    return found + [Slice.whole(FALL_BACK_PREFIX + name, trouble) for name, trouble in held_troubles(module)]


def _named(module: nn.Module, optimizer: Optimizer | None) -> dict[str, Mapping[str, torch.Tensor]]:
    """By prefix the tensors of each parameter's shape."""
    # the optimizer's parameters are the sharded ones, whatever a forward pass has left gathered in the module
    named: dict[str, Mapping[str, torch.Tensor]] = {
        "": dict(module.named_parameters()) if optimizer is None else optimizer.params
    }
    for kind, tensors in optimizer.state_tensors().items() if optimizer is not None else ():
        named[f"{OPTIMIZER_PREFIX}{kind}/"] = tensors
    return named


def state_names(
    spec: ModelSpec, train: TrainSection, amax_names: Sequence[str] = (), fall_back_names: Sequence[str] = ()
) -> list[str]:
    """The canonical names of the whole state over all ranks, however little of it one rank holds. `amax_names`: the
    tensors whose scales follow a history; `fall_back_names`: those that may go on without quantising."""
    names = list(shapes(spec))
    kinds = {name: moments(name, len(shape), train) for name, shape in shapes(spec).items()}
    moved = [f"{OPTIMIZER_PREFIX}{kind}/{name}" for name in names for kind in kinds[name]]
    scaled = [HISTORY_PREFIX + name for name in amax_names] + [FALL_BACK_PREFIX + name for name in fall_back_names]
    return names + moved + scaled


def slices_of(module: nn.Module, named: Mapping[str, torch.Tensor], prefix: str = "") -> list[Slice]:
    """`named` tensors, each of the shape and sharding of the parameter of that name, as canonical slices."""
    return [Slice(prefix + h.piece.name, h.piece.shape, h.offset, h.tensor) for h in held(module, named)]


def owned_slices(module: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[Slice]:
    """The slices that this rank writes. Ranks with copies of the same slices share them out by size, largest first,
    each in the same way."""
    alike: dict[Copies, list[Slice]] = {}
    for prefix, named in _named(module, optimizer).items():
        for h in held(module, named):
            made = Slice(prefix + h.piece.name, h.piece.shape, h.offset, h.tensor)
            alike.setdefault(copies_of(h.piece, named[h.piece.param], mesh), []).append(made)
    mine: list[Slice] = []
    for copies, slices in alike.items():
        loads = [0] * copies.count
        for s in sorted(slices, key=lambda s: (-s.tensor.nbytes, s.name)):
            least = loads.index(min(loads))
            loads[least] += s.tensor.nbytes
            if least == copies.place:
                mine.append(s)
    if mesh.at("replica") == mesh.index("data") == mesh.at("tp") == 0:  # all ranks of a stage have the same, and little
        mine += _precision_slices(module)
    return mine
