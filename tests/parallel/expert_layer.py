"""What a mixture of experts does after its router, with routes given, so that they can be as uneven as one likes.

Legend: T tokens, D model, X experts, K experts a token, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bessemer.core.model import ModelSpec, MoeSpec
from bessemer.models.moe import Experts
from bessemer.models.parts import Compute
from bessemer.models.split import ExpertSplit, Split

X, K, D, F = 8, 2, 16, 16
SPEC = ModelSpec(
    family="mixtral",
    vocab_size=8,
    hidden_size=D,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=F,
    max_positions=32,
    moe=MoeSpec(num_experts=X, top_k=K, expert_ffn_size=F),
)
TOKENS = 12
CASES = ("spread", "all to two experts", "odd experts only", "a rank without tokens", "no tokens")


def chosen_of(case: str, rank: int) -> Tensor:
    """The experts of the tokens of a rank, [T, K]; T differs from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS + rank
    if case == "no tokens" or (case == "a rank without tokens" and rank == 1):
        tokens = 0
    if case == "all to two experts":
        return torch.tensor([0, 1]).repeat(tokens, 1)
    apart = torch.stack([torch.randperm(X, generator=generator)[:K] for _ in range(tokens + 1)])[1:]
    return apart // 2 * 2 + 1 if case == "odd experts only" else apart


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _Mark(torch.autograd.Function):
    """The identity, which writes down when it is run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.log.append(f"{ctx.name} backward")
        return grad, None, None


class Layer(nn.Module):
    """Dispatch, a shared expert, experts, combine; writes into `log` when the middle two run."""

    def __init__(self, split: ExpertSplit, log: list[str]) -> None:
        super().__init__()
        self.split, self.log = split, log
        self.experts = Experts(SPEC, Compute(split=Split(experts=split)), "cpu")
        self.shared = nn.Linear(D, D, bias=False)
        self.load_weights(split.rank, split.width_rank)

    @torch.no_grad()
    def load_weights(self, rank: int, width_rank: int) -> None:
        """This rank's part of weights that are the same for any layout."""
        split, whole = self.split, weights()
        for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
            mine = whole[name].chunk(split.degree, 0)[rank].chunk(split.width_degree, dim)[width_rank]
            self.get_parameter(f"experts.{name}.weight").copy_(mine)
        self.shared.weight.copy_(noise(D, D, seed=3) / 4)

    def forward(self, x_TD: Tensor, chosen_TK: Tensor) -> Tensor:
        flat = chosen_TK.flatten()
        order = flat.argsort(stable=True)
        counts_X = torch.bincount(flat, minlength=X)
        sent = self.split.dispatch(x_TD.index_select(0, order // K), counts_X)
        shared_TD = self.mark("shared end", self.shared(self.mark("shared start", x_TD)))
        rows, counts = sent.arrived()
        assert counts.sum() == rows.shape[0] and counts.shape[0] == X // self.split.degree
        out = self.split.combine(self.mark("experts", self.experts(rows, counts)), sent)
        out_TKD = out.index_select(0, order.argsort()).unflatten(0, chosen_TK.shape)
        gates_K1 = torch.tensor([[0.7], [0.3]])
        mixed_TD: Tensor = (out_TKD * gates_K1).sum(1) + shared_TD
        return mixed_TD

    def mark(self, name: str, x: Tensor) -> Tensor:
        marked: Tensor = _Mark.apply(x, self.log, name)  # type: ignore[no-untyped-call]
        return marked


def weights() -> dict[str, Tensor]:
    shapes = {"gate": (X, F, D), "up": (X, F, D), "down": (X, D, F)}
    return {name: noise(*shape, seed=seed) / 4 for seed, (name, shape) in enumerate(shapes.items())}


def inputs(ranks: list[int], case: str) -> tuple[Tensor, Tensor, Tensor]:
    """(x [T, D], experts [T, K], the output's gradient [T, D]) of the tokens of some ranks."""
    chosen = [chosen_of(case, rank) for rank in ranks]
    x = [noise(len(c), D, seed=10 + rank) for rank, c in zip(ranks, chosen, strict=True)]
    slope = [noise(len(c), D, seed=20 + rank) for rank, c in zip(ranks, chosen, strict=True)]
    return torch.cat(x).requires_grad_(), torch.cat(chosen), torch.cat(slope)
