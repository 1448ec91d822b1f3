"""`validate`: predicted against measured, row by row and source by source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.plan.calibration import Calibration, Constants, default_calibration, stack_constants
from bessemer.plan.dims import Dims, stack
from bessemer.plan.layer import Work
from bessemer.plan.price import Prices, price_case
from bessemer.plan.rates import Rates, stack_rates
from bessemer.plan.rows import Row, Skipped, read_rows
from bessemer.plan.space import Layouts
from bessemer.plan.step import Case

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Batch", "batch_of", "predict", "validate"]


@dataclass(frozen=True)
class Batch:
    """Rows side by side, ready to be priced in one call."""

    layouts: Layouts
    dims: Dims
    rates: Rates
    work: Work
    global_batch: NDArray[np.float64]
    one_layer: NDArray[np.bool_]


def batch_of(rows: list[Row]) -> Batch:
    """The rows as arrays."""
    columns: dict[str, Any] = {k: [r.layout[k] for r in rows] for k in rows[0].layout}
    work = Work(
        seq=np.array([r.seq for r in rows]),
        attention_share=np.array([r.attention_share for r in rows]),
        frozen=np.array([r.frozen for r in rows]),
        imbalance=np.array([r.imbalance for r in rows]),
    )
    return Batch(
        Layouts.of(len(rows), **columns),
        stack([r.dims for r in rows]),
        stack_rates([r.rates for r in rows]),
        work,
        np.array([r.global_batch for r in rows]),
        np.array([r.one_layer for r in rows]),
    )


def predict(batch: Batch, constants: Constants, *, memory: bool = True) -> tuple[NDArray[np.float64], Prices]:
    """Seconds of each row, and the whole prices. A row that measured one layer alone gets just its kernels."""
    each = batch.global_batch / (batch.layouts.micro_batch * batch.layouts.dp)
    case = Case(batch.layouts, batch.dims, batch.work, batch.rates, constants, each)
    prices = price_case(case, memory=memory)
    layers = np.sum([v for k, v in prices.breakdown.items() if k not in _BESIDE], axis=0)
    return np.where(batch.one_layer, layers, prices.step_s), prices


_BESIDE = ("ends", "p2p", "bubble", "dp", "offload", "optimizer", "scale", "fixed")


def constants_of(rows: list[Row], calibration: Calibration) -> Constants:
    """The constants of each row, stacked."""
    found = {(r.gpus, r.era): calibration.resolve(r.gpus, r.era) for r in rows}
    return stack_constants([found[r.gpus, r.era] for r in rows])


def validate(path: Path, *, calibration: Calibration | None = None) -> dict[str, Any]:
    """Predicts every row that carries enough fields. The answer has the keys sources, all and rows, errors as
    fractions: mean, median and 90th percentile of |predicted / measured - 1|, and the signed mean as bias.

    DataError where the file can't be read; a row that can't be predicted is counted with its reason, never dropped.
    """
    rows, skipped = read_rows(path)
    if not rows:
        return {"sources": _by_source([], [], skipped), "all": _statistics([], [], skipped), "rows": []}
    seconds, prices = predict(batch_of(rows), constants_of(rows, calibration or default_calibration()))
    allocated = prices.memory.allocated
    results = []
    for i, row in enumerate(rows):
        memory = allocated[i] if row.allocated_only else prices.memory_bytes[i]
        results.append(
            {
                "id": row.id,
                "measured_s": row.measured_s,
                "predicted_s": float(seconds[i]) if np.isfinite(seconds[i]) else None,
                "measured_mem": row.measured_bytes,
                "predicted_mem": float(memory),
                "assumed": row.assumed,
            }
        )
    sources = [r.source for r in rows]
    return {
        "sources": _by_source(results, sources, skipped),
        "all": _statistics(results, sources, skipped),
        "rows": results,
    }


def _by_source(results: list[dict[str, Any]], sources: list[str], skipped: list[Skipped]) -> dict[str, Any]:
    names = sorted({*sources, *(s.source for s in skipped)})
    out = {}
    for name in names:
        own = [r for r, s in zip(results, sources, strict=True) if s == name]
        out[name] = _statistics(own, [name] * len(own), [s for s in skipped if s.source == name])
    return out


def _statistics(results: list[dict[str, Any]], sources: list[str], skipped: list[Skipped]) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for s in skipped:
        reasons[s.reason] = reasons.get(s.reason, 0) + 1
    timed = [r["predicted_s"] / r["measured_s"] - 1 for r in results if r["measured_s"] and r["predicted_s"]]
    weighed = [r["predicted_mem"] / r["measured_mem"] - 1 for r in results if r["measured_mem"] and r["predicted_mem"]]
    errors, memory = np.array(timed), np.array(weighed)
    some = len(errors) > 0
    return {
        "rows": len(results),
        "skipped": reasons,
        "time_rows": len(errors),
        "time_mean_ape": float(np.abs(errors).mean()) if some else None,
        "time_median_ape": float(np.median(np.abs(errors))) if some else None,
        "time_p90_ape": float(np.quantile(np.abs(errors), 0.9)) if some else None,
        "time_bias": float(errors.mean()) if some else None,
        "mem_rows": len(memory),
        "mem_mean_ape": float(np.abs(memory).mean()) if len(memory) else None,
    }
