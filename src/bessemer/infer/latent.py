"""The cache of latent attention: per token and layer one latent and one rotated key, shared by all heads.

Legend: B batch, S tokens of a call, L positions, C latent and rotated key together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer.core.model import ModelSpec
from bessemer.infer.cache import Positions

__all__ = ["LatentCache"]


class LatentCache(Positions):
    """Latents by layer, at the positions where they belong; see `KvCache` for how positions work."""

    def __init__(self, spec: ModelSpec, batch: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(batch, capacity, device)
        mla = spec.mla
        assert mla is not None
        width = mla.kv_lora_rank + mla.qk_rope_head_dim
        self._latents = torch.zeros(spec.num_layers, batch, capacity, width, dtype=dtype, device=device)

    def keep(self, rows_B: Tensor) -> None:
        """Drops the sequences that are not in `rows_B` (indices), as they finish."""
        self._latents = self._latents[:, rows_B]

    def extend(self, layer: int, latent_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores this call's latents; returns all up to the farthest position [B, L, C], and which of them each
        query sees, bool [B, S, L]."""
        at_BS = self.positions
        stored_BLC = self._latents[layer]
        stored_BLC[torch.arange(latent_BSC.shape[0], device=at_BS.device)[:, None], at_BS] = latent_BSC
        column_L = torch.arange(self.length, device=at_BS.device)
        return stored_BLC[:, : self.length], column_L <= at_BS[:, :, None]
