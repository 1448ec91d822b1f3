"""How FSDP2 gathers the parameters of a unit: whole, or each in the narrowest form that its use allows.

The masters stay float32 and sharded, and so is what is gathered float32 in memory; between ranks a parameter travels as

    float32   what is computed in float32: norms, biases, routers, embeddings (also where the head is tied to one).
    nearest   bfloat16, of weights that every product converts to it anyway: the same step, bit for bit.
    odd       bfloat16 rounded to odd (`wire.to_odd`), of weights that a recipe quantises (`gather = "bf16"`): the same
              codes, scales and step, bit for bit, since every scale is a power of two.
    tensor    e4m3 under the scale of the recipe, one for each logical tensor that the weight packs (for each expert),
              on which all ranks that hold a part of it agree. Quantising what arrives gives the same numbers again,
              which are on the grid of this scale and of half of it: the same step, bit for bit.
    blocks    e4m3 with a scale for each 128 inputs (the recipe's own block, if smaller), where the recipe's scales are
              finer than a tensor's. Where the recipe's own block is 1 x 32 the forward product is the same bit for bit.
              A recipe's other tiles (rows, squares, blocks along the outputs) round the same numbers once more, which
              changes those alone that are below the normal numbers of either scale.

Under delayed scaling the amax that a step has seen of a weight stays that of its master. (Not of a smooth projection's,
which is multiplied by channels first: what is seen of it is right to 2^-8, and no scale follows from it. Such weights
travel rounded to odd under `gather = "fp8"` too.)

Legend: N elements of a shard, filled up as FSDP2 does; G ranks; R rows of a shard, C columns; P logical tensors of a
weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from bessemer.comm import collectives as comm
from bessemer.models.moe import Experts, Stack
from bessemer.models.parts import Projection
from bessemer.models.quantised import Quantised, QuantisedExperts
from bessemer.parallel.wire import coded_rows, decoded_rows, to_odd
from bessemer.precision import ROLES, Grain, Scheme, encode
from bessemer.precision.casts import amax
from bessemer.precision.formats import E4M3, E8M0
from bessemer.precision.scaled import TENSOR, scale_from

__all__ = ["ALIGNMENT", "Gather", "NarrowGather", "gathering"]

ALIGNMENT = 16
"""Bytes at multiples of which the parts of a rank's message begin: a GPU's widest load."""
BLOCK = 128
"""Inputs that share a scale where the recipe has one for a whole row."""
WEIGHT = ROLES.index("weight")

Travels = Literal["float32", "nearest", "odd", "tensor", "blocks"]


def gathering(unit: FSDPModule, kind: str, tensor: dist.ProcessGroup | None) -> Gather:
    """For a unit of FSDP2; `kind` is precision.gather. tensor: the ranks that hold other parts of its weights."""
    return Gather() if kind == "fp32" else NarrowGather(unit, kind, tensor)


class Gather(DefaultAllGather):
    """FSDP2's own gathering, marked and counted like all other communication."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return comm.all_gather_single(output_tensor, input_tensor, group, async_op)


@dataclass(frozen=True)
class _Logical:
    """The logical tensors that a weight packs, each `sizes` rows of it: q, k and v, or the experts of a stack. inside:
    FSDP cuts each of them, and `sizes` is what a rank has of each; otherwise it cuts all rows as they come. index: of
    the weight's amaxes in what `held` keeps of all. owner: whose call makes the products."""

    owner: nn.Module
    held: Quantised | QuantisedExperts
    sizes: tuple[int, ...]
    inside: bool
    index: tuple[Any, ...]

    @property
    def remembered(self) -> bool:
        """Whether a history follows the amaxes of the weight as it stands."""
        return self.held.numerics.delayed and not self.held.smooth

    def amaxes(self, shard_RC: Tensor, rank: int) -> Tensor:
        """Float32 [P]: of this rank's part of each, 0 of none."""
        rows, found = shard_RC.shape[0], []
        at = 0 if self.inside else -rank * rows
        for size in self.sizes:
            start, stop = (min(max(end, 0), rows) for end in (at, at + size))
            found.append(amax(shard_RC[start:stop]))
            at += size
        return torch.stack(found)

    def row_scales(self, amax_P: Tensor | None, rows: int, ranks: int) -> Tensor:
        """Float32 [G x R], of each row of all shards, from `amax_P` where no history says otherwise."""
        past_P = None if self.held.past is None else self.held.past[self.index]
        if past_P is not None:
            amax_P = past_P if amax_P is None else torch.where(past_P == 0, amax_P, past_P)
        assert amax_P is not None
        sizes = list(self.sizes)
        sizes[-1] += (rows if self.inside else ranks * rows) - sum(sizes)  # rows that only fill up
        scale_P = scale_from(amax_P, E4M3.max)
        scale = torch.cat([scale.expand(count) for scale, count in zip(scale_P.unbind(), sizes, strict=True)])
        return scale.repeat(ranks) if self.inside else scale


@dataclass(frozen=True)
class _Part:
    """A parameter on its way: `rows` of `columns` on each rank, filled up. logical: of a weight that a recipe
    quantises; scheme: of blocks."""

    rows: int
    columns: int
    travels: Travels
    logical: _Logical | None = None
    scheme: Scheme | None = None

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Of a rank's shard."""
        each = {"float32": 4, "nearest": 2, "odd": 2, "tensor": 1, "blocks": 1}[self.travels]
        scales = 0 if self.scheme is None else self.rows * -(-self.columns // self.scheme.grain.cols)
        return -(-(each * self.elements + scales) // ALIGNMENT) * ALIGNMENT

    @property
    def asks(self) -> bool:
        """Whether the ranks have to agree on its scales."""
        return self.travels == "tensor" and not (self.logical is not None and self.logical.held.known)

    def pack(self, shard_N: Tensor, into: Tensor, scale_R: Tensor | None) -> None:
        """`into`: uint8 [nbytes]."""
        if self.travels == "float32":
            made = shard_N
        elif self.travels == "nearest":
            made = shard_N.to(torch.bfloat16)
        elif self.travels == "odd":
            made = to_odd(shard_N)
        elif self.scheme is not None:
            made = coded_rows(shard_N.view(self.rows, self.columns), self.scheme)
        else:
            assert scale_R is not None
            made = encode(shard_N.view(self.rows, self.columns) / scale_R[:, None], E4M3)
        codes = made.flatten().view(torch.uint8)
        into[: codes.numel()] = codes

    def unpack(self, packed_GB: Tensor, into_GN: Tensor, scale_GR: Tensor | None) -> None:
        """uint8 [G, nbytes] -> float32 of all shards."""
        count = self.elements
        if self.travels == "float32":
            into_GN.copy_(packed_GB[:, : 4 * count].view(torch.float32))
        elif self.travels in ("nearest", "odd"):
            into_GN.copy_(packed_GB[:, : 2 * count].view(torch.bfloat16))
        elif self.scheme is not None:
            width = self.columns + -(-self.columns // self.scheme.grain.cols)
            rows = packed_GB[:, : self.rows * width].reshape(-1, width)
            into_GN.copy_(decoded_rows(rows, self.columns, self.scheme, torch.float32).view_as(into_GN))
        else:
            assert scale_GR is not None
            into_GN.copy_(packed_GB[:, :count].view(E4M3.dtype))  # widening is exact, and takes no memory on the way
            torch.unflatten(into_GN, 1, (self.rows, self.columns)).mul_(scale_GR.view(-1, self.rows, 1))


class NarrowGather(Gather):
    """Packs this rank's shards into bytes, gathers these, and writes what they stand for where FSDP2 expects masters.

    All of it runs on the stream that FSDP2 calls on, and nothing is read on the host. The ranks of the group, and those
    of `tensor` or of the experts' width, agree on scales per tensor with one all-reduce for the unit and each kind of
    ranks; with none while a history says all of them.
    """

    def __init__(self, unit: FSDPModule, kind: str, tensor: dist.ProcessGroup | None) -> None:
        self._unit, self._kind, self._tensor = unit, kind, tensor
        self._masters: dict[int, Tensor] = {}
        """By place in the unit: of a weight with a history float32 [P], the amaxes of this rank's part or of all."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Never asynchronous: on a GPU the stream waits, and not the host."""
        del async_op
        ranks, rank, parts = group.size(), group.rank(), self._parts(group.size())
        elements, sizes = [part.elements for part in parts], [part.nbytes for part in parts]
        shards = torch.split(input_tensor, elements)
        scales = self._scales(parts, shards, group)
        packed_GB = torch.empty(ranks, sum(sizes), dtype=torch.uint8, device=input_tensor.device)
        mine = torch.split(packed_GB[rank], sizes)
        for part, shard_N, into, scale_GR in zip(parts, shards, mine, scales, strict=True):
            own = None if scale_GR is None else scale_GR[rank * part.rows : (rank + 1) * part.rows]
            part.pack(shard_N, into, own)
        comm.all_gather_single(packed_GB.view(-1), packed_GB[rank], group)
        outputs = torch.split(output_tensor.view(ranks, -1), elements, 1)
        arrived = torch.split(packed_GB, sizes, 1)
        for part, packed, into_GN, scale_GR in zip(parts, arrived, outputs, scales, strict=True):
            part.unpack(packed, into_GN, scale_GR)
        return None

    def _parts(self, ranks: int) -> list[_Part]:
        """In FSDP2's order. Anew each time: whether a layer is quantised may change between steps."""
        [params] = [group.fsdp_params for group in self._unit._get_fsdp_state()._fsdp_param_groups]
        return [
            self._part(p._module_info.module, p.padded_sharded_param_size, p.fsdp_placement.dim, p._orig_size, ranks)
            for p in params
        ]

    def _part(self, owner: nn.Module, shape: torch.Size, dim: int, whole: torch.Size, ranks: int) -> _Part:
        rows, columns = (1, shape[0]) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])
        if len(shape) == 1 or not isinstance(owner, Projection | Stack):
            return _Part(rows, columns, "float32")
        logical = _of_projection(owner) if isinstance(owner, Projection) else None
        if isinstance(owner, Stack):
            assert isinstance(self._unit, Experts)
            logical = _of_stack(self._unit, owner, whole, ranks if dim == 1 else 1)
        if logical is None:
            return _Part(rows, columns, "nearest")
        if self._kind == "bf16" or logical.held.smooth:
            return _Part(rows, columns, "odd", logical)
        grain = logical.held.numerics.weight.grain
        if grain == TENSOR:
            return _Part(rows, columns, "tensor", logical)
        return _Part(rows, columns, "blocks", logical, Scheme(E4M3, Grain(1, grain.cols or BLOCK), E8M0))

    def _scales(
        self, parts: Sequence[_Part], shards: Sequence[Tensor], group: dist.ProcessGroup
    ) -> list[Tensor | None]:
        """Of each part that travels under a scale per tensor: float32 [G x R]."""
        known = {i: part.logical for i, part in enumerate(parts) if part.logical is not None}
        found = {
            i: logical.amaxes(shards[i].view(-1, parts[i].columns), group.rank())
            for i, logical in known.items()
            if parts[i].asks or logical.remembered
        }
        asking = [i for i in found if parts[i].asks]
        if asking:
            agreed = self._agreed(torch.cat([found[i] for i in asking]), group)
            found |= zip(asking, torch.split(agreed, [len(found[i]) for i in asking]), strict=True)
        for i, amax_P in found.items():
            if known[i].remembered:
                self._remember(i, known[i], amax_P)
        return [
            known[i].row_scales(found.get(i), part.rows, group.size()) if part.travels == "tensor" else None
            for i, part in enumerate(parts)
        ]

    def _agreed(self, amax_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The elementwise maximum over all ranks that hold a part of the same tensors; as integers, whose order is that
        of the numbers with NaN above Inf."""
        bits = amax_N.view(torch.int32)
        comm.all_reduce(bits, dist.ReduceOp.MAX, group)
        if isinstance(self._unit, Experts):
            split = self._unit.compute.split.experts
            if split.width_degree > 1:
                held = self._unit.gate.weight.shape[0]
                bits = split.largest(bits.view(-1, held).t()).t().flatten()
        elif self._tensor is not None:
            comm.all_reduce(bits, dist.ReduceOp.MAX, self._tensor)
        return bits.view(torch.float32)

    def _remember(self, place: int, logical: _Logical, amax_P: Tensor) -> None:
        """In one and the same memory, which a product of the same step may read while this is written once more."""
        if place not in self._masters:
            self._masters[place] = torch.empty_like(amax_P)
            logical.owner.register_forward_hook(partial(self._correct, place, logical))
        self._masters[place].copy_(amax_P)

    def _correct(self, place: int, logical: _Logical, *_call: Any) -> None:
        """After a product, which has noted the amax of what arrived."""
        if torch.is_grad_enabled() and not logical.held.fallen:
            logical.held.seen[logical.index] = self._masters[place]


def _of_projection(owner: Projection) -> _Logical | None:
    held = owner.quantised
    if held is None or held.fallen:
        return None
    return _Logical(owner, held, held.sizes, False, (slice(None), WEIGHT))


def _of_stack(owner: Experts, stack: Stack, whole: torch.Size, cut: int) -> _Logical | None:
    """whole: the shape of what FSDP divides; cut: into how many parts it divides each expert."""
    held = owner.quantised_down if stack is owner.down else owner.quantised_up
    if held is None or held.fallen:
        return None
    experts, rows = whole[:2]
    first = owner.compute.split.experts.rank * experts
    index = (int(stack is owner.up), slice(first, first + experts), WEIGHT)
    return _Logical(owner, held, (rows // cut,) * experts, cut > 1, index)
