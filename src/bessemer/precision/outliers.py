"""What an amplified channel does to the down projection of a SwiGLU layer under each way to scale.

Two channels have gate = up scaled by A and their column of `down` divided by A^2: the function stays the same, their
part of h grows by A^2 (how SwiGLU outliers arise: arXiv 2409.12517).
Legend: T tokens, F feed-forward width, D model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.precision.casts import decode
from bessemer.precision.numerics import numerics
from bessemer.precision.product import multiply
from bessemer.precision.products import QuantProducts
from bessemer.precision.scaled import quantise
from bessemer.precision.smooth import channel_scales

__all__ = ["amplified_layer", "down_errors", "relative_error"]


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64, of all elements together."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def amplified_layer(
    amplification: float, *, tokens: int = 1024, width: int = 512, model: int = 256, channels: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(h [T, F], down [D, F]), float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, model, generator=generator)
    gate, up, down = (
        torch.randn(n, m, generator=generator) / m**0.5 for n, m in ((width, model),) * 2 + ((model, width),)
    )
    up[:channels] = gate[:channels] = gate[:channels] * amplification
    down[:, :channels] /= amplification**2
    return F.silu(x @ gate.t()) * (x @ up.t()), down


def down_errors(h_TF: Tensor, down_DF: Tensor) -> dict[str, float]:
    """Relative error of the output against float64, by way to scale: "bf16", "tensor", "stale" (an eighth of the
    amax, as after a burst), "row", "block", "mx", "nvfp4", "smooth" (per tensor after Smooth-SwiGLU). Also "zeros":
    the share of h that per-tensor scaling flushes to zero, "smooth-zeros" the same after Smooth-SwiGLU."""
    want = h_TF.double() @ down_DF.double().t()
    low_h, low_down = h_TF.bfloat16(), down_DF.bfloat16()
    found = {"bf16": relative_error(F.linear(low_h, low_down), want)}
    for name, key in (
        ("fp8-current", "tensor"), ("fp8-row", "row"), ("fp8-block128", "block"), ("mxfp8", "mx"), ("nvfp4", "nvfp4")
    ):  # fmt: skip
        recipe = numerics(name)
        found[key] = relative_error(multiply(quantise(low_h, recipe.x), quantise(down_DF, recipe.weight)), want)
    recipe = numerics("fp8-current")
    weight = quantise(down_DF, recipe.weight)
    stale = quantise(low_h, recipe.x, past=low_h.abs().amax().float() / 8)
    found["stale"] = relative_error(multiply(stale, weight), want)
    smooth, (codes, *_) = QuantProducts(recipe, torch.bfloat16, channels=channel_scales(low_h)).output(
        low_h, down_DF, None
    )
    found["smooth"] = relative_error(smooth, want)
    for key, read in (("zeros", quantise(low_h, recipe.x).codes), ("smooth-zeros", codes)):
        found[key] = float((decode(read, recipe.x.format) == 0).float().mean())
    return found
