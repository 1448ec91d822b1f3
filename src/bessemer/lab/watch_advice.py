"""Which way of scaling each tensor of a watched run asks for, and how urgently.

The rules, for a tensor in one of its roles, over the samples after the warm-up (the first that holds):

* *fell back*: the run itself went on without quantising it.
* *finer*: more than `FLUSHED` of its numbers become 0, or its error is more than `WORSE` times that of numbers that
  the scale holds well. Under a scale per tensor: `smooth` where the input of a down projection has a channel
  2^`LOUD` times as loud as the median one (what SwiGLU makes, and Smooth-SwiGLU evens out), else `block`. Under rows:
  `block`; under blocks of 128: `mxfp8`; under smaller ones: `bf16`, since no finer scale is left.
* *current*: its amax was more than twice the largest of its past, or more than `SATURATED` of its numbers were clipped
  (or so large ones that they made its error `WORSE`). A scale is rounded up to a power of two, which leaves less than
  a factor of 2 above the past's largest: whatever the rounding was, a delayed scale clips such a step.
* *margin*: more than 2^0.5. Rounding up leaves half a power of two on the average: every second such step is clipped;
  `precision.margin = 1` doubles the room and costs one of the format's 18 (e4m3) or 32 (e5m2) powers of two.
* *delayed*: none of these, so that the cheapest way, without another read of the tensor, is safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bessemer.core.recipes import RECIPES
from bessemer.lab.watch import ROLES, Watched
from bessemer.precision import Scheme, numerics
from bessemer.precision.watch import expected_error

__all__ = ["Advice", "advise", "well_scaled_error", "words"]

FLUSHED = 0.01
"""Numbers that are normally distributed lose 10^-5 of them; 0.01 is lost where channels differ by some 2^4, and from
there the share grows fast (docs/precision.md, "Outliers")."""
WORSE = 1.5
"""Then what the scale adds is as large as the rounding itself."""
SATURATED = 1e-3
LOUD = 5.0
_HISTORY = 16  # samples looked back on where the recipe keeps no history of steps
_FINER = {-1: "block", 128: "mxfp8"}


@dataclass(frozen=True)
class Advice:
    """Of one tensor in one role, over the samples that count: the latest amax, log2 of the largest move (`jump`) and of
    the largest rise above the past (`burst`), the largest shares and errors; None where nothing was counted."""

    name: str
    role: str
    advice: str
    urgency: float
    amax: float | None
    jump: float | None
    burst: float | None
    spread: float | None
    saturated: float | None
    flushed: float | None
    error: float | None
    result: float | None
    why: str

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def well_scaled_error(watched: Watched, role: str) -> float:
    """|q - x| / |x| of numbers that the recipe's scale holds well."""
    precision = watched.job.precision
    scheme: Scheme = getattr(numerics(precision.recipe), role)
    return expected_error(scheme, stochastic=precision.stochastic and role == "grad")


def advise(watched: Watched) -> list[Advice]:
    """For every tensor and role, the most urgent first."""
    found = [_of(watched, n, role) for n in range(len(watched.names)) for role in ROLES]
    return sorted(found, key=lambda a: (-a.urgency, a.name, ROLES.index(a.role)))


def _of(watched: Watched, n: int, role: str) -> Advice:
    name, counts = watched.names[n], watched.settled
    mine = {key: values[:, n] for key, values in watched.figures[role].items()}
    amax, burst = mine["amax"], _largest(mine["burst"][counts])
    jump = _largest(mine["jump"][counts])
    if burst is None:
        jump, burst = _moves(amax, counts)
    figures = {key: _largest(mine[key][counts]) for key in ("spread", "saturated", "flushed", "error")}
    ratio = (figures["error"] or 0.0) / well_scaled_error(watched, role)
    advice, why = _rule(watched, name, role, figures, ratio, burst)
    urgency = max(
        ratio / WORSE,
        (figures["flushed"] or 0.0) / FLUSHED,
        (figures["saturated"] or 0.0) / SATURATED,
        (burst or 0.0) / 1.0,
        1e3 if advice == "fell back" else 0.0,
    )
    known = amax[np.isfinite(amax)]
    return Advice(
        name=name,
        role=role,
        advice=advice,
        urgency=float(urgency),
        amax=float(known[-1]) if len(known) else None,
        jump=jump,
        burst=burst,
        result=_largest(watched.results[counts, n]) if role == "x" else None,
        why=why,
        **figures,
    )


def _rule(
    watched: Watched, name: str, role: str, figures: dict[str, float | None], ratio: float, burst: float | None
) -> tuple[str, str]:
    if name in watched.fallen:
        step, why = watched.fallen[name]
        return "fell back", f"after step {step}: {why}"
    flushed, saturated, spread = (figures[k] or 0.0 for k in ("flushed", "saturated", "spread"))
    clipped = saturated > SATURATED or (saturated > 0 and ratio > WORSE)  # few large numbers make most of an error
    if flushed > FLUSHED or (ratio > WORSE and not clipped):
        why = f"{flushed:.1%} become 0" if flushed > FLUSHED else f"error {ratio:.1f} times that of good scaling"
        block = RECIPES[watched.job.precision.recipe].scale_block
        if block != 0:
            return _FINER.get(block, "bf16"), why
        if role == "x" and spread >= LOUD and name.endswith(".down") and not watched.job.precision.smooth:
            return "smooth", f"{why}; a channel is 2^{spread:.1f} times as loud as the median one"
        return "block", f"{why}; channels differ by 2^{spread:.1f}" if role == "x" else why
    if clipped or (burst or 0.0) > 1.0:
        why = f"amax rose to 2^{burst or 0.0:.1f} times the largest of its past"
        return "current", f"{saturated:.2%} clipped, {why}" if clipped else why
    if (burst or 0.0) > 0.5:
        return "margin", f"amax rose to 2^{burst:.1f} times the largest of its past"
    return "delayed", "" if burst is None else f"amax stays within 2^{burst:.1f} times the largest of its past"


def _moves(amax_S: NDArray[np.float64], counts: NDArray[np.bool_]) -> tuple[float | None, float | None]:
    """(jump, burst) between samples, for recipes that keep no history of steps."""
    known = amax_S[counts & np.isfinite(amax_S) & (amax_S > 0)]
    if len(known) < 2:
        return None, None
    logs = np.log2(known)
    past = [logs[max(0, i - _HISTORY) : i].max() for i in range(1, len(logs))]
    return float(np.abs(np.diff(logs)).max()), float(max(0.0, (logs[1:] - past).max()))


def _largest(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None


_WORDS = {
    "delayed": "a delayed scale per tensor is safe",
    "margin": "a delayed scale with precision.margin = 1",
    "current": "a scale from the tensor's own amax (fp8-current)",
    "block": "scales per block (fp8-block128 or mxfp8)",
    "mxfp8": "blocks of 32 (mxfp8)",
    "smooth": "Smooth-SwiGLU (precision.smooth), or blocks",
    "bf16": "no narrower type (precision.high_first, high_last or fall_back)",
    "fell back": "already without quantising",
}


def words(advice: str) -> str:
    """What an advice means."""
    return _WORDS[advice]
