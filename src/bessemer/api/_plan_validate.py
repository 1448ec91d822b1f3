"""The verb `plan validate`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.plan.text import table
from bessemer.plan.validate import validate as validate_rows

__all__ = ["Validation", "validate"]


@dataclass(frozen=True)
class Validation:
    """Predicted against measured; `found` is what `bessemer.plan.validate` returns."""

    found: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.found

    def __str__(self) -> str:
        headings = ("source", "rows", "left out", "time mean", "median", "p90", "bias", "memory rows", "mean")
        rows = [_row(name, s) for name, s in (*self.found["sources"].items(), ("all", self.found["all"]))]
        reasons = [
            f"    {name}: {count} x {reason}"
            for name, source in self.found["sources"].items()
            for reason, count in source["skipped"].items()
        ]
        lines = table(headings, rows)
        return "\n".join([*lines, *(["", "  left out:", *reasons] if reasons else [])])


def _row(name: str, source: dict[str, Any]) -> tuple[str, ...]:
    def share(key: str, sign: str = "") -> str:
        value = source[key]
        return "-" if value is None else f"{value:{sign}.1%}"

    times = (share("time_mean_ape"), share("time_median_ape"), share("time_p90_ape"), share("time_bias", "+"))
    return (
        name,
        str(source["rows"]),
        str(sum(source["skipped"].values())),
        *times,
        str(source["mem_rows"]),
        share("mem_mean_ape"),
    )


def validate(*, rows: str) -> Validation:
    """Predict every measured training run of a table and print the error, source by source.

    rows: A CSV file of measured runs (the columns are described in docs/validation.md).
    """
    return Validation(validate_rows(Path(rows)))
