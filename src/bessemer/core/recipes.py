"""Precision recipes: what the matrix products of a training step read, and what it costs to make that.

The trainer builds its linear layers from a recipe, the planner prices and weighs them from the same description.
Sources of the recipes: Transformer Engine documentation (delayed and current scaling, 128-wide blocks, MXFP8, NVFP4),
torchao float8 (row-wise), DeepSeek-V3 technical report arXiv 2412.19437 (blocks of 128).
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.core.errors import ConfigError
from bessemer.core.machine import Machine
from bessemer.core.problem import Problem, nearest, one_of

__all__ = ["RECIPES", "Recipe", "lacking", "recipe"]


@dataclass(frozen=True)
class Recipe:
    """`gemm` is the operands' type in the linear layers of a block (a name of `Machine.peak`); the head, the router
    and the attention core stay in `compute`. `cast_bytes`: bytes read and written to turn one element of an input or
    a gradient into its quantised copies. `operand_bytes`: one copy, its share of the scales included. `square_blocks`:
    whether the blocks of weights are as high as wide. `scale_bytes`: of one scale on a GPU."""

    name: str
    runnable: bool
    gemm: str
    compute: str
    operand_bytes: float
    cast_bytes: float
    scale_block: int  # elements that share a scale; 0: the whole tensor, -1: a row, or none where unquantised
    what: str
    square_blocks: bool = False
    scale_bytes: int = 4

    @property
    def quantised(self) -> bool:
        """Whether operands are narrower than what is computed around them."""
        return self.gemm in ("fp8", "fp4")

    @property
    def keeps_codes(self) -> bool:
        """Whether a linear layer keeps its input quantised for the backward pass, a byte an element: one scale for the
        whole tensor serves along either dimension."""
        return self.quantised and self.scale_block == 0

    @property
    def gathers_quantised(self) -> bool:
        """Whether tensor-parallel gathers carry quantised elements; with a scale per row they come too early."""
        return self.quantised and self.scale_block != -1


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("fp32", True, "fp32", "fp32", 4.0, 0.0, -1, "all in float32"),
        Recipe("bf16", True, "bf16", "bf16", 2.0, 0.0, -1, "bfloat16 products, float32 masters"),
        Recipe("fp16", False, "fp16", "fp16", 2.0, 0.0, -1, "float16 products, loss scaling, float32 masters"),
        Recipe("fp8-delayed", True, "fp8", "bf16", 1.0, 4.0, 0, "a scale per tensor from the amax of past steps"),
        Recipe("fp8-current", True, "fp8", "bf16", 1.0, 6.0, 0, "a scale per tensor from its own amax, one more read"),
        Recipe("fp8-row", True, "fp8", "bf16", 1.0, 15.0, -1, "a scale per row; both layouts quantised apart"),
        Recipe("fp8-block128", True, "fp8", "bf16", 1.03, 4.1, 128, "1 x 128 activations, 128 x 128 weights", True),
        Recipe("mxfp8", True, "fp8", "bf16", 1.03, 4.1, 32, "blocks of 32, power-of-two scales, two layouts", False, 1),
        Recipe("nvfp4", True, "fp4", "bf16", 0.56, 6.0, 16, "blocks of 16, Hadamard, stochastic rounding", True, 1),
    )
}
"""In the order of their ids in `bessemer.plan.space.Layouts`."""


def lacking(recipe: Recipe, machine: Machine) -> str:
    """What the recipe's products need and the machine's file doesn't know it to have, "" where nothing: accelerators
    have wide types, and a CPU emulates narrow ones exactly. Scales of MXFP8 and NVFP4 came into matrix units with FP4
    (NVIDIA Blackwell). What the device at hand takes is asked again at the start (`precision.gpu.path_for`)."""
    if not recipe.quantised or machine.device == "cpu":
        return ""
    if machine.peak(recipe.gemm) is None:
        return f"{recipe.gemm} matrix units"
    if recipe.scale_block in (16, 32) and (machine.device != "cuda" or machine.peak("fp4") is None):
        return f"matrix units that take a scale per {recipe.scale_block} elements"
    if recipe.scale_block > 0 and machine.device != "cuda":
        return f"a product with a scale per {recipe.scale_block} elements for {machine.device}"
    return ""


def recipe(name: str) -> Recipe:
    """ConfigError with the nearest names for one that isn't known."""
    if name in RECIPES:
        return RECIPES[name]
    fix = one_of("precision.recipe", [f'"{n}"' for n in nearest(name.lower(), RECIPES) or RECIPES])
    why = "recipes: " + ", ".join(RECIPES)
    what = f"{name!r} is not a precision recipe"
    raise ConfigError([Problem(code="recipe-unknown", where="precision.recipe", what=what, why=why, fix=fix)])
