"""The dense decoder: named blocks put together as a `ModelSpec` says.

Parameters are float32 masters; products run in `compute_dtype`, and norms, rotation, softmax, the residual stream
and the loss in float32. Query, key and value share one packed parameter, as do gate and up; `canonical.py` says
which rows are which logical tensor.

Legend: B batch, S sequence, D model, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.model import ModelSpec
from bessemer.models.rope import Rope

__all__ = ["Attention", "Block", "Cache", "Decoder", "FeedForward"]


class Cache(Protocol):
    """What attention asks of a key/value cache (`infer/cache.py`)."""

    positions: Tensor  # [B, S] of the tokens of this call, int64
    length: int  # positions that exist after this call: the rotation tables' size

    def attend(self, layer: int, window: int | None, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """Stores k and v at the positions and returns [B, S, H, E]."""
        ...


@dataclass
class _Compute:
    """The type that all parts of one model compute in; one object, so that it can be changed in one place."""

    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Visible:
    """What one call's attention may see: per window the first key of each query, or a cache."""

    starts: dict[int | None, Tensor | None]
    rope: tuple[Tensor, Tensor] | None
    cache: Cache | None = None


class Projection(nn.Module):
    """A weight [out, in] and perhaps a bias [out]; applied in the model's compute type."""

    def __init__(self, inputs: int, outputs: int, bias: bool, compute: _Compute, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, device=device)) if bias else None
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, self.compute.dtype)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, with the residual add in front of it."""

    def __init__(self, size: int, spec: ModelSpec, compute: _Compute, device: Any, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.bias = nn.Parameter(torch.empty(size, device=device)) if bias and spec.norm == "layernorm" else None
        self.eps, self.kind, self.compute = spec.norm_eps, spec.norm, compute

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, norm(x + delta) in the compute type)."""
        return ops.add_norm(x, delta, self.weight, self.bias, self.eps, self.kind, self.compute.dtype)


class HeadNorm(nn.Module):
    """The RMSNorm weight of each query or key head (Qwen3); `ops.split_heads` applies it."""

    def __init__(self, size: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))


class Attention(nn.Module):
    """Grouped-query causal attention with rotation, qk-norm, sliding window and document mask as the spec says."""

    def __init__(self, spec: ModelSpec, layer: int, compute: _Compute, device: Any) -> None:
        super().__init__()
        self.heads = ops.Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        width = spec.num_heads * spec.head_dim
        packed = width + 2 * spec.num_kv_heads * spec.head_dim
        self.qkv = Projection(spec.hidden_size, packed, spec.qkv_bias, compute, device)
        self.o = Projection(width, spec.hidden_size, spec.o_bias, compute, device)
        self.q_norm = HeadNorm(spec.head_dim, device) if spec.qk_norm else None
        self.k_norm = HeadNorm(spec.head_dim, device) if spec.qk_norm else None
        self.layer, self.window, self.eps = layer, spec.window(layer), spec.norm_eps

    def forward(self, x_BSD: Tensor, visible: Visible) -> Tensor:
        norms = None if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        q, k, v = ops.split_heads(self.qkv(x_BSD), self.heads, visible.rope, norms, self.eps)
        if visible.cache is not None:
            out_BSHE = visible.cache.attend(self.layer, self.window, q, k, v)
        else:
            out_BSHE = ops.attend(q, k, v, visible.starts[self.window])
        return self.o(out_BSHE.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU with packed gate and up, or an ungated GELU."""

    def __init__(self, spec: ModelSpec, compute: _Compute, device: Any) -> None:
        super().__init__()
        self.activation = spec.activation
        if spec.gated:
            self.gate_up = Projection(spec.hidden_size, 2 * spec.ffn_size, spec.mlp_bias, compute, device)
        else:
            self.up = Projection(spec.hidden_size, spec.ffn_size, spec.mlp_bias, compute, device)
        self.down = Projection(spec.ffn_size, spec.hidden_size, spec.mlp_bias, compute, device)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.down(ops.swiglu(self.gate_up(x_BSD)))
        return self.down(ops.gelu(self.up(x_BSD), self.activation == "gelu_tanh"))


class Block(nn.Module):
    """Pre-norm attention and feed-forward. The residual stream enters and leaves as one tensor, so that blocks can
    be sharded, recomputed or put on pipeline stages one by one."""

    def __init__(self, spec: ModelSpec, layer: int, compute: _Compute, device: Any) -> None:
        super().__init__()
        self.attn_norm = Norm(spec.hidden_size, spec, compute, device)
        self.attn = Attention(spec, layer, compute, device)
        self.mlp_norm = Norm(spec.hidden_size, spec, compute, device)
        self.mlp = FeedForward(spec, compute, device)

    def forward(self, x_BSD: Tensor, visible: Visible) -> Tensor:
        x_BSD, normed = self.attn_norm(x_BSD)
        x_BSD, normed = self.mlp_norm(x_BSD, self.attn(normed, visible))
        return x_BSD + self.mlp(normed)


class Embedding(nn.Module):
    """A table [rows, D]."""

    def __init__(self, rows: int, size: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, device=device))


class Decoder(nn.Module):
    """A decoder-only language model; parameters are left uninitialised (`models.build` fills them)."""

    def __init__(self, spec: ModelSpec, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        if spec.moe is not None or spec.mla is not None or spec.mtp_layers:
            raise ValueError(f"family {spec.family!r} is not dense: only dense models can be built")
        self.spec = spec
        self._compute = _Compute()
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, device)
        learned = spec.positions == "learned"
        self.pos_embed = Embedding(spec.max_positions, spec.hidden_size, device) if learned else None
        self.blocks = nn.ModuleList(Block(spec, i, self._compute, device) for i in range(spec.num_layers))
        self.norm = Norm(spec.hidden_size, spec, self._compute, device)
        self.head = None
        if not spec.tied_embeddings:
            self.head = Projection(spec.hidden_size, spec.vocab_size, False, self._compute, device)
        self._rope = None if learned else Rope(spec)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the products: torch.float32 or torch.bfloat16. Parameters keep theirs."""
        return self._compute.dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"compute_dtype {dtype} is not torch.float32 or torch.bfloat16")
        self._compute.dtype = dtype

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        *,
        weights_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight x cross-entropy in nats, sum of weights), float32 scalars over the tokens that count.

        labels_BS: int64, already shifted; -100, or weight 0, is not counted. segments_BS: documents of packed
        sequences; a token attends only to its own. A loss that asks for gradients can be differentiated once.
        """
        hidden = self._hidden(tokens_BS, segments_BS, None)
        counted_BS = labels_BS != -100
        weights = counted_BS.float() if weights_BS is None else torch.where(counted_BS, weights_BS.float(), 0.0)
        loss = ops.linear_cross_entropy(hidden.flatten(0, 1), self._head_weight, labels_BS.flatten(), weights.flatten())
        return loss, weights.sum()

    def logits(self, tokens_BS: Tensor, *, segments_BS: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Next-token logits [B, S, V] in the compute type; with a cache, tokens_BS go on from what it holds."""
        return ops.linear(self._hidden(tokens_BS, segments_BS, cache), self._head_weight, None, self.compute_dtype)

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def _hidden(self, tokens_BS: Tensor, segments_BS: Tensor | None, cache: Cache | None) -> Tensor:
        batch, seq = tokens_BS.shape
        positions = None if cache is None else cache.positions
        length = seq if cache is None else cache.length
        if length > self.spec.max_positions and self.pos_embed is not None:
            raise ValueError(f"{length} tokens in a sequence, but the model has {self.spec.max_positions} positions")
        x_BSD = F.embedding(tokens_BS, self.embed.weight)
        if self.pos_embed is not None:
            at = torch.arange(seq, device=tokens_BS.device) if positions is None else positions
            x_BSD = x_BSD + F.embedding(at, self.pos_embed.weight)
        visible = self._visible(batch, seq, segments_BS, cache, positions, length, tokens_BS.device)
        for block in self.blocks:
            x_BSD = block(x_BSD, visible)
        return self.norm(x_BSD)[1]

    def _visible(
        self, batch: int, seq: int, segments: Any, cache: Any, positions: Any, length: int, device: Any
    ) -> Visible:
        rope = None if self._rope is None else self._rope.tables(length, device, positions)
        if cache is not None:
            return Visible({}, rope, cache)
        windows = {self.spec.window(i) for i in range(self.spec.num_layers)}
        starts = {w: ops.first_keys(segments, batch, seq, w) for w in windows}
        return Visible({w: None if s is None else s.to(device) for w, s in starts.items()}, rope)
