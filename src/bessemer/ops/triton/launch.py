"""The functions to call: each allocates what a kernel writes, and starts it on the stream of the current device.

Tensors live on the current CUDA device, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1 before Triton is
imported). No kernel waits for the host, and none reads a size from the device.
Legend: R rows, C columns, T tokens, F feed-forward width, M rows of a, N rows of b, K the summed dimension, X experts.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bessemer.core.errors import RequestError
from bessemer.ops.triton.product import DENSE, ROWS, SUMS, product_kernel
from bessemer.ops.triton.quantise import quantise_kernel
from bessemer.ops.triton.swiglu import swiglu_backward_kernel, swiglu_kernel

__all__ = [
    "BLOCK",
    "QUANTISE_WARPS",
    "SWIGLU_WARPS",
    "TILES",
    "Blocks",
    "Quantising",
    "Tile",
    "multiply",
    "multiply_rows",
    "multiply_sums",
    "quantise_blocks",
    "runs_on",
    "swiglu_backward_blocks",
    "swiglu_blocks",
    "tile_for",
]

BLOCK = 128
"""Elements that share a scale."""

QUANTISE_WARPS, SWIGLU_WARPS = 8, 16
"""Compiled for Hopper, quantising takes 128 registers a thread with 8 warps, so that two programs share a processor;
the fused kernels take about 180 with 8 and 78 to 104 with 16: one program then fills it with as many warps."""


@dataclass(frozen=True)
class Blocks:
    """codes [R, C] and scale float32, [R, C / 128] with the rows of a column side by side, or, square, [R / 128,
    C / 128] with rows that begin at multiples of 16 bytes: what `F.scaled_mm` wants of each on Hopper too. `amax`
    float32 (): max |x| of the whole tensor."""

    codes: Tensor
    scale: Tensor
    amax: Tensor
    square: bool = False

    def __post_init__(self) -> None:
        rows, cols = self.codes.shape
        tall = BLOCK if self.square else 1
        shape = (math.ceil(rows / tall), math.ceil(cols / BLOCK))
        fits = self.scale.stride(1) == 1 if self.square else self.scale.t().is_contiguous()
        if tuple(self.scale.shape) != shape or not (fits or 1 in shape) or not self.codes.is_contiguous():
            found = f"{tuple(self.scale.shape)} with strides {self.scale.stride()}"
            raise ValueError(f"scales {found} of codes {rows} x {cols} in blocks of {tall} x {BLOCK}")

    @property
    def pitch(self) -> int:
        """Elements between the scales of neighbouring columns, or rows where square."""
        storage = self.scale if self.square else self.scale.t()
        return storage.stride(0) if storage.shape[0] > 1 else storage.shape[1]


@dataclass(frozen=True)
class Quantising:
    """How: into `dtype` (float8_e4m3fn or float8_e5m2); scales of powers of two or of any float32; `both`: the
    transpose too; `multiple`: codes are filled up with zeros to a multiple of it in both dimensions."""

    dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = True
    both: bool = True
    multiple: int = 1

    def filled(self, rows: int, cols: int) -> tuple[int, int]:
        """The sizes of the codes."""
        return math.ceil(rows / self.multiple) * self.multiple, math.ceil(cols / self.multiple) * self.multiple


@dataclass(frozen=True)
class Tile:
    """What a program of the product makes, with how many warps and how many blocks of K on their way at once."""

    rows: int
    cols: int
    warps: int
    stages: int


TILES = (Tile(128, 128, 8, 4), Tile(64, 128, 4, 4), Tile(64, 64, 4, 4))
"""From the largest, which fetches the fewest bytes a multiplication (1/64, 3/128, 1/32), to the smallest. Compiled for
Hopper they take 154, 152 and 79 registers a thread and nothing spills; 128 x 256 would need more than there are, since
the accumulator and the block's own sum live side by side."""


def tile_for(rows: int, cols: int, processors: int) -> Tile:
    """The largest tile of which every processor of the GPU gets one, else the smallest. Which one it is changes no
    bit of the result, so nothing has to be tried at run time."""
    for tile in TILES:
        if math.ceil(rows / tile.rows) * math.ceil(cols / tile.cols) >= processors:
            return tile
    return TILES[-1]


def quantise_blocks(x_RC: Tensor, how: Quantising, *, square: bool = False) -> tuple[Blocks, Blocks | None]:
    """x (float32, bfloat16, float16) in blocks of 1 x 128, and its transpose in blocks of 1 x 128 of its own, in one
    read; `square`: in blocks of 128 x 128, which both share. A block with Inf or NaN gets the scale NaN."""
    x_RC = x_RC.detach().contiguous()
    rows, cols = x_RC.shape
    made = _Made(x_RC, how.filled(rows, cols), how, square)
    if x_RC.numel():
        grid = (triton.cdiv(made.cols, BLOCK), triton.cdiv(made.rows, BLOCK))
        quantise_kernel[grid](
            x_RC, *made.pointers, rows, cols, *made.sizes, SQUARE=square, **made.constants, num_warps=QUANTISE_WARPS
        )
    return made.blocks()


def swiglu_blocks(gate_up_T2F: Tensor, how: Quantising, smooth_F: Tensor | None = None) -> tuple[Blocks, Blocks | None]:
    """h = silu(gate) * up [T, F] of a packed projection (gate first), rounded to its type, and each channel divided by
    smooth_F (float32, powers of two) where given; quantised as `quantise_blocks` would."""
    gate_up_T2F = gate_up_T2F.detach().contiguous()
    tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    made = _Made(gate_up_T2F, how.filled(tokens, width), how)
    if gate_up_T2F.numel():
        grid = (triton.cdiv(made.cols, BLOCK), triton.cdiv(made.rows, BLOCK))
        smooth = gate_up_T2F if smooth_F is None else smooth_F
        swiglu_kernel[grid](
            gate_up_T2F, smooth, *made.pointers, tokens, width, *made.sizes,
            SMOOTH=smooth_F is not None, **made.constants, num_warps=SWIGLU_WARPS,
        )  # fmt: skip
    return made.blocks()


def swiglu_backward_blocks(
    grad_TF: Tensor, gate_up_T2F: Tensor, how: Quantising, smooth_F: Tensor | None = None
) -> tuple[Blocks, Blocks | None]:
    """The gradient of gate_up [T, 2F] from that of what `swiglu_blocks` quantised, quantised itself. RequestError
    `triton-shape` where F isn't whole blocks of 128: a block would cover both gate and up."""
    grad_TF, gate_up_T2F = grad_TF.detach().contiguous(), gate_up_T2F.detach().contiguous()
    tokens, width = grad_TF.shape
    if width % BLOCK:
        what = f"a width of {width} isn't whole blocks of {BLOCK}, which the fused gradient of SwiGLU needs"
        raise RequestError(what, code="triton-shape", fix="ops.swiglu and quantise_blocks")
    made = _Made(gate_up_T2F, (how.filled(tokens, 2 * width)[0], 2 * width), how)
    if grad_TF.numel():
        grid = (2 * width // BLOCK, triton.cdiv(made.rows, BLOCK))
        smooth = gate_up_T2F if smooth_F is None else smooth_F
        swiglu_backward_kernel[grid](
            grad_TF, gate_up_T2F, smooth, *made.pointers, tokens, width, *made.sizes,
            SMOOTH=smooth_F is not None, **made.constants, num_warps=SWIGLU_WARPS,
        )  # fmt: skip
    return made.blocks()


class _Made:
    """What a quantising kernel writes."""

    def __init__(self, like: Tensor, size: tuple[int, int], how: Quantising, square: bool = False) -> None:
        _on_device(like)
        self.rows, self.cols = size
        self.how, self.square = how, square
        self._amax = torch.zeros((), dtype=torch.int32, device=like.device)
        amax = self._amax.view(torch.float32)
        self._rows = Blocks(*_empty(like, self.rows, self.cols, how.dtype, square), amax, square)
        self._columns = None
        if how.both:
            self._columns = Blocks(*_empty(like, self.cols, self.rows, how.dtype, square), amax, square)

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        other = self._columns or self._rows
        return self._rows.codes, self._rows.scale, other.codes, other.scale, self._amax

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.rows, self.cols, self._rows.pitch, (self._columns or self._rows).pitch

    @property
    def constants(self) -> dict[str, bool]:
        how = self.how
        return {"BOTH": how.both, "POWER_OF_TWO": how.power_of_two, "ROUND_FIRST": _interpreted()}

    def blocks(self) -> tuple[Blocks, Blocks | None]:
        return self._rows, self._columns


def _empty(like: Tensor, rows: int, cols: int, dtype: torch.dtype, square: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows, cols, dtype=dtype, device=like.device)
    wide = triton.cdiv(cols, BLOCK)
    if square:
        pitch = triton.cdiv(wide, 4) * 4
        scale = torch.ones(triton.cdiv(rows, BLOCK), pitch, device=like.device)[:, :wide]
    else:
        scale = torch.empty(wide, rows, device=like.device).t()
    return codes, scale


def multiply(
    a_MK: Blocks, b_NK: Blocks, dtype: torch.dtype = torch.bfloat16, *, bias_N: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """a b^T (+ bias) [M, N] in `dtype`; b square or not. RequestError `triton-shape` where K isn't a multiple of 16."""
    rows, cols = a_MK.codes.shape[0], b_NK.codes.shape[0]
    out = a_MK.codes.new_empty(rows, cols, dtype=dtype)
    call = _Call(a_MK, b_NK, out, tile or tile_for(rows, cols, _processors(out)), (rows, cols, a_MK.codes.shape[1]))
    call.run(DENSE, bias=bias_N)
    return out


def multiply_rows(
    a_TK: Blocks, b_NK: Blocks, ends_X: Tensor, steps: tuple[int, int], dtype: torch.dtype = torch.bfloat16, *,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Each run of rows of a times its expert's part of b, [T, N]. Expert x owns the rows up to ends_X[x] (int32, on
    the device, multiples of 128); rows behind the last end come out as 0.

    b is square and holds all experts: the part of an expert begins `steps` (rows, columns) after that of the one
    before, multiples of 128, one of them 0. Stacked weights [X O, I] have steps (O, 0), their transpose (0, O).
    """
    rows, depth = a_TK.codes.shape
    cols = steps[0] or b_NK.codes.shape[0]
    if steps[0] % BLOCK or steps[1] % BLOCK or not b_NK.square:
        what = f"experts' weights {steps} apart aren't whole blocks of {BLOCK} x {BLOCK}"
        raise RequestError(what, code="triton-shape", fix=f"weights of multiples of {BLOCK}")
    out = a_TK.codes.new_empty(rows, cols, dtype=dtype)
    call = _Call(a_TK, b_NK, out, tile or tile_for(rows, cols, _processors(out)), (rows, cols, depth))
    call.run(ROWS, ends=ends_X, steps=steps)
    return out


def multiply_sums(
    a_MT: Blocks, b_NT: Blocks, ends_X: Tensor, dtype: torch.dtype = torch.bfloat16, *, tile: Tile | None = None
) -> Tensor:
    """The product of each expert's run of the summed dimension, [X, M, N]; runs as in `multiply_rows`."""
    rows, cols, experts = a_MT.codes.shape[0], b_NT.codes.shape[0], ends_X.shape[0]
    out = a_MT.codes.new_empty(experts, rows, cols, dtype=dtype)
    tile = tile or tile_for(rows * experts, cols, _processors(out))
    _Call(a_MT, b_NT, out, tile, (rows, cols, a_MT.codes.shape[1])).run(SUMS, ends=ends_X)
    return out


@dataclass(frozen=True)
class _Call:
    a: Blocks
    b: Blocks
    out: Tensor
    tile: Tile
    size: tuple[int, int, int]

    def run(
        self, kind: Any, *, bias: Tensor | None = None, ends: Tensor | None = None, steps: tuple[int, int] = (0, 0)
    ) -> None:
        rows, cols, depth = self.size
        _on_device(self.out)
        if depth % 16:
            what = f"a summed dimension of {depth} isn't a multiple of 16, which the copy engine needs"
            raise RequestError(what, code="triton-shape", fix="Quantising(multiple=16)")
        if not self.out.numel() or not depth:
            self.out.zero_()
            return
        experts = 1 if ends is None else ends.shape[0]
        tiles = triton.cdiv(rows, self.tile.rows) * triton.cdiv(cols, self.tile.cols)
        product_kernel[(tiles, experts if kind.value == SUMS.value else 1)](
            TensorDescriptor.from_tensor(self.a.codes, [self.tile.rows, BLOCK]),
            TensorDescriptor.from_tensor(self.b.codes, [self.tile.cols, BLOCK]),
            self.a.scale, self.b.scale, self.out if bias is None else bias, self.out,
            self.out if ends is None else ends, rows, cols, depth, self.a.pitch, self.b.pitch, experts, *steps,
            BLOCK_M=self.tile.rows, BLOCK_N=self.tile.cols, SQUARE=self.b.square, BIAS=bias is not None,
            KIND=kind.value, EXPERTS=triton.next_power_of_2(experts),
            num_warps=self.tile.warps, num_stages=self.tile.stages,
        )  # fmt: skip


def _interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels take tensors there: CUDA, and in the interpreter the CPU."""
    return device.type == "cuda" or (device.type == "cpu" and _interpreted())


def _on_device(x: Tensor) -> None:
    if not runs_on(x.device):
        what = f"Triton's kernels run on CUDA devices, not on {x.device}"
        raise RequestError(what, code="triton-device", fix="bessemer.precision, which emulates them exactly")


def _processors(x: Tensor) -> int:
    """Of the GPU; in the interpreter those of an H100."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132
