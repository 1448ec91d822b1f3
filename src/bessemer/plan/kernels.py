"""Seconds of the kernels of one decoder layer for one micro-batch, by pass: forward, input gradient, weight gradient.

Sources of the formulas: a product of M x K by K x N takes 2MNK / (peak x efficiency) + bytes / bandwidth + a gap
(fitted on 15,000 measured shapes to 6-7 %; two-parameter roofline); flash attention does 4 x tokens x keys x heads x
dim forward and 2.5 times that backward (arXiv 2205.14135). Everything broadcasts: floats or arrays.

T tokens of a rank's micro-batch, N output and K input width, all after division by the parallel degrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.recipes import RECIPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.calibration import Constants
    from bessemer.plan.dims import Dims
    from bessemer.plan.rates import Rates

__all__ = [
    "Passes",
    "Precision",
    "attention_flops",
    "cross_entropy_s",
    "gemm_s",
    "grouped_share",
    "mean_keys",
    "optimizer_s",
    "precision_of",
]

FORWARD, INPUTS, WEIGHTS = 0, 1, 2
_FILL = 1.25
"""How sharply a grouped product saturates; between 1 and 1.5 the rows can't tell."""


@dataclass(frozen=True)
class Precision:
    """What a recipe means on a machine, as floats or arrays: rate of the block's products in operations/s with the
    sustained efficiency in it, the same for 16-bit products, bytes of an operand, bytes to quantise an element."""

    gemm_flops_per_s: Any
    wide_flops_per_s: Any
    operand_bytes: Any
    cast_bytes: Any
    compute_bytes: Any
    gather_bytes: Any  # of an element on its way to the other tensor-parallel ranks


def precision_of(recipe: NDArray[np.int64], r: Rates, c: Constants) -> Precision:
    """What the recipes with these ids mean on that machine. A recipe the machine has no units for gets rate nan."""
    recipes = list(RECIPES.values())
    wide = r.bf16 * c.clock * c.gemm_bf16
    with np.errstate(invalid="ignore", divide="ignore"):
        by_kind = {
            "fp32": r.fp32 * c.clock * c.gemm_fp32,
            "bf16": wide,
            "fp16": wide,
            "fp8": np.where(np.asarray(r.fp8) > 0, r.fp8 * c.clock * c.gemm_fp8, np.nan),
            "mx": np.where(np.asarray(r.fp8) > 0, r.fp8 * c.clock * c.gemm_mxfp8, np.nan),
            "fp4": np.where(np.asarray(r.fp4) > 0, r.fp4 * c.clock * c.gemm_fp4, np.nan),
        }
    shape = np.broadcast(recipe, wide).shape
    rate, wide_rate = np.zeros(shape), np.zeros(shape)
    ids = np.broadcast_to(recipe, shape)
    for index in np.unique(ids):
        spec = recipes[index]
        kind = "mx" if spec.gemm == "fp8" and spec.scale_block > 0 else spec.gemm
        here = ids == index
        rate[here] = np.broadcast_to(by_kind[kind], shape)[here]
        wide_rate[here] = np.broadcast_to(by_kind["fp32" if spec.gemm == "fp32" else "bf16"], shape)[here]
    pick = lambda values: np.array(values)[ids]  # noqa: E731
    return Precision(
        rate,
        wide_rate,
        pick([s.operand_bytes for s in recipes]),
        pick([s.cast_bytes for s in recipes]),
        pick([4.0 if s.compute == "fp32" else 2.0 for s in recipes]),
        pick([s.operand_bytes if s.gathers_quantised else 4.0 if s.compute == "fp32" else 2.0 for s in recipes]),
    )


@dataclass
class Passes:
    """Seconds by kind of kernel, each an array [3, S]: forward, input gradient, weight gradient."""

    gemm: NDArray[np.float64]
    attention: NDArray[np.float64]
    grouped: NDArray[np.float64]
    element: NDArray[np.float64]
    cast: NDArray[np.float64]
    gap: NDArray[np.float64]

    @classmethod
    def zero(cls, size: int) -> Passes:
        return cls(*(np.zeros((3, size)) for _ in range(6)))

    @property
    def total(self) -> NDArray[np.float64]:
        """[3, S]: all kernels of a pass."""
        return self.gemm + self.attention + self.grouped + self.element + self.cast + self.gap

    def scaled(self, factor: Any) -> Passes:
        return Passes(*(getattr(self, k) * factor for k in ("gemm", "attention", "grouped", "element", "cast", "gap")))

    def __add__(self, other: Passes) -> Passes:
        names = ("gemm", "attention", "grouped", "element", "cast", "gap")
        return Passes(*(getattr(self, k) + getattr(other, k) for k in names))


def gemm_s(
    tokens: Any, out: Any, depth: Any, p: Precision, r: Rates, c: Constants, *, wide: bool = False
) -> NDArray[np.float64]:
    """[3, S] seconds of one linear layer [T, K] x [K, N] without gaps and casts; zero where `out` is zero.

    The depth of the sum (K forward, N for the input gradient, T for the weight gradient) fills the pipeline of the
    tensor units: efficiency x depth / (depth + gemm_half_k). The weight gradient is added to a float32 buffer.
    """
    rate = p.wide_flops_per_s if wide else p.gemm_flops_per_s
    operand = p.compute_bytes if wide else p.operand_bytes
    tokens, out, depth = (np.asarray(x, float) for x in (tokens, out, depth))
    flops = 2 * tokens * out * depth / rate
    a, b, y = tokens * depth, depth * out, tokens * out
    hbm = r.hbm_bytes_per_s
    narrow = 1.0 + c.gemm_half_n * (1 / np.maximum(tokens, 1.0) + 1 / np.maximum(out, 1.0) + 1 / np.maximum(depth, 1.0))
    flops = flops * narrow
    return np.stack(
        np.broadcast_arrays(
            flops * _deep(depth, c) + (operand * (a + b) + p.compute_bytes * y) / hbm,
            flops * _deep(out, c) + (operand * (y + b) + p.compute_bytes * a) / hbm,
            flops * _deep(tokens, c) + (operand * (a + y) + 8.0 * b) / hbm,
        )
    )


def _deep(depth: Any, c: Constants) -> Any:
    return 1.0 + c.gemm_half_k / np.maximum(depth, 1.0)


def cast_s(tokens: Any, grads: Any, out: Any, depth: Any, p: Precision, r: Rates, c: Constants) -> NDArray[np.float64]:
    """[3, S] seconds to quantise `tokens` rows of a linear layer's input (forward) and `grads` rows of the gradient of
    its output (backward): what is gathered over tensor-parallel ranks is quantised before, by each its own part."""
    each = c.cast * p.cast_bytes / (r.hbm_bytes_per_s * c.hbm)
    zero = np.zeros(np.broadcast(tokens, out, depth).shape)
    used = np.where(np.asarray(out) > 0, 1.0, 0.0)
    return np.stack(np.broadcast_arrays(each * tokens * depth * used, each * grads * out * used, zero))


def mean_keys(seq: Any, d: Dims) -> Any:
    """Keys that a query meets, averaged over positions and layers: (s+1)/2, or with a window w < s w (1 - w/2s)."""
    full = (np.asarray(seq, float) + 1) / 2
    w = np.minimum(np.where(np.asarray(d.window) > 0, d.window, seq), seq)
    windowed = (w * (w + 1) / 2 + (seq - w) * w) / seq
    return full * (1 - d.window_share) + windowed * d.window_share


def attention_flops(tokens: Any, seq: Any, tp: Any, d: Dims) -> Any:
    """Forward FLOPs of the attention core of a layer on causal pairs: q k^T and the weighted sum of v."""
    return 2.0 * tokens * mean_keys(seq, d) * d.heads / tp * (d.qk_dim + d.v_dim)


def attention_core(
    tokens: Any, seq: Any, tp: Any, d: Dims, p: Precision, r: Rates, c: Constants
) -> NDArray[np.float64]:
    """[3, S] seconds of flash attention, or of scores that go through memory (`unfused_attention`).

    Unfused: two batched products over all pairs, and 14 bytes a score forward and 14 backward (16-bit scores, mask,
    softmax, dropout); both get slow where head_dim is no multiple of 8.
    """
    flops = attention_flops(tokens, seq, tp, d)
    eff = c.attention * np.asarray(seq, float) / (seq + c.attention_half)
    eff = eff * (1 + c.attention_half_dim / 128) / (1 + c.attention_half_dim / d.qk_dim)  # the constants speak of 128
    flash_f = flops / (r.bf16 * c.clock * eff)
    flash_b = 2.5 * flops / (r.bf16 * c.clock * eff * c.attention_backward)
    scores = np.asarray(tokens, float) * seq * d.heads / tp
    odd = np.where(np.asarray(d.qk_dim) % 8 == 0, 1.0, c.head_dim_penalty)
    traffic = 14.0 * scores * c.unfused / (r.hbm_bytes_per_s * c.hbm)
    pairs = 2.0 * scores * (d.qk_dim + d.v_dim) / p.wide_flops_per_s * (1 + c.gemm_half_k / d.qk_dim)
    plain_f, plain_b = (traffic + pairs) * odd, (traffic + 2 * pairs) * odd
    unfused = np.asarray(c.unfused_attention) > 0
    zero = np.zeros_like(flash_f * odd)
    return np.stack(np.broadcast_arrays(np.where(unfused, plain_f, flash_f), np.where(unfused, plain_b, flash_b), zero))


def grouped_share(tokens_per_expert: Any, width: Any, c: Constants) -> Any:
    """Efficiency of a grouped product against a plain one: saturates in tokens of an expert and in its width."""
    rows = np.asarray(tokens_per_expert, float)
    return 1 / ((1 + (c.grouped_half_tokens / rows) ** _FILL) * (1 + (c.grouped_half_width / width) ** _FILL))


def cross_entropy_s(tokens: Any, vocab: Any, r: Rates, c: Constants) -> Any:
    """Softmax, loss and gradient over float32 logits: 24 bytes a logit, forward and backward together."""
    return 24.0 * c.cross_entropy * np.asarray(tokens, float) * vocab / (r.hbm_bytes_per_s * c.hbm)


def optimizer_s(params: Any, r: Rates, c: Constants) -> Any:
    """Adam over the local shard: gradient, master, two moments read and three written, the 16-bit copy: 30 bytes."""
    return 30.0 * c.optimizer * np.asarray(params, float) / (r.hbm_bytes_per_s * c.hbm)
