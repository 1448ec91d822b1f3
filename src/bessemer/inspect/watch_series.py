"""The curves of a run: a row a committed step, kept as columns, and handed out in few enough points to be drawn."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["COLUMNS", "MOST_ROWS", "Series"]

COLUMNS = (
    "step", "t", "loss", "val_loss", "grad_norm", "lr", "step_s", "tokens_per_s", "waiting_s", "imbalance", "dropped",
    "saturated", "flushed",
)  # fmt: skip
"""imbalance: the worst MoE layer's largest expert load over its mean; saturated and flushed: the shares of the worst
watched tensor. Columns of JSON are null where a step has no such figure."""
MOST_ROWS = 4000
"""What is handed out at once: more than a screen has pixels."""
_ROLES = ("x", "weight", "grad")


class Series:
    """`generation` grows whenever rows that were handed out are no longer true."""

    def __init__(self) -> None:
        self.generation = 0
        self._columns = {name: array("d") for name in COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def clear(self) -> None:
        """Forgets all rows."""
        self._cut(0)

    def add(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl. A step that was there already, and those after it, were done again."""
        step, steps = record.get("step"), self._columns["step"]
        if not isinstance(step, int | float):
            return
        if steps and step <= steps[-1]:
            first = next((row for row in range(len(steps) - 1, -1, -1) if steps[row] < step), -1) + 1
            self._cut(first)
        row = {**record, **_of_parts(record)}
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(float(value) if isinstance(value, int | float) else math.nan)

    def last(self, name: str) -> float | None:
        """The newest known value of a column."""
        return next((v for v in reversed(self._columns[name]) if not math.isnan(v)), None)

    def usual(self, name: str, rows: int = 50) -> float | None:
        """The median of the last rows that have a value."""
        known = sorted(v for v in self._columns[name][-rows:] if not math.isnan(v))
        return known[len(known) // 2] if known else None

    def handed(self, generation: int, start: int) -> dict[str, Any]:
        """The rows from `start` on for a reader who has those before of `generation`; all of them for any other."""
        first = start if generation == self.generation and 0 <= start <= len(self) else 0
        rows = self._chosen(first)
        columns = {
            name: [_short(column[row]) for row in rows]
            for name, column in self._columns.items()
            if name in ("step", "t") or any(not math.isnan(column[row]) for row in rows)
        }
        return {"generation": self.generation, "from": first, "rows": len(self), "columns": columns}

    def _chosen(self, first: int) -> Sequence[int]:
        """All rows from `first`, or of each of many equal stretches the lowest and the highest loss, so that no spike
        is lost, with whatever was evaluated."""
        count = len(self) - first
        if count <= MOST_ROWS:
            return range(first, len(self))
        loss, evaluated = self._columns["loss"], self._columns["val_loss"]
        width = -(-count // (MOST_ROWS // 2))
        chosen: set[int] = {first, len(self) - 1}
        for start in range(first, len(self), width):
            stretch = range(start, min(start + width, len(self)))
            chosen |= {min(stretch, key=lambda r: _order(loss[r])), max(stretch, key=lambda r: _order(loss[r]))}
        chosen |= {row for row in range(first, len(self)) if not math.isnan(evaluated[row])}
        return sorted(chosen)

    def _cut(self, length: int) -> None:
        if length < len(self):
            self.generation += 1
            for column in self._columns.values():
                del column[length:]


def _of_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures that stand inside of a record's parts."""
    found: dict[str, float] = {}
    if isinstance(experts := record.get("experts"), Mapping):
        found["imbalance"] = max(experts.get("imbalance") or [math.nan])
        found["dropped"] = experts.get("dropped") or 0
    if isinstance(precision := record.get("precision"), Mapping):
        for figure in ("saturated", "flushed"):
            shares = [v for r in _ROLES for v in (precision.get(r) or {}).get(figure) or () if v is not None]
            if shares:
                found[figure] = max(shares)
    if isinstance(waited := (record.get("phases") or {}).get("comm_s"), int | float):
        found["waiting_s"] = waited
    return found


def _order(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _short(value: float) -> float | int | None:
    """Six significant digits of a figure, all of a time; null for JSON where nothing is known."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.6g}")
