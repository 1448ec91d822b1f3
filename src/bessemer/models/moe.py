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
from bessemer.models.parts import Compute, FeedForward, Projection, Visible, swiglu_part
from bessemer.models.quantised import QuantisedExperts
from bessemer.models.router import Router
from bessemer.ops.grouped import GroupedProducts

__all__ = ["Experts", "MixtureOfExperts", "expert_load", "held_routers", "moe_layers"]


class Stack(nn.Module):
    """One weight [X, out, in] of all experts that this rank holds."""

    def __init__(self, experts: int, inputs: int, outputs: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, device=device))


class Experts(nn.Module):
    """The SwiGLU of every expert: gate, up [X, F, D] and down [X, D, F]; by a recipe, once `models.quantise` has chosen
    it."""

    def __init__(self, spec: ModelSpec, compute: Compute, device: Any) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        split = compute.split.experts
        experts, width = moe.num_experts // split.degree, moe.expert_ffn_size // split.width_degree
        self.gate = Stack(experts, spec.hidden_size, width, device)
        self.up = Stack(experts, spec.hidden_size, width, device)
        self.down = Stack(experts, width, spec.hidden_size, device)
        self.compute = compute
        self.quantised_up: QuantisedExperts | None = None
        self.quantised_down: QuantisedExperts | None = None

    def forward(self, x_TD: Tensor, counts_X: Tensor) -> Tensor:
        """Rows sorted by expert, counts_X of each -> as many rows, in the compute type."""
        x_TD = x_TD.to(self.compute.dtype)
        saving = self.compute.saving
        made_TF = swiglu_part(saving, saving.part("up", self._gate_up, x_TD, counts_X), self.quantised_down)
        how = self._how(self.quantised_down, made_TF, counts_X)
        return ops.grouped_linear(made_TF, self.down.weight, counts_X, how)

    def _gate_up(self, x_TD: Tensor, counts_X: Tensor) -> Tensor:
        how = self._how(self.quantised_up, x_TD, counts_X)
        return ops.grouped_linear(x_TD, (self.gate.weight, self.up.weight), counts_X, how)

    def _how(self, quantised: QuantisedExperts | None, x_TI: Tensor, counts_X: Tensor) -> GroupedProducts | None:
        if quantised is None:
            return None
        keeps = self.compute.saving.keeps(x_TI)
        return quantised.products(x_TI, counts_X, self.compute.dtype, self.compute.split, keeps=keeps)


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and the shared expert that every token visits (with a sigmoid gate in Qwen2-MoE)."""

    def __init__(self, spec: ModelSpec, compute: Compute, device: Any) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.split, self.compute = compute.split, compute
        self.router = Router(spec.hidden_size, moe, compute, device)
        self.experts = Experts(spec, compute, device)
        shared = moe.shared_ffn_size
        self.shared = FeedForward(spec, shared, compute, device) if shared else None
        self.shared_gate = Projection(spec.hidden_size, 1, False, compute, device) if moe.shared_gate else None

    def forward(self, x_BSD: Tensor, visible: Visible | None = None) -> Tensor:
        """[B, S, D] in the compute type -> the same."""
        weights_B = None if visible is None else visible.weights
        mine_BSD = self.split.tensor.take_tokens(x_BSD)
        part = self.compute.saving.part
        gates_TK, chosen_TK = part("router", self.router, mine_BSD, weights_B)
        # the load of this call: when the experts are made again, the router's may be that of another
        return part("experts", self._mixed, x_BSD, mine_BSD, gates_TK, chosen_TK, self.router.load)

    def _mixed(self, x_BSD: Tensor, mine_BSD: Tensor, gates_TK: Tensor, chosen_TK: Tensor, load_X: Tensor) -> Tensor:
        order = chosen_TK.flatten().argsort(stable=True)
        rows = self.compute.saving.part("dispatch", _sorted_rows, mine_BSD, order, chosen_TK.shape[1])
        sent = self.split.experts.dispatch(rows, load_X)
        shared = None if self.shared is None else self._shared(x_BSD)  # while the tokens travel
        out = self.split.experts.combine(self.experts(*sent.arrived()), sent)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        out_TKD = out.index_select(0, back).unflatten(0, chosen_TK.shape)
        mixed_TD = (out_TKD * gates_TK.unsqueeze(-1)).sum(1)
        mixed_BSD = self.split.tensor.give_tokens(mixed_TD.to(out.dtype).view(mine_BSD.shape))
        return mixed_BSD if shared is None else mixed_BSD + shared

    def _shared(self, x_BSD: Tensor) -> Tensor:
        assert self.shared is not None
        shared_BSD = self.shared(x_BSD)
        return shared_BSD if self.shared_gate is None else shared_BSD * self.shared_gate(x_BSD).sigmoid()


def _sorted_rows(x_BSD: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The row of each choice of an expert, [T K, D], in the order of the experts."""
    return _Chosen.apply(x_BSD.flatten(0, 1), order, top_k)  # type: ignore[no-any-return]


class _Chosen(torch.autograd.Function):
    """Rows T, each as often as it chose. Gradients of one row are summed in the order of its choices: that of
    `index_select` would add them as they come, on a GPU in another order each time."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return x_TD.index_select(0, order // top_k)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        [order] = ctx.saved_tensors
        by_choice = torch.empty_like(grad).index_copy_(0, order, grad)
        return by_choice.unflatten(0, (-1, ctx.top_k)).sum(1), None, None


def held_routers(model: nn.Module, layers: range | None = None) -> list[tuple[int, Router]]:
    """(place among the model's MoE layers, router) of those that this rank holds, of `layers` only if given.

    The prediction modules of multi-token prediction come last, and belong to the last layer.
    """
    spec: ModelSpec = model.spec
    places = {layer: place for place, layer in enumerate(moe_layers(spec))}
    wanted = range(spec.num_layers) if layers is None else layers
    found = []
    for layer, block in model.held_blocks():
        if isinstance(block.mlp, MixtureOfExperts) and min(layer, spec.num_layers - 1) in wanted:
            found.append((places[layer], block.mlp.router))
    return found


def expert_load(model: nn.Module, layers: range | None = None) -> Tensor | None:
    """How often each expert was chosen in the latest forward pass for the tokens of this rank, int64 [MoE layers of
    the whole model, X], 0 in layers of other ranks and outside of `layers`; None without experts there."""
    spec: ModelSpec = model.spec
    loads = {place: router.load for place, router in held_routers(model, layers) if router.load is not None}
    if not loads or spec.moe is None:
        return None
    table = next(iter(loads.values())).new_zeros(len(moe_layers(spec)), spec.moe.num_experts)
    for place, load in loads.items():
        table[place] = load
    return table


def moe_layers(spec: ModelSpec) -> list[int]:
    """The layers with experts; the blocks of multi-token prediction are numbered after the last layer."""
    layers = [i for i in range(spec.num_layers) if spec.is_moe_layer(i)]
    predicts = spec.is_moe_layer(spec.num_layers - 1)
    return layers + [spec.num_layers + k for k in range(spec.mtp_layers) if predicts]
