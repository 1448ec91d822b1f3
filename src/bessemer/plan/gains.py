"""What a recipe gains in each linear layer over 16-bit products, and what is left high where it would lose.

Planner and trainer ask here which layers lose, and `core.linear_layers` which ones are too small or oddly shaped, so
that both run the same layers quantised. The answer follows from job and machine alone, never from what was measured on
one host: the rates are those of the machine's file, the constants those that come with the package.

Time of a layer: its three products (`kernels.gemm_s`), at the sizes to which they are filled up, and what quantises
inputs and gradients (`kernels.cast_s`). Launches are not in it: those of small layers cost more than is said here.

S layouts, R recipes in the order of `RECIPES`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.errors import ConfigError
from bessemer.core.job import PrecisionSection
from bessemer.core.layout import Layout
from bessemer.core.linear_layers import CHOICE_TOKENS, Row, kept_layers, layer_table, multiples
from bessemer.core.recipes import RECIPES, lacking
from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.kernels import cast_s, gemm_s, precision_of
from bessemer.plan.rates import rates_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.core.job import Job
    from bessemer.core.machine import Machine
    from bessemer.core.model import ModelSpec
    from bessemer.plan.calibration import Constants
    from bessemer.plan.rates import Rates

__all__ = ["Choice", "Gain", "choice_of", "filled_work", "gains_text", "layer_gains", "slow_layers"]

_ERA = "megatron-2026"
"""Whose constants decide: the newest that were fitted to GPUs."""
_NAMES = tuple(RECIPES)
_NO_UNITS = "routed experts are emulated, which only takes longer than bf16"
_EXPERTS = "mlp.experts."
_NEVER = ("mlp.router", "join", "head")
"""What no recipe quantises, whatever its size."""


@dataclass(frozen=True)
class Gain:
    """A kind of linear layer as a rank of the job has it, in `blocks` blocks. `high`: why it isn't quantised, empty
    where it is; `wide_s`, `recipe_s`: seconds of a micro-batch in 16 bits and in the recipe, None where the machine
    emulates or has no figures."""

    name: str
    blocks: int
    size: tuple[int, int, int]  # tokens, inputs, outputs
    experts: int
    high: str
    wide_s: float | None
    recipe_s: float | None
    unknown: str = ""  # why nothing is predicted

    @property
    def speedup(self) -> float | None:
        """Of the three products with their casts over the same in 16 bits; above 1 the recipe gains."""
        return None if self.wide_s is None or self.recipe_s is None else self.wide_s / self.recipe_s

    def as_json(self) -> dict[str, Any]:
        tokens, inputs, outputs = self.size
        return {
            "layer": self.name, "blocks": self.blocks, "tokens": tokens, "inputs": inputs, "outputs": outputs,
            "experts": self.experts, "quantised": not self.high, "why": self.high, "bf16_s": self.wide_s,
            "recipe_s": self.recipe_s, "speedup": self.speedup,
            "unknown": self.unknown,
        }  # fmt: skip


def gains_text(gains: list[Gain], recipe: str) -> list[str]:
    """A line a kind of linear layer, for people; none where there are none."""
    if not gains:
        return []
    cells = [(f"linear layers in {recipe}", "blocks", "tokens", "inputs x outputs", "speed-up (modelled)", "runs as")]
    for gain in gains:
        tokens, inputs, outputs = gain.size
        speed = gain.unknown or f"{gain.speedup:.3f}"
        runs = f"high: {gain.high}" if gain.high else recipe
        times = f"{gain.blocks} x {gain.experts}" if gain.experts else str(gain.blocks)
        cells.append((gain.name, times, str(tokens), f"{inputs} x {outputs}", speed, runs))
    widths = [max(len(c[i]) for c in cells) for i in range(5)]
    return [
        f"  {c[0]:<{widths[0]}}  " + "  ".join(f"{c[i]:>{widths[i]}}" for i in range(1, 5)) + f"  {c[5]}" for c in cells
    ]


@dataclass(frozen=True)
class Choice:
    """Which linear layers of one model run high on one machine. `kept`: by name in the block the share of its layers
    that do under any layout [R]; `by_layout` [R]: whether those that lose at a layout's sizes do too. `emulated`:
    whether routed experts multiply in 16 bits what they have quantised."""

    kept: Mapping[str, NDArray[np.float64]]
    by_layout: NDArray[np.bool_]
    emulated: bool
    rates: Rates | None
    constants: Constants | None

    def high(self, name: str, recipe: NDArray[np.int64], tokens: Any, outputs: Any, inputs: Any) -> NDArray[np.float64]:
        """[S]: share of the layers of that name that run in 16 bits. Experts don't look at their sizes.
        Of a kind that the model hasn't got, a dense part beside experts alone, it is 1."""
        if name not in self.kept:
            return np.ones(len(recipe))
        always: NDArray[np.float64] = self.kept[name][recipe]
        if self.rates is None or self.constants is None or name.startswith(_EXPERTS):
            return always
        wide, narrow = _seconds(recipe, (tokens, outputs, inputs), self.rates, self.constants)
        return np.where(self.by_layout[recipe] & (narrow > wide), 1.0, always)


def choice_of(spec: ModelSpec, machine: Machine, precision: PrecisionSection) -> Choice:
    """For layouts with any recipe; the other fields of `precision` count as they stand."""
    shares: dict[str, NDArray[np.float64]] = {}
    for at, name in enumerate(_NAMES):
        if not RECIPES[name].quantised:
            continue  # runs in its own type, which is high
        section = precision.model_copy(update={"recipe": name})
        slow = _slow(spec, machine, name, _whole(spec, name)) if _decides(section, machine) else ()
        found: dict[str, list[bool]] = {}
        kept = _kept(spec, name, precision.high_first, precision.high_last, _lasting(slow, section))
        for (_, layer), why in kept.items():
            found.setdefault(layer, []).append(bool(why))
        for layer, values in found.items():
            shares.setdefault(layer, np.ones(len(_NAMES)))[at] = sum(values) / len(values)
    figures = _figures(machine)
    sections = [precision.model_copy(update={"recipe": name}) for name in _NAMES]
    by_layout = np.array([_decides(s, machine) and not _remembers(s) for s in sections])
    return Choice(shares, by_layout, machine.device != "cpu", *(figures or (None, None)))


def slow_layers(job: Job, spec: ModelSpec, machine: Machine) -> tuple[tuple[str, str], ...]:
    """(name in its block, why) of the linear layers that the job's recipe would slow down on its machine. Empty where
    the machine emulates, has no figures, or `precision.emulate` asks for the recipe whatever it costs.

    Sizes are those of a rank. Where state belongs to quantised layers (histories of amaxes, falling back) they are the
    whole model's, or the run couldn't go on under another layout."""
    section = job.precision
    if not _decides(section, machine):
        return ()
    whole = _slow(spec, machine, section.recipe, _whole(spec, section.recipe))
    if _remembers(section):
        return whole
    experts = tuple(s for s in whole if s[0].startswith(_EXPERTS))
    rows = [row for row in _rows(job, spec) if not row.name.startswith(_EXPERTS)]
    return _slow(spec, machine, section.recipe, rows) + experts


def layer_gains(job: Job, spec: ModelSpec, machine: Machine) -> list[Gain]:
    """Every kind of linear layer that a quantised recipe could run; none for another recipe."""
    section, name = job.precision, job.precision.recipe
    if not RECIPES[name].quantised:
        return []
    slow = slow_layers(job, spec, machine)
    kept = kept_layers(spec, name, high_first=section.high_first, high_last=section.high_last, slow=slow)
    emulates = machine.device == "cpu" or bool(lacking(RECIPES[name], machine))
    figures, found = None if emulates else _figures(machine), []
    unknown = "emulated" if emulates else "no figures" if figures is None else ""
    for row in (row for row in _rows(job, spec) if row.name not in _NEVER):
        reasons: dict[str, int] = {}
        for layer in row.layers:
            reasons[kept[layer, row.name]] = reasons.get(kept[layer, row.name], 0) + 1
        wide, narrow = (None, None) if figures is None else _row_seconds(row, name, *figures)
        size = (row.shape.tokens, row.shape.inputs, row.shape.outputs)
        make = functools.partial(Gain, row.name, size=size, experts=row.experts, wide_s=wide, recipe_s=narrow)
        found += [make(count, high=why, unknown=unknown) for why, count in reasons.items()]
    return found


def filled_work(recipe: NDArray[np.int64], tokens: Any, outputs: Any, inputs: Any) -> NDArray[np.float64]:
    """[3, S]: the work of each product with the zeros that fill it up over that without (`core.linear_layers`)."""
    m, n, k = (_MULTIPLES[:, i][recipe] for i in range(3))
    quantised = _QUANTISED[recipe]

    def work(*sizes: Any) -> Any:
        pairs = [(np.maximum(np.asarray(s, float), 1.0), of) for s, of in zip(sizes, (m, n, k), strict=True)]
        ratio = np.prod(np.broadcast_arrays(*(np.ceil(size / of) * of / size for size, of in pairs)), axis=0)
        return np.where(quantised, ratio, 1.0)

    return np.stack(
        np.broadcast_arrays(work(tokens, outputs, inputs), work(tokens, inputs, outputs), work(outputs, inputs, tokens))
    )


_OF = [multiples(r) for r in RECIPES.values()]
_MULTIPLES = np.array([(of.m, of.n, of.k) for of in _OF], float)
_QUANTISED = np.array([r.quantised for r in RECIPES.values()])


def _decides(section: PrecisionSection, machine: Machine) -> bool:
    """Whether speed is a reason at all: where the machine has the recipe's units and nobody asked for emulation."""
    recipe = RECIPES[section.recipe]
    on_units = recipe.quantised and machine.device != "cpu" and not lacking(recipe, machine)
    return on_units and not section.emulate


def _remembers(section: PrecisionSection) -> bool:
    return section.recipe == "fp8-delayed" or section.fall_back


def _lasting(slow: tuple[tuple[str, str], ...], section: PrecisionSection) -> tuple[tuple[str, str], ...]:
    """Of what is slow at the whole model's sizes, what is left high under every layout."""
    return slow if _remembers(section) else tuple(s for s in slow if s[0].startswith(_EXPERTS))


def _rows(job: Job, spec: ModelSpec) -> list[Row]:
    layout, recipe = job.layout, job.precision.recipe
    return layer_table(spec, layout, recipe, micro_batch=job.train.micro_batch, seq_len=job.data.seq_len)


@functools.lru_cache(maxsize=64)
def _kept(
    spec: ModelSpec, recipe: str, high_first: int, high_last: int, slow: tuple[tuple[str, str], ...]
) -> dict[tuple[int, str], str]:
    return kept_layers(spec, recipe, high_first=high_first, high_last=high_last, slow=slow)


@functools.lru_cache(maxsize=64)
def _allowed(spec: ModelSpec, recipe: str) -> frozenset[str]:
    """What sizes alone let the recipe quantise."""
    return frozenset(name for (_, name), why in kept_layers(spec, recipe).items() if not why)


@functools.lru_cache(maxsize=64)
def _whole(spec: ModelSpec, recipe: str) -> list[Row]:
    return layer_table(spec, Layout(), recipe, micro_batch=1, seq_len=CHOICE_TOKENS)


def _slow(spec: ModelSpec, machine: Machine, recipe: str, rows: list[Row]) -> tuple[tuple[str, str], ...]:
    """Of the layers that sizes alone let the recipe quantise."""
    figures, found = _figures(machine), []
    if figures is None:
        return ()
    allowed = _allowed(spec, recipe)
    for row in rows:
        if row.name not in allowed:
            continue
        wide, narrow = _row_seconds(row, recipe, *figures)
        if row.name.startswith(_EXPERTS):
            found.append((row.name, f"{_NO_UNITS} on {machine.name}"))
        elif narrow > wide:
            size = f"{row.shape.tokens} tokens, {row.shape.inputs} x {row.shape.outputs}"
            found.append(
                (row.name, f"it takes {narrow / wide:.3f} times as long as bf16 on {machine.name} ({size}; modelled)")
            )
    return tuple(found)


def _figures(machine: Machine) -> tuple[Rates, Constants] | None:
    try:
        return rates_of(machine), default_calibration().resolve(gpu_of(machine), _ERA)
    except ConfigError:  # its file lacks a rate: nothing is predicted of it
        return None


def _row_seconds(row: Row, recipe: str, r: Rates, c: Constants) -> tuple[float, float]:
    """Of one layer; of all experts of a rank together."""
    tokens, inputs, outputs = row.shape.tokens, row.shape.inputs, row.shape.outputs
    ids, many = np.array([_NAMES.index(recipe)]), max(row.experts, 1)
    wide, narrow = _seconds(ids, (tokens, outputs, inputs), r, c)
    if row.experts:  # quantised, decoded and multiplied as they were
        casts = cast_s(tokens, tokens, outputs, inputs, precision_of(ids, r, c), r, c).sum(axis=0) * c.layer
        narrow = wide + casts
    return many * float(wide[0]), many * float(narrow[0])


def _seconds(recipe: NDArray[np.int64], size: tuple[Any, Any, Any], r: Rates, c: Constants) -> tuple[Any, Any]:
    """[S] in 16 bits and in the recipe; size: tokens, outputs, inputs."""
    tokens, outputs, inputs = size
    p = precision_of(recipe, r, c)
    wide = gemm_s(tokens, outputs, inputs, p, r, c, wide=True)
    narrow = gemm_s(tokens, outputs, inputs, p, r, c) * filled_work(recipe, tokens, outputs, inputs)
    casts = cast_s(tokens, tokens, outputs, inputs, p, r, c)
    return wide.sum(axis=0) * c.layer, (narrow + casts).sum(axis=0) * c.layer
