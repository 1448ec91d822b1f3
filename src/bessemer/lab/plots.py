"""Plots of experiments as SVG: lines with bands over steps, and points with intervals by name.

Inside of a page they take its colours and its light or dark theme; `standalone` gives a file that needs no page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bessemer.plan.charts import WIDTH, axis_text, escape, ticks
from bessemer.plan.page import STYLE

__all__ = ["PLOT_STYLE", "Line", "Points", "difference_plot", "line_plot", "points_plot", "standalone"]

HEIGHT = 300
LEFT, TOP, BOTTOM, RIGHT = 78, 26, 38, 12
NUM_COLOURS = 12  # classes c0 ... c11 of the page

PLOT_STYLE = (
    ".band{fill:var(--idle)}.zero{stroke:var(--soft);stroke-width:1}.plot-ground{fill:var(--card)}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}.thin{stroke-width:1;opacity:.35}"
    ".whisker{stroke-width:2}"
) + "".join(f".s{i}{{stroke:var(--c{i})}}" for i in range(NUM_COLOURS))


@dataclass(frozen=True, kw_only=True)
class Line:
    """`y` over the plot's x; `thin` are drawn faintly behind it, in its colour."""

    y: Sequence[float]
    thin: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, kw_only=True)
class Points:
    """`values` as dots, their `mean` as a bar, and an interval from `low` to `high`."""

    values: Sequence[float]
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class _Frame:
    """From the figures of a plot to places in it."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - self.x[0]) / (self.x[1] - self.x[0])

    def down(self, y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - self.y[0]) / (self.y[1] - self.y[0]))

    def path(self, x: Sequence[float], y: Sequence[float]) -> str:
        return " ".join(f"{self.across(a):.1f},{self.down(b):.1f}" for a, b in zip(x, y, strict=True))


def line_plot(
    x: Sequence[float],
    lines: Mapping[str, Line],
    *,
    names: tuple[str, str],
    colours: Mapping[str, int],
    band: tuple[Sequence[float], str] | None = None,
) -> str:
    """Lines over `x`. `names` are of the axes, `colours` the number of each line's colour; `band`: a half width about
    zero at each x, and its name."""
    shown = [v for line in lines.values() for y in (line.y, *line.thin) for v in y]
    if band is not None:
        shown += [sign * b for b in band[0] for sign in (1, -1)]
    frame = _Frame((min(x), max(x)), _padded(shown))
    marks = [*_scale(frame, names[1])]
    for at in ticks(*frame.x, 8):
        marks.append(axis_text(frame.across(at), HEIGHT - BOTTOM + 16, "middle", f"{at:g}"))
    if band is not None:
        edge = frame.path([*x, *reversed(x)], [*band[0], *(-b for b in reversed(band[0]))])
        marks.insert(0, f'<polygon class="band" points="{edge}"><title>{escape(band[1])}</title></polygon>')
        marks.append(_level(frame, 0.0))
    for name, line in lines.items():
        colour = _colour(colours, name)
        marks += [f'<polyline class="line thin s{colour}" points="{frame.path(x, y)}"/>' for y in line.thin]
    for name, line in lines.items():
        place = f'class="line s{_colour(colours, name)}" points="{frame.path(x, line.y)}"'
        marks.append(f"<polyline {place}><title>{escape(name)}</title></polyline>")
    marks.append(axis_text(WIDTH - RIGHT, HEIGHT - 4, "end", escape(names[0])))
    keys = {name: f"c{_colour(colours, name)}" for name in lines} | ({band[1]: "band"} if band is not None else {})
    return _picture(marks, keys, f"{names[1]} over {names[0]}")


def difference_plot(steps: Sequence[float], losses: Mapping[str, NDArray[np.float64]], base: str) -> str:
    """Losses less those of `base` with the same seed, over the steps: a line for the mean of each and thin ones for
    its seeds. losses: by name [seeds, points]. The band is the standard deviation of `base` between seeds."""
    apart = {name: y - losses[base] for name, y in losses.items() if name != base}
    return line_plot(
        steps,
        {name: Line(y=d.mean(axis=0).tolist(), thin=d.tolist()) for name, d in apart.items()},
        names=("step", f"training loss - {base} of the same seed, nats a token"),
        colours={name: i for i, name in enumerate(losses)},
        band=(losses[base].std(axis=0, ddof=1).tolist(), f"seed noise of {base}"),
    )


def points_plot(
    groups: Mapping[str, Points], *, name: str, colours: Mapping[str, int], band: tuple[float, str] | None = None
) -> str:
    """A column for each group. `name` is of the y axis; `band`: a half width about zero, and its name."""
    shown = [v for p in groups.values() for v in (*p.values, p.low, p.high, 0.0)]
    if band is not None:
        shown += [band[0], -band[0]]
    frame = _Frame((-0.5, len(groups) - 0.5), _padded(shown))
    marks = [*_scale(frame, name), _level(frame, 0.0)]
    if band is not None:
        high, low = frame.down(band[0]), frame.down(-band[0])
        place = f'x="{LEFT}" y="{high:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{low - high:.1f}"'
        marks.insert(0, f'<rect class="band" {place}><title>{escape(band[1])}</title></rect>')
    for column, (label, points) in enumerate(groups.items()):
        colour, x = _colour(colours, label), frame.across(column)
        marks.append(axis_text(x, HEIGHT - BOTTOM + 18, "middle", escape(label)))
        low, high, mean = (frame.down(v) for v in (points.low, points.high, points.mean))
        title = f"{escape(label)}: mean {points.mean:+.4f}, from {points.low:+.4f} to {points.high:+.4f}"
        for x1, x2, y1, y2 in ((x, x, low, high), (x - 9, x + 9, low, low), (x - 9, x + 9, high, high)):
            marks.append(f'<line class="whisker s{colour}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')
        bar = f'class="c{colour}" x="{x - 22:.1f}" y="{mean - 2:.1f}" width="44" height="4"'
        marks.append(f"<rect {bar}><title>{title}</title></rect>")
        for number, value in enumerate(points.values):
            at = x + 34 + 12 * number
            dot = f'class="c{colour}" cx="{at:.1f}" cy="{frame.down(value):.1f}" r="4"'
            marks.append(f"<circle {dot}><title>{value:+.4f}</title></circle>")
    return _picture(marks, {band[1]: "band"} if band is not None else {}, name)


def standalone(svg: str) -> str:
    """A plot as the text of a file of its own, on a ground of its own."""
    head, _, rest = svg.partition(">")
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    ground = f'<rect class="plot-ground" width="{WIDTH}" height="{HEIGHT}"/>'
    return f"{head} {size}><style>{STYLE}{PLOT_STYLE}</style>{ground}{rest}\n"


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    return low - room, high + room


def _scale(frame: _Frame, name: str) -> list[str]:
    """Lines across at round values, and the name of the y axis."""
    marks = []
    for at in ticks(*frame.y, 5):
        y = frame.down(at)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(axis_text(LEFT - 8, y + 4, "end", f"{at:.6g}"))
    return [*marks, axis_text(0, 14, "start", escape(name))]


def _level(frame: _Frame, at: float) -> str:
    y = frame.down(at)
    return f'<line class="zero" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _colour(colours: Mapping[str, int], name: str) -> int:
    return colours[name] % NUM_COLOURS


def _picture(marks: Sequence[str], keys: Mapping[str, str], label: str) -> str:
    """The plot with its legend at the upper right."""
    x, parts = float(WIDTH - RIGHT), list(marks)
    for name, kind in reversed(list(keys.items())):
        x -= 7.2 * len(name)
        parts.append(f'<text x="{x:.1f}" y="14">{escape(name)}</text>')
        x -= 18
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="4" width="12" height="12"/>')
        x -= 14
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
