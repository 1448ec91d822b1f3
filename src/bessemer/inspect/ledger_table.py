"""The printed ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bessemer.core.units import counted, format_count, format_rate, format_seconds
from bessemer.inspect.wall_time import CAUSES

if TYPE_CHECKING:
    from bessemer.inspect.ledger import Factor, Ledger

__all__ = ["ledger_table"]

MEANING = {
    "generality": "fallbacks, slower paths",
    "effective_compute": "rate in the kernels",
    "node_efficiency": "kernels' share of a step",
    "cluster_efficiency": "one-node step over step",
    "stability": "steps' share of the time",
}


def ledger_table(ledger: Ledger) -> Group:
    """Factors, what each cost, what stability lost by cause, and the figures they rest on."""
    parts: list[Table | Text] = [Text(f"ledger of {ledger.run}", style="bold"), _factors(ledger)]
    worst = max(
        ((f.lost_s, name) for name, f in ledger.factors.items() if f.lost_s is not None),
        default=(0.0, ""),
    )
    if ledger.wall.wall_s and (share := worst[0] / ledger.wall.wall_s) >= 0.001:
        parts.append(Text(f"lost most: {worst[1]}, {format_seconds(worst[0])} ({share:.1%} of the wall-clock time)"))
    parts.append(Text(_figures(ledger)))
    parts += [Text(f"note: {note}", style="dim") for note in ledger.notes]
    return Group(*parts)


def _factors(ledger: Ledger) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("factor", "left"), ("value", "right"), ("kind", "left"), ("lost", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("what", overflow="fold")
    for name, factor in ledger.factors.items():
        table.add_row(name, *_cells(factor), _meaning(name, factor))
        if name == "stability":
            for cause, seconds in ledger.wall.lost_s.items():
                if seconds >= 0.0005:
                    table.add_row("", "", "", format_seconds(seconds), "  " + CAUSES[cause], style="dim")
    what = "F / (wall x P)" if ledger.total.value is not None else ledger.total.reason
    table.add_row("yield", *_cells(ledger.total), what, style="bold")
    return table


def _cells(factor: Factor) -> tuple[str, str, str]:
    value = "-" if factor.value is None else f"{factor.value:.4f}"
    lost = "" if factor.lost_s is None else _signed(factor.lost_s)
    return value, factor.kind or ("unknown" if factor.value is None else "-"), lost


def _meaning(name: str, factor: Factor) -> str:
    return factor.reason if factor.kind is None else MEANING[name]


def _signed(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0 else "-" + format_seconds(-seconds)


def _figures(ledger: Ledger) -> str:
    useful = "unknown" if ledger.useful_flops is None else f"{ledger.useful_flops:.4g}"
    peak = "unknown" if ledger.peak_flops_per_s is None else format_rate(ledger.peak_flops_per_s, "FLOP")
    return (
        f"F {useful} FLOPs   P {peak} of all devices   wall {format_seconds(ledger.wall.wall_s)}   "
        f"{counted(ledger.steps, 'step')}   {format_count(ledger.tokens)} tokens"
    )
