"""Rotary position embedding: frequencies of each scaling, and the tables of a batch.

Legend: B batch, S sequence, E head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bessemer.core.model import ModelSpec, RopeSpec

__all__ = ["Rope", "frequencies"]


def frequencies(rope: RopeSpec, dim: int, max_positions: int, seq: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [dim / 2], and the factor on cos and sin, for a sequence of `seq` tokens.

    none: theta^(-2i/dim) (Su et al. 2021).  linear: divided by `factor`.  dynamic: theta grows with the sequence
    once it is longer than `max_positions` (NTK-aware).  yarn: arXiv 2309.00071.  llama3: Meta's three bands.
    """
    steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / rope.theta**steps
    if rope.kind == "linear":
        return plain / _need(rope, "factor"), 1.0
    if rope.kind == "dynamic":
        longest = rope.original_max_positions or max_positions
        factor, length = _need(rope, "factor"), max(seq, longest)
        theta = rope.theta * ((factor * length / longest) - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / theta**steps, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim, max_positions)
    return plain, 1.0


def _need(rope: RopeSpec, field: str) -> float:
    value = getattr(rope, field)
    if value is None:
        raise ValueError(f"rope.kind = {rope.kind!r} needs rope.{field}")
    return float(value)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    factor, original = _need(rope, "factor"), _need(rope, "original_max_positions")
    low, high = _need(rope, "low_freq_factor"), _need(rope, "high_freq_factor")
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, between)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(rope: RopeSpec, plain: Tensor, dim: int, max_positions: int) -> tuple[Tensor, float]:
    original = rope.original_max_positions or max_positions
    factor = _need(rope, "factor") if rope.factor is not None else max_positions / original
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0

    def turns_at(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns_at(fast), turns_at(slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_magnitude(rope, factor)


def _yarn_magnitude(rope: RopeSpec, factor: float) -> float:
    """The factor on cos and sin (YaRN's attention temperature); DeepSeek's form takes the ratio of two of them."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class Rope:
    """The tables of a model, kept for the longest sequence met. Not a module: nothing here is saved or sharded,
    and FSDP's mixed precision must not round the angles."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, seq: int, device: torch.device, positions_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, float32: [S, E/2] for positions 0..seq-1, or [B, S, E/2] at `positions_BS` (all < seq)."""
        key = (seq, device)
        if key not in self._tables:
            spec = self.spec
            dim = spec.head_dim if spec.mla is None else spec.mla.qk_rope_head_dim
            inverse, scale = frequencies(spec.rope, dim, spec.max_positions, seq)
            angles = torch.outer(torch.arange(seq, dtype=torch.float32), inverse)
            self._tables = {key: ((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))}
        cos, sin = self._tables[key]
        return (cos, sin) if positions_BS is None else (cos[positions_BS], sin[positions_BS])
