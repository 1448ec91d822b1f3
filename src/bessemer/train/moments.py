"""AdamW whose moments are kept in bfloat16, or in FP8 with a range for each group of 128 (`precision/expanded.py`).

Only matrices and stacks of experts: what has one dimension keeps float32 moments with torch's own AdamW.
A step takes each block of a logical tensor that this rank holds, in chunks: moments are decoded to float32, updated,
used for the update of the parameter, and encoded again. The first moment is rounded to the nearest number: gradients
move it by more than a step. The second moves by less than half a step in most updates (by 1 - beta2 of itself), so that
it would stand still; it is rounded up or down by chance. The draws follow from seed, step, name and the element's place
in the logical tensor, so that no layout, restart or replica draws others.

Groups are cut from a block as it lies in memory. They are the same under every layout whose blocks begin at multiples
of 128 elements and have rows of such a width.
"""

# N elements of a chunk

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bessemer.core.job import TrainSection
from bessemer.core.rank_memory import MOMENT_GROUP
from bessemer.models.canonical import held, local
from bessemer.precision.expanded import (
    decode_expanded,
    empty_ranges,
    encode_expanded,
    num_groups,
    round_by_chance,
)
from bessemer.precision.formats import E4M3

__all__ = ["ADAMW_MOMENTS", "NarrowAdamW", "NarrowKind", "draws"]

NarrowKind = Literal["bf16", "fp8"]
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ELSEWHERE = 1 << 22
"""Elements of a chunk, a multiple of a group: on a CPU its float32 copies stay in the cache (measured: half the time of
chunks of 2^20), elsewhere launches are few. The size changes no bit."""


def draws(key: int, index_N: Tensor) -> Tensor:
    """int32 in [0, 65536) for each int64 index: the same for the same key and index, whatever else is asked for."""
    # two rounds of multiply and shift mix all bits; the constants are odd, from the fractional parts of square roots
    mixed = (index_N ^ key).mul_(0x6A09E667F3BCC909)
    mixed ^= mixed >> 32
    mixed.mul_(0x3C6EF372FE94F82B)
    mixed ^= mixed >> 29
    mixed.mul_(0x1F83D9ABFB41BD6B)
    return (mixed >> 40).bitwise_and_(0xFFFF).to(torch.int32)


def _key(*parts: str | int) -> int:
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True)
class _Block:
    """A block of the logical tensor `name`, of shape `whole`: `shape` at `offset`; of the parameter's local part the
    elements from `start` on, with ranges from `group` on."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    group: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def index(self, first: int, count: int, device: torch.device) -> Tensor:
        """int64 [N]: the places in the logical tensor of elements `first`.. of the block."""
        index_N = torch.arange(first, first + count, device=device)
        if self.shape[1:] == self.whole[1:]:
            return index_N.add_(self.offset[0] * math.prod(self.whole[1:]))
        place_N, stride = torch.zeros_like(index_N), 1
        for size, offset, whole in zip(self.shape[::-1], self.offset[::-1], self.whole[::-1], strict=True):
            place_N += (index_N % size + offset) * stride
            index_N //= size
            stride *= whole
        return place_N


class _Bfloat16:
    """A moment of a parameter's local part. `read` and `write` take the range of elements and the first group."""

    def __init__(self, param: Tensor, blocks: list[_Block]) -> None:
        self.kept = [torch.zeros(param.numel(), dtype=torch.bfloat16, device=param.device)]

    def read(self, at: slice, group: int) -> Tensor:
        return self.kept[0][at].float()

    def write(self, at: slice, group: int, x_N: Tensor, noise_N: Tensor | None) -> None:
        self.kept[0][at] = x_N if noise_N is None else round_by_chance(x_N, noise_N)

    def values(self) -> Tensor:
        return self.kept[0]


class _Expanded(_Bfloat16):
    """The same in FP8: `kept` are codes and ranges."""

    def __init__(self, param: Tensor, blocks: list[_Block]) -> None:
        groups = sum(num_groups(block.count) for block in blocks)
        codes = torch.zeros(param.numel(), dtype=E4M3.dtype, device=param.device)
        self.kept = [codes, empty_ranges(groups, param.device)]
        self._blocks = blocks

    def read(self, at: slice, group: int) -> Tensor:
        codes, ranges = self.kept
        return decode_expanded(codes[at], ranges[group : group + num_groups(at.stop - at.start)])

    def write(self, at: slice, group: int, x_N: Tensor, noise_N: Tensor | None) -> None:
        codes, ranges = self.kept
        codes[at], ranges[group : group + num_groups(at.stop - at.start)] = encode_expanded(x_N, noise_N)

    def values(self) -> Tensor:
        codes, _ = self.kept
        found = torch.zeros(codes.numel(), dtype=torch.bfloat16, device=codes.device)
        for block in self._blocks:
            for at, group, _ in _chunks(block, codes.device):
                found[at] = self.read(at, group).to(torch.bfloat16)
        return found


def _chunks(block: _Block, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """(elements of the parameter's local part, first group, first element of the block)."""
    most = _CHUNK.get(device.type, _CHUNK_ELSEWHERE)
    for first in range(0, block.count, most):
        stop = min(first + most, block.count)
        yield slice(block.start + first, block.start + stop), block.group + first // MOMENT_GROUP, first


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW over `params`, by name in `module`, each of two dimensions or more. `steps` counts the updates so far.

    Rows that fill a parameter up to equal shares belong to no logical tensor and are left alone.
    """

    def __init__(
        self, module: nn.Module, params: Mapping[str, nn.Parameter], train: TrainSection, kind: NarrowKind
    ) -> None:
        super().__init__(list(params.values()), {"lr": train.lr})
        self.steps = 0
        self._train = train
        self._params = dict(params)
        self._blocks: dict[str, list[_Block]] = {name: [] for name in params}
        for h in held(module, params):
            param, blocks = h.piece.param, self._blocks[h.piece.param]
            start = int(h.tensor.storage_offset() - local(params[param]).storage_offset())
            group = blocks[-1].group + num_groups(blocks[-1].count) if blocks else 0
            blocks.append(_Block(h.piece.name, h.piece.shape, h.offset, tuple(h.tensor.shape), start, group))
        make = _Expanded if kind == "fp8" else _Bfloat16
        self._moments = {
            name: tuple(make(local(param).detach(), self._blocks[name]) for _ in ADAMW_MOMENTS)
            for name, param in params.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for name, param in self._params.items():
            if param.grad is not None:
                value_N, grad_N = local(param).view(-1), local(param.grad).reshape(-1)
                for block in self._blocks[name]:
                    self._update(name, block, value_N, grad_N)

    def _update(self, name: str, block: _Block, value_N: Tensor, grad_N: Tensor) -> None:
        (beta1, beta2), lr = self._train.betas, self.param_groups[0]["lr"]
        corrected1, corrected2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        first, second = self._moments[name]
        key = _key(self._train.seed, self.steps, ADAMW_MOMENTS[1], block.name)
        for at, group, begin in _chunks(block, value_N.device):
            chunk_N = grad_N[at]
            mean_N = first.read(at, group).lerp_(chunk_N, 1 - beta1)
            square_N = second.read(at, group).mul_(beta2).addcmul_(chunk_N, chunk_N, value=1 - beta2)
            root_N = square_N.sqrt().div_(math.sqrt(corrected2)).add_(self._train.eps)
            value_N[at].mul_(1 - lr * self._train.weight_decay).addcdiv_(mean_N, root_N, value=-lr / corrected1)
            index_N = block.index(begin, at.stop - at.start, value_N.device)
            first.write(at, group, mean_N, None)
            second.write(at, group, square_N, draws(key, index_N))

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """{moment: {parameter: bfloat16 values of the parameter's shape and sharding}}: of moments in bfloat16 a view,
        of those in FP8 a copy, which says all that they hold."""
        return {
            kind: {name: _like(self._params[name], both[i].values()) for name, both in self._moments.items()}
            for i, kind in enumerate(ADAMW_MOMENTS)
        }

    @torch.no_grad()
    def take(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Keep what `state_tensors` gave, with other values in it."""
        for i, kind in enumerate(ADAMW_MOMENTS):
            for name, both in self._moments.items():
                values_N = local(state[kind][name]).view(-1)
                for block in self._blocks[name]:
                    for at, group, _ in _chunks(block, values_N.device):
                        both[i].write(at, group, values_N[at].float(), None)

    def kept(self) -> Iterator[Tensor]:
        """The tensors that really hold the moments."""
        for both in self._moments.values():
            for moment in both:
                yield from moment.kept


def _like(param: nn.Parameter, values_N: Tensor) -> Tensor:
    """`values_N` in the shape of the parameter's local part, sharded like it."""
    found = values_N.view(local(param).shape)
    if not isinstance(param, DTensor):
        return found
    return DTensor.from_local(
        found, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
