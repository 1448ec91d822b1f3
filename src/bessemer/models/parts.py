"""The parts that blocks are made of: projections, norms, attention and the dense feed-forward.

Legend: B batch, S sequence, D model, H query heads, K key/value heads, E head dim, F feed-forward, C latent width,
L positions in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.model import ModelSpec
from bessemer.models.quantised import Quantised, QuantisedExperts
from bessemer.models.saving import Saving
from bessemer.models.split import Split
from bessemer.ops.linear import How
from bessemer.precision import kept_swiglu, swiglu_again

__all__ = [
    "Attention",
    "Cache",
    "Compute",
    "FeedForward",
    "HeadNorm",
    "Norm",
    "Part",
    "Projection",
    "Visible",
    "swiglu_part",
]


class Cache(Protocol):
    """What attention asks of a cache; one that keeps keys and values (`infer/cache.py`) has `attend`, one that keeps
    latents (`infer/latent.py`) has `extend`."""

    positions: Tensor  # [B, S] of the tokens of this call, int64
    length: int  # positions that exist after this call: the rotation tables' size

    def extend(self, layer: int, latent_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores latents at the positions; returns all of them [B, L, C] and which of them each query sees,
        bool [B, S, L]."""
        ...

    def attend(self, layer: int, window: int | None, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """Stores k and v at the positions and returns [B, S, H, E]."""
        ...


@dataclass
class Compute:
    """What all parts of one model share: the type that they compute in, which can so be changed in one place, how the
    model is split over processes, and what is kept for the backward pass."""

    dtype: torch.dtype = torch.float32
    split: Split = field(default_factory=Split)
    saving: Saving = field(default_factory=Saving)


@dataclass(frozen=True)
class Visible:
    """What the blocks of one call share: what attention may see (per window the first key of each query of the whole
    sequence, or a cache), the rotation tables, and what each sequence weighs in the loss."""

    starts: dict[int | None, Tensor | None]
    rope: tuple[Tensor, Tensor] | None
    cache: Cache | None = None
    weights: Tensor | None = None  # float32 [B]: the counted tokens of each sequence; None outside of training


Part = Literal["whole", "columns", "rows"]
"""What a rank of tensor parallelism holds of a projection: all of it, its share of the outputs, or of the inputs."""


class Projection(nn.Module):
    """A weight [out, in] and perhaps a bias [out], applied in the model's compute type or, once `models.quantise` has
    chosen it, by a recipe; of `part` "columns" and "rows" the sizes given are those of this rank's share."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, compute: Compute, device: Any, *, part: Part = "whole"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, device=device)) if bias else None
        self.compute, self.part = compute, part
        self.quantised: Quantised | None = None

    def forward(self, x: Tensor) -> Tensor:
        split, how = self.compute.split, self._how(x)
        if self.part == "columns":
            return split.tensor.columns(x, self.weight, self.bias, how)
        if self.part == "rows":
            return split.tensor.rows(x, self.weight, self.bias, how)
        return ops.linear(x, self.weight, self.bias, how)

    def _how(self, x: Tensor) -> How:
        if self.quantised is None:
            return self.compute.dtype
        return self.quantised.products(x, self.compute.dtype, self.compute.split, keeps=self._keeps(x))

    def _keeps(self, x: Tensor) -> bool:
        """Whether x, or the copy of it that the product reads, is kept for the product."""
        tensor, saving = self.compute.split.tensor, self.compute.saving
        rearranged = self.part == "rows" and (len(x) > 1 or tensor.chunks > 1)
        copied = tensor.sequence_parallel and (self.part == "columns" or rearranged)
        return not saving.again("gather") if copied else saving.keeps(x)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, with the residual add in front of it."""

    def __init__(self, size: int, spec: ModelSpec, compute: Compute, device: Any, *, eps: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.bias = nn.Parameter(torch.empty(size, device=device)) if spec.norm == "layernorm" else None
        self.eps, self.kind, self.compute = spec.norm_eps if eps is None else eps, spec.norm, compute

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, norm(x + delta) in the compute type)."""
        return self.compute.saving.part("norm", self._add_norm, x, delta)

    def _add_norm(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, delta, self.weight, self.bias, self.eps, self.kind, self.compute.dtype)


class HeadNorm(nn.Module):
    """The RMSNorm weight of each query or key head (Qwen3); `ops.split_heads` applies it."""

    def __init__(self, size: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))


class Attention(nn.Module):
    """Grouped-query causal attention with rotation, qk-norm, sliding window and document mask as the spec says."""

    def __init__(self, spec: ModelSpec, layer: int, compute: Compute, device: Any) -> None:
        super().__init__()
        tp = compute.split.tensor.degree
        # with more ranks than key/value heads, several ranks hold the same head
        self.heads = ops.Heads(spec.num_heads // tp, max(1, spec.num_kv_heads // tp), spec.head_dim)
        width = self.heads.query * spec.head_dim
        packed = width + 2 * self.heads.kv * spec.head_dim
        self.qkv = Projection(spec.hidden_size, packed, spec.qkv_bias, compute, device, part="columns")
        self.o = Projection(width, spec.hidden_size, spec.o_bias, compute, device, part="rows")
        self.q_norm = HeadNorm(spec.head_dim, device) if spec.qk_norm else None
        self.k_norm = HeadNorm(spec.head_dim, device) if spec.qk_norm else None
        self.layer, self.window, self.eps, self.compute = layer, spec.window(layer), spec.norm_eps, compute

    def forward(self, x_BSD: Tensor, visible: Visible) -> Tensor:
        part = self.compute.saving.part
        q, k, v = part("qkv", self._project, x_BSD, visible.rope)
        if visible.cache is not None:
            return self.o(visible.cache.attend(self.layer, self.window, q, k, v).flatten(2))
        out_BSP = part("attention", self._attend, q, k, v, visible.starts[self.window])
        return part("out", self.o, out_BSP)

    def _project(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x_BSD)
        if self.q_norm is None:  # rotation alone needs no input to be differentiated: nothing would be won
            return self._heads(packed, rope)
        return self.compute.saving.part("heads", self._heads, packed, rope)

    def _heads(self, packed: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        norms = None if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        return ops.split_heads(packed, self.heads, rope, norms, self.eps)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        return self.compute.split.context.attend(q, k, v, starts).flatten(2)


class FeedForward(nn.Module):
    """SwiGLU with packed gate and up, or an ungated GELU, `width` wide."""

    def __init__(self, spec: ModelSpec, width: int, compute: Compute, device: Any) -> None:
        super().__init__()
        self.activation, self.compute = spec.activation, compute
        width //= compute.split.tensor.degree
        if spec.gated:
            self.gate_up = Projection(spec.hidden_size, 2 * width, spec.mlp_bias, compute, device, part="columns")
        else:
            self.up = Projection(spec.hidden_size, width, spec.mlp_bias, compute, device, part="columns")
        self.down = Projection(width, spec.hidden_size, spec.mlp_bias, compute, device, part="rows")

    def forward(self, x_BSD: Tensor, visible: Visible | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]; `visible` is what a mixture of experts needs in the same place."""
        part = self.compute.saving.part
        if self.activation == "swiglu":
            made_BSF = swiglu_part(self.compute.saving, part("up", self.gate_up, x_BSD), self.down.quantised)
            return self.down(made_BSF)
        return self.down(part("activation", ops.gelu, part("up", self.up, x_BSD), self.activation == "gelu_tanh"))


def swiglu_part(saving: Saving, gate_up: Tensor, down: Quantised | QuantisedExperts | None) -> Tensor:
    """silu(gate) * up [..., F] of [..., 2F]. Kept narrow where the projection behind it asks: then that gets its input
    made again from what is kept, as from a part."""
    narrow = down is not None and down.narrow and not down.fallen
    if not narrow or saving.again("up") or not torch.is_grad_enabled():
        return saving.part("activation", ops.swiglu, gate_up)
    made, codes, scale = kept_swiglu(gate_up)
    return saving.made("activation", made, swiglu_again, codes, scale, made.dtype)
