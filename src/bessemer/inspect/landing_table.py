"""The printed landing report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bessemer.inspect.landing_remains import clock_text

if TYPE_CHECKING:
    from bessemer.inspect.landing import Landing
    from bessemer.inspect.landing_verdict import Verdict

__all__ = ["landing_table"]


def landing_table(landing: Landing) -> Group:
    """Verdict, evidence, what to do; then what the run outlived, and the clusters of stacks. Text of logs is printed
    as it is, without markup."""
    verdict = landing.verdict
    parts: list[Table | Text] = [
        Text(f"landing of {landing.run}", style="bold"),
        Text(f"verdict: {_headline(verdict)}", style="green" if verdict.kind == "no fault" else "red"),
        *(Text(f"  {line}") for line in verdict.evidence),
    ]
    if verdict.victims:
        parts.append(Text(f"victims: ranks {', '.join(map(str, verdict.victims[:32]))} only lost a peer"))
    if verdict.next:
        parts.append(Text(f"  -> {verdict.next}"))
    if landing.losses:
        table = Table("time", "step", "lost", "evidence", title="outlived", title_justify="left", box=None)
        for loss in landing.losses:
            step = "" if loss.step is None else str(loss.step)
            row = (clock_text(loss.t), step, _headline(loss.verdict), loss.verdict.evidence[0])
            table.add_row(*(Text(cell) for cell in row))
        parts.append(table)
    for cluster in landing.clusters:
        ranks = ", ".join(map(str, cluster.ranks[:32]))
        parts.append(Text(f"same stack on {len(cluster.ranks)} (ranks {ranks}): {cluster.trace.evidence[-1]}", "dim"))
    return Group(*parts)


def _headline(verdict: Verdict) -> str:
    who = "" if verdict.rank is None else f"rank {verdict.rank}" + (f" on {verdict.host}" if verdict.host else "")
    return f"{who + ': ' if who else ''}{verdict.kind}, confidence {verdict.confidence:.2f}"
