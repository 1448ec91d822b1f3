"""Pictures of a replayed step: a trace for Perfetto or chrome://tracing, and SVG of the timeline and of the memory."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.units import format_bytes, format_seconds
from bessemer.plan.idle import rank_times
from bessemer.plan.replay import KINDS

if TYPE_CHECKING:
    from bessemer.plan.replay import Replay

__all__ = ["memory_svg", "timeline_svg", "trace_events", "write_trace"]

WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
COLOURS = {"F": "#3b76b5", "B": "#2f9e63", "I": "#2f9e63", "W": "#c98a1b", "dp": "#8e5bb0", "optimizer": "#6b6b6b"}
LEFT, RIGHT, HEAD, FOOT = 64.0, 12.0, 34.0, 26.0
MOST_NUMBERS = 1500
"""Passes up to which each carries the number of its micro-batch, where that fits."""


def trace_events(step: Replay, *, memory: bool = True) -> list[dict[str, Any]]:
    """The events of the Chrome trace format, times in microseconds.

    Process 0 has a track for each pipeline rank, process 1 one for each pair of ranks that exchange messages; arrows
    lead from the pass that made a message to the one that waited for it. Counters show the memory of each rank.
    """
    events = [_named("process_name", 0, 0, "pipeline ranks"), _named("process_name", 1, 0, "transfers")]
    events += [_named("thread_name", 0, rank, f"rank {rank}") for rank in range(step.ranks)]
    for i in range(len(step)):
        kind, stage, micro = KINDS[step.kind[i]], int(step.stage[i]), int(step.micro[i])
        name = f"{kind}{micro}" if step.stage.max() < step.ranks else f"{kind}{micro} stage {stage}"
        where = {"stage": stage, "micro_batch": micro, "pass": WORDS[kind]}
        events.append(_slice(name, WORDS[kind], (0, int(step.rank[i])), (step.start_s[i], step.end_s[i]), where))
    events += _after_the_passes(step)
    events += _transfers(step)
    if memory:
        for rank in range(step.ranks):
            curve = step.memory(rank)
            events += [
                {"ph": "C", "name": f"memory of rank {rank}", "pid": 0, "ts": 1e6 * t, "args": {"bytes": b}}
                for t, b in zip(curve.time_s.tolist(), curve.bytes.tolist(), strict=True)
            ]
    return events


def write_trace(step: Replay, path: Path, *, memory: bool = True) -> None:
    """Writes `trace_events` as a JSON file that ui.perfetto.dev and chrome://tracing open."""
    path.write_text(json.dumps({"traceEvents": trace_events(step, memory=memory), "displayTimeUnit": "ms"}))


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    name: str, category: str, track: tuple[int, int], span_s: tuple[float, float], args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": track[0],
        "tid": track[1],
        "ts": 1e6 * float(span_s[0]),
        "dur": 1e6 * float(span_s[1] - span_s[0]),
        "args": args,
    }


def _after_the_passes(step: Replay) -> list[dict[str, Any]]:
    return [_slice(name, name, (0, rank), (start, end), {}) for name, rank, start, end in _ends(step)]


def _ends(step: Replay) -> list[tuple[str, int, float, float]]:
    """(what, rank, from, to) of exposed exchange and update, where they take time."""
    ready = float((step.free_s + step.dp_s).max())
    found = []
    for rank in range(step.ranks):
        free, dp, update = float(step.free_s[rank]), float(step.dp_s[rank]), float(step.optimizer_s[rank])
        found += [("dp", rank, free, free + dp)] * (dp > 0) + [("optimizer", rank, ready, ready + update)] * (
            update > 0
        )
    return found


def _transfers(step: Replay) -> list[dict[str, Any]]:
    moves, events = step.transfers, []
    waiting = {int(need): i for i, need in enumerate(step.needs.tolist()) if need >= 0 and KINDS[step.kind[i]] != "W"}
    channels = sorted(set(zip(moves.source.tolist(), moves.target.tolist(), strict=True)))
    events += [_named("thread_name", 1, tid, f"{a} to {b}") for tid, (a, b) in enumerate(channels)]
    track = {channel: tid for tid, channel in enumerate(channels)}
    for n, item in enumerate(moves.item.tolist()):
        source, target = int(moves.source[n]), int(moves.target[n])
        what = "activations" if step.kind[item] == 0 else "gradients"
        span = (float(moves.start_s[n]), float(moves.end_s[n]))
        name = f"{what} {int(step.micro[item])}"
        events.append(_slice(name, what, (1, track[source, target]), span, {"from": source, "to": target}))
        then = waiting.get(item)
        if then is not None and step.rank[then] == target:
            arrow = {"cat": "needs", "name": what, "id": n, "pid": 0}
            events.append({"ph": "s", "tid": source, "ts": 1e6 * float(step.end_s[item]), **arrow})
            events.append({"ph": "f", "bp": "e", "tid": target, "ts": 1e6 * float(step.start_s[then]), **arrow})
    return events


def timeline_svg(step: Replay, *, width: int = 1200, row: int = 0, title: str = "") -> str:
    """One row a rank, time to the right; passes by colour, later chunks of a rank paler, idle time left blank.

    `row`: height in pixels, 0: 12 to 26, so that many ranks fit. Text takes the colour of the page around.
    """
    height = row or int(np.clip(520 / step.ranks, 12, 26))
    scale = (width - LEFT - RIGHT) / step.step_s
    bottom = HEAD + step.ranks * (height + 3)
    parts = [_opening(width, bottom + FOOT, title or f"Timeline of a {step.name} step")]
    spent = rank_times(step)
    for rank in range(step.ranks):
        y = HEAD + rank * (height + 3)
        busy = 100 * step.busy_s[rank] / step.step_s
        why = ", ".join(
            f"{name.replace('_', '-')} {format_seconds(float(values[rank]))}"
            for name, values in vars(spent).items()
            if values[rank] > 0
        )
        parts.append(
            f'<rect x="{LEFT}" y="{y:.1f}" width="{width - LEFT - RIGHT:.1f}" height="{height}" fill="#8883">'
            f"<title>rank {rank}: busy {busy:.1f} %; {escape(why)}</title></rect>"
            f'<text x="{LEFT - 6}" y="{y + height / 2:.1f}" {_TEXT} text-anchor="end">rank {rank}</text>'
        )
    parts += _paths(step, scale, height)
    parts += _numbers(step, scale, height)
    for name, rank, start, end in _ends(step):
        box = f'x="{LEFT + scale * start:.2f}" y="{HEAD + rank * (height + 3):.1f}" width="{scale * (end - start):.2f}"'
        parts.append(f'<rect {box} height="{height}" fill="{COLOURS[name]}"/>')
    parts += _axis(step.step_s, scale, bottom)
    used = [WORDS[k] for i, k in enumerate(KINDS) if np.any(step.kind == i)]
    legend = [(w, COLOURS[k]) for k, w in WORDS.items() if w in used]
    legend += [
        (w, COLOURS[n])
        for n, w in (("dp", "data-parallel exchange"), ("optimizer", "optimizer"))
        if any(e[0] == n for e in _ends(step))
    ]
    return "\n".join([*parts, _legend(legend), "</svg>"])


_TEXT = 'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" dominant-baseline="central"'


def _opening(width: float, height: float, title: str) -> str:
    box = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{escape(title)}</title>'


def _paths(step: Replay, scale: float, height: float) -> list[str]:
    """One path for all passes of a kind and chunk: small files even for long steps."""
    chunk = step.stage // step.ranks if step.stage.max() >= step.ranks else (step.stage != step.rank).astype(int)
    x, length = LEFT + scale * step.start_s, scale * (step.end_s - step.start_s)
    gap = np.minimum(0.6, 0.2 * length)  # neighbours stay apart to the eye
    parts = []
    for code, kind in enumerate(KINDS):
        for number in range(int(chunk.max()) + 1):
            own = np.flatnonzero((step.kind == code) & (chunk == number))
            if not len(own):
                continue
            boxes = "".join(
                f"M{x[i]:.2f} {HEAD + step.rank[i] * (height + 3):.1f}h{length[i] - gap[i]:.2f}v{height:g}H{x[i]:.2f}z"
                for i in own.tolist()
            )
            parts.append(f'<path d="{boxes}" fill="{COLOURS[kind]}" fill-opacity="{max(1 - 0.3 * number, 0.3):.1f}"/>')
    return parts


def _numbers(step: Replay, scale: float, height: float) -> list[str]:
    if len(step) > MOST_NUMBERS:
        return []
    size = min(10.0, height - 3)
    style = f'font-family="system-ui, sans-serif" font-size="{size:g}" fill="#fff" text-anchor="middle"'
    texts = []
    for i in range(len(step)):
        label = str(int(step.micro[i]))
        if scale * (step.end_s[i] - step.start_s[i]) > 4 + 0.6 * size * len(label):
            x = LEFT + scale * (step.start_s[i] + step.end_s[i]) / 2
            y = HEAD + step.rank[i] * (height + 3) + height / 2
            texts.append(f'<text x="{x:.1f}" y="{y:.1f}">{label}</text>')
    return [f'<g {style} dominant-baseline="central">', *texts, "</g>"] if texts else []


def _axis(end_s: float, scale: float, y: float) -> list[str]:
    step_s = _round_step(end_s / 8)
    parts = []
    for n in range(int(end_s / step_s + 1e-9) + 1):
        x = LEFT + scale * n * step_s
        parts.append(
            f'<path d="M{x:.1f} {y:.1f}v4" stroke="currentColor"/>'
            f'<text x="{x:.1f}" y="{y + 13:.1f}" {_TEXT} text-anchor="middle">{_ticks(n * step_s, step_s)}</text>'
        )
    return parts


def _round_step(least: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9)))


def _ticks(value_s: float, step_s: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if step_s >= 0.1 * size:
            return f"{round(value_s / size, 6):g} {unit}"
    return f"{value_s:g} s"


def _legend(entries: list[tuple[str, str]]) -> str:
    parts, x = [], LEFT
    for word, colour in entries:
        parts.append(
            f'<rect x="{x:.0f}" y="9" width="11" height="11" fill="{colour}"/>'
            f'<text x="{x + 16:.0f}" y="15" {_TEXT}>{escape(word)}</text>'
        )
        x += 34 + 6.3 * len(word)
    return "".join(parts)


def memory_svg(step: Replay, *, width: int = 1200, height: int = 260, limit_bytes: float = 0.0) -> str:
    """Bytes over time, a line a rank; the fullest is drawn strong and says its peak. `limit_bytes`: of the device."""
    curves = [step.memory(rank) for rank in range(step.ranks)]
    fullest = int(np.argmax([c.peak_bytes for c in curves]))
    top = max(curves[fullest].peak_bytes, limit_bytes) * 1.06 or 1.0
    bottom = height - FOOT
    across, up = (width - LEFT - RIGHT) / step.step_s, (bottom - HEAD) / top

    def line(rank: int) -> str:
        curve = curves[rank]
        x, y = LEFT + across * curve.time_s, bottom - up * curve.bytes
        tail = "".join(f"H{a:.2f}V{b:.2f}" for a, b in zip(x[1:].tolist(), y[1:].tolist(), strict=True))
        strong = rank == fullest
        style = 'stroke="#b5423b" stroke-width="1.6"' if strong else 'stroke="#8888" stroke-width="1"'
        d = f"M{x[0]:.2f} {y[0]:.2f}{tail}H{width - RIGHT:.2f}"
        return f'<path d="{d}" fill="none" {style}><title>rank {rank}: {format_bytes(curve.peak_bytes)}</title></path>'

    peak = curves[fullest]
    told = f"rank {fullest}: {format_bytes(peak.peak_bytes)} at {format_seconds(peak.peak_at_s)}"
    parts = [_opening(width, height, f"Memory of each rank; the fullest is {told}")]
    parts += [line(rank) for rank in range(step.ranks) if rank != fullest] + [line(fullest)]
    parts.append(f'<text x="{LEFT}" y="14" {_TEXT}>Fullest {escape(told)}</text>')
    for part in (0.0, 0.5, 1.0):
        y, value = bottom - up * top * part / 1.06, top * part / 1.06
        parts.append(f'<text x="{LEFT - 6}" y="{y:.1f}" {_TEXT} text-anchor="end">{format_bytes(value)}</text>')
        parts.append(f'<path d="M{LEFT} {y:.1f}H{width - RIGHT}" stroke="#8884"/>')
    if limit_bytes:
        y = bottom - up * limit_bytes
        dashed = 'stroke="#b5423b" stroke-dasharray="5 4"'
        parts.append(f'<path d="M{LEFT} {y:.1f}H{width - RIGHT}" {dashed}><title>device memory</title></path>')
    return "\n".join([*parts, *_axis(step.step_s, across, bottom), "</svg>"])
