"""The report of a scaling-law grid: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer import __version__
from bessemer.lab.scaling_fit import LEVEL, Fit
from bessemer.lab.scaling_grid import HIGH, bits_of
from bessemer.lab.scaling_report import COST_MODEL, LIMITS, ScalingLaw
from bessemer.plan.charts import WIDTH, axis_text, escape, ticks
from bessemer.plan.page import PAGE, SCRIPT, STYLE

__all__ = ["report_html"]

HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 320, 78, 24, 40, 12
_STYLE = ".curve{fill:none;stroke-width:1.8}" + "".join(f".p{i}{{stroke:var(--c{i})}}" for i in range(12))


@dataclass(frozen=True, kw_only=True)
class _Series:
    """Dots or a curve of one colour."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    dots: bool = True
    named: bool = True


@dataclass(frozen=True)
class _Frame:
    """From the figures of a plot to places in it."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _Frame:
        wide, tall = 0.02 * (max(xs) - min(xs)) or 1.0, 0.05 * (max(ys) - min(ys)) or 0.1
        return cls((min(xs) - wide, max(xs) + wide), (min(ys) - tall, max(ys) + tall))

    def across(self, x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - self.x[0]) / (self.x[1] - self.x[0])

    def down(self, y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.y[1] - y) / (self.y[1] - self.y[0])


def report_html(found: ScalingLaw) -> str:
    """The whole page."""
    sections = [("data", "Loss over bits", _data(found))]
    for name, f in found.fits.items():
        sections.append((name, f"Law '{name}'", _constants(f) + _agreement(f)))
    sections += [("best", "What a fixed cost buys", _best(found)), ("points", "The models", _points(found))]
    links = "".join(f'<a href="#s-{key}">{escape(title)}</a>' for key, title, _ in sections)
    title = "Scaling law with precision"
    head = (
        f"<header><div><h1>{title}</h1><p>{escape(found.summary())}.</p>"
        f'<nav aria-label="sections">{links}</nav></div><button id="theme" type="button">Light / dark</button></header>'
    )
    body = head + "".join(f'<section id="s-{key}"><h2>{escape(t)}</h2>{text}</section>' for key, t, text in sections)
    body += "".join(f'<p class="note">{escape(text)}</p>' for text in LIMITS)
    body += f'<p class="note">Bessemer {escape(__version__)}. Losses are measured, laws are fitted.</p>'
    return PAGE.format(title=title, style=STYLE + _STYLE, body=body, script=SCRIPT)


def _data(found: ScalingLaw) -> str:
    """Loss in bf16 against that in each format, as what precision costs: a series for each width."""
    rows = [r for r in found.records if r["loss"] is not None and r["weight"] == r["inputs"] and not r["block"]]
    high = {_seed(r): r["loss"] for r in rows if r["weight"] == HIGH}
    rows = [r for r in rows if _seed(r) in high]
    if not rows:
        return '<p class="note">No model in bf16 to compare with.</p>'
    series = []
    for colour, width in enumerate(sorted({r["width"] for r in rows})):
        mine = [r for r in rows if r["width"] == width]
        x = [float(np.log2(_bits(r))) for r in mine]
        y = [r["loss"] - high[_seed(r)] for r in mine]
        series.append(_Series(name=f"width {width}", x=x, y=y, colour=colour))
    labels = [(float(np.log2(b)), f"{b} bits") for b in sorted({_bits(r) for r in rows})]
    note = '<p class="note">Each dot is a model less the one of the same size and seed in bf16.</p>'
    return _plot(series, "loss - bf16, nats a byte", labels) + note


def _constants(f: Fit) -> str:
    rows = []
    for constant in f.law.constants:
        c = f.constants[constant.name]
        value = "not determined" if c.why else f"{c.value:.4g}"
        cells = f'<td class="w">{constant.name}</td><td>{value}</td><td>{c.low:.4g}</td><td>{c.high:.4g}</td>'
        rows.append(
            f'<tr>{cells}<td class="why">{escape(constant.what)}{escape("; " + c.why if c.why else "")}</td></tr>'
        )
    head = f'<tr><th class="w">constant</th><th>value</th><th colspan="2">{LEVEL:.0%} interval</th><th></th></tr>'
    text = (
        f"<p>{escape(f.law.formula)}</p><p>{len(f.points)} models scatter about it by {f.scatter:.2%} of the loss.</p>"
    )
    return f'{text}<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _agreement(f: Fit) -> str:
    """Measured over predicted loss."""
    bits = np.maximum(f.points.weight_bits, f.points.input_bits)
    series = []
    for colour, b in enumerate(sorted(set(bits.tolist()))):
        mine = bits == b
        name = f"{b:g} bits"
        series.append(_Series(name=name, x=f.predicted[mine].tolist(), y=f.points.loss[mine].tolist(), colour=colour))
    least, most = float(f.predicted.min()), float(f.predicted.max())
    series.append(_Series(name="equal", x=[least, most], y=[least, most], colour=7, dots=False))
    labels = [(at, f"{at:g}") for at in ticks(least, most, 8)]
    return _plot(series, "measured loss over the law's, nats a byte", labels)


def _best(found: ScalingLaw) -> str:
    least = min(_bits(r) for r in found.records)
    bits = np.linspace(least, 16, 10 * (16 - least) + 1)
    series = []
    for colour, (name, f) in enumerate(found.fits.items()):
        middle, low, high = f.curve(bits.tolist())
        series.append(_Series(name=f"law '{name}'", x=bits.tolist(), y=middle.tolist(), colour=colour, dots=False))
        for edge in (low, high):
            words = f"law '{name}', an end of the interval"
            line = _Series(name=words, x=bits.tolist(), y=edge.tolist(), colour=colour, dots=False, named=False)
            series.append(line)
    texts = []
    for name, f in found.fits.items():
        best = f.optimum
        shown = f"not determined: {best.why}" if best.why else f"{best.value:.2f} bits"
        texts.append(f"<p>Law '{escape(name)}': {escape(shown)}, interval {best.low:.2f} to {best.high:.2f} bits.</p>")
    labels = [(float(b), f"{b} bits") for b in range(least, 17)]
    note = f'<p class="note">The least loss at N D P = {found.cost:.3g}, N and D free; outer lines: {LEVEL:.0%} of the '
    note += f"bootstrap. {escape(COST_MODEL)}</p>"
    return _plot(series, "loss, nats a byte", labels) + "".join(texts) + note if series else note


def _points(found: ScalingLaw) -> str:
    heads = ["width", "parameters", "tokens", "weights", "inputs", "block", "repeat", "loss", "CPU s"]
    head = "".join(f'<th scope="col"><button type="button">{h}</button></th>' for h in heads)
    keys = ("width", "parameters", "trained_tokens", "weight", "inputs", "block", "repeat", "loss", "cpu_s")
    rows = []
    for r in found.records:
        values = ["diverged" if r[k] is None else f"{r[k]:.4f}" if k == "loss" else r[k] for k in keys]
        rows.append(f"<tr>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>")
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table id="ranking">{body}</table></div>'


def _plot(series: Sequence[_Series], name: str, labels: Sequence[tuple[float, str]]) -> str:
    """`labels`: places on the x axis and their words."""
    frame = _Frame.around([v for s in series for v in s.x], [v for s in series for v in s.y])
    marks = [axis_text(0, 14, "start", escape(name))]
    for at in ticks(*frame.y, 6):
        y = frame.down(at)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(axis_text(LEFT - 8, y + 4, "end", f"{at:.5g}"))
    marks += [axis_text(frame.across(at), HEIGHT - BOTTOM + 18, "middle", escape(words)) for at, words in labels]
    for s in series:
        words, places = escape(s.name), [(frame.across(x), frame.down(y)) for x, y in zip(s.x, s.y, strict=True)]
        if s.dots:
            for (x, y), value in zip(places, s.y, strict=True):
                dot = f'class="c{s.colour % 12}" cx="{x:.1f}" cy="{y:.1f}" r="4"'
                marks.append(f"<circle {dot}><title>{words}: {value:.4f}</title></circle>")
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            marks.append(f'<polyline class="curve p{s.colour % 12}" points="{path}"><title>{words}</title></polyline>')
    keys = "".join(f'<span><i class="key c{s.colour % 12}"></i>{escape(s.name)}</span>' for s in series if s.named)
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">{"".join(marks)}</svg>'
    return f'{picture}<p class="keys">{keys}</p>'


def _seed(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """What decides the seed."""
    return record["width"], record["tokens"], record["repeat"]


def _bits(record: Mapping[str, Any]) -> int:
    return 1 + sum(bits_of(record["weight"]))
