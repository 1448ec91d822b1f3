"""What a grid of small models says about two scaling laws, as an object, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.core.errors import RequestError
from bessemer.core.units import format_count, format_seconds
from bessemer.lab.scaling_fit import LEVEL, Fit, fit
from bessemer.lab.scaling_grid import HIGH, bits_of
from bessemer.lab.scaling_laws import LAWS, Law, Points

__all__ = ["COST_MODEL", "LIMITS", "ScalingLaw", "analyse", "points_of"]

COST_MODEL = (
    "Training is taken to cost N D P: as much as the bits of an operand, in forward and backward alike. Here the "
    "gradients stay in bf16, so a machine would save less."
)
LIMITS = (
    "The models are a thousandth the size of those that the published constants come from, on one corpus of code: how "
    "the loss falls here doesn't carry over to large models, and neither do constants.",
    "One learning rate for each width, found in bf16, serves all formats; another one for few bits might lose less.",
    "Integers and floats count by their bits alone in the law 'effective'.",
)


@dataclass(frozen=True)
class ScalingLaw:
    """`records`: the points as results.jsonl has them; `fits`: by the law's name; `refused`: why a law wasn't fitted;
    `scatters`: the standard deviation of log L between seeds, of bf16 and of formats less bf16."""

    records: Sequence[Mapping[str, Any]]
    missing: int
    fits: dict[str, Fit]
    refused: dict[str, str]
    scatters: dict[str, float]
    cost: float
    folder: Path

    @property
    def diverged(self) -> int:
        return sum(r["loss"] is None for r in self.records)

    @property
    def cpu_s(self) -> float:
        return sum(float(r["cpu_s"]) for r in self.records)

    def as_json(self) -> dict[str, Any]:
        """Losses in nats a byte; `determined` false where the points don't tell a constant."""
        return {
            "points": [dict(r) for r in self.records],
            "missing": self.missing,
            "diverged": self.diverged,
            "cpu_s": self.cpu_s,
            "seed_scatter": self.scatters,
            "level": LEVEL,
            "cost": self.cost,
            "cost_model": COST_MODEL,
            "laws": {name: _law_json(f) for name, f in self.fits.items()},
            "refused": self.refused,
            "limits": list(LIMITS),
            "report": str(self.folder / "report.html"),
            "kind": "measured losses, fitted laws",
        }

    def summary(self) -> str:
        """One sentence of what was trained."""
        sizes, tokens = ([r[k] for r in self.records] for k in ("parameters", "trained_tokens"))
        text = (
            f"{len(self.records)} models of {format_count(min(sizes))} to {format_count(max(sizes))} parameters in "
            f"their blocks, on {format_count(min(tokens))} to {format_count(max(tokens))} bytes, "
            f"{format_seconds(self.cpu_s)} of CPU"
        )
        gone = [f"{self.missing} not trained yet"] if self.missing else []
        gone += [f"{self.diverged} diverged"] if self.diverged else []
        return f"{text} ({', '.join(gone)})" if gone else text

    def __str__(self) -> str:
        lines = [self.summary()]
        if self.scatters:
            shown = ", ".join(f"{name} {s:.2%}" for name, s in self.scatters.items())
            lines.append(f"scatter of the loss between seeds: {shown}")
        for f in self.fits.values():
            lines += ["", *_fit_lines(f)]
        lines += [f"\nlaw {name!r}: not fitted, {why}" for name, why in self.refused.items()]
        lines += ["", COST_MODEL, *LIMITS, "", f"report: {self.folder / 'report.html'}"]
        return "\n".join(lines)


def points_of(records: Sequence[Mapping[str, Any]]) -> Points:
    """Those that ended with a loss."""
    good = [r for r in records if r["loss"] is not None]
    weights, inputs = ([bits_of(r[k]) for r in good] for k in ("weight", "inputs"))
    alike = [w if w == i else (math.nan, math.nan) for w, i in zip(weights, inputs, strict=True)]
    seeds = [(r["width"], r["tokens"], r["repeat"]) for r in good]
    numbers = {seed: number for number, seed in enumerate(dict.fromkeys(seeds))}
    columns = {
        "parameters": [r["parameters"] for r in good],
        "tokens": [r["trained_tokens"] for r in good],
        "weight_bits": [1 + sum(w) for w in weights],
        "input_bits": [1 + sum(i) for i in inputs],
        "exponent_bits": [x for x, _ in alike],
        "mantissa_bits": [m for _, m in alike],
        "block": [r["block"] for r in good],
        "loss": [r["loss"] for r in good],
        "group": [numbers[seed] for seed in seeds],
    }
    return Points(**{name: np.array(values, dtype=np.float64) for name, values in columns.items()})


def analyse(records: Sequence[Mapping[str, Any]], *, missing: int, samples: int, folder: Path) -> ScalingLaw:
    """Both laws at the points, with the best precision for the cost of the dearest of them in bf16. RequestError where
    there is no point at all."""
    points = points_of(records)
    if not len(points):
        raise RequestError("no model of the grid is finished", code="lab-few-points", fix="leave out --fit-only")
    cost = float((points.parameters * points.tokens).max() * 16)
    fits, refused = {}, {}
    for law in LAWS:
        try:
            fits[law.name] = fit(law, points, cost=cost, samples=samples)
        except RequestError as error:
            refused[law.name] = error.message
    return ScalingLaw(records, missing, fits, refused, _scatters(records), cost, folder)


def _scatters(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of bf16 and of each format less bf16 with the same seed, where the same size was trained with three seeds."""
    losses: dict[tuple[int, int, str], dict[int, float]] = {}
    for r in records:
        if r["loss"] is not None and r["weight"] == r["inputs"] and not r["block"]:
            losses.setdefault((r["width"], r["tokens"], r["weight"]), {})[r["repeat"]] = math.log(r["loss"])
    found = {}
    for (width, tokens, name), by_seed in losses.items():
        high = losses.get((width, tokens, HIGH), {})
        if name == HIGH:
            logs, words = list(by_seed.values()), HIGH
        else:
            logs, words = [v - high[seed] for seed, v in by_seed.items() if seed in high], f"{name} less {HIGH}"
        if len(logs) > 2:
            found[words] = float(np.std(logs, ddof=1))
    return found


def _law_json(found: Fit) -> dict[str, Any]:
    return {
        "formula": found.law.formula,
        "points": len(found.points),
        "scatter": found.scatter,
        "constants": {name: c.as_json() for name, c in found.constants.items()},
        "best_bits": found.optimum.as_json(),
    }


def _fit_lines(found: Fit) -> list[str]:
    law: Law = found.law
    lines = [
        f"law {law.name!r}: {law.formula}",
        f"  {len(found.points)} points, which scatter about it by {found.scatter:.2%} of the loss",
        f"  {'':<4}{'value':>11}  {f'{LEVEL:.0%} interval':<24}",
    ]
    for constant in law.constants:
        c = found.constants[constant.name]
        interval = f"{c.low:.4g} to {c.high:.4g}"
        if c.why:
            lines.append(f"  {constant.name:<4}{'-':>11}  {interval:<24}  not determined: {c.why}; {constant.what}")
        else:
            lines.append(f"  {constant.name:<4}{c.value:>11.4g}  {interval:<24}  {constant.what}")
    best = found.optimum
    text = f"  best precision for a cost N D P of {found.cost:.3g}: "
    if best.why:
        text += f"not determined, {best.low:.2f} to {best.high:.2f} bits: {best.why}"
    else:
        text += f"{best.value:.2f} bits ({best.low:.2f} to {best.high:.2f})"
    return [*lines, text]
