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
        self.mla, self.layer, self.split = mla, layer, compute.split
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
        queries = self.q(x_BSD) if self.q is not None else self._compressed_queries(x_BSD)
        nope, rope = self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim
        q_nope, q_rope = queries.unflatten(-1, (self.heads, self.head_dim)).split((nope, rope), -1)
        latent_BSC, k_rope = self.kv_a(x_BSD).split((self.mla.kv_lora_rank, rope), -1)
        latent_BSC = self.kv_a_norm(latent_BSC)[1]
        q_rope = _rotate(q_rope, visible.rope, self.interleaved)
        k_rope = self.split.tensor.enter(k_rope)  # all heads share it, so it is not one of `columns`
        k_rope = _rotate(k_rope.unsqueeze(2), visible.rope, self.interleaved)
        if visible.cache is not None:
            out_BSHV = self._cached(q_nope, q_rope, latent_BSC, k_rope, visible.cache)
        else:
            out_BSHV = self._expanded(q_nope, q_rope, latent_BSC, k_rope, visible.starts[None])
        return self.o(out_BSHV.flatten(2))

    def _compressed_queries(self, x_BSD: Tensor) -> Tensor:
        assert self.q_a is not None
        return self.q_b(self.q_a_norm(self.q_a(x_BSD))[1])

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor, latent_BSC: Tensor, k_rope: Tensor, starts: Tensor | None
    ) -> Tensor:
        """The training form -> [B, S, H, V]. The kernels take values as wide as keys or narrower."""
        nope, value = self.mla.qk_nope_head_dim, self.mla.v_head_dim
        keys_values = self.kv_b(latent_BSC).unflatten(-1, (self.heads, nope + value))
        k_nope, v = keys_values.split((nope, value), -1)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), -1)
        width = max(self.head_dim, value)
        q = q * (self.scale * math.sqrt(width))  # the kernels divide by the square root of the width
        q, k = (F.pad(t, (0, width - self.head_dim)) for t in (q, k))
        return self.split.context.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), starts)

    def _cached(self, q_nope: Tensor, q_rope: Tensor, latent_BSC: Tensor, k_rope: Tensor, cache: Cache) -> Tensor:
        """The generation form -> [B, S, H, V]; a first call, which meets no older token, takes the training form."""
        stored_BLC, seen_BSL = cache.extend(self.layer, torch.cat((latent_BSC, k_rope.squeeze(2)), -1))
        if cache.length == q_nope.shape[1]:
            return self._expanded(q_nope, q_rope, latent_BSC, k_rope, None)
        weight = self.kv_b.weight.to(latent_BSC.dtype).unflatten(0, (self.heads, -1))
        key_HNC, value_HVC = weight.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), 1)
        q_BSHC = torch.einsum("bshn,hnc->bshc", q_nope, key_HNC)
        q = torch.cat((q_BSHC, q_rope), -1) * self.scale
        scores_BHSL = torch.einsum("bshc,blc->bhsl", q.float(), stored_BLC.float())
        shares = scores_BHSL.masked_fill(~seen_BSL.unsqueeze(1), float("-inf")).softmax(-1).to(q.dtype)
        mixed_BSHC = torch.einsum("bhsl,blc->bshc", shares, stored_BLC[..., : self.mla.kv_lora_rank])
        return torch.einsum("bshc,hvc->bshv", mixed_BSHC, value_HVC)
