"""Recompute policies: which activations of a layer are kept for its backward and which are made again.

A block is made of named *parts*, each a function of its inputs. A part that is made again keeps neither what it saves
nor what it returns: the operator that reads its output gets it from a second run in the backward pass. So the price is
the part's own forward, and the outputs of the products that aren't made again stay.

A policy is a set of parts. For the planner it also says which shares of a layer run a second time, between 0 and 1,
and which saved tensors thereby go away. Sources: full and selective arXiv 2205.05198; `fine` is the output-discarding
recompute of Megatron-Core (norms, activation function, MLA up-projections); `every-second` is torchtitan's selective
checkpointing by operator, which keeps every second matrix product, `ops` the same with all of them kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from bessemer.core.errors import ConfigError
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, nearest, one_of

__all__ = ["FINE", "PARTS", "RECOMPUTE", "PartName", "Recompute", "parts_of_layer", "recompute"]

PartName = Literal[
    "norm", "heads", "activation", "router", "dispatch", "gather", "mla_up", "attention", "qkv", "out", "up", "experts"
]

PARTS: dict[str, str] = {
    "norm": "the norms, and the sum of stream and attention between them",
    "heads": "norm and rotation of query and key heads (models with qk-norm)",
    "activation": "the activation function of feed-forward parts",
    "router": "scores, weights and balance losses of a router; its choice is kept",
    "dispatch": "tokens sorted by expert, where they needn't travel",
    "gather": "what sequence parallelism gathers or rearranges for a product; with its exchange",
    "mla_up": "queries, keys and values of all heads, from the latents (latent attention)",
    "attention": "the attention core: scores, softmax, values",
    "qkv": "the projections to queries, keys and values, or to their latents",
    "out": "the projection that leaves attention",
    "up": "the projections into feed-forward parts: gate and up",
    "experts": "all of a mixture of experts behind its router, with its exchanges",
}
"""The parts, from cheap to dear: up to `gather` they hold no matrix product of note. The projection that leaves a
feed-forward part is no part: nothing needs its output (with experts it is: the gates do)."""

_CHEAP = ("norm", "heads", "activation", "router", "dispatch")
FINE = (*_CHEAP, "gather", "mla_up")
"""What `fine` makes again where `train.recompute_modules` doesn't say, as far as the model has it."""


@dataclass(frozen=True)
class Recompute:
    """Shares of a layer's forward that run again (`again_*`) and of its saved tensors that are dropped (`drop_*`).

    gemm: linear layers; core: the attention core (scores, softmax, values); element: norms, rotary, activation
    function, residuals; comm: tensor-, context- and expert-parallel exchanges.
    drop_norm: outputs of the norms; drop_act: output of the activation function; drop_core: what the core saves
    beside q, k, v; drop_rest: everything else but the layer's input.
    `by_layer`: the policy takes effect in `recompute_layers` layers of each stage, the rest keep everything.
    `parts`: what the trainer makes again, of those that a layer has.
    """

    name: str
    runnable: bool
    again_gemm: float
    again_core: float
    again_element: float
    again_comm: float
    drop_norm: float
    drop_act: float
    drop_core: float
    drop_rest: float
    by_layer: bool
    parts: tuple[str, ...]
    what: str


_ALL = tuple(PARTS)
_MLP = ("norm", "activation", "router", "dispatch", "gather", "up", "experts")

RECOMPUTE: dict[str, Recompute] = {
    r.name: r
    for r in (
        Recompute("none", True, 0, 0, 0, 0, 0, 0, 0, 0, False, (), "keep everything"),
        Recompute("full", True, 1, 1, 1, 1, 1, 1, 1, 1, False, _ALL, "keep the input of each layer"),
        Recompute("selective", True, 0, 1, 0, 0, 0, 0, 1, 0, False, ("attention",), "the attention core again"),
        Recompute("block", True, 1, 1, 1, 1, 1, 1, 1, 1, True, _ALL, "full, in the first layers of each stage"),
        Recompute("fine", True, 0, 0, 0.6, 0, 1, 1, 0, 0, False, FINE, "chosen parts, by default the cheap ones again"),
        Recompute("mlp", True, 0.6, 0, 0.5, 0.5, 0.5, 1, 0, 0.45, False, _MLP, "norms and the feed-forward part again"),
        Recompute("ops", True, 0, 0, 0.8, 0, 1, 1, 0, 0.05, False, _CHEAP, "all but products and attention again"),
        Recompute(
            "every-second", False, 0.5, 0, 1, 0, 1, 1, 0, 0.4, False, (), "every second product, all small operators"
        ),
    )
}
"""In the order of their ids in `bessemer.plan.space.Layouts`."""


def parts_of_layer(spec: ModelSpec, layer: int, wanted: Collection[str] = PARTS) -> frozenset[str]:
    """Those of the `wanted` parts that a layer has. All have `gather`, which is idle without sequence parallelism."""
    has = {"norm", "activation", "gather", "attention", "qkv", "out", "up"}
    has |= {"mla_up"} if spec.mla is not None else {"heads"} if spec.qk_norm else set()
    has |= {"router", "dispatch", "experts"} if spec.is_moe_layer(layer) else set()
    return frozenset(has & set(wanted))


def recompute(name: str) -> Recompute:
    """ConfigError with the nearest names for one that isn't known."""
    if name in RECOMPUTE:
        return RECOMPUTE[name]
    fix = one_of("train.recompute", [f'"{n}"' for n in nearest(name.lower(), RECOMPUTE) or RECOMPUTE])
    why = "policies: " + ", ".join(RECOMPUTE)
    what = f"{name!r} is not a recompute policy"
    raise ConfigError([Problem(code="recompute-unknown", where="train.recompute", what=what, why=why, fix=fix)])
