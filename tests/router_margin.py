"""How far the choices of experts are from a tie: a layout may round differently, and must not change a route."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bessemer.models.moe import held_routers
from bessemer.models.router import Router, scores


def routers(module: nn.Module) -> list[Router]:
    """In the order of the layers."""
    return [router for _, router in held_routers(module)]


def margin_of(router: Router, x_BSD: torch.Tensor) -> float:
    """The smallest gap between the last chosen and the first left out, of experts and of groups, over all tokens."""
    moe = router.moe
    ranked = scores(x_BSD.flatten(0, 1).float() @ router.weight.t(), moe)
    if router.bias is not None:
        ranked = ranked + router.bias
    gaps = []
    if moe.num_groups > moe.top_groups:
        grouped = ranked.unflatten(-1, (moe.num_groups, -1))
        groups = grouped.topk(2 if moe.group_score == "top2" else 1, -1).values.sum(-1)
        best = groups.sort(-1, descending=True)
        gaps.append(best.values[:, moe.top_groups - 1] - best.values[:, moe.top_groups])
        left_out = torch.ones_like(groups, dtype=torch.bool).scatter(-1, best.indices[:, : moe.top_groups], False)
        ranked = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
    best = ranked.sort(-1, descending=True).values
    if moe.top_k < best.shape[1]:
        gaps.append(best[:, moe.top_k - 1] - best[:, moe.top_k])
    return min((float(gap.min()) for gap in gaps), default=float("inf"))


@contextlib.contextmanager
def smallest_margin(module: nn.Module) -> Iterator[list[float]]:
    """Inside the block, every call of a router of an unsharded `module` adds its margin to the list."""
    found: list[float] = []

    def look(router: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        assert isinstance(router, Router)
        with torch.no_grad():
            found.append(margin_of(router, args[0]))

    handles = [router.register_forward_hook(look) for router in routers(module)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
