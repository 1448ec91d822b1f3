"""Experts' load: balanced without an auxiliary loss by moving each router's selection bias at the commit of a step."""

from __future__ import annotations

import torch
from torch import nn

from bessemer.models.canonical import local, local_rows
from bessemer.models.moe import held_routers

__all__ = ["imbalance", "move_selection_biases"]


@torch.no_grad()
def move_selection_biases(module: nn.Module, load: torch.Tensor) -> None:
    """Raise the bias of each expert that got less than the mean by the spec's `bias_rate`, lower the others'.

    load: how often each expert was chosen in the step by all ranks, [MoE layers, experts], so that every rank moves
    its part of a bias alike (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437 section 2.1.2).
    """
    for place, router in held_routers(module):
        counts = load[place]
        if router.bias is not None:
            first, rows = local_rows(router.bias)
            side = torch.sign(counts.mean() - counts)[first : first + rows]
            local(router.bias).add_(side.to(router.bias.dtype), alpha=router.moe.bias_rate)


def imbalance(load: torch.Tensor) -> list[float]:
    """The largest load of an expert over the mean one, of each layer; 1.0 is even."""
    return (load.amax(1) / load.mean(1)).tolist()
