"""Triton kernels of FP8 training: quantise, SwiGLU with quantise, and the product of scaled blocks with promotion.

    from bessemer.ops import triton as triton_ops
    kernels = triton_ops.kernels()       # RequestError `triton-missing` where Triton isn't installed
    rows, columns = kernels.quantise_blocks(x_RC, kernels.Quantising())

This file imports without Triton, the modules beside it don't. `launch` holds the functions to
call, `blocks`, `quantise`, `swiglu` and `product` the device code, `ahead` compiles it for a GPU that isn't there.
None of it has been run on a GPU of this project: the tests run it in Triton's interpreter on the CPU and look at the
machine code for Hopper.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from bessemer.core.errors import RequestError

__all__ = ["INSTALL", "kernels", "why_absent"]

INSTALL = "pip install 'bessemer[kernels]'"
"""Triton needs no CUDA to be installed; the CUDA builds of torch 2.13 bring it themselves."""


def why_absent() -> str:
    """Why the Triton kernels can't be used in this process; empty where they can."""
    return "" if importlib.util.find_spec("triton") else "the package 'triton' is not installed"


def kernels() -> ModuleType:
    """`bessemer.ops.triton.launch`. RequestError with what to install where Triton is missing."""
    why = why_absent()
    if why:
        raise RequestError(f"the Triton kernels can't be used: {why}", code="triton-missing", fix=INSTALL)
    return importlib.import_module("bessemer.ops.triton.launch")
