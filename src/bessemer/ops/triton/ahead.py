"""Compiles the kernels for a GPU that isn't there, and reads the machine code.

Triton brings the assembler and the disassembler, so neither a GPU nor the CUDA toolkit is needed. `VARIANTS` are the
kernels with the tiles and types that `launch` starts; `build` gives their registers, spills, shared memory and
instructions. What it can't tell is whether the numbers are right (the interpreter does) and how fast they come.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bessemer.ops.triton.launch import QUANTISE_WARPS, SWIGLU_WARPS, TILES, Tile
from bessemer.ops.triton.product import DENSE, ROWS, SUMS, product_kernel
from bessemer.ops.triton.quantise import quantise_kernel
from bessemer.ops.triton.swiglu import swiglu_backward_kernel, swiglu_kernel

__all__ = ["HOPPER", "SHARED_LIMIT", "VARIANTS", "Built", "Variant", "build"]

HOPPER = 90
"""Compute capability 9.0."""
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a program may use on Hopper (CUDA C++ programming guide, compute capability 9.0)."""

_TYPES = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "bf16": "bf16", "fp32": "fp32", "int32": "i32"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.x]*)", re.MULTILINE)


@dataclass(frozen=True)
class Variant:
    """A kernel as `launch` starts it. `types`: of the tensors among its arguments, "tensordesc<...>" or a name of
    _TYPES; integers not in `odd` are taken for multiples of 16, as Triton does with those that are."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    odd: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """`opcodes` counts the instructions of the machine code; `stack_bytes` are spilled registers, 0 if none."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    opcodes: Counter[str] = field(repr=False)
    ptx: str = field(repr=False)

    def count(self, pattern: str) -> int:
        """Instructions whose whole name matches."""
        return sum(n for name, n in self.opcodes.items() if re.fullmatch(pattern, name))


def build(variant: Variant, capability: int = HOPPER) -> Built:
    """Compiled for that compute capability. CalledProcessError where the disassembler fails."""
    signature, aligned = {}, {}
    for place, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        kind = variant.types.get(name, "i32")
        signature[name] = f"*{_TYPES[kind]}" if kind in _TYPES else kind
        if not kind.startswith("tensordesc") and name not in variant.odd:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = _disassembled(made.asm["cubin"])
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", code)}
    opcodes = Counter(_INSTRUCTION.findall(code))
    return Built(numbers["REG"], numbers["STACK"], made.metadata.shared, opcodes, made.asm["ptx"])


def _disassembled(cubin: bytes) -> str:
    """What it uses, and its instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", "--dump-sass", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def _quantising(kernel: Any, warps: int, *, narrow: str = "e4m3", wide: str = "bf16", **constants: bool) -> Variant:
    given = dict.fromkeys(("x", "gate_up", "grad"), wide)
    types = {
        **given,
        "codes": narrow,
        "codes_t": narrow,
        "scales": "fp32",
        "scales_t": "fp32",
        "smooth": "fp32",
        "amax": "int32",
    }
    chosen = {"BOTH": True, "POWER_OF_TWO": True, "ROUND_FIRST": False, **constants}
    return Variant(kernel, types, chosen, warps, odd=("pitch", "pitch_t"))


def _product(tile: Tile, *, square: bool, kind: Any = DENSE, a: str = "e4m3", b: str = "e4m3") -> Variant:
    types = {
        "a": f"tensordesc<{_TYPES[a]}[{tile.rows},128]>",
        "b": f"tensordesc<{_TYPES[b]}[{tile.cols},128]>",
        "out": "bf16",
        "ends": "int32",
        **dict.fromkeys(("a_scale", "b_scale", "bias"), "fp32"),
    }
    constants = {
        "BLOCK_M": tile.rows, "BLOCK_N": tile.cols, "SQUARE": square, "BIAS": False, "KIND": kind, "EXPERTS": 16,
    }  # fmt: skip
    return Variant(product_kernel, types, constants, tile.warps, tile.stages, odd=("b_pitch", "experts"))


VARIANTS: dict[str, Variant] = {
    "quantise": _quantising(quantise_kernel, QUANTISE_WARPS, SQUARE=False),
    "quantise e5m2": _quantising(quantise_kernel, QUANTISE_WARPS, narrow="e5m2", SQUARE=False),
    "quantise any scale": _quantising(quantise_kernel, QUANTISE_WARPS, SQUARE=False, POWER_OF_TWO=False),
    "quantise rows": _quantising(quantise_kernel, QUANTISE_WARPS, SQUARE=False, BOTH=False),
    "quantise weights": _quantising(quantise_kernel, QUANTISE_WARPS, wide="fp32", SQUARE=True),
    "swiglu": _quantising(swiglu_kernel, SWIGLU_WARPS, SMOOTH=False),
    "swiglu smooth": _quantising(swiglu_kernel, SWIGLU_WARPS, SMOOTH=True),
    "swiglu backward": _quantising(swiglu_backward_kernel, SWIGLU_WARPS, SMOOTH=False),
    "swiglu backward smooth": _quantising(swiglu_backward_kernel, SWIGLU_WARPS, SMOOTH=True),
    **{f"product {t.rows}x{t.cols}": _product(t, square=True) for t in TILES},
    **{f"product {t.rows}x{t.cols} rows": _product(t, square=False) for t in TILES},
    "product e5m2": _product(TILES[0], square=False, a="e5m2"),
    "experts rows": _product(TILES[0], square=True, kind=ROWS),
    "experts sums": _product(TILES[0], square=False, kind=SUMS),
}
"""What runs in training, with names for people."""
