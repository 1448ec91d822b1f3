"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

Keys and values are made from a latent vector of each token that all heads share, and a rotated key of
`qk_rope_head_dim` that they share too. Training expands them to whole heads. With a cache only the latent and the
rotated key are kept: the expansion is absorbed into the query and the output, so that attention is over one shared
head of the latent.

Legend: B batch, S sequence, L positions in the cache, D model, H heads, N unrotated and R rotated dims of a head,
V dims of a head's value, C latent.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.core.model import ModelSpec, RopeSpec
from bessemer.models.parts import Cache, Compute, Norm, Projection, Visible

__all__ = ["LatentAttention", "score_scale"]

_LATENT_EPS = 1e-6  # of the norms inside, whatever the model's own eps is: as in DeepSeek's published code


def score_scale(rope: RopeSpec, head_dim: int) -> float:
    """The factor on q k^T: 1 / sqrt(head_dim), and YaRN's attention temperature where `mscale_all_dim` asks for it."""
    scale = head_dim**-0.5
    if rope.kind != "none" and rope.mscale_all_dim and rope.factor and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


def _rotate(x_BSHR: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Turned in float32, back in the type of x. Interleaved pairs come out with their halves apart: the same
    permutation for queries and keys, which no score sees."""
    wide = x_BSHR.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    cos, sin = (table.unsqueeze(-2) for table in rope)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BSHR.dtype)


class LatentAttention(nn.Module):
    """q (or q_a, q_a_norm, q_b with query compression), kv_a (latent, then the rotated key), kv_a_norm, kv_b (of each
    head its key, then its value) and o."""

    def __init__(self, spec: ModelSpec, layer: int, compute: Compute, device: Any) -> None:
        super().__init__()
        mla = spec.mla
        assert mla is not None
        self.mla, self.layer, self.compute = mla, layer, compute
        self.heads = spec.num_heads // compute.split.tensor.degree
        self.interleaved = spec.rope.interleaved
        self.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.scale = score_scale(spec.rope, self.head_dim)
        hidden, queries = spec.hidden_size, self.heads * self.head_dim
        self.q: Projection | None = None
        self.q_a: Projection | None = None
        if mla.q_lora_rank is None:
            self.q = Projection(hidden, queries, False, compute, device, part="columns")
        else:
            self.q_a = Projection(hidden, mla.q_lora_rank, False, compute, device)
            self.q_a_norm = Norm(mla.q_lora_rank, spec, compute, device, eps=_LATENT_EPS)
            self.q_b = Projection(mla.q_lora_rank, queries, False, compute, device, part="columns")
        self.kv_a = Projection(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, False, compute, device)
        self.kv_a_norm = Norm(mla.kv_lora_rank, spec, compute, device, eps=_LATENT_EPS)
        expanded = self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b = Projection(mla.kv_lora_rank, expanded, False, compute, device, part="columns")
        self.o = Projection(self.heads * mla.v_head_dim, hidden, False, compute, device, part="rows")

    def forward(self, x_BSD: Tensor, visible: Visible) -> Tensor:
        assert visible.rope is not None
        part = self.compute.saving.part
        query_BSC, latent_BSC, k_rope = part("qkv", self._down, x_BSD)
        if self.q_a is not None:
            query_BSC = self.q_a_norm(query_BSC)[1]
        latent_BSC = self.kv_a_norm(latent_BSC)[1]
        k_rope = self.compute.split.tensor.enter(k_rope)  # all heads share it, so it is not one of `columns`
        if visible.cache is not None:
            out_BSHV = self._cached(query_BSC, latent_BSC, k_rope, visible.rope, visible.cache)
            return self.o(out_BSHV.flatten(2))
        q, k, v = part("mla_up", self._up, query_BSC, latent_BSC, k_rope, visible.rope)
        out_BSP = part("attention", self._attend, q, k, v, visible.starts[None])
        return part("out", self.o, out_BSP)

    def _down(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries (of all heads, or their latent), the latent of keys and values, and the unrotated shared key."""
        first = self.q if self.q is not None else self.q_a
        assert first is not None
        latent_BSC, k_rope = self.kv_a(x_BSD).split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), -1)
        return first(x_BSD), latent_BSC, k_rope

    def _turned(self, query_BSC: Tensor, k_rope: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The unrotated and the rotated part of the queries [B, S, H, N] and [B, S, H, R], the rotated key
        [B, S, 1, R]."""
        queries = query_BSC if self.q_a is None else self.q_b(query_BSC)
        sizes = (self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim)
        q_nope, q_rope = queries.unflatten(-1, (self.heads, self.head_dim)).split(sizes, -1)
        q_rope = _rotate(q_rope, rope, self.interleaved)
        return q_nope, q_rope, _rotate(k_rope.unsqueeze(2), rope, self.interleaved)

    def _up(
        self, query_BSC: Tensor, latent_BSC: Tensor, k_rope: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_nope, q_rope, k_rope = self._turned(query_BSC, k_rope, rope)
        return self._whole(q_nope, q_rope, latent_BSC, k_rope)

    def _whole(
        self, q_nope: Tensor, q_rope: Tensor, latent_BSC: Tensor, k_rope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of whole heads [B, H, S, ·], for the training form. The kernels take values as wide
        as keys or narrower."""
        nope, value = self.mla.qk_nope_head_dim, self.mla.v_head_dim
        keys_values = self.kv_b(latent_BSC).unflatten(-1, (self.heads, nope + value))
        k_nope, v = keys_values.transpose(1, 2).split((nope, value), -1)
        q_nope, q_rope, k_rope = (t.transpose(1, 2) for t in (q_nope, q_rope, k_rope))
        q = torch.cat((q_nope, q_rope), -1)  # contiguous: attention saves this very tensor, not a copy
        k = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1, -1)), -1)
        width = max(self.head_dim, value)
        q = q * (self.scale * math.sqrt(width))  # the kernels divide by the square root of the width
        q, k = (F.pad(t, (0, width - self.head_dim)) for t in (q, k))
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        return self.compute.split.context.attend(q, k, v, starts).flatten(2)

    def _cached(
        self, query_BSC: Tensor, latent_BSC: Tensor, k_rope: Tensor, rope: tuple[Tensor, Tensor], cache: Cache
    ) -> Tensor:
        """The generation form -> [B, S, H, V]; a first call, which meets no older token, takes the training form."""
        q_nope, q_rope, k_rope = self._turned(query_BSC, k_rope, rope)
        stored_BLC, seen_BSL = cache.extend(self.layer, torch.cat((latent_BSC, k_rope.squeeze(2)), -1))
        if cache.length == q_nope.shape[1]:
            q, k, v = self._whole(q_nope, q_rope, latent_BSC, k_rope)
            return self.compute.split.context.attend(q, k, v, None)
        weight = self.kv_b.weight.to(latent_BSC.dtype).unflatten(0, (self.heads, -1))
        key_HNC, value_HVC = weight.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), 1)
        q_BSHC = torch.einsum("bshn,hnc->bshc", q_nope, key_HNC)
        q = torch.cat((q_BSHC, q_rope), -1) * self.scale
        scores_BHSL = torch.einsum("bshc,blc->bhsl", q.float(), stored_BLC.float())
        shares = scores_BHSL.masked_fill(~seen_BSL.unsqueeze(1), float("-inf")).softmax(-1).to(q.dtype)
        mixed_BSHC = torch.einsum("bhsl,blc->bshc", shares, stored_BLC[..., : self.mla.kv_lora_rank])
        return torch.einsum("bshc,hvc->bshv", mixed_BSHC, value_HVC)
