"""Plans as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bessemer.core.problem import render
from bessemer.core.units import format_bytes, format_count, format_seconds
from bessemer.plan.figures import Priced

if TYPE_CHECKING:
    from bessemer.plan.outcome import Details, Outcome

__all__ = ["PARTS", "compare_text", "details_text", "layout_words", "search_text", "table"]

PARTS = {
    "gemm": "matrix products",
    "attention": "attention core",
    "grouped": "experts' products",
    "element": "norms, activations, permutation",
    "cast": "quantisation",
    "gap": "gaps between kernels",
    "host": "waiting for the host",
    "recompute": "recompute",
    "offload": "offloading",
    "tp": "tensor-parallel exchanges",
    "cp": "context-parallel exchanges",
    "ep": "expert-parallel exchanges",
    "ends": "embedding, head, loss",
    "p2p": "between stages",
    "bubble": "pipeline bubble",
    "imbalance": "waiting for a fuller stage",
    "dp": "data-parallel exchanges",
    "optimizer": "optimizer",
    "scale": "loss with the number of nodes",
    "fixed": "once a step",
}
"""The parts of a step in words (`bessemer.plan.price.BREAKDOWN`)."""
_FACTORS = ("generality", "effective_compute", "node_efficiency", "cluster_efficiency", "stability", "yield")
NEIGHBOURS = 12
TIGHT = 0.05


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, numbers to the right, words to the left."""
    widths = [max(len(r[i]) for r in (headings, *rows)) for i in range(len(headings))]
    left = [all(not r[i][:1].isdigit() for r in rows) for i in range(len(headings))]
    lines = []
    for row in (headings, *rows):
        cells = [c.ljust(w) if l_ else c.rjust(w) for c, w, l_ in zip(row, widths, left, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def layout_words(priced: Priced, index: int) -> str:
    """A layout in one line: what differs from one plain rank."""
    row = priced.layouts.row(index)
    words = [f"{k} {row[k]}" for k in ("dp", "tp", "pp", "cp", "ep", "etp") if row[k] != 1]
    words.append(f"micro-batch {row['micro_batch']}")
    if row["pp"] != 1:
        words.append(str(row["schedule"]) + (f" x {row['virtual_stages']}" if row["virtual_stages"] != 1 else ""))
    words += [str(row["recipe"]), f"recompute {row['recompute']}", f"shard {row['dp_shard']}"]
    if row["cp"] != 1:
        words.append(str(row["cp_kind"]))
    words += [k.replace("_", " ") for k in ("offload_optimizer", "offload_activations", "graph") if row[k]]
    return ", ".join(words)


def search_text(outcome: Outcome) -> str:
    """The printed form of `bessemer plan search`."""
    request = outcome.request
    lines = [
        f"{outcome.model} on {request.num_gpus:,} x {request.machine.name}, {request.global_batch:,} sequences of "
        f"{request.seq_len:,} tokens a step  (all figures modelled)",
        *(f"  note: {note}" for note in request.notes),
        f"  {outcome.searched:,} layouts priced in {format_seconds(outcome.seconds)}, {outcome.feasible:,} fit; "
        f"{outcome.pruned:,} combinations cut by rules",
    ]
    if outcome.problem is not None:
        return "\n".join([*lines, "", render([outcome.problem], "the request")])
    lines += ["", *_ranking(outcome), ""]
    if outcome.alike > 1:
        width = outcome.ranked.prices.high_s[0] / outcome.ranked.prices.step_s[0] - 1
        lines.append(
            f"  Within the band of +-{width:.0%} the best can't be told apart from {outcome.alike - 1:,} of the others "
            "(~ marks those shown)."
        )
    if any(_left(outcome.ranked.row(i)).endswith("!") for i in range(outcome.shown)):
        lines.append(f"  ! less than {TIGHT:.0%} of the memory left: as little as the memory model may be wrong by.")
    lines.append("  runs: what `bessemer train` can run today; the others are modelled only.")
    lines += ["", f"The best: {layout_words(outcome.ranked, 0)}", *details_text(outcome.details)]
    if outcome.front is not None and len(outcome.front) > 1:
        lines += ["", "Time against memory (no other layout beats these in both)", *_front(outcome.front)]
    if outcome.written:
        lines += ["", outcome.written]
    return "\n".join(lines)


def _ranking(outcome: Outcome) -> list[str]:
    headings = ("#", "dp", "tp", "pp", "cp", "ep", "mbs", "schedule", "recompute", "shard", "recipe",
                "step s", "MFU", "tokens/s/GPU", "memory", "left", "runs")  # fmt: skip
    rows = []
    for i in range(outcome.shown):
        row = outcome.ranked.row(i)
        at = row["layout"]
        schedule = "-" if at["pp"] == 1 else str(at["schedule"])
        if at["virtual_stages"] != 1:
            schedule += f" x{at['virtual_stages']}"
        rows.append(
            (
                f"{i + 1}{'~' if i and outcome.alike_best(i) else ' '}",
                *(str(at[k]) for k in ("dp", "tp", "pp", "cp", "ep", "micro_batch")),
                schedule, str(at["recompute"]), str(at["dp_shard"]), str(at["recipe"]),
                f"{row['step_s']:.3f}", f"{row['mfu']:.1%}", f"{row['tokens_per_s_per_gpu']:,.0f}",
                format_bytes(row["memory_bytes"]), _left(row), "yes" if row["runnable"] else "no",
            )
        )  # fmt: skip
    return table(headings, rows)


def _left(row: dict[str, Any]) -> str:
    tight = row["headroom_bytes"] < TIGHT * row["memory_bytes"]
    return format_bytes(row["headroom_bytes"]) + ("!" if tight else " ")


def details_text(details: Details, *, around: bool = True) -> list[str]:
    """Where the time and the memory of one layout go, the predicted factors, and (`around`) its neighbourhood."""
    priced, index = details.priced, details.index
    step, total = float(priced.prices.step_s[index]), float(priced.prices.memory_bytes[index])
    low, high = float(priced.prices.low_s[index]), float(priced.prices.high_s[index])
    lines = [f"  step {format_seconds(step)}  (band {format_seconds(low)} to {format_seconds(high)})", ""]
    parts = [(PARTS.get(k, k), format_seconds(v), f"{v / step:.1%}") for k, v in priced.breakdown(index).items()]
    lines += table(("where the time goes", "", ""), [p for p in parts if p[2] != "0.0%"])
    memory = priced.memory(index)
    stage = int(priced.prices.memory.stage[index])
    rows = [(k.replace("_", " "), format_bytes(v), f"{v / total:.1%}") for k, v in memory.items()]
    lines += ["", *table((f"memory of the fullest stage ({stage})", "", ""), rows)]
    left = float(priced.headroom_bytes[index])
    lines.append(
        f"  {format_bytes(total)} in all, "
        + (f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} TOO MUCH")
    )
    factors = details.factors
    shown = " x ".join(f"{name.replace('_', ' ')} {factors[name]:.3f}" for name in _FACTORS[:-1])
    lines += ["", f"  predicted yield {factors['yield']:.3f} = {shown} (stability: see `bessemer plan goodput`)"]
    lines += _money_text(details)
    if around:
        lines += ["", *_around(details)]
    return lines


def _money_text(details: Details) -> list[str]:
    money = details.money
    text = f"  {format_count(money.tokens)} tokens: {money.hours / 24:,.1f} days, {money.gpu_hours:,.0f} device hours"
    if money.energy_kwh is not None:
        text += f", at most {money.energy_kwh / 1000:,.1f} MWh (every device at its power limit)"
    return [text + (f", cost {money.cost:,.0f}" if money.cost is not None else "")]


def _around(details: Details) -> list[str]:
    rows, step = [], float(details.priced.prices.step_s[details.index])
    for n in details.neighbours:
        if n.rules or n.delta_s is None:
            continue
        why = ", ".join(f"{PARTS.get(k, k)} {v * 1e3:+,.0f} ms" for k, v in n.reasons) or "no part changes by 0.1 %"
        cost = f"{n.delta_s * 1e3:+,.0f} ms ({n.delta_s / step:+.1%})"
        if n.over_bytes:
            why = f"doesn't fit by {format_bytes(n.over_bytes)}; {why}"
        rows.append((n.change, cost, why))
    lines = table(("one change away", "costs", "why"), rows[:NEIGHBOURS]) if rows else []
    over = [r for r in rows[NEIGHBOURS:] if r[2].startswith("doesn't fit") and r[1].startswith("-")][:4]
    lines += table(("would be faster", "", ""), over) if over else []
    lines += ["", "  what breaks first"]
    lines += [f"    {x.size} {x.now:,} -> {x.most:,} still works; then {x.breaks}" for x in details.limits]
    saved = ", ".join(f"{name} {share:.1%}" for name, share in details.sensitivity.items() if share >= 0.0005)
    return [*lines, "", f"  10 % more of each would save: {saved}"]


def _front(front: Priced, most: int = 8) -> list[str]:
    """The front, thinned evenly to `most` rows with both ends."""
    last = len(front) - 1
    picked = sorted({round(i * last / (most - 1)) for i in range(most)}) if last >= most else range(last + 1)
    rows = [
        (f"{front.prices.step_s[i]:.3f} s", format_bytes(front.prices.memory_bytes[i]), layout_words(front, i))
        for i in picked
    ]
    return table(("step", "memory", "layout"), rows)


def compare_text(names: tuple[str, str], both: tuple[Details, Details]) -> str:
    """Two layouts side by side: where each spends its time and memory, and the difference."""
    a, b = ({"step": float(d.priced.prices.step_s[d.index]), **d.priced.breakdown(d.index)} for d in both)
    keys = sorted({*a, *b}, key=lambda k: (k != "step", -abs(b.get(k, 0) - a.get(k, 0))))
    rows = [
        (
            PARTS.get(k, k),
            format_seconds(a.get(k, 0.0)),
            format_seconds(b.get(k, 0.0)),
            f"{(b.get(k, 0) - a.get(k, 0)) * 1e3:+,.1f} ms",
        )
        for k in keys
    ]
    m, n = ({"memory": float(d.priced.prices.memory_bytes[d.index]), **d.priced.memory(d.index)} for d in both)
    more = [
        (
            k.replace("_", " "),
            format_bytes(m.get(k, 0.0)),
            format_bytes(n.get(k, 0.0)),
            f"{(n.get(k, 0) - m.get(k, 0)) / 2**20:+,.0f} MiB",
        )
        for k in {**m, **n}
    ]
    words = [
        f"  {label}: {name}: {layout_words(d.priced, d.index)}"
        for label, name, d in zip("AB", names, both, strict=True)
    ]
    return "\n".join([*words, "", *table(("", "A", "B", "B - A"), [*rows, *more])])
