"""Plots of a watched run as SVG: amaxes over time, exponents by tensor, and figures by layer as heat maps.

Colours are CSS variables of the page: `heat` is the accent colour, of which a mark's opacity says how much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bessemer.lab.watch import ROLES, Watched, split_name
from bessemer.plan.charts import WIDTH, axis_text, escape, ticks
from bessemer.precision import Numerics, numerics

__all__ = ["WATCH_STYLE", "Heat", "amax_plots", "exponent_plot", "heat_map"]

WATCH_STYLE = (
    ".heat{fill:var(--accent)}.none{fill:var(--idle)}.fell{fill:none;stroke:var(--ink);stroke-width:1.5}"
    ".depth{fill:none;stroke:var(--c1);stroke-width:1.3;stroke-linejoin:round}.edge{stroke:var(--ink);stroke-width:1}"
    ".flush{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 3}.frame{fill:none;stroke:var(--line)}"
)
Floats = NDArray[np.float64]

_POINTS = 120  # of a line: more can't be told apart in a plot of that width
_LINES = 32
_SHADES = 16


def _svg(height: float, label: str, marks: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(marks)}</svg>'


def kinds_of(watched: Watched) -> dict[str, list[tuple[int, int]]]:
    """By kind ("attn.q") its (layer, place among the names), in the order of the layers."""
    layers = 1 + max((split_name(n, 0)[0] for n in watched.names if n.startswith("layers.")), default=0)
    found: dict[str, list[tuple[int, int]]] = {}
    for place, name in enumerate(watched.names):
        layer, kind = split_name(name, layers)
        found.setdefault(kind, []).append((layer, place))
    return {kind: sorted(places) for kind, places in found.items()}


def amax_plots(watched: Watched) -> str:
    """A row of small plots for each kind of tensor, one a role: log2 amax over steps, a line a layer, the deeper the
    darker."""
    kinds = kinds_of(watched)
    left, top, tall, gap = 118.0, 22.0, 112.0, 26.0
    wide = (WIDTH - left - 2 * 62) / 3
    marks = [axis_text(left + r * (wide + 62) + wide / 2, 12, "middle", role) for r, role in enumerate(ROLES)]
    for row, (kind, places) in enumerate(kinds.items()):
        y = top + row * (tall + gap)
        marks.append(f'<text x="0" y="{y + tall / 2:.1f}">{escape(kind)}</text>')
        for column, role in enumerate(ROLES):
            box = (left + column * (wide + 62), y, wide, tall)
            marks += _small_plot(watched, role, kind, places, box)
    return _svg(top + len(kinds) * (tall + gap), "amax over steps", marks)


def _small_plot(
    watched: Watched, role: str, kind: str, places: Sequence[tuple[int, int]], box: tuple[float, float, float, float]
) -> list[str]:
    x0, y0, wide, tall = box
    every = max(1, math.ceil(len(places) / _LINES))
    amax = watched.figures[role]["amax"]
    steps, thinned = _thinned(watched.steps.astype(float), amax[:, [place for _, place in places]])
    logs = np.log2(np.where(thinned > 0, thinned, np.nan))
    marks = [f'<rect class="frame" x="{x0:.1f}" y="{y0:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>']
    if not np.isfinite(logs).any():
        return [*marks, axis_text(x0 + wide / 2, y0 + tall / 2, "middle", "nothing but zeros")]
    low, high = math.floor(np.nanmin(logs)), math.ceil(np.nanmax(logs))
    high = max(high, low + 1)
    across = _scale(steps[0], steps[-1], x0, x0 + wide)
    down = _scale(low, high, y0 + tall, y0)
    for at in {round(t) for t in ticks(low, high, 4)}:
        marks.append(f'<line class="grid" x1="{x0:.1f}" x2="{x0 + wide:.1f}" y1="{down(at):.1f}" y2="{down(at):.1f}"/>')
        marks.append(axis_text(x0 - 5, down(at) + 4, "end", f"2^{at:.0f}"))
    for i in range(0, len(places), every):
        _layer, place = places[i]
        known = [(s, v) for s, v in zip(steps, logs[:, i], strict=True) if np.isfinite(v)]
        line = " ".join(f"{across(s):.1f},{down(v):.1f}" for s, v in known)
        dark = 0.25 + 0.75 * (i + 1) / len(places)
        title = f"{escape(watched.names[place])} {role}"
        if len(known) == 1:
            spot = f'cx="{across(known[0][0]):.1f}" cy="{down(known[0][1]):.1f}" r="2.5"'
            marks.append(f'<circle class="dot" {spot}><title>{title}</title></circle>')
        else:
            marks.append(
                f'<polyline class="depth" opacity="{dark:.2f}" points="{line}"><title>{title}</title></polyline>'
            )
    marks.append(axis_text(x0, y0 + tall + 14, "start", f"step {steps[0]:.0f}"))
    marks.append(axis_text(x0 + wide, y0 + tall + 14, "end", f"{steps[-1]:.0f}"))
    return marks


def _thinned(steps: Floats, values_SN: Floats) -> tuple[Floats, Floats]:
    """At most `_POINTS` of the samples, each the largest of those that it stands for."""
    edges = np.unique(np.linspace(0, len(steps), min(_POINTS, len(steps)) + 1).astype(int))
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    largest = [np.where(np.isnan(values_SN[p]), -np.inf, values_SN[p]).max(0) for p in parts]
    return steps[edges[1:] - 1], np.array(largest)


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (stop - start) * (value - low) / span


def exponent_plot(watched: Watched) -> str:
    """Beside each other for the roles: a row a tensor, a column an exponent of |x| / scale, the darker the larger its
    share. Lines: the format's largest number, its smallest normal one, and what becomes 0 (dashed)."""
    kinds = kinds_of(watched)
    rows = [(kind, layer, place) for kind, places in kinds.items() for layer, place in places]
    tall = min(14.0, max(2.0, 900.0 / len(rows)))
    left, top = 118.0, 22.0
    wide = (WIDTH - left - 40) / 3
    first, stop = watched.exponents
    recipe = numerics(watched.job.precision.recipe)
    marks: list[str] = []
    order = [place for _, _, place in rows]
    for column, role in enumerate(ROLES):
        x0 = left + column * (wide + 20)
        cell = wide / (stop - first)
        marks.append(axis_text(x0 + wide / 2, 12, "middle", f"{role}, {getattr(recipe, role).format.name}"))
        marks += _cells(watched.histograms[role][order], (x0, top, cell, tall))
        for row, place in enumerate(order):
            box = (x0, top + row * tall, wide, tall)
            marks.append(_box("heat", 0.0, box, f"{watched.names[place]} {role}"))
        marks += _format_lines(recipe, role, first, (x0, top, cell, tall * len(rows)))
    y = top
    for kind, places in kinds.items():
        marks.append(f'<text x="0" y="{y + min(12.0, tall * len(places)):.1f}">{escape(kind)}</text>')
        y += tall * len(places)
        marks.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _svg(top + tall * len(rows) + 20, "exponents by tensor", marks)


def _cells(shares_NB: Floats, place: tuple[float, float, float, float]) -> list[str]:
    """A path for each of `_SHADES` degrees of darkness: thousands of cells stay light."""
    x0, top, cell, tall = place
    paths: dict[int, list[str]] = {}
    for row, i in np.argwhere(shares_NB > 0):
        shade = math.ceil(_SHADES * min(1.0, math.sqrt(shares_NB[row, i] / 0.3)))
        corner = f"M{x0 + i * cell:.1f} {top + row * tall:.1f}"
        paths.setdefault(shade, []).append(f"{corner}h{cell:.1f}v{tall:.1f}h-{cell:.1f}z")
    return [
        f'<path class="heat" opacity="{0.04 + 0.96 * shade / _SHADES:.2f}" d="{"".join(parts)}"/>'
        for shade, parts in sorted(paths.items())
    ]


def _format_lines(recipe: Numerics, role: str, first: int, place: tuple[float, float, float, float]) -> list[str]:
    x0, top, cell, tall = place
    fmt = getattr(recipe, role).format
    edges = (
        (math.floor(math.log2(fmt.max)) + 1, "edge", "middle"),
        (fmt.min_exponent, "edge", "start"),
        (math.floor(math.log2(fmt.smallest)) - 1, "flush", "end"),
    )
    marks = []
    for exponent, kind, anchor in edges:
        x = x0 + (exponent - first) * cell
        marks.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{top + tall:.1f}"/>')
        marks.append(axis_text(x, top + tall + 14, anchor, f"2^{exponent}"))
    return marks


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A heat map: `values` [N], drawn from `low` (pale) to `high` (full), on a logarithmic scale."""

    title: str
    values: Floats
    low: float
    high: float
    form: str


def heat_map(watched: Watched, maps: Sequence[Heat], fallen: Mapping[str, tuple[int, str]]) -> str:
    """Beside each other: a row for each kind of tensor, a column a layer. Framed: what fell back."""
    kinds = kinds_of(watched)
    layers = 1 + max(layer for places in kinds.values() for layer, _ in places)
    left, top, tall, gap = 118.0, 26.0, 17.0, 24.0
    wide = (WIDTH - left - gap * (len(maps) - 1)) / len(maps)
    cell = min(wide / layers, 60.0)
    marks: list[str] = []
    for row, kind in enumerate(kinds):
        marks.append(f'<text x="0" y="{top + row * tall + 13:.1f}">{escape(kind)}</text>')
    for column, heat in enumerate(maps):
        x0 = left + column * (wide + gap)
        marks.append(f'<text x="{x0:.1f}" y="14">{escape(heat.title)}</text>')
        for row, places in enumerate(kinds.values()):
            for layer, place in places:
                box = (x0 + layer * cell, top + row * tall, cell - 1, tall - 1)
                marks.append(_heat_cell(watched.names[place], heat, float(heat.values[place]), box))
                if watched.names[place] in fallen:
                    marks.append(_box("fell", 1.0, box, f"fell back after step {fallen[watched.names[place]][0]}"))
        bottom = top + tall * len(kinds) + 13
        marks.append(axis_text(x0, bottom, "start", "layer 0"))
        if layers > 1:
            marks.append(axis_text(x0 + layers * cell, bottom, "end", str(layers - 1)))
    return _svg(top + tall * len(kinds) + 20, " and ".join(heat.title for heat in maps), marks)


def _heat_cell(name: str, heat: Heat, value: float, box: tuple[float, float, float, float]) -> str:
    if not math.isfinite(value):
        return _box("none", 1.0, box, f"{name}: nothing counted")
    share = (math.log(max(value, heat.low)) - math.log(heat.low)) / (math.log(heat.high) - math.log(heat.low))
    return _box("heat", 0.06 + 0.94 * min(1.0, share), box, f"{name}: {value:{heat.form}}")


def _box(kind: str, opacity: float, box: tuple[float, float, float, float], title: str) -> str:
    x, y, wide, tall = box
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.5):.1f}" height="{tall:.1f}"'
    return f'<rect class="{kind}" opacity="{opacity:.2f}" {place}><title>{escape(title)}</title></rect>'
