"""Slices: the blocks of whole ("canonical") tensors that ranks own, and the arithmetic of such blocks.

A block is an N-dimensional box: an offset and a shape within a global shape. Scalars have shape () and volume 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPE_BYTES", "Box", "Slice", "dtype_name", "intersect", "tiling_faults", "torch_dtype"]

# Names and sizes as in the safetensors format; torch's name of each.
_DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
    "F32": (4, "float32"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
DTYPE_BYTES: dict[str, int] = {name: size for name, (size, _) in _DTYPES.items()}


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it begins and how large it is, one number a dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index that picks this box out of a tensor that holds `outer`."""
        return tuple(slice(o - p, o - p + s) for o, s, p in zip(self.offset, self.shape, outer.offset, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


@dataclass(frozen=True)
class Slice:
    """The block of the canonical tensor `name` (of shape `global_shape`) that begins at `global_offset`.

    `tensor` is that block, contiguous, of any dtype in `DTYPE_BYTES`; saving reads it, loading writes into it.
    ValueError if the block leaves the global shape.
    """

    name: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if not len(shape) == len(self.global_shape) == len(self.global_offset) or any(
            o < 0 or o + s > g for o, s, g in zip(self.global_offset, shape, self.global_shape, strict=True)
        ):
            raise ValueError(
                f"slice of {self.name!r}: a block of shape {shape} at {tuple(self.global_offset)} "
                f"does not lie within the tensor's shape {tuple(self.global_shape)}"
            )

    @property
    def box(self) -> Box:
        return Box(tuple(self.global_offset), tuple(self.tensor.shape))

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Slice:
        """A slice that is the entire tensor."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


@functools.cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    import torch

    return {name: getattr(torch, torch_name) for name, (_, torch_name) in _DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name; KeyError for an unknown one."""
    return _torch_dtypes()[name]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; ValueError for one that the format has no name for."""
    for name, known in _torch_dtypes().items():
        if known == dtype:
            return name
    raise ValueError(f"tensors of {dtype} can't be saved; the format knows {', '.join(_DTYPES)}")


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None when they share no element."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    if any(e <= o for o, e in zip(offset, end, strict=True)):
        return None
    return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))


def tiling_faults(global_shape: Sequence[int], boxes: Iterable[tuple[Box, str]]) -> list[str]:
    """Why the boxes (each with the name of its owner) do not tile the global shape exactly; empty when they do.

    Boxes in bounds, without overlap and with the right total volume leave no hole.
    """
    items = list(boxes)
    faults = [
        f"{box} in {owner} lies outside the shape {list(global_shape)}"
        for box, owner in items
        if len(box.shape) != len(global_shape)
        or any(o < 0 or e > g for o, e, g in zip(box.offset, box.end, global_shape, strict=True))
    ]
    if faults:
        return faults
    if len(items) > 1:
        # Sweep along the dimension that is cut most, where a box can meet few others.
        cut = max(range(len(global_shape)), key=lambda dim: len({box.offset[dim] for box, _ in items}), default=0)
        items.sort(key=lambda item: item[0].offset[cut] if item[0].offset else 0)
        for i, (box, owner) in enumerate(items):
            for other, other_owner in items[i + 1 :]:
                if box.shape and other.offset[cut] >= box.end[cut]:
                    break
                common = intersect(box, other)
                if common is not None:
                    faults.append(f"{common} is stored twice, in {owner} and in {other_owner}")
    stored, wanted = sum(box.volume for box, _ in items), math.prod(global_shape)
    if not faults and stored != wanted:
        faults.append(f"{wanted - stored} of {wanted} elements are stored nowhere")
    return faults
