"""The report of a comparison of recipes: a page that needs nothing else, its plots as files, the figures as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from bessemer import __version__
from bessemer.keep.records import write_atomically
from bessemer.lab.parity import QUANTITIES, Curves, Parity
from bessemer.lab.parity_jobs import REFERENCE
from bessemer.lab.plots import PLOT_STYLE, Line, Points, difference_plot, line_plot, points_plot, standalone
from bessemer.lab.statistics import LEVEL, deviation_interval, least_flip_p
from bessemer.plan.charts import escape
from bessemer.plan.page import PAGE, SCRIPT, STYLE

__all__ = ["parity_plots", "report_html", "write_report"]

NOISE = f"seed noise of {REFERENCE}"
_CURVES = (
    '<p class="note">Means of seeds; thin lines are the seeds. The band is the standard deviation between seeds of '
    f"{REFERENCE} at that point. A point is the mean of a fiftieth of the run.</p>"
)


def write_report(found: Parity, curves: Curves, folder: Path) -> None:
    """Writes report.html, parity.json and one SVG file a plot."""
    write_atomically(folder / "report.html", report_html(found, curves))
    write_atomically(folder / "parity.json", json.dumps(found.as_json(), indent=1) + "\n")
    for name, svg in parity_plots(found, curves).items():
        write_atomically(folder / f"{name}.svg", standalone(svg))


def parity_plots(found: Parity, curves: Curves) -> dict[str, str]:
    """By name: "loss", "difference" and "paired-val", "paired-train"."""
    colours = {name: i for i, name in enumerate(found.losses)}
    x = [float(step) for step in curves.steps]
    means = {name: Line(y=y.mean(axis=0).tolist()) for name, y in curves.losses.items()}
    plots = {
        "loss": line_plot(x, means, names=("step", "training loss, nats a token, mean of seeds"), colours=colours),
        "difference": difference_plot(x, curves.losses, REFERENCE),
    }
    for name, quantity in (("paired-val", "val_loss"), ("paired-train", "train_loss")):
        compared = {recipe: by[quantity] for recipe, by in found.comparisons.items()}
        groups = {r: Points(values=c.differences, mean=c.mean, low=c.low, high=c.high) for r, c in compared.items()}
        words = f"{QUANTITIES[quantity]} - {REFERENCE} of the same seed, nats a token"
        plots[name] = points_plot(groups, name=words, colours=colours, band=(found.noise(quantity), NOISE))
    return plots


def report_html(found: Parity, curves: Curves) -> str:
    """The whole page as text."""
    title = f"Recipes compared: {found.name}"
    plots = parity_plots(found, curves)
    sections = [
        ("verdicts", "Verdicts", _verdicts(found)),
        ("paired", "Paired differences after the last step", plots["paired-val"] + plots["paired-train"]),
        ("difference", "Difference over the run", plots["difference"] + _CURVES),
        ("loss", "Loss over the run", plots["loss"]),
        ("job", "The job", _job(found)),
    ]
    links = "".join(f'<a href="#s-{key}">{name}</a>' for key, name, _ in sections)
    head = (
        f"<header><div><h1>{escape(title)}</h1><p>{len(found.recipes)} recipes x {len(found.seeds)} seeds; "
        f'differences are taken between runs of the same seed.</p><nav aria-label="sections">{links}</nav></div>'
        '<button id="theme" type="button">Light / dark</button></header>'
    )
    body = head + "".join(f'<section id="s-{key}"><h2>{name}</h2>{text}</section>' for key, name, text in sections)
    body += f'<p class="note">Bessemer {escape(__version__)}. Losses are measured.</p>'
    return PAGE.format(title=escape(title), style=STYLE + PLOT_STYLE, body=body, script=SCRIPT)


def _verdicts(found: Parity) -> str:
    heads = ["recipe", "quantity", "mean", "difference", "from", "to", "/ noise", "p", "exact p", "step", "verdict"]
    words = ("recipe", "quantity", "verdict")
    head = "".join(
        f'<th scope="col"{" class=w" if h in words else ""}><button type="button">{h}</button></th>' for h in heads
    )
    rows = []
    for name in found.recipes:
        for key, quantity in QUANTITIES.items():
            if name in found.diverged:
                cells = [f'<td class="w">{escape(name)}</td><td class="w">{quantity}</td>{"<td></td>" * 8}']
                rows.append(f'<tr>{"".join(cells)}<td class="w">{found.divergence(name)}</td></tr>')
                continue
            losses = found.losses[name]
            mean, step = sum(losses[key]) / len(losses[key]), found.step_s[name]
            cells = [f'<td class="w">{escape(name)}</td><td class="w">{quantity}</td>{_cell(mean, "")}']
            if name == REFERENCE:
                cells.append(f'{"<td></td>" * 6}{_cell(step, "")}<td class="w">the reference</td>')
            else:
                c = found.comparisons[name][key]
                ratio = c.mean / c.noise if c.noise else float("nan")
                cells += [_cell(v, "+") for v in (c.mean, c.low, c.high, ratio)]
                cells += [_cell(v, "") for v in (c.p_value, c.exact_p, step)]
                cells.append(f'<td class="w">{c.verdict}</td>')
            rows.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<table id="ranking"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll">{table}</div>{_reading(found)}'


def _cell(value: float, sign: str) -> str:
    return f'<td data-v="{value}">{value:{sign}.4f}</td>'


def _reading(found: Parity) -> str:
    key = "val_loss"
    count = len(found.seeds)
    low, high = deviation_interval(found.noise(key), count)
    return (
        f'<p class="note">Losses in nats a token; step: median seconds of a step. Seed noise is the standard deviation '
        f"of {REFERENCE} between seeds: {found.noise(key):.4f} for the {QUANTITIES[key]}, from {count} seeds, so the "
        f"true one lies between {low:.4f} and {high:.4f}. from, to: the {1 - 2 * LEVEL:.0%} interval of the mean "
        "difference. Within seed noise: the interval lies inside of plus and minus the noise. Worse, better: it lies "
        "wholly above or below that. Too few seeds to tell: it crosses an end. Diverged: a loss, gradient or amax of a "
        "seed was no number; nothing is computed from the others. "
        f"p: that nothing differs, by Student's paired test; exact p: by flipping signs, {least_flip_p(count):.3g} at "
        "least.</p>"
    )


def _job(found: Parity) -> str:
    cells = [(escape(k), escape(v)) for k, v in found.summary.items()]
    rows = "".join(f'<tr><td class="w">{k}</td><td class="why">{v}</td></tr>' for k, v in cells)
    unread = [(escape(", ".join(names)), escape(recipe)) for recipe, names in found.dropped.items() if names]
    left = "".join(
        f'<p class="note">{names} left at default under {recipe}, which reads none.</p>' for names, recipe in unread
    )
    return f"<table>{rows}</table>{left}"
