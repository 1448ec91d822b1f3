"""Mixture of experts without capacity: every token reaches all the experts that it chose.

Tokens are sorted by expert, each run goes through its expert as one product of a grouped GEMM, and the results are
put back in the tokens' order before they are summed, so that a step is bitwise repeatable.

Legend: B batch, S sequence, T tokens (B x S), D model, X experts, K experts a token, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.model import ModelSpec
from bessemer.models.parts import Compute, FeedForward, Projection, Visible
from bessemer.models.router import Router

__all__ = ["Experts", "MixtureOfExperts", "expert_load", "routers"]


class Stack(nn.Module):
    """One weight [X, out, in] of all experts."""

    def __init__(self, experts: int, inputs: int, outputs: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, device=device))


class Experts(nn.Module):
    """The SwiGLU of every expert: gate, up [X, F, D] and down [X, D, F]."""

    def __init__(self, spec: ModelSpec, compute: Compute, device: Any) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.gate = Stack(moe.num_experts, spec.hidden_size, moe.expert_ffn_size, device)
        self.up = Stack(moe.num_experts, spec.hidden_size, moe.expert_ffn_size, device)
        self.down = Stack(moe.num_experts, moe.expert_ffn_size, spec.hidden_size, device)
        self.compute = compute

    def forward(self, x_TD: Tensor, counts_X: Tensor) -> Tensor:
        """Rows sorted by expert, counts_X of each -> as many rows, in the compute type."""
        x_TD = x_TD.to(self.compute.dtype)
        gate = ops.grouped_linear(x_TD, self.gate.weight, counts_X)
        up = ops.grouped_linear(x_TD, self.up.weight, counts_X)
        return ops.grouped_linear(ops.swiglu(torch.cat((gate, up), -1)), self.down.weight, counts_X)


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and the shared expert that every token visits (with a sigmoid gate in Qwen2-MoE)."""

    def __init__(self, spec: ModelSpec, compute: Compute, device: Any) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.router = Router(spec.hidden_size, moe, device)
        self.experts = Experts(spec, compute, device)
        shared = moe.shared_ffn_size
        self.shared = FeedForward(spec, shared, compute, device) if shared else None
        self.shared_gate = Projection(spec.hidden_size, 1, False, compute, device) if moe.shared_gate else None

    def forward(self, x_BSD: Tensor, visible: Visible | None = None) -> Tensor:
        """[B, S, D] in the compute type -> the same."""
        weights_B = None if visible is None else visible.weights
        gates_TK, chosen_TK = self.router(x_BSD, weights_B)
        flat = chosen_TK.flatten()
        order = flat.argsort(stable=True)
        rows = x_BSD.flatten(0, 1).index_select(0, order // chosen_TK.shape[1])
        out = self.experts(rows, self.router.load)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        out_TKD = out.index_select(0, back).unflatten(0, chosen_TK.shape)
        mixed_TD = (out_TKD * gates_TK.unsqueeze(-1)).sum(1)
        mixed = mixed_TD.to(out.dtype).view(x_BSD.shape)
        if self.shared is None:
            return mixed
        shared = self.shared(x_BSD)
        return mixed + (shared if self.shared_gate is None else shared * self.shared_gate(x_BSD).sigmoid())


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model in the order of its layers."""
    return [part for part in model.modules() if isinstance(part, Router)]


def expert_load(model: nn.Module) -> Tensor | None:
    """How often each expert was chosen in the latest forward pass, int64 [MoE layers, X]; None without experts."""
    loads = [router.load for router in routers(model) if router.load is not None]
    return torch.stack(loads) if loads else None
