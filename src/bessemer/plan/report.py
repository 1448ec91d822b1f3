"""`write_report`: the answer of a search as one HTML file that needs nothing else, on no network."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bessemer import __version__
from bessemer.core.units import format_bytes, format_count, format_seconds
from bessemer.plan.charts import escape, front_chart, memory_chart, share_bar, timeline_chart
from bessemer.plan.outcome import Outcome
from bessemer.plan.page import PAGE, SCRIPT, STYLE
from bessemer.plan.stages import lanes_of, stage_memory
from bessemer.plan.text import PARTS, layout_words

__all__ = ["report_html", "write_report"]

_FIRST = np.array([0])


def write_report(outcome: Outcome, path: Path) -> None:
    """Writes the page. The outcome must have a layout that fits."""
    path.write_text(report_html(outcome), encoding="utf-8")


def report_html(outcome: Outcome) -> str:
    """The whole page as text."""
    title = f"Plan: {outcome.model} on {outcome.request.num_gpus:,} x {outcome.request.machine.name}"
    sections = [
        ("ranking", "Ranking", _ranking(outcome)),
        ("time", "Where the time goes", _time(outcome)),
        ("timeline", "A step of the best layout", _timeline(outcome)),
        ("memory", "Memory by pipeline rank", _memory(outcome)),
        ("front", "Time against memory", _front(outcome)),
        ("around", "One change away", _around(outcome)),
        ("sensitivity", "What the step hangs on", _sensitivity(outcome)),
    ]
    links = "".join(f'<a href="#s-{key}">{name}</a>' for key, name, _ in sections)
    parts = [_head(outcome, title, links), _tiles(outcome)]
    parts += [f'<section id="s-{key}"><h2>{name}</h2>{body}</section>' for key, name, body in sections]
    parts.append(
        f'<p class="note">Bessemer {escape(__version__)}. Every figure is modelled; none was measured on this machine. '
        "Bands hold four of five measured steps of configurations that the model had not seen.</p>"
    )
    return PAGE.format(title=escape(title), style=STYLE, body="".join(parts), script=SCRIPT)


def _head(outcome: Outcome, title: str, links: str) -> str:
    request = outcome.request
    notes = "".join(f'<p class="note">Note: {escape(note)}.</p>' for note in request.notes)
    batch = f"{request.global_batch:,} sequences of {request.seq_len:,} tokens a step."
    return (
        f"<header><div><h1>{escape(title)}</h1><p>{batch} "
        f"{outcome.searched:,} layouts priced in {format_seconds(outcome.seconds)}, {outcome.feasible:,} fit, "
        f'{outcome.pruned:,} combinations cut by rules.</p>{notes}<nav aria-label="sections">{links}</nav></div>'
        '<button id="theme" type="button">Light / dark</button></header>'
    )


def _tiles(outcome: Outcome) -> str:
    ranked, money = outcome.ranked, outcome.details.money
    row = ranked.row(0)
    low, high = row["band"]
    tiles = [
        (format_seconds(row["step_s"]), f"a step, {format_seconds(low)} to {format_seconds(high)}"),
        (f"{row['mfu']:.1%}", "model FLOPs utilisation"),
        (f"{row['tokens_per_s_per_gpu']:,.0f}", "tokens/s a device"),
        (format_bytes(row["memory_bytes"]), f"of memory, {format_bytes(row['headroom_bytes'])} left"),
        (
            f"{money.hours / 24:,.1f} days",
            f"for {format_count(money.tokens)} tokens, {money.gpu_hours:,.0f} device hours",
        ),
    ]
    if money.cost is not None:
        tiles.append((f"{money.cost:,.0f}", f"cost, at {outcome.wishes.gpu_hour:g} a device hour"))
    if money.energy_kwh is not None:
        tiles.append((f"{money.energy_kwh / 1000:,.0f} MWh", "at most: every device at its power limit"))
    cells = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)
    return f'<div class="tiles">{cells}</div>'


_COLUMNS = (
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "micro_batch",
    "schedule",
    "virtual_stages",
    "recompute",
    "dp_shard",
    "recipe",
)
_WORDS = ("schedule", "recompute", "dp_shard", "recipe")


def _ranking(outcome: Outcome) -> str:
    heads = ["#", *_COLUMNS, "step", "MFU", "tokens/s/GPU", "memory", "left", "runs"]
    shown = {"micro_batch": "mbs", "virtual_stages": "v", "dp_shard": "shard"}
    head = "".join(
        f'<th scope="col"{" class=w" if h in _WORDS else ""}><button type="button">{shown.get(h, h)}</button></th>'
        for h in heads
    )
    lines = []
    for i in range(outcome.shown):
        row = outcome.ranked.row(i)
        at = row["layout"]
        cells = [f'<td data-v="{i}">{i + 1}{"~" if i and outcome.alike_best(i) else ""}</td>']
        cells += [
            f'<td class="w">{escape(at[k])}</td>' if k in _WORDS else f'<td data-v="{at[k]}">{at[k]:,}</td>'
            for k in _COLUMNS
        ]
        cells += [
            f'<td data-v="{row["step_s"]}">{row["step_s"]:.3f} s</td>',
            f'<td data-v="{row["mfu"]}">{row["mfu"]:.1%}</td>',
            f'<td data-v="{row["tokens_per_s_per_gpu"]}">{row["tokens_per_s_per_gpu"]:,.0f}</td>',
            f'<td data-v="{row["memory_bytes"]}">{format_bytes(row["memory_bytes"])}</td>',
            f'<td data-v="{row["headroom_bytes"]}">{format_bytes(row["headroom_bytes"])}</td>',
            f"<td>{'yes' if row['runnable'] else 'no'}</td>",
        ]
        lines.append(f"<tr{' class=best' if i == 0 else ''}>{''.join(cells)}</tr>")
    note = (
        "~ can't be told apart from the best within the band of uncertainty; "
        f"{outcome.alike - 1:,} of the layouts that fit can't. "
        "runs: what the trainer can run today; the others are modelled only."
    )
    return (
        f'<div class="scroll"><table id="ranking"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="note">{note}</p>'
    )


def _time(outcome: Outcome) -> str:
    factors = outcome.details.factors
    names = ("generality", "effective_compute", "node_efficiency", "cluster_efficiency")
    shown = " x ".join(f"{n.replace('_', ' ')} {factors[n]:.3f}" for n in names)
    yields = f"Predicted yield of a step {factors['yield']:.3f} = {shown}."
    words = escape(layout_words(outcome.ranked, 0))
    return f"<p>{words}</p>{share_bar(outcome.ranked.breakdown(0), PARTS, 's')}<p class='note'>{yields}</p>"


def _timeline(outcome: Outcome) -> str:
    lanes = lanes_of(outcome.ranked, 0)
    if lanes is None:
        return "<p>The step has too many passes to draw.</p>"
    alone = "<p class='note'>No pipeline: every rank does the same.</p>" if len(lanes.lanes) == 1 else ""
    return timeline_chart(lanes) + alone


def _memory(outcome: Outcome) -> str:
    limit = outcome.request.rank_machine.limit_bytes
    return memory_chart(stage_memory(outcome.ranked, 0), None if limit is None else float(limit))


def _front(outcome: Outcome) -> str:
    front = outcome.front if outcome.front is not None and len(outcome.front) else outcome.ranked.take(_FIRST)
    points = [
        (float(front.prices.step_s[i]), float(front.prices.memory_bytes[i]), layout_words(front, i))
        for i in range(len(front))
    ]
    limit = outcome.request.rank_machine.limit_bytes
    rows = "".join(
        f'<tr><td>{s:.3f} s</td><td>{format_bytes(b)}</td><td class="w">{escape(w)}</td></tr>' for s, b, w in points
    )
    chart = front_chart(points, None if limit is None else float(limit))
    inner = f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
    table = f"<details><summary>{len(points)} layouts as a table</summary>{inner}</details>"
    return f"{chart}<p class='note'>No other layout beats these in both time and memory.</p>{table}"


def _around(outcome: Outcome) -> str:
    rows, step = [], float(outcome.ranked.prices.step_s[0])
    for n in outcome.details.neighbours:
        why = ", ".join(f"{escape(PARTS.get(k, k))} {v * 1e3:+,.0f} ms" for k, v in n.reasons)
        if n.rules or n.delta_s is None:
            cost, why = "&ndash;", f"not possible: {escape(', '.join(n.rules))}"
        else:
            cost = f"{n.delta_s * 1e3:+,.0f} ms ({n.delta_s / step:+.1%})"
        if n.over_bytes:
            why = f"doesn't fit by {format_bytes(n.over_bytes)}; {why}"
        rows.append(f'<tr><td class="w">{escape(n.change)}</td><td>{cost}</td><td class="why">{why}</td></tr>')
    head = '<thead><tr><th class="w">change</th><th>costs a step</th><th class="w">why</th></tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _sensitivity(outcome: Outcome) -> str:
    saved = outcome.details.sensitivity
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{share:.2%}</td></tr>" for name, share in saved.items())
    limits = "".join(
        f'<tr><td class="w">{escape(x.size)}</td><td>{x.now:,}</td><td>{x.most:,}</td>'
        f'<td class="why">{escape(x.breaks)}</td></tr>'
        for x in outcome.details.limits
    )
    return (
        '<div class="two"><div><p>Ten per cent more of each would save, of a step:</p>'
        f'<table class="legend"><tbody>{rows}</tbody></table></div>'
        "<div><p>What breaks first, as the job grows or the cluster shrinks:</p>"
        '<table><thead><tr><th class="w">size</th><th>now</th><th>still works</th><th class="w">then</th></tr></thead>'
        f"<tbody>{limits}</tbody></table></div></div>"
    )
