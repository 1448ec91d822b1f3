"""Recompute policies: which activations of a layer are kept for its backward and which are made again.

A policy names the parts of a layer that run a second time before the backward, as shares between 0 and 1, and the
saved tensors that thereby go away. Sources: full and selective arXiv 2205.05198; `fine` is the output-discarding
recompute of Megatron-Core (norms, activation function, MLA up-projections); `ops` is torchtitan's selective
checkpointing by operator, which keeps every second matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem, nearest, one_of

__all__ = ["RECOMPUTE", "Recompute", "recompute"]


@dataclass(frozen=True)
class Recompute:
    """Shares of a layer's forward that run again (`again_*`) and of its saved tensors that are dropped (`drop_*`).

    gemm: linear layers; core: the attention core (scores, softmax, values); element: norms, rotary, activation
    function, residuals; comm: tensor-, context- and expert-parallel exchanges.
    drop_norm: outputs of the norms; drop_act: output of the activation function; drop_core: what the core saves
    beside q, k, v; drop_rest: everything else but the layer's input.
    `by_layer`: the policy takes effect in `recompute_layers` layers of each stage, the rest keep everything.
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
    what: str


RECOMPUTE: dict[str, Recompute] = {
    r.name: r
    for r in (
        Recompute("none", True, 0, 0, 0, 0, 0, 0, 0, 0, False, "keep everything"),
        Recompute("full", False, 1, 1, 1, 1, 1, 1, 1, 1, False, "keep the input of each layer"),
        Recompute("selective", False, 0, 1, 0, 0, 0, 0, 1, 0, False, "the attention core again"),
        Recompute("block", False, 1, 1, 1, 1, 1, 1, 1, 1, True, "full, in the first layers of each stage"),
        Recompute("fine", False, 0, 0, 0.6, 0, 1, 1, 0, 0, False, "norms and activation function again"),
        Recompute("mlp", False, 0.6, 0, 0.5, 0.5, 0.5, 1, 0, 0.45, False, "the feed-forward part again"),
        Recompute("ops", False, 0.5, 0, 1, 0, 1, 1, 0, 0.4, False, "every second matrix product, all small operators"),
    )
}
"""In the order of their ids in `bessemer.plan.space.Layouts`."""


def recompute(name: str) -> Recompute:
    """ConfigError with the nearest names for one that isn't known."""
    if name in RECOMPUTE:
        return RECOMPUTE[name]
    fix = one_of("train.recompute", [f'"{n}"' for n in nearest(name.lower(), RECOMPUTE) or RECOMPUTE])
    why = "policies: " + ", ".join(RECOMPUTE)
    what = f"{name!r} is not a recompute policy"
    raise ConfigError([Problem(code="recompute-unknown", where="train.recompute", what=what, why=why, fix=fix)])
