"""The key/value cache of a batch of sequences, each at its own length.

Legend: B batch, S tokens of a call, L positions, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer import ops
from bessemer.core.model import ModelSpec

__all__ = ["KvCache", "Positions"]


class Positions:
    """Where the tokens of the next call stand, each sequence at its own length."""

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.positions = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self.length = 0

    def begin(self, starts_B: Tensor, count: int) -> None:
        """The next call brings `count` tokens a sequence, sequence b's at starts_B[b], starts_B[b] + 1, ..."""
        self.positions = starts_B[:, None] + torch.arange(count, device=starts_B.device)
        self.length = int(self.positions.max()) + 1
        if self.length > self.capacity:
            raise ValueError(f"{self.length} positions, but the cache holds {self.capacity}")


class KvCache(Positions):
    """Keys and values by layer, at the positions where they belong; a sequence's row may be shorter than others.

    Before each call of `Decoder.logits`, `begin` says how many tokens come and from which position each sequence
    goes on. What lies at or beyond a sequence's position is never read, so padding needs no clearing.
    """

    def __init__(self, spec: ModelSpec, batch: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(batch, capacity, device)
        shape = (spec.num_layers, batch, spec.num_kv_heads, capacity, spec.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    def keep(self, rows_B: Tensor) -> None:
        """Drops the sequences that are not in `rows_B` (indices), as they finish."""
        self._keys, self._values = self._keys[:, rows_B], self._values[:, rows_B]

    def attend(self, layer: int, window: int | None, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """Stores k and v of this call, and attends from q to all positions up to each query's own -> [B, S, H, E].

        A first call (all positions from 0) is plain causal attention. Later, only the columns that some query's
        window still reaches are read.
        """
        batch, _, count, _ = k_BKSE.shape
        at_BS = self.positions
        rows_B1 = torch.arange(batch, device=at_BS.device)[:, None]
        keys, values = self._keys[layer], self._values[layer]
        keys[rows_B1, :, at_BS] = k_BKSE.transpose(1, 2)
        values[rows_B1, :, at_BS] = v_BKSE.transpose(1, 2)
        if self.length == count:
            return ops.attend(q_BHSE, k_BKSE, v_BKSE, ops.first_keys(None, batch, count, window))
        low = 0 if window is None else max(0, int(at_BS.min()) - window + 1)
        column_L = torch.arange(low, self.length, device=at_BS.device)
        seen_BSL = column_L <= at_BS[:, :, None]
        if window is not None:
            seen_BSL &= column_L > at_BS[:, :, None] - window
        part = slice(low, self.length)
        return ops.attend_masked(q_BHSE, keys[:, :, part], values[:, :, part], seen_BSL[:, None])
