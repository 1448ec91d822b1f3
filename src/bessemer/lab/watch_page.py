"""The page of a watched run, precision.html in its folder: one file that needs nothing else, on no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bessemer import __version__
from bessemer.keep.records import write_atomically
from bessemer.lab.watch import ROLES, Watched
from bessemer.lab.watch_advice import Advice, well_scaled_error, words
from bessemer.lab.watch_plots import WATCH_STYLE, Heat, amax_plots, exponent_plot, heat_map
from bessemer.lab.watch_text import cells
from bessemer.plan.charts import escape
from bessemer.plan.page import PAGE, SCRIPT, STYLE

__all__ = ["page_html", "write_page"]

_ROWS = 40  # of the table; the JSON has all


def write_page(watched: Watched, found: Sequence[Advice], path: Path) -> None:
    """Writes the page of the advice `found`, the most urgent first."""
    write_atomically(path, page_html(watched, found))


def page_html(watched: Watched, found: Sequence[Advice]) -> str:
    """The whole page as text."""
    title = f"Precision watch: {watched.job.run.name}, {watched.job.precision.recipe}"
    sections = [
        ("advice", "Advice, the most urgent first", _advice(found)),
        ("errors", "Errors by layer", _errors(watched)),
        ("lost", "Clipped and lost by layer", _lost(watched)),
        ("amax", "Amax over time", amax_plots(watched) + _AMAX_NOTE),
        ("exponents", "Where numbers lie in their format", exponent_plot(watched) + _EXPONENT_NOTE),
    ]
    links = "".join(f'<a href="#s-{key}">{name}</a>' for key, name, _ in sections)
    steps = watched.steps
    text = f"{len(steps)} samples, every {watched.every} steps, from step {steps[0]:,} to {steps[-1]:,}; "
    text += f"{int(watched.settled.sum())} of them count for the advice."
    head = (
        f'<header><div><h1>{escape(title)}</h1><p>{text}</p><nav aria-label="sections">{links}</nav></div>'
        '<button id="theme" type="button">Light / dark</button></header>'
    )
    body = head + _tiles(watched, found)
    body += "".join(f'<section id="s-{key}"><h2>{name}</h2>{part}</section>' for key, name, part in sections)
    body += f'<p class="note">Bessemer {escape(__version__)}. Every figure is measured, over all ranks.</p>'
    return PAGE.format(title=escape(title), style=STYLE + WATCH_STYLE, body=body, script=SCRIPT)


_AMAX_NOTE = (
    '<p class="note">The largest |x| of a step, on a scale of powers of two: a line a layer, the deeper the darker. '
    "A delayed scale is safe where lines are smooth.</p>"
)
_EXPONENT_NOTE = (
    '<p class="note">A row a tensor, by kind and layer: the darker, the more of its numbers have that exponent after '
    "division by the scale. Lines: above the largest number of the format, its smallest normal number, and (dashed) "
    "what becomes 0. Room on the right is range that a smaller scale would use; darkness left of the dashed line is "
    "lost.</p>"
)


def _tiles(watched: Watched, found: Sequence[Advice]) -> str:
    counts = watched.settled
    worst = [
        (_largest(watched.results[counts]), ".4f", "largest error of a forward product"),
        (max(_largest(watched.figures[r]["saturated"][counts]) for r in ROLES), ".3%", "most clipped of a tensor"),
        (max(_largest(watched.figures[r]["flushed"][counts]) for r in ROLES), ".2%", "most lost to 0 of a tensor"),
    ]
    tiles = [(f"{len(watched.names):,}", "tensors watched")]
    tiles += [(format(value, form), what) for value, form, what in worst]
    safe = sum(a.advice == "delayed" for a in found) / max(1, len(found))
    tiles += [(f"{safe:.0%}", "of tensors and roles fit a delayed scale"), (f"{len(watched.fallen)}", "fell back")]
    shown = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)
    return f'<div class="tiles">{shown}</div>'


def _largest(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else 0.0


def _advice(found: Sequence[Advice]) -> str:
    heads = ("tensor", "role", "amax", "rise", "spread", "clipped", "to 0", "error", "result", "advice", "why")
    left = ("tensor", "role", "advice", "why")
    head = "".join(
        f'<th scope="col"{" class=w" if h in left else ""}><button type="button">{h}</button></th>' for h in heads
    )
    rows = []
    for a in found[:_ROWS]:
        raw = (a.amax, a.burst, a.spread, a.saturated, a.flushed, a.error, a.result)
        numbers = "".join(
            f'<td data-v="{-1 if value is None else value}">{escape(text)}</td>'
            for value, text in zip(raw, cells(a), strict=True)
        )
        said = f'<td class="w" title="{escape(words(a.advice))}">{escape(a.advice)}</td>'
        name = f'<td class="w">{escape(a.name)}</td><td class="w">{a.role}</td>'
        rows.append(f'<tr>{name}{numbers}{said}<td class="why">{escape(a.why)}</td></tr>')
    table = f'<table id="ranking"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    more = f" The first {_ROWS} of {len(found):,}; --json has all." if len(found) > _ROWS else ""
    meant = "; ".join(f"{w}: {words(w)}" for w in dict.fromkeys(a.advice for a in found))
    return (
        f'<div class="scroll">{table}</div><p class="note">Largest of the samples that count. rise: of amax above the '
        "largest of its past; spread: of the loudest over the median channel, both as powers of two; clipped: beyond "
        "what the scale holds; to 0: lost below it; error: of the quantised tensor; result: of the forward product. "
        f"{escape(meant)}.{more}</p>"
    )


def _errors(watched: Watched) -> str:
    counts = watched.settled
    maps = [
        Heat(
            title=f"error of {role}",
            values=_middle(watched.figures[role]["error"][counts]),
            low=0.7 * well_scaled_error(watched, role),
            high=4 * well_scaled_error(watched, role),
            form=".4f",
        )
        for role in ROLES
    ]
    result = 2**0.5 * well_scaled_error(watched, "x")
    values = _middle(watched.results[counts])
    maps.append(Heat(title="error of the result", values=values, low=0.4 * result, high=4 * result, form=".4f"))
    expected = ", ".join(f"{well_scaled_error(watched, r):.4f} of {r}" for r in ROLES)
    return (
        heat_map(watched, maps, watched.fallen) + '<p class="note">Mean of the samples, relative: |q - x| / |x|; full '
        f"colour is four times what a good scale gives, which is {expected} and {result:.4f} of the result. Framed: "
        "fell back. Grey: nothing was counted.</p>"
    )


def _lost(watched: Watched) -> str:
    counts, shown = watched.settled, []
    for key, words_of in (("saturated", "clipped"), ("flushed", "lost to 0")):
        maps = [
            Heat(
                title=f"{words_of}, {role}",
                values=_top(watched.figures[role][key][counts]),
                low=1e-6,
                high=1e-1,
                form=".4%",
            )
            for role in ROLES
        ]
        shown.append(heat_map(watched, maps, watched.fallen))
    note = "Largest share of the samples, of the numbers that aren't 0; pale is one in a million, full one in ten."
    return "".join(shown) + f'<p class="note">{note}</p>'


def _middle(values_SN: np.ndarray) -> np.ndarray:
    """The mean of each column's numbers, NaN where it has none."""
    known = np.isfinite(values_SN)
    total = np.where(known, values_SN, 0.0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _top(values_SN: np.ndarray) -> np.ndarray:
    known = np.isfinite(values_SN)
    return np.where(known.any(0), np.where(known, values_SN, -np.inf).max(0), np.nan)
