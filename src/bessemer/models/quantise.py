"""Which projections of a model a recipe quantises, and the amaxes of all of them as one table.

Embedding, head, router, norms, the attention core and the join of multi-token prediction stay as they are; so do the
first and last blocks where asked, and what is too small or oddly shaped to gain (`precision.shapes`). The choice looks
at the whole model's sizes only, so that it is the same under every layout.

Legend: N logical tensors of the whole model with quantised products; three roles x, weight, grad.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from bessemer.core.layout import Layout
from bessemer.core.model import ModelSpec
from bessemer.models.canonical import pieces
from bessemer.models.decoder import Decoder
from bessemer.models.parts import Projection
from bessemer.models.quantised import Quantised
from bessemer.precision import Numerics
from bessemer.precision.shapes import layer_table

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

_TOKENS = 4096  # of a micro-batch, for the choice: so many that only the weights' sizes decide


@dataclass(frozen=True)
class Quantising:
    """A recipe, how many of the first and last blocks it leaves alone, and whether down projections are smooth."""

    numerics: Numerics
    high_first: int = 0
    high_last: int = 0
    smooth: bool = False
    fall_back: bool = False  # what the watch finds misbehaving goes on without quantising


@functools.lru_cache(maxsize=8)
def why_kept(spec: ModelSpec, how: Quantising) -> dict[tuple[int, str], str]:
    """By (layer, name in its block) of each linear layer why it isn't quantised, "" where it is. The blocks of
    multi-token prediction are numbered after the last layer, and count as that."""
    found: dict[tuple[int, str], str] = {}
    last = spec.num_layers - 1
    for row in layer_table(spec, Layout(), how.numerics.recipe, micro_batch=1, seq_len=_TOKENS):
        for layer in row.layers:
            found[layer, row.name] = row.plan.kept or _asked_high(min(layer, last), last, how, row.experts > 0)
    return found


def _asked_high(layer: int, last: int, how: Quantising, experts: bool) -> str:
    if experts:
        return "the trainer runs routed experts without quantising"
    if layer < how.high_first:
        return f"precision.high_first = {how.high_first}"
    return f"precision.high_last = {how.high_last}" if layer > last - how.high_last else ""


def choice(spec: ModelSpec, how: Quantising) -> list[dict[str, str | int]]:
    """For people: of each kind of linear layer in how many blocks it runs as what, and why where not quantised."""
    found: dict[tuple[str, str], int] = {}
    for (_, name), why in why_kept(spec, how).items():
        found[name, why] = found.get((name, why), 0) + 1
    runs = how.numerics.recipe
    return [
        {"layer": n, "blocks": count, "runs": runs if not why else "high", "why": why}
        for (n, why), count in found.items()
    ]


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
                    falls_back=how.fall_back,
                )
    refresh_amax(model)


@functools.lru_cache(maxsize=8)
def amax_names(spec: ModelSpec, how: Quantising) -> tuple[str, ...]:
    """The logical tensors of the whole model with states of delayed scaling: `layers.3.attn.q` ..."""
    if not how.numerics.delayed:
        return ()
    model = Decoder(spec, device="meta")
    quantise(model, how)
    return tuple(name for held in _quantised(model) for name in held.names)


def _quantised(model: nn.Module) -> Iterator[Quantised]:
    """Those with states."""
    return (m for m in model.modules() if isinstance(m, Quantised) and m.numerics.delayed)


def histories(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(logical tensor, its history [3, H], a view) of those held here."""
    for held in _quantised(model):
        yield from zip(held.names, held.history, strict=True)


def key_draws(model: nn.Module, seed: int, step: int, tokens_BS: Tensor) -> None:
    """Before the forward pass of a micro-batch. Its tokens name it, so that whoever runs it draws the same."""
    found = [m for m in model.modules() if isinstance(m, Quantised) and m.numerics.stochastic]
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
    table = torch.zeros(len(names), 3, device=device)
    places = _places(names)
    for held in _quantised(model):
        table[[places[name] for name in held.names]] = held.seen
    return table


@torch.no_grad()
def advance_amax(model: nn.Module, names: tuple[str, ...], seen_N3: Tensor) -> None:
    """At the commit of a step: history' = f(history, amax), with the amax over all ranks."""
    places = _places(names)
    for held in _quantised(model):
        held.advance(seen_N3[[places[name] for name in held.names]])
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
def _places(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}
