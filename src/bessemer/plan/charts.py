"""Charts of a report as SVG text. Every text that comes from outside is escaped; colours are CSS variables."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from bessemer.core.units import format_bytes, format_seconds
from bessemer.plan.stages import Lanes

__all__ = ["WIDTH", "axis_text", "escape", "front_chart", "memory_chart", "share_bar", "ticks", "timeline_chart"]

WIDTH = 1120
NUM_COLOURS = 12
"""The page has classes c0 ... c11."""
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "dp": "data-parallel exchange",
    "optimizer": "optimizer",
}


def escape(text: object) -> str:
    """Text for HTML and for attributes in double quotes."""
    return html.escape(str(text), quote=True)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = max(high - low, 1e-12)
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(k for k in (1, 2, 5, 10) if span / (step * k) <= count)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def _rect(kind: str, box: tuple[float, float, float, float], title: str) -> str:
    x, y, width, height = box
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="{kind}" {place}><title>{title}</title></rect>'


def axis_text(x: float, y: float, anchor: str, text: str) -> str:
    """A label of an axis; `text` is escaped already, `anchor` one of start, middle and end."""
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def share_bar(parts: Mapping[str, float], names: Mapping[str, str], unit: str) -> str:
    """One bar of a whole cut into its parts, with a table of them below. `unit`: "s" or "B"."""
    whole = sum(parts.values()) or 1.0
    shown = format_seconds if unit == "s" else format_bytes
    x, cells, rows = 0.0, [], []
    for i, (key, value) in enumerate(parts.items()):
        width = WIDTH * value / whole
        name, colour = escape(names.get(key, key.replace("_", " "))), min(i, NUM_COLOURS - 1)
        label = f"{name}: {shown(value)}, {value / whole:.1%}"
        cells.append(_rect(f"c{colour}", (x, 0.0, max(width - 1, 0.4), 40.0), label))
        if width > 9 * len(name):
            cells.append(f'<text class="in" x="{x + 8:.2f}" y="25">{name}</text>')
        rows.append(
            f'<tr><td><i class="key c{colour}"></i>{name}</td><td>{shown(value)}</td><td>{value / whole:.1%}</td></tr>'
        )
        x += width
    picture = f'<svg viewBox="0 0 {WIDTH} 40" role="img" aria-label="shares of {shown(whole)}">{"".join(cells)}</svg>'
    half = (len(rows) + 1) // 2
    tables = "".join(f'<table class="legend">{"".join(part)}</table>' for part in (rows[:half], rows[half:]) if part)
    return f'{picture}<div class="two">{tables}</div>'


def timeline_chart(lanes: Lanes) -> str:
    """Passes of every pipeline rank over time: one path a kind and rank, so that thousands stay light."""
    left, lane, gap = 70, 26 if len(lanes.lanes) <= 16 else 16, 3
    height = len(lanes.lanes) * (lane + gap)
    span = max(lanes.end_s - lanes.start_s, 1e-12)
    scale = (WIDTH - left) / span
    marks: list[str] = []
    for rank, bars in enumerate(lanes.lanes):
        y = rank * (lane + gap)
        marks.append(axis_text(left - 8, y + lane * 0.7, "end", f"rank {rank}"))
        marks.append(f'<rect class="idle" x="{left}" y="{y}" width="{WIDTH - left}" height="{lane}"/>')
        for kind, words in KIND_NAMES.items():
            paths = []
            for b in bars:
                if b.kind == kind:
                    wide = max((b.end_s - b.start_s) * scale - 0.3, 0.2)
                    paths.append(
                        f"M{left + (b.start_s - lanes.start_s) * scale:.2f} {y}h{wide:.2f}v{lane}h-{wide:.2f}z"
                    )
            if paths:
                busy = sum(b.end_s - b.start_s for b in bars if b.kind == kind)
                title = f"rank {rank}: {words}, {format_seconds(busy)} in all"
                marks.append(f'<path class="k{kind}" d="{"".join(paths)}"><title>{title}</title></path>')
    for at in ticks(lanes.start_s, lanes.end_s, 8):
        x = left + (at - lanes.start_s) * scale
        marks.append(axis_text(x, height + 14, "middle", format_seconds(at) if at else "0"))
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    present = {b.kind for bars in lanes.lanes for b in bars if b.end_s > b.start_s}
    keys = "".join(f'<span><i class="key k{k}"></i>{name}</span>' for k, name in KIND_NAMES.items() if k in present)
    note = f'<p class="note">Shown: {escape(lanes.note)}.</p>' if lanes.note else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 20}" role="img" aria-label="timeline of a step">{"".join(marks)}</svg>'
        f'<p class="keys">{keys}<span><i class="key idle"></i>idle</span></p>{note}'
    )


def memory_chart(stages: Sequence[Mapping[str, float]], limit: float | None) -> str:
    """A column for each pipeline rank, its lines on top of one another, and the device's memory as a line."""
    names = list(dict.fromkeys(name for stage in stages for name in stage))
    totals = [sum(stage.values()) for stage in stages]
    top = max([*totals, limit or 0.0]) * 1.05
    left, height = 70, 260
    column = (WIDTH - left) / len(stages)
    width = min(column * 0.7, 120)
    marks = []
    for at in ticks(0, top / 2**30, 5):
        y = height * (1 - at * 2**30 / top)
        marks.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(axis_text(left - 8, y + 4, "end", f"{at:g} GiB"))
    for rank, stage in enumerate(stages):
        x, y = left + column * (rank + 0.5) - width / 2, float(height)
        for i, name in enumerate(names):
            size = height * stage.get(name, 0.0) / top
            y -= size
            title = f"rank {rank}: {escape(name.replace('_', ' '))} {format_bytes(stage.get(name, 0.0))}"
            box = (x, y, width, max(size - 0.5, 0.0))
            marks.append(_rect(f"c{min(i, NUM_COLOURS - 1)}", box, title))
        if column > 24:
            marks.append(axis_text(x + width / 2, height + 16, "middle", str(rank)))
    if limit is not None:
        y = height * (1 - limit / top)
        marks.append(f'<line class="limit" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(axis_text(WIDTH, y - 5, "end", f"device {format_bytes(limit)}"))
    keys = "".join(
        f'<span><i class="key c{min(i, NUM_COLOURS - 1)}"></i>{escape(n.replace("_", " "))}</span>'
        for i, n in enumerate(names)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 24}" role="img" aria-label="memory by rank">{"".join(marks)}</svg>'
        f'<p class="keys">{keys}</p>'
    )


def front_chart(points: Sequence[tuple[float, float, str]], limit: float | None) -> str:
    """Step time against memory, on logarithmic time: (seconds, bytes, words) of each layout of the front."""
    left, height, low = 70, 260, min(p[0] for p in points)
    high = max([low * 1.2, *(p[0] for p in points)])
    top = max([*(p[1] for p in points), limit or 0.0]) * 1.05
    place = lambda s: left + 12 + (WIDTH - left - 24) * math.log(s / low) / math.log(high / low)  # noqa: E731
    marks = []
    for at in ticks(0, top / 2**30, 5):
        y = height * (1 - at * 2**30 / top)
        marks.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(axis_text(left - 8, y + 4, "end", f"{at:g} GiB"))
    for i in range(7):
        tick = low * (high / low) ** (i / 6)
        anchor = "end" if i == 6 else "middle"
        marks.append(axis_text(place(tick), height + 16, anchor, format_seconds(tick)))
    if limit is not None:
        y = height * (1 - limit / top)
        marks.append(f'<line class="limit" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(axis_text(WIDTH, y - 5, "end", f"device {format_bytes(limit)}"))
    line = " ".join(f"{place(s):.1f},{height * (1 - b / top):.1f}" for s, b, _ in points)
    marks.append(f'<polyline class="front" points="{line}"/>')
    for seconds, size, words in points:
        title = f"{format_seconds(seconds)}, {format_bytes(size)}: {escape(words)}"
        at = f'cx="{place(seconds):.1f}" cy="{height * (1 - size / top):.1f}" r="5"'
        marks.append(f'<circle class="dot" tabindex="0" {at}><title>{title}</title></circle>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 24}" role="img" aria-label="time against memory">{"".join(marks)}</svg>'
    )
