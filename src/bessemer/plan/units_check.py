"""Figures of a machine that look like another unit: Gbit/s for GB/s, GB for bytes, TFLOP/s for FLOP/s.

The bounds are wide: from below any accelerator or CPU of the last ten years to well above what has been announced.
"""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.core.machine import DTYPES, Machine
from bessemer.core.problem import Problem
from bessemer.core.units import format_rate

__all__ = ["BOUNDS", "unit_problems"]

BOUNDS: dict[str, tuple[float, float, str]] = {
    "memory_bytes": (1e8, 4e12, "bytes: 80e9, not 80"),
    "memory_bytes_per_s": (1e9, 40e12, "bytes/s: 3350e9, not 3350"),
    "scaleup_bidirectional_bytes_per_s": (1e9, 8e12, "bytes/s of both directions: 900e9"),
    "nic_bytes_per_s": (1e8, 250e9, "bytes/s of one direction: 400 Gbit/s are 50e9"),
    "host_bytes_per_s": (1e8, 1e12, "bytes/s of one direction: 64e9"),
    "tdp_w": (5, 5000, "watts"),
}
"""Field -> least and most plausible value, and how it is meant."""
_PEAK = (1e9, 2e17)
_BITS = 8.0


def unit_problems(machine: Machine) -> list[Problem]:
    """A problem for every figure out of its bounds, and for a network card above the scale-up link."""
    found = list(_outside(machine))
    for dtype in DTYPES:
        peak = machine.peak(dtype)
        if peak is not None and not _PEAK[0] <= peak <= _PEAK[1]:
            found.append(_problem(f"peak_flops_per_s.{dtype}", peak, "operations/s: 989e12, not 989", "FLOP"))
    link, nic = machine.scaleup_bytes_per_s, machine.nic_bytes_per_s
    if link is not None and nic is not None and nic > link and not any(p.where.startswith("nic") for p in found):
        what = f"nic_bytes_per_s = {nic:g} is more than one direction of the scale-up link, {link:g}"
        fix = f"nic_bytes_per_s = {nic / _BITS:g}, if bits were meant"
        found.append(
            Problem(code="unit-bounds", where="nic_bytes_per_s", what=what, why="that looks like bits/s", fix=fix)
        )
    return found


def _outside(machine: Machine) -> Iterator[Problem]:
    for field, (low, high, meant) in BOUNDS.items():
        value = getattr(machine, field)
        if value is not None and not low <= value <= high:
            yield _problem(field, value, meant, "B" if field.endswith("_s") else "")


def _problem(field: str, value: float, meant: str, unit: str) -> Problem:
    shown = format_rate(value, unit) if unit else f"{value:g}"
    bounds = BOUNDS.get(field, (*_PEAK, ""))
    bits = value > bounds[1] and value / _BITS <= bounds[1] and field.endswith("bytes_per_s")
    fix = f"{field} = {value / _BITS:g}, if bits were meant" if bits else f"{field} in {meant}"
    why = f"plausible is {bounds[0]:g} to {bounds[1]:g}; it is meant in {meant}"
    return Problem(code="unit-bounds", where=field, what=f"{field} = {shown} can't be right", why=why, fix=fix)
