"""Which projections of a model a recipe quantises, and the amaxes of all of them as one table.

Embedding, head, router, norms, the attention core and the join of multi-token prediction stay as they are; so do the
first and last blocks where asked, what is too small or oddly shaped to gain, and what would be slower on the job's
machine (`core.linear_layers.kept_layers`).

Legend: N logical tensors of the whole model with quantised products, of stacked experts each for itself; three roles
x, weight, grad.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from bessemer.core.linear_layers import kept_layers
from bessemer.core.model import ModelSpec
from bessemer.models.canonical import pieces, shapes
from bessemer.models.decoder import Decoder
from bessemer.models.moe import Experts
from bessemer.models.parts import Projection
from bessemer.models.quantised import Quantised, QuantisedExperts
from bessemer.precision import Numerics
from bessemer.precision.gpu import Path

__all__ = [
    "Quantising",
    "advance_amax",
    "amax_names",
    "choice",
    "held_amax",
    "histories",
    "key_draws",
    "quantise",
    "refresh_amax",
    "start_amax",
    "why_kept",
]


@dataclass(frozen=True)
class Quantising:
    """A recipe, how many of the first and last blocks it leaves alone, whether down projections are smooth, and
    whether blocks keep their activations narrow for the backward pass."""

    numerics: Numerics
    high_first: int = 0
    high_last: int = 0
    smooth: bool = False
    narrow: bool = False
    fall_back: bool = False  # what the watch finds misbehaving goes on without quantising
    path: Path = "emulated"  # of the device; routed experts are emulated on any
    slow: tuple[tuple[str, str], ...] = ()  # (name in its block, why) of what would be slower on the job's machine


@functools.lru_cache(maxsize=8)
def why_kept(spec: ModelSpec, how: Quantising) -> dict[tuple[int, str], str]:
    """By (layer, name in its block) of each linear layer why it isn't quantised, "" where it is. The blocks of
    multi-token prediction are numbered after the last layer, and count as that."""
    return kept_layers(spec, how.numerics.recipe, high_first=how.high_first, high_last=how.high_last, slow=how.slow)


def choice(spec: ModelSpec, how: Quantising) -> list[dict[str, str | int]]:
    """For people: of each kind of linear layer in how many blocks it runs as what, and why where not quantised or
    where a device with matrix units emulates it."""
    found: dict[tuple[str, str], int] = {}
    for (_, name), why in why_kept(spec, how).items():
        found[name, why] = found.get((name, why), 0) + 1
    return [{"layer": n, "blocks": count, **_runs(n, why, how)} for (n, why), count in found.items()]


def _runs(name: str, why: str, how: Quantising) -> dict[str, str]:
    if why:
        return {"runs": "high", "why": why}
    if how.path != "emulated" and name.startswith("mlp.experts."):
        return {"runs": f"{how.numerics.recipe}, emulated", "why": "routed experts are emulated on any device"}
    return {"runs": how.numerics.recipe, "why": ""}


def quantise(model: Decoder, how: Quantising) -> None:
    """Have the projections held here run the recipe's products; call it once the parameters are in memory."""
    kept = why_kept(model.spec, how)
    names: dict[str, list[tuple[str, int]]] = {}
    for piece in pieces(model):
        names.setdefault(piece.param, []).append((piece.name.removesuffix(".weight"), piece.rows))
    params = {id(module): name for name, module in model.named_modules()}
    for layer, block in model.held_blocks():
        for local, module in block.named_modules():
            if isinstance(module, Projection) and not kept[layer, local]:
                own = names[f"{params[id(module)]}.weight"]
                module.quantised = Quantised(
                    how.numerics,
                    tuple(name for name, _ in own),
                    tuple(rows for _, rows in own),
                    module.weight.device,
                    smooth=how.smooth and local.endswith(".down"),
                    narrow=how.narrow and not _read_elsewhere(model, local),
                    falls_back=how.fall_back,
                )
                module.quantised.path = how.path
            elif isinstance(module, Experts):
                kinds = [kind for kind in ("gate", "up", "down") if not kept[layer, f"{local}.{kind}"]]
                stacks = {kind: names[f"{params[id(module)]}.{kind}.weight"][0][0] for kind in kinds}
                _quantise_experts(module, how, stacks)
    refresh_amax(model)


def _quantise_experts(module: Experts, how: Quantising, names: dict[str, str]) -> None:
    """names: of the stacks chosen, by kind; gate and up are alike, so that both are or neither."""
    experts = module.gate.weight.shape[0] * module.compute.split.experts.degree

    def made(*kinds: str) -> QuantisedExperts:
        stacks = [module.get_submodule(kind).get_parameter("weight") for kind in kinds]
        return QuantisedExperts(
            how.numerics,
            tuple(names[kind] for kind in kinds),
            tuple(stack.shape[1] for stack in stacks),
            experts,
            stacks[0].device,
            smooth=how.smooth and kinds == ("down",),
            narrow=how.narrow,
            falls_back=how.fall_back,
        )

    if "gate" in names:
        module.quantised_up = made("gate", "up")
    if "down" in names:
        module.quantised_down = made("down")


def _read_elsewhere(model: Decoder, local: str) -> bool:
    """Whether something else in the block keeps the same input: codes of it would be kept beside it."""
    spec = model.spec
    if local == "attn.o":  # attention keeps its result; of latent attention, as wide as keys
        padded = spec.mla is not None and spec.mla.v_head_dim < spec.head_dim
        return not padded or model.split.context.degree > 1
    return local == "mlp.shared.gate_up" or local in ("attn.q_a", "attn.q", "attn.kv_a")


@functools.lru_cache(maxsize=8)
def amax_names(spec: ModelSpec, how: Quantising) -> tuple[str, ...]:
    """The logical tensors of the whole model with states of delayed scaling: `layers.3.attn.q` ..."""
    if not how.numerics.delayed:
        return ()
    model = Decoder(spec, device="meta")
    quantise(model, how)
    return tuple(name for held in _quantised(model) for name in held.names)


def _quantised(model: nn.Module) -> Iterator[Quantised | QuantisedExperts]:
    """Those with states."""
    return (m for m in model.modules() if isinstance(m, Quantised | QuantisedExperts) and m.numerics.delayed)


def histories(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(logical tensor, its history [3, H], of stacked experts [X, 3, H], a view) of those held here."""
    for held in _quantised(model):
        yield from zip(held.names, held.history, strict=True)


def key_draws(model: nn.Module, seed: int, step: int, tokens_BS: Tensor) -> None:
    """Before the forward pass of a micro-batch. Its tokens name it, so that whoever runs it draws the same."""
    found = [m for m in model.modules() if isinstance(m, Quantised | QuantisedExperts) and m.numerics.stochastic]
    if found:
        name = zlib.crc32(tokens_BS.cpu().numpy().tobytes())
        for held in found:
            held.key = (seed, step, name)


@torch.no_grad()
def start_amax(model: nn.Module) -> None:
    """Forget what units have shown: a share that is done again begins anew."""
    for held in _quantised(model):
        held.seen.zero_()


def held_amax(model: nn.Module, names: tuple[str, ...], device: torch.device) -> Tensor:
    """What this rank's units have shown, float32 [N, 3]; 0 for what other ranks hold."""
    places = _places(model.spec, names)
    table = torch.zeros(max((rows.stop for rows in places.values()), default=0), 3, device=device)
    for held in _quantised(model):
        for name, seen in zip(held.names, held.seen, strict=True):
            table[places[name]] = seen
    return table


@torch.no_grad()
def advance_amax(model: nn.Module, names: tuple[str, ...], seen_N3: Tensor) -> None:
    """At the commit of a step: history' = f(history, amax), with the amax over all ranks."""
    places = _places(model.spec, names)
    for held in _quantised(model):
        held.advance(torch.stack([seen_N3[places[name]] for name in held.names]).view_as(held.seen))
    refresh_amax(model)


@torch.no_grad()
def refresh_amax(model: nn.Module) -> None:
    """After histories have changed (a commit, a restore). One read on the host for all of them."""
    found = list(_quantised(model))
    if not found:
        return
    least = torch.stack([held.refresh().amin() for held in found])
    known = [False] * len(found) if least.device.type == "meta" else cast("list[float]", least.tolist())
    for held, amount in zip(found, known, strict=True):
        held.known = bool(amount > 0)


@functools.lru_cache(maxsize=8)
def _places(spec: ModelSpec, names: tuple[str, ...]) -> dict[str, slice]:
    """The rows of each logical tensor in the table: one, or one for each of its experts."""
    places, end = {}, 0
    for name in names:
        shape = shapes(spec)[f"{name}.weight"]
        places[name] = slice(end, end := end + (shape[0] if len(shape) == 3 else 1))
    return places
