"""The table that every file of `bench/` prints, and its `--json` form.

    from table import Row, main

    def rows() -> list[Row]:
        return [Row("train tokens/s over transformers", 1.41, "x", "higher", bar=1.3)]

    if __name__ == "__main__":
        main(rows)

`python bench/x.py` prints the table, `python bench/x.py --json` a list of
{"name", "value", "unit", "better", "bar", "holds"}.
"""

from __future__ import annotations

import argparse
import json as json_module
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "as_dicts", "main", "show"]


@dataclass(frozen=True)
class Row:
    """One measured figure. `bar` is the value it should reach (None: reported only); `note` says how or the spread."""

    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    bar: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the bar is reached; None without a bar."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as `--json` prints them; `note` only where there is one."""
    listed = []
    for row in rows:
        fields = asdict(row)
        note = fields.pop("note")
        listed.append({**fields, "holds": row.holds, **({"note": note} if note else {})})
    return listed


def show(rows: Sequence[Row], json: bool = False, title: str | None = None) -> None:
    """Prints the rows on standard output, as a table or as JSON."""
    if json:
        print(json_module.dumps(as_dicts(rows), indent=2))
        return
    table = Table(title=title, title_justify="left")
    for heading, justify in (
        ("what", "left"),
        ("value", "right"),
        ("unit", "left"),
        ("bar", "right"),
        ("holds", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")
    table.add_column("note", overflow="fold")
    for row in rows:
        bar = "" if row.bar is None else f"{'>=' if row.better == 'higher' else '<='} {_figure(row.bar)}"
        holds = {None: "", True: "yes", False: "no"}[row.holds]
        table.add_row(row.name, _figure(row.value), row.unit, bar, holds, row.note)
    Console(width=None if Console().is_terminal else 140).print(table)


def main(rows_fn: Callable[[], Sequence[Row]]) -> None:
    """Runs a bench script: reads `--json` from the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=rows_fn.__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    arguments = parser.parse_args()
    show(rows_fn(), json=arguments.json)


def _figure(value: float) -> str:
    """Four significant digits, with thousands separated; no exponent for the figures a bench has."""
    if value != 0 and abs(value) < 0.001:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
