"""Whether training under a recipe differs from bf16 by more than the spread between seeds, from finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bessemer.lab.parity_jobs import REFERENCE, LabRun, tail_mean
from bessemer.lab.statistics import LEVEL, Comparison, compare, deviation
from bessemer.plan.text import table

__all__ = ["DIVERGED", "QUANTITIES", "Curves", "Parity", "analyse", "curves"]

QUANTITIES = {"val_loss": "validation loss", "train_loss": "training loss, last 10 %"}
"""What is compared: the loss on held-back text after the last step, which decides, and the mean of the last tenth of
the training losses beside it. Nats a token."""

DIVERGED = "diverged"
"""The verdict on a recipe of which a seed has no loss: those that survived are no fair sample of it."""

SMOOTH = 50
"""A curve's points are means over 1/SMOOTH of the run: a step's loss varies with its batch."""

_SIGMA = "standard deviation between seeds"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Training losses by recipe, [seeds, points], each point the mean of a window of steps that ends at `steps`."""

    steps: NDArray[np.int64]
    losses: dict[str, NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Parity:
    """`losses[recipe][quantity]`: a value a seed. `comparisons` are those of all but the reference. `diverged`: the
    seeds without a loss of each recipe that has such; it stands neither in `losses` nor in `comparisons`."""

    name: str
    summary: dict[str, str]
    seeds: tuple[int, ...]
    losses: dict[str, dict[str, tuple[float, ...]]]
    comparisons: dict[str, dict[str, Comparison]]
    dropped: dict[str, tuple[str, ...]]
    step_s: dict[str, float]
    diverged: dict[str, tuple[int, ...]]

    @property
    def recipes(self) -> tuple[str, ...]:
        """All, as they were asked for."""
        return tuple(self.dropped)

    def verdict(self, recipe: str) -> str:
        """By the validation loss, unless it diverged."""
        if recipe in self.diverged:
            return DIVERGED
        return self.comparisons[recipe]["val_loss"].verdict

    def as_json(self) -> dict[str, Any]:
        """Losses in nats a token; times in seconds."""
        return {
            "job": self.summary,
            "reference": REFERENCE,
            "seeds": list(self.seeds),
            "level": LEVEL,
            "recipes": {
                name: {
                    "losses": self.losses.get(name, {}),
                    "step_s": self.step_s.get(name),
                    "dropped_settings": list(self.dropped[name]),
                    "diverged_seeds": list(self.diverged.get(name, ())),
                    **({} if name == REFERENCE else self._compared(name)),
                }
                for name in self.recipes
            },
        }

    def _compared(self, name: str) -> dict[str, Any]:
        found = {key: c.as_json() for key, c in self.comparisons.get(name, {}).items()}
        return {"verdict": self.verdict(name), "comparisons": found}

    def text(self) -> str:
        """The printed table, one block a quantity."""
        lines = [f"{self.name}: every recipe against {REFERENCE}, {len(self.seeds)} seeds, paired by seed"]
        for key, words in QUANTITIES.items():
            noise = self.noise(key)
            lines += ["", f"{words} (seed noise {noise:.4f}: {_SIGMA} of {REFERENCE})"]
            rows = [self._row(name, key) for name in self.recipes]
            lines += table(
                ("recipe", "mean", f"- {REFERENCE}", f"{1 - 2 * LEVEL:.0%} interval", "/ noise", "p", "verdict"), rows
            )
        notes = [f"  note: {', '.join(d)} left at its default under {name}" for name, d in self.dropped.items() if d]
        return "\n".join([*lines, *notes])

    def noise(self, quantity: str) -> float:
        return deviation(self.losses[REFERENCE][quantity])

    def divergence(self, recipe: str) -> str:
        """In words, of one that diverged."""
        return f"{DIVERGED} in {len(self.diverged[recipe])} of {len(self.seeds)} seeds"

    def _row(self, name: str, quantity: str) -> tuple[str, ...]:
        if name in self.diverged:
            return name, "", "", "", "", "", self.divergence(name)
        mean = f"{float(np.mean(self.losses[name][quantity])):.4f}"
        if name == REFERENCE:
            return name, mean, "", "", "", "", ""
        c = self.comparisons[name][quantity]
        ratio = f"{c.mean / c.noise:+.2f}" if c.noise else "-"
        return name, mean, f"{c.mean:+.4f}", f"{c.low:+.4f} to {c.high:+.4f}", ratio, f"{c.p_value:.3f}", c.verdict


def analyse(name: str, summary: Mapping[str, str], runs: Sequence[LabRun]) -> tuple[Parity, Curves]:
    """From runs of all recipes with the same seeds, each finished or diverged, the reference's finished."""
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    by_recipe = {r: sorted((run for run in runs if run.recipe == r), key=lambda run: run.seed) for r in recipes}
    seeds = {r: tuple(run.seed for run in group if run.diverged) for r, group in by_recipe.items()}
    diverged = {r: gone for r, gone in seeds.items() if gone}
    records = {r: [run.records() for run in group] for r, group in by_recipe.items() if r not in diverged}
    losses = {
        r: {
            "val_loss": tuple(float(run[-1]["val_loss"]) for run in group),
            "train_loss": tuple(tail_mean([float(step["loss"]) for step in run]) for run in group),
        }
        for r, group in records.items()
    }
    comparisons = {
        r: {key: compare(losses[r][key], losses[REFERENCE][key]) for key in QUANTITIES}
        for r in records
        if r != REFERENCE
    }
    found = Parity(
        name=name,
        summary=dict(summary),
        seeds=tuple(run.seed for run in by_recipe[REFERENCE]),
        losses=losses,
        comparisons=comparisons,
        dropped={r: group[0].dropped for r, group in by_recipe.items()},
        step_s={r: float(np.median([s["step_s"] for run in group for s in run])) for r, group in records.items()},
        diverged=diverged,
    )
    return found, curves({r: np.array([[s["loss"] for s in run] for run in group]) for r, group in records.items()})


def curves(losses: Mapping[str, NDArray[np.float64]]) -> Curves:
    """Means over windows of 1/SMOOTH of the steps. losses: by recipe [seeds, steps]."""
    steps = next(iter(losses.values())).shape[1]
    width = max(1, steps // SMOOTH)
    ends = np.arange(width, steps + 1, width)
    smooth = {r: np.stack([x[:, end - width : end].mean(axis=1) for end in ends], axis=1) for r, x in losses.items()}
    return Curves(steps=ends, losses=smooth)
