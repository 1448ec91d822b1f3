"""Products of scaled tensors, emulated: decoded to bfloat16 (exact for power-of-two scales), then the fast product.

The fast product sums in float32 from end to end, which is at least what a GPU with promotion every 128 gives;
`promoted` imitates a narrow accumulator, with promotion and without, to show what that is for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.ops.linear import product
from bessemer.precision.scaled import Scaled

__all__ = ["hadamard", "multiply", "promoted", "working_dtype"]


def working_dtype(dtype: torch.dtype, *operands: Scaled) -> torch.dtype:
    """What to decode to: bfloat16 if the result is bfloat16 and the operands fit exactly, else float32."""
    exact = dtype == torch.bfloat16 and all(o.scheme.exact for o in operands)
    return torch.bfloat16 if exact else torch.float32


def multiply(a_MK: Scaled, b_NK: Scaled, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a b^T [M, N] in `dtype`: rounded once, from float32 sums of products of the dequantised operands."""
    if a_MK.codes.shape[1] != b_NK.codes.shape[1]:
        shapes = f"{tuple(a_MK.codes.shape)} and {tuple(b_NK.codes.shape)}"
        raise RequestError(f"{shapes} don't share their last dimension", code="precision-shape")
    work = working_dtype(dtype, a_MK, b_NK)
    return product(a_MK.dequantise(work), b_NK.dequantise(work).t()).to(dtype)


def promoted(a_MK: Tensor, b_NK: Tensor, *, bits: int, every: int | None, chunk: int = 32) -> Tensor:
    """float32 a b^T with an accumulator that keeps `bits` of mantissa (towards zero) after each `chunk` of K, as
    Hopper's FP8 units do with about 14; `every` K its value moves to a float32 sum and it starts anew (DeepSeek-V3,
    arXiv 2412.19437, section 3.3.2: 128); None: never. The sum inside a chunk is float32: a model, not the hardware.
    """
    keep = -(1 << (23 - bits))
    total = torch.zeros(a_MK.shape[0], b_NK.shape[0])
    narrow = torch.zeros_like(total)
    for start in range(0, a_MK.shape[1], chunk):
        part = a_MK[:, start : start + chunk].float() @ b_NK[:, start : start + chunk].float().t()
        narrow = ((narrow + part).view(torch.int32) & keep).view(torch.float32)
        if every is not None and (start + chunk) % every == 0:
            total, narrow = total + narrow, torch.zeros_like(total)
    return total + narrow


_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1)  # any fixed draw does, if both operands share it


def hadamard(x_RC: Tensor) -> Tensor:
    """x with each 16 columns rotated by a Hadamard matrix with signs (columns are filled up to a multiple of 16).

    Orthogonal, so (x H)(y H)^T = x y^T; a lone large element spreads over 16 (NVIDIA's NVFP4 training recipe)."""
    matrix = torch.ones(1, 1, device=x_RC.device)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    matrix = (matrix * torch.tensor(_SIGNS, device=x_RC.device)[:, None] / 4).to(x_RC.dtype)
    x_RC = torch.nn.functional.pad(x_RC, (0, -x_RC.shape[1] % 16))
    return (x_RC.reshape(x_RC.shape[0], -1, 16) @ matrix).view(x_RC.shape)
