"""How many spares, which interval, which mode reaches a goal, and what it would take where none does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from bessemer.plan.goodput import MODES, Estimate, GoodputInputs, Mode, estimate, overcome_s

__all__ = ["Advice", "ModeAdvice", "advise"]


@dataclass(frozen=True, kw_only=True)
class ModeAdvice:
    """One mode. `reaches`: whether any number of spares brings its effective time to the target; `estimate`: with the
    fewest nodes in reserve that do, or, where none does, with those that serve all devices best. `best`: with
    spares enough; `at_once`: if training also went on at once after a failure that needs no fall-back. `overcome_s`:
    from such a failure to training again, as it is; `overcome_limit_s`: what it may be at the most for the target, with
    spares enough (None: then even `at_once` falls short)."""

    mode: Mode
    reaches: bool
    estimate: Estimate
    best: Estimate
    at_once: Estimate
    overcome_s: float
    overcome_limit_s: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All modes that the job allows, and the one to take: of those that reach the target the one that serves all
    devices, spares counted, best; None where none does."""

    target: float
    modes: tuple[ModeAdvice, ...]
    choice: Mode | None


def advise(inputs: GoodputInputs, target: float, spares: int | None = None) -> Advice:
    """Searches modes, intervals (their optimum, unless given) and spares; with `spares` given, only the first two.

    ValueError unless 0 < target < 1.
    """
    if not 0 < target < 1:
        raise ValueError(f"the target is a share between 0 and 1, not {target}")
    found = tuple(_mode(inputs, mode, target, spares) for mode in MODES if mode != "zero" or inputs.replicas > 1)
    fit = [m for m in found if m.reaches]
    best = max(fit, key=lambda m: m.estimate.effective_time_all_devices, default=None)
    return Advice(target=target, modes=found, choice=best.mode if best else None)


def _mode(inputs: GoodputInputs, mode: Mode, target: float, spares: int | None) -> ModeAdvice:
    best = estimate(inputs, mode)
    if spares is not None:
        chosen = estimate(inputs, mode, spares)
    elif best.effective_time > target:
        enough = _first(lambda n: estimate(inputs, mode, n).effective_time >= target, inputs.nodes)
        chosen = estimate(inputs, mode, enough)
    else:
        most = math.ceil(inputs.under_repair + 6 * math.sqrt(inputs.under_repair)) + 4
        tries = sorted({round(most * i / 64) for i in range(65)})
        chosen = max((estimate(inputs, mode, n) for n in tries), key=lambda e: e.effective_time_all_devices)
    return ModeAdvice(
        mode=mode,
        reaches=chosen.effective_time >= target,
        estimate=chosen,
        best=best,
        at_once=estimate(_overcoming(inputs, mode, 0.0), mode),
        overcome_s=overcome_s(inputs, mode)[0],
        overcome_limit_s=_limit(inputs, mode, target),
    )


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number up to `most` for which `holds`, which stays true from there on; `most` where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _limit(inputs: GoodputInputs, mode: Mode, target: float) -> float | None:
    def reached(seconds: float) -> bool:
        return estimate(_overcoming(inputs, mode, seconds), mode).effective_time >= target

    if not reached(0.0):
        return None
    low, high = 0.0, inputs.mttf_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) else (low, middle)
    return low


def _overcoming(inputs: GoodputInputs, mode: Mode, seconds: float) -> GoodputInputs:
    """The inputs, with `seconds` from a common failure to training again; what falls back takes as long as before."""
    back = inputs.detection_s + inputs.restart_disk_s
    slow = replace(inputs, detection_s=0.0, restart_disk_s=back)
    if mode == "disk":
        return replace(slow, restart_disk_s=seconds)
    return replace(slow, restart_memory_s=seconds) if mode == "memory" else replace(slow, stall_s=seconds)
