"""Attention: heads split from the packed projection, rotated, and the causal product in all its masks.

What a query may see is one number: `starts_BS` (int32), the first key of query i, which sees starts[i]..i. Plain
causal attention is None; a sliding window and packed documents are both said by it (`first_keys`).

Legend: B batch, S sequence, H query heads, K key/value heads, E head dim, P packed (H + 2K) * E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops import native
from bessemer.ops.attention_blocks import Block, as_wide, filled, run_backward, run_forward
from bessemer.ops.registry import native_fits, register
from bessemer.ops.tracing import made_again, traced

__all__ = ["Heads", "attend", "attend_masked", "first_keys", "split_heads"]

_CHUNK = 64  # kRowChunk of csrc/vector.cpp
_MAX_HEAD = 512  # kMaxHead of csrc/pointwise.cpp


@dataclass(frozen=True)
class Heads:
    """How many query and key/value heads of which width a packed projection holds."""

    query: int
    kv: int
    dim: int


def first_keys(segments_BS: Tensor | None, batch: int, seq: int, window: int | None) -> Tensor | None:
    """The first visible key of each query, int32 [B, S], or None where that is plain causal attention.

    segments_BS: a change of number starts a new document. window: positions that a query sees, itself included.
    """
    starts_BS = None
    if segments_BS is not None:
        new_BS = segments_BS[:, 1:] != segments_BS[:, :-1]
        if bool(new_BS.any()):
            at_S = torch.arange(1, seq, dtype=torch.int32, device=segments_BS.device)
            marks_BS = F.pad(torch.where(new_BS, at_S, 0).to(torch.int32), (1, 0))
            starts_BS = marks_BS.cummax(1).values
    if window is not None and window < seq:
        device = None if segments_BS is None else segments_BS.device
        low_S = (torch.arange(seq, dtype=torch.int32, device=device) - (window - 1)).clamp_min(0)
        starts_BS = low_S.expand(batch, seq) if starts_BS is None else torch.maximum(starts_BS, low_S)
    return None if starts_BS is None else starts_BS.to(torch.int32).contiguous()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x_BSHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BSHE.float().chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def _split_reference(
    qkv_BSP: Tensor,
    heads: Heads,
    rope: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed projections (q heads, then k, then v) -> q [B,H,S,E], k and v [B,K,S,E], contiguous, in their type.

    norms: RMSNorm weights [E] of q and k, applied to each head first (Qwen3). rope: cos and sin, float32 [S, E/2]
    or [B, S, E/2]; the two halves of a head turn together (Hugging Face's rotate_half). Computed in float32.
    """
    batch, seq, _ = qkv_BSP.shape
    split = qkv_BSP.view(batch, seq, heads.query + 2 * heads.kv, heads.dim)
    q, k, v = split.split((heads.query, heads.kv, heads.kv), 2)
    if norms is not None:
        q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
    if rope is not None:
        q, k = _rotate(q, *rope), _rotate(k, *rope)
    dtype = qkv_BSP.dtype
    return tuple(t.to(dtype).transpose(1, 2).contiguous() for t in (q, k, v))  # type: ignore[return-value]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, qw: Tensor | None, kw: Tensor | None, cos: Tensor | None, sin: Tensor | None, rest: Any
    ) -> Any:
        heads, eps = rest
        batch, seq, _ = qkv.shape
        qkv = qkv.contiguous()
        wide = (None, None) if qw is None else (qw.detach().float(), kw.detach().float())
        q = qkv.new_empty(batch, heads.query, seq, heads.dim)
        k, v = (qkv.new_empty(batch, heads.kv, seq, heads.dim) for _ in range(2))
        rows = batch * seq * (heads.query + heads.kv)
        rstd = None if qw is None else torch.empty(rows, dtype=torch.float32, device=qkv.device)
        sizes = (batch, seq, heads.query, heads.kv, heads.dim, cos is not None and cos.dim() == 3)
        native.kernels(qkv).bessemer_split_heads(
            qkv.data_ptr(),
            qkv.dtype == torch.bfloat16,
            *(_pointer(t) for t in (cos, sin, *wide, q, k, v, rstd)),
            *sizes,
            eps,
            native.threads(),
        )
        ctx.save_for_backward(cos, sin, qw, kw, rstd, None if qw is None else qkv)
        ctx.sizes, ctx.heads, ctx.shape = sizes, heads, qkv.shape
        return q, k, v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        cos, sin, qw, kw, rstd, qkv = ctx.saved_tensors
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        dqkv = dq.new_empty(ctx.shape)
        wide = (None, None) if qw is None else (qw.detach().float(), kw.detach().float())
        chunks = (ctx.shape[0] * ctx.shape[1] + _CHUNK - 1) // _CHUNK
        partial = None if qw is None else torch.empty(chunks, 2, ctx.heads.dim, dtype=torch.float32, device=dq.device)
        native.kernels(dq).bessemer_split_heads_backward(
            *(_pointer(t) for t in (dq, dk, dv)),
            dq.dtype == torch.bfloat16,
            *(_pointer(t) for t in (cos, sin, qkv, *wide, rstd, dqkv, partial)),
            *ctx.sizes,
            native.threads(),
        )
        if partial is None:
            return dqkv, None, None, None, None, None
        dqw, dkw = partial.sum(0).to(qw.dtype)
        return dqkv, dqw, dkw, None, None, None


def _split_native(qkv_BSP: Tensor, heads: Heads, rope: Any, norms: Any, eps: float) -> Any:
    return _SplitHeads.apply(qkv_BSP, *(norms or (None, None)), *(rope or (None, None)), (heads, eps))


def _split_fits(qkv_BSP: Tensor, heads: Heads, rope: Any, norms: Any, eps: float) -> bool:
    even = heads.dim % 2 == 0 and heads.dim <= _MAX_HEAD
    tables = rope is None or all(t.is_contiguous() and t.dtype == torch.float32 for t in rope)
    return even and tables and native_fits(qkv_BSP, *(norms or ()), *(rope or ()))


split_heads = register("split_heads", reference=_split_reference, native=_split_native, fits=_split_fits)


def _attend_reference(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts_BS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v over the visible keys -> [B, S, H, E]; query heads share key/value heads in groups.

    Values may be narrower than keys (latent attention); the result is then as wide as they.
    Through torch's scaled_dot_product_attention: its causal path when starts_BS is None, else an explicit mask.
    """
    if starts_BS is None:
        out = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    return attend_masked(q_BHSE, k_BKSE, v_BKSE, made_again(_seen, starts_BS, q_BHSE.dtype)[:, None])


def _seen(starts_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, S]: which keys (last) each query sees. While tracing, what is added to the scores: torch turns booleans
    into that, and the compiler would keep it."""
    at_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    mask_BSS = (at_S[None, None, :] <= at_S[None, :, None]) & (at_S[None, None, :] >= starts_BS[:, :, None])
    return torch.where(mask_BSS, 0.0, -torch.inf).to(dtype) if traced() else mask_BSS


def attend_masked(q_BHSE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, mask: Tensor) -> Tensor:
    """Attention under any boolean mask (True: seen) that broadcasts to [B, H, S, L] -> [B, S, H, E]."""
    out = F.scaled_dot_product_attention(q_BHSE, k_BKLE, v_BKLE, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        ctx.value_dim = v.shape[-1]
        block = filled(Block(q, k, v, starts=starts))
        out, lse = run_forward(block, ctx.value_dim, q.dtype)
        ctx.save_for_backward(block.q, block.k, block.v, out, lse, starts)
        return out if ctx.value_dim == out.shape[-1] else out[..., : ctx.value_dim]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, starts = ctx.saved_tensors
        block = Block(q, k, v, starts=starts)
        return *run_backward(block, as_wide(grad, q.shape[-1]), out, lse, ctx.value_dim, q.dtype), None


def _attend_fits(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts_BS: Tensor | None) -> bool:
    square = q_BHSE.shape[2] == k_BKSE.shape[2] and q_BHSE.numel() > 0 and v_BKSE.shape[3] <= k_BKSE.shape[3]
    return square and native_fits(q_BHSE, k_BKSE, v_BKSE) and q_BHSE.dtype == k_BKSE.dtype == v_BKSE.dtype


attend = register("attend", reference=_attend_reference, native=_Attend.apply, fits=_attend_fits)
