"""The router of a mixture of experts: scores, choice, weights, and what keeps the load balanced.

Always in float32: a rounded score would flip the choice of an expert. What a call chose is left in `Router.load`
(overwritten by each call, so that a recomputed forward pass counts once).

Legend: B batch, S sequence, T tokens (B x S), D model, X experts, K experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.model import MoeSpec
from bessemer.models.parts import Compute

__all__ = ["Router", "balance_loss", "choose", "gates", "run_counts", "scores", "z_loss"]


def scores(logits_TX: Tensor, moe: MoeSpec) -> Tensor:
    """Each expert's affinity to each token: softmax over the experts, or a sigmoid each (DeepSeek-V3)."""
    return logits_TX.softmax(-1) if moe.scoring == "softmax" else logits_TX.sigmoid()


def choose(scores_TX: Tensor, bias_X: Tensor | None, moe: MoeSpec) -> Tensor:
    """The experts of each token, int64 [T, K], likeliest first; the bias acts here and nowhere else.

    With groups a token may only go to experts of its `top_groups` best ones, a group counting as much as its best
    expert ("max", DeepSeek-V2, arXiv 2405.04434) or its best two ("top2", DeepSeek-V3, arXiv 2412.19437).
    """
    ranked_TX = scores_TX.detach() if bias_X is None else scores_TX.detach() + bias_X
    if moe.num_groups > 1:
        grouped = ranked_TX.unflatten(-1, (moe.num_groups, -1))
        best = 2 if moe.group_score == "top2" else 1
        group_scores = grouped.topk(best, -1).values.sum(-1)
        taken = torch.zeros_like(group_scores, dtype=torch.bool)
        taken = taken.scatter(-1, group_scores.topk(moe.top_groups, -1).indices, True)
        ranked_TX = grouped.masked_fill(~taken.unsqueeze(-1), float("-inf")).flatten(-2)
    return ranked_TX.topk(moe.top_k, -1).indices


def gates(scores_TX: Tensor, chosen_TK: Tensor, moe: MoeSpec) -> Tensor:
    """What each chosen expert's output is multiplied with, [T, K]: the scores, perhaps made to sum to one, scaled."""
    gates_TK = scores_TX.gather(-1, chosen_TK)
    if moe.norm_top_k:
        gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20)
    return gates_TK * moe.routed_scale


def run_counts(chosen_TK: Tensor, groups: int, num_experts: int) -> Tensor:
    """How often each of `groups` equal runs of tokens chose each expert, float32 [groups, X]."""
    flat = chosen_TK.reshape(groups, -1)
    counts = torch.zeros(groups, num_experts, device=chosen_TK.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=counts.dtype))


def balance_loss(scores_TX: Tensor, counts_GX: Tensor, top_k: int) -> Tensor:
    """sum_x f_x P_x of each of G equal runs of tokens -> [G]; 1 where the load is even.

    f_x: the share of choices that went to expert x, times the experts (`counts_GX`, of the whole run). P_x: its mean
    normalised score. DeepSeek-V3's equations 17 to 20 where a run is a sequence (arXiv 2412.19437); with one run the
    loss of the Switch Transformer (arXiv 2101.03961), for top-k divided by k.
    Of runs whose tokens are divided among ranks the result is this rank's summand, since the loss is linear in P_x.
    """
    groups, experts = counts_GX.shape
    choices_G = counts_GX.sum(-1, keepdim=True)
    share = (scores_TX / scores_TX.sum(-1, keepdim=True)).view(groups, -1, experts).sum(1) * (top_k / choices_G)
    return (counts_GX * (experts / choices_G) * share).sum(-1)


def z_loss(logits_TX: Tensor, groups: int) -> Tensor:
    """The mean squared log-sum-exp of each run of tokens -> [groups] (ST-MoE, arXiv 2202.08906)."""
    return logits_TX.logsumexp(-1).square().view(groups, -1).mean(1)


class _WithTerm(torch.autograd.Function):
    """`value`, whose backward pass also differentiates the scalar `term`, as if the loss had it as a summand.

    So a block stays a function from one tensor to one tensor, wherever its backward pass runs, and the reported loss
    is the cross-entropy alone.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, term: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        one = None if grad is None else torch.ones((), dtype=torch.float32, device=grad.device)
        return grad, one


class Router(nn.Module):
    """Chooses each token's experts. `bias` (present with `selection_bias`) is state, not trained by gradients: the
    trainer moves it at the commit of a step (`train/balance.py`)."""

    def __init__(self, hidden: int, moe: MoeSpec, compute: Compute, device: Any) -> None:
        super().__init__()
        self.moe, self.split = moe, compute.split.experts
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden, device=device))
        self.bias: nn.Parameter | None = None
        if moe.selection_bias:
            self.bias = nn.Parameter(torch.empty(moe.num_experts, device=device), requires_grad=False)
        self.load: Tensor | None = None
        """int64 [X]: how often each expert was chosen in the latest call."""

    def forward(self, x_BSD: Tensor, weights_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """(gates float32 [T, K], experts int64 [T, K]) of the tokens in order.

        weights_B: what each whole sequence counts in the loss (float32); with it the balance and z-losses act on the
        gradients. Each is a mean over tokens, weighted like a token's cross-entropy. Where other ranks hold tokens of
        the same sequences, this rank's gradients are those of its own summand.
        """
        logits_TX = ops.linear(x_BSD.flatten(0, 1).float(), self.weight, None, torch.float32)
        scores_TX = scores(logits_TX, self.moe)
        chosen_TK = choose(scores_TX, self.bias, self.moe)
        flat = chosen_TK.flatten()
        self.load = flat.new_zeros(self.moe.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        gates_TK = gates(scores_TX, chosen_TK, self.moe)
        if weights_B is not None and torch.is_grad_enabled():
            term = self._terms(logits_TX, scores_TX, chosen_TK, weights_B)
            gates_TK = gates_TK if term is None else _WithTerm.apply(gates_TK, term)
        return gates_TK, chosen_TK

    def _terms(self, logits_TX: Tensor, scores_TX: Tensor, chosen_TK: Tensor, weights_B: Tensor) -> Tensor | None:
        moe, batch = self.moe, weights_B.shape[0]
        terms = []
        if moe.aux_loss_coef:
            runs = batch if moe.aux_loss_per_sequence else 1
            weights = weights_B if moe.aux_loss_per_sequence else weights_B.sum()
            counts_GX = self.split.sum_counts(run_counts(chosen_TK, runs, moe.num_experts))
            terms.append(moe.aux_loss_coef * (balance_loss(scores_TX, counts_GX, moe.top_k) * weights).sum())
        if moe.z_loss_coef:
            mean_B = z_loss(logits_TX, batch) / self.split.token_ranks
            terms.append(moe.z_loss_coef * (mean_B * weights_B).sum())
        return torch.stack(terms).sum() if terms else None
