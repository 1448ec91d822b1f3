"""The watch over a model's quantised projections, and those that go on without quantising because of what it saw.

    watching = watching_of(spec, how, every=10)
    start_watch(module, window)                       # before the units of a sampled step
    with window: ...                                  # each forward pass
    table = end_watch(module, watching, device)       # then summed over ranks
    falls = fall_back(module, watching, table, step)  # at the commit, on every rank alike

Legend: P logical tensors packed in a weight, N of the whole model with quantised products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bessemer.core.model import ModelSpec
from bessemer.models.decoder import Decoder
from bessemer.models.quantise import Quantising, quantise
from bessemer.models.quantised import Quantised, QuantisedExperts
from bessemer.precision import Numerics
from bessemer.precision.watch import Figures, Limits, Table, TensorWatch, Window

__all__ = [
    "Fall",
    "Watching",
    "end_watch",
    "fall_back",
    "fallen",
    "held_troubles",
    "refresh_fallen",
    "start_watch",
    "watching_of",
]


@dataclass(frozen=True)
class Watching:
    """What is watched and when. groups: the logical tensors (`layers.3.attn.q` ...) of each quantised projection of the
    whole model; every: steps between samples; fall_back: whether what misbehaves goes on without quantising."""

    groups: tuple[tuple[str, ...], ...]
    numerics: Numerics
    every: int
    fall_back: bool = False
    limits: Limits = field(default_factory=Limits)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def samples(self, step: int) -> bool:
        """Whether step `step` (from 0) is one: the `every`-th, and so on."""
        return (step + 1) % self.every == 0


@dataclass(frozen=True)
class Fall:
    """A projection that goes on without quantising: its logical tensors, and why, with figures and rule."""

    names: tuple[str, ...]
    why: str


def watching_of(spec: ModelSpec, how: Quantising, *, every: int) -> Watching | None:
    """None where nothing is to be watched."""
    if every == 0:
        return None
    return Watching(_groups(spec, how), how.numerics, every, how.fall_back)


@functools.lru_cache(maxsize=8)
def _groups(spec: ModelSpec, how: Quantising) -> tuple[tuple[str, ...], ...]:
    model = Decoder(spec, device="meta")
    quantise(model, how)
    return tuple(held.names for held in _held(model))


def _held(model: nn.Module) -> Iterator[Quantised | QuantisedExperts]:
    return (m for m in model.modules() if isinstance(m, Quantised | QuantisedExperts))


def start_watch(model: nn.Module, window: Window) -> None:
    """Have every projection that is quantised now count, from nothing on, what its calls do."""
    for held in _held(model):
        held.watch = None if held.fallen else TensorWatch(held.sizes, held.device, window)


def end_watch(model: nn.Module, watching: Watching, device: torch.device) -> Table:
    """What this rank's units have shown; nothing is counted any more."""
    table = Table.empty(watching.names, device)
    for held in _held(model):
        places = [watching.places[name] for name in held.names]
        if held.watch is not None:
            table.take(places, held.watch, held.history if held.numerics.delayed else None)
        if held.falls_back:
            table.trouble[places] = held.trouble.double()
        held.watch = None
    return table


def fall_back(model: nn.Module, watching: Watching, table: Table, figures: Figures, step: int) -> tuple[Fall, ...]:
    """The projections that go on without quantising after step `step` (counted from 1), decided from a table that is
    the same on all ranks; the state of those held here follows."""
    trouble_N2, said = table.trouble.cpu(), watching.limits.trouble(figures, watching.numerics)
    falls = []
    for group in watching.groups:
        rows = [watching.places[name] for name in group]
        if trouble_N2[rows, 1].any():
            continue
        for row in rows:
            trouble_N2[row, 0] = trouble_N2[row, 0] + 1 if said[row] else 0
        if trouble_N2[rows, 0].amax() >= watching.limits.samples:
            trouble_N2[rows, 1] = step
            why = "; ".join(f"{watching.names[row]}: {said[row]}" for row in rows if said[row])
            falls.append(Fall(group, f"{why}, in {watching.limits.samples} samples in a row"))
    with torch.no_grad():
        for held in _held(model):
            held.trouble.copy_(trouble_N2[[watching.places[name] for name in held.names]])
    refresh_fallen(model)
    return tuple(falls)


def refresh_fallen(model: nn.Module) -> None:
    """After that state has changed (a sample, a restore)."""
    for held in _held(model):
        held.fallen = held.falls_back and bool(held.trouble[:, 1].any())


def held_troubles(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(logical tensor, float32 [2], a view: samples in a row with trouble, and the step after which it fell back or 0)
    of those held here that may fall back."""
    for held in _held(model):
        if held.falls_back:
            yield from zip(held.names, held.trouble, strict=True)


def fallen(model: nn.Module, watching: Watching, device: torch.device) -> Tensor:
    """float64 [N]: the step after which each tensor fell back, 0 of others and of those that aren't held here."""
    steps = torch.zeros(len(watching.names), dtype=torch.float64, device=device)
    for name, trouble in held_troubles(model):
        steps[watching.places[name]] = trouble[1]
    return steps
