"""From logits to the next token; pure functions.

Legend: B batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.core.errors import RequestError

__all__ = ["Sampling", "probabilities", "sample"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0: the likeliest token each time. top_k 0 and top_p 1: no restriction. The same seed draws the
    same random numbers for a sequence, whatever else is in the batch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good, fix in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not good:
                raise RequestError(f"{name} = {value} makes no distribution", code="sampling", fix=f"{name}: {fix}")


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that a token is drawn from, float32 [B, V]; temperature 0 puts all on the likeliest.

    Temperature first, then the `top_k` likeliest (ties at the border stay), then the fewest likeliest tokens whose
    probabilities reach `top_p` (Holtzman et al. 2020, arXiv 1904.09751).
    """
    wide_BV = logits_BV.float()
    if sampling.temperature == 0:
        return torch.zeros_like(wide_BV).scatter_(1, wide_BV.argmax(1, keepdim=True), 1.0)
    wide_BV = wide_BV / sampling.temperature
    if 0 < sampling.top_k < wide_BV.shape[1]:
        border_B1 = wide_BV.topk(sampling.top_k, 1).values[:, -1:]
        wide_BV = wide_BV.masked_fill(wide_BV < border_B1, float("-inf"))
    share_BV = wide_BV.softmax(1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = share_BV.sort(dim=1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(1) - sorted_BV
        kept_BV = torch.zeros_like(share_BV).scatter_(1, order_BV, (before_BV < sampling.top_p).float())
        share_BV = share_BV * kept_BV
        share_BV = share_BV / share_BV.sum(1, keepdim=True)
    return share_BV


def sample(logits_BV: Tensor, sampling: Sampling, sequences: list[int], position: list[int]) -> Tensor:
    """The next token of each row, int64 [B]. Row b is drawn with randomness keyed by (seed, sequences[b],
    position[b]), not by what was drawn before."""
    share_BV = probabilities(logits_BV, sampling)
    if sampling.temperature == 0:
        return share_BV.argmax(1)
    drawn = [_uniform(sampling.seed, s, p) for s, p in zip(sequences, position, strict=True)]
    at_B1 = torch.tensor(drawn, dtype=torch.float64, device=logits_BV.device)[:, None]
    reached_BV = share_BV.double().cumsum(1)
    picked_B = torch.searchsorted(reached_BV, at_B1 * reached_BV[:, -1:], right=True).squeeze(1)
    return picked_B.clamp_max(share_BV.shape[1] - 1)


def _uniform(seed: int, sequence: int, position: int) -> float:
    digest = hashlib.sha256(f"{seed}/{sequence}/{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
