"""The printed take-off report: a line a host, the exchanges, what was found, the verdict. Fits in 80 to 100 columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bessemer.core.units import counted, format_bytes, format_rate, format_seconds
from bessemer.inspect.takeoff_records import Fleet, HostState, Pair, RankState
from bessemer.inspect.takeoff_verdict import Verdict

if TYPE_CHECKING:
    from bessemer.inspect.takeoff import Takeoff

__all__ = ["takeoff_table"]

_MOST_HOSTS, _MOST_DOUBTS = 32, 12
_WIDTH = 96


def takeoff_table(takeoff: Takeoff) -> Group:
    """Of a large fleet only bad hosts and the first ones are listed; the JSON form has all."""
    fleet, verdict = takeoff.fleet, takeoff.verdict
    ranks = sum(len(state.ranks) for state in fleet.hosts)
    mode = "short" if fleet.minutes is None else f"burn-in of {fleet.minutes:g} min"
    head = f"take-off: {counted(len(fleet.hosts), 'host')}, {counted(ranks, 'rank')}, {mode}, "
    parts: list[Table | Text] = [Text(head + format_seconds(fleet.seconds), style="bold")]
    if fleet.ranks:
        parts += [Text(line, style="dim") for line in _about(fleet)]
        parts.append(_hosts(fleet, verdict))
    if fleet.pairs:
        parts += [Text(line) for line in _pairs(fleet)]
    if fleet.collectives:
        parts.append(_collectives(fleet))
    parts += _findings(verdict)
    return Group(*parts)


def _about(fleet: Fleet) -> list[str]:
    kinds = sorted({rank.device for rank in fleet.ranks})
    first = fleet.ranks[0]
    threads = f", {counted(first.threads, 'thread')} a rank" if first.kind == "cpu" else ""
    lines = [f"device: {', '.join(kinds)}{threads}"]
    absent = {p.format: p.absent for p in first.products if p.absent}
    lines += [f"no products of {name}: {why}"[:_WIDTH] for name, why in absent.items()]
    return lines


def _hosts(fleet: Fleet, verdict: Verdict) -> Table:
    formats = [p.format for p in fleet.ranks[0].products if not p.absent]
    title = "products in op/s of the slowest rank; copy, disk in B/s; drift: end to start"
    table = Table("host", *formats, "drift", "copy", "disk", "clock", "", title=title, title_justify="left", box=None,
                  title_style="dim", pad_edge=False)  # fmt: skip
    listed = sorted(fleet.hosts, key=lambda state: state.host not in verdict.bad)[:_MOST_HOSTS]
    for state in (s for s in fleet.hosts if s in listed):
        own = [rank for rank in fleet.ranks if rank.rank in state.ranks]
        word, style = ("bad", "red") if state.host in verdict.bad else ("good", "green")
        cells = [Text(_short(state.host)), *(Text(_slowest(own, name)) for name in formats)]
        cells += [Text(_change(own)), Text(_copy(own)), Text(_disk(state)), Text(_clock(state)), Text(word, style)]
        table.add_row(*cells)
    if len(fleet.hosts) > _MOST_HOSTS:
        table.add_row(Text(f"... {len(fleet.hosts) - _MOST_HOSTS} more", "dim"))
    return table


def _short(host: str) -> str:
    return host if len(host) <= 16 else f"{host[:7]}..{host[-7:]}"


def _slowest(ranks: Sequence[RankState], name: str) -> str:
    rates = [p.rate for rank in ranks for p in rank.products if p.format == name and p.rate]
    return _tight(min(rates)) if rates else "-"


def _tight(rate: float) -> str:
    return format_rate(rate, "").removesuffix("/s").replace(" ", "")


def _change(ranks: Sequence[RankState]) -> str:
    changes = [p.rate_end / p.rate_start - 1 for rank in ranks for p in rank.products if p.rate_start]
    return f"{statistics.median(changes):+.0%}" if changes else "-"


def _copy(ranks: Sequence[RankState]) -> str:
    return _tight(min(rank.memory.copy_bytes_per_s for rank in ranks)) if ranks else "-"


def _disk(state: HostState) -> str:
    return _tight(min(disk.write_bytes_per_s for disk in state.disks)) if state.disks else "-"


def _clock(state: HostState) -> str:
    if state.clock_s is None:
        return "-"
    if state.clock_error_s == 0.0:
        return "first"  # against whose clock the others are told
    shown = max(abs(state.clock_s), state.clock_error_s)
    sign = "<" if abs(state.clock_s) <= state.clock_error_s else "+" if state.clock_s > 0 else "-"
    return sign + format_seconds(shown).replace(" ", "")


def _pairs(fleet: Fleet) -> list[str]:
    lines = []
    for title, inside in (("between hosts", False), ("inside hosts", True)):
        pairs = [p for p in fleet.pairs if (fleet.host_of(p.a) == fleet.host_of(p.b)) == inside]
        if pairs:
            taken, of = fleet.rounds
            part = f", {taken} of {of} rounds" if not inside and taken < of else ""
            lines.append(f"{counted(len(pairs), 'pair')} {title}{part}: {_spread(pairs)}")
    return lines


def _spread(pairs: Sequence[Pair]) -> str:
    slow, quick = max(p.latency_s for p in pairs), statistics.median(p.latency_s for p in pairs)
    least, usual = min(p.bytes_per_s for p in pairs), statistics.median(p.bytes_per_s for p in pairs)
    return (
        f"{format_seconds(quick)} (slowest {format_seconds(slow)}), "
        f"{format_rate(usual, 'B')} (least {format_rate(least, 'B')})"
    )


def _collectives(fleet: Fleet) -> Table:
    right = [found for found in fleet.collectives if not found.fault]
    sizes = sorted({found.size_bytes for found in right})
    heads = ["all ranks", *map(format_bytes, sizes)]
    table = Table(
        *heads, title="time and bus bandwidth", title_style="dim", title_justify="left", box=None, pad_edge=False
    )
    for name in dict.fromkeys(found.operation for found in right):
        cells = {f.size_bytes: f"{format_seconds(f.seconds)}, {format_rate(f.bus_bytes_per_s, 'B')}"
                 for f in right if f.operation == name}  # fmt: skip
        table.add_row(name.replace("_", "-"), *(cells.get(size, "-") for size in sizes))
    return table


def _findings(verdict: Verdict) -> list[Table | Text]:
    bad = [finding for finding in verdict.findings if finding.bad]
    doubts = [finding for finding in verdict.findings if not finding.bad]
    parts: list[Table | Text] = []
    for title, found, style in (("bad", bad, "red"), ("doubt", doubts[:_MOST_DOUBTS], "yellow")):
        parts += [Text(f"{title}: {f.host or 'the fleet'}: {f.check}: {f.what}", style) for f in found]
    if len(doubts) > _MOST_DOUBTS:
        parts.append(Text(f"... {len(doubts) - _MOST_DOUBTS} more doubts, in the JSON form", "yellow"))
    parts.append(Text(f"verdict: {_verdict(verdict)}", "green" if verdict.ok else "red"))
    for old, new in verdict.replaced.items():
        parts.append(Text(f"  {old} -> {new}, a spare"))
    if verdict.missing:
        parts.append(Text(f"  {counted(verdict.missing, 'host')} missing for the job: no good one is left", "red"))
    return parts


def _verdict(verdict: Verdict) -> str:
    if verdict.ok and not verdict.bad:
        return "all good"
    if not verdict.bad:
        return "the fleet is bad, and no host by itself"
    return f"{counted(len(verdict.bad), 'bad host')} ({', '.join(verdict.bad[:8])}), {len(verdict.good)} good"
