"""Published failures of training clusters: how often, of which part, how soon noticed, how long until training goes on.

`data/faults.csv` holds the rows with their sources; nothing here is a figure of ours except where `kind` says modelled.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem, nearest

__all__ = [
    "FLEETS", "LAYERS", "Fleet", "Part", "Sourced", "cold_restart", "communicator_start", "detection", "fault_row",
    "fleet", "mean_time_to_failure", "parts", "warm_restart",
]  # fmt: skip

Kind = Literal["published", "measured", "modelled", "given"]
HOUR_S = 3600.0
LAYERS = ("gpu", "host", "network", "software", "facility", "unknown")
_LAYER = {"unplanned maintenance": "facility", "hardware": "gpu"}


@dataclass(frozen=True)
class Sourced:
    """A figure, whether it was published, measured or modelled (or given by the user), and where it comes from."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class Part:
    """A cause of interruptions: its layer (one of `LAYERS`) and its share of all of them."""

    name: str
    layer: str
    share: float


@dataclass(frozen=True)
class Fleet:
    """A study of failures. `points`: (accelerators of a job, row of its mean time to failure); `parts_of`: the study
    that counts parts; `defaults`: inputs of `bessemer.plan.goodput` that the study itself tells."""

    name: str
    what: str
    points: tuple[tuple[int, str], ...]
    parts_of: str
    defaults: Mapping[str, Sourced]


def _llama_save() -> Sourced:
    return Sourced(
        405e9 * 14 / 2e12,
        "modelled",
        "14 bytes a parameter of 405 B over the 2 TB/s that arXiv 2407.21783, section 3.3, gives for its storage",
    )


FLEETS: dict[str, Fleet] = {
    f.name: f
    for f in (
        Fleet(
            "llama-3",
            "Llama 3 405B, 16,384 H100, 54 days, 419 unexpected interruptions",
            ((16384, "F003"),),
            "Llama 3 Herd of Models",
            {"checkpoint_s": _llama_save()},
        ),
        Fleet(
            "rsc-1",
            "Meta RSC-1, 16K A100, 11 months: measured at 1,024, projected at 16,384 and 131,072",
            ((1024, "F085"), (16384, "F086"), (131072, "F087")),
            "Llama 3 Herd of Models",
            {},
        ),
        Fleet("rsc-2", "Meta RSC-2, 8K A100, 11 months", ((8192, "F084"),), "Llama 3 Herd of Models", {}),
        Fleet(
            "ft-hsdp",
            "Meta FT-HSDP, 98,304 accelerators, a failure every 18 minutes",
            ((98304, "F055"),),
            "Meta FT-HSDP",
            {
                "detection_s": Sourced(0.0, "published", "the stalls of arXiv 2602.00277 include it"),
                "restart_disk_s": Sourced(
                    600.0, "published", "arXiv 2602.00277: stall of synchronous training, 10 min"
                ),
                "stall_s": Sourced(180.0, "published", "arXiv 2602.00277: stall with FT-HSDP, 3 min"),
            },
        ),
        Fleet("b200-504", "504 B200, 55 days, 21 failures", ((504, "F150"),), "Llama 3 Herd of Models", {}),
    )
}


def fleet(name: str) -> Fleet:
    """ConfigError with the nearest names for one that isn't known."""
    if name in FLEETS:
        return FLEETS[name]
    fix = "--fleet " + " or ".join(nearest(name.lower(), FLEETS) or FLEETS)
    why = "fleets: " + ", ".join(FLEETS)
    problem = Problem(code="fleet-unknown", where="fleet", what=f"{name!r} is not a known fleet", why=why, fix=fix)
    raise ConfigError([problem], "the request")


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    text = resources.files("bessemer.plan").joinpath("data/faults.csv").read_text(encoding="utf-8")
    return {row["id"]: row for row in csv.DictReader(text.splitlines())}


def fault_row(row_id: str) -> Sourced:
    """The value of one row of data/faults.csv, leaving out a sign in front (">90"); a share as a fraction."""
    row = _rows()[row_id]
    source = f"{row['study']}, {row['source_url']}: {row['metric']} {row['category']}".rstrip() + f" ({row_id})"
    value = float(row["value"].lstrip("<>=~")) if row["value"] else float(row["share_pct"]) / 100
    return Sourced(value, "published", source)


def mean_time_to_failure(of: Fleet, gpus: int) -> Sourced:
    """Seconds between failures of a job on `gpus` accelerators.

    Between the fleet's points on a line of logarithms, beyond them in inverse proportion to the number of accelerators.
    """
    sizes = np.array([size for size, _ in of.points], float)
    hours = np.array([_hours(row, size) for size, row in of.points])
    source = "; ".join(f"{h:.3g} h at {s:,.0f}" for s, h in zip(sizes, hours, strict=True))
    inside = float(np.clip(gpus, sizes[0], sizes[-1]))
    value = np.exp(np.interp(np.log(inside), np.log(sizes), np.log(hours))) * inside / gpus
    exact = gpus in sizes
    note = "" if exact else ", scaled to the size"
    return Sourced(float(value * HOUR_S), "published" if exact else "modelled", f"{of.what}: {source}{note}")


def _hours(row_id: str, gpus: float) -> float:
    """A row's mean time to failure in hours; rates and counts are turned into one."""
    row, value = _rows()[row_id], fault_row(row_id).value
    if row["unit"] == "min":
        return value / 60
    if row["unit"] == "per 1000 node-days":
        return 24 * 1000 / (value * gpus / 8)
    if row["unit"] == "count":
        return float(row["window"].split()[0]) * 24 / value
    return value


@functools.cache
def parts(of: str) -> tuple[Part, ...]:
    """The causes that a study counts, the most frequent first."""
    counted = [r for r in _rows().values() if r["study"] == of and r["metric"].endswith("by root cause")]
    total = sum(float(r["value"]) for r in counted)
    found = [Part(r["category"], _LAYER.get(r["layer"], r["layer"]), float(r["value"]) / total) for r in counted]
    return tuple(sorted(found, key=lambda part: -part.share))


def detection(of: Fleet, *, inspected: bool) -> dict[str, Sourced]:
    """Seconds until a failure is noticed, by layer. Without inspection the collective's timeout tells: 10 minutes."""
    slow = Sourced(600.0, "published", "ByteRobust table 3, arXiv 2509.16293: without inspection about 10 min (F077)")
    if not inspected:
        return dict.fromkeys(LAYERS, slow)
    network = [fault_row(i) for i in ("F077", "F078", "F079")]
    mean = sum(r.value for r in network) / len(network)
    return {
        "gpu": fault_row("F081"),
        "host": fault_row("F077"),
        "network": Sourced(mean, "published", "mean of NIC crash, port flapping and switch down: " + network[0].source),
        "software": fault_row("F080"),
        "facility": slow,
        "unknown": slow,
    }


def cold_restart(gpus: int) -> Sourced:
    """Seconds from the decision to restart until training goes on from disk: least squares a + b n through the
    published times at 16K to 98K accelerators (F047 ... F053)."""
    found = [_rows()[i] for i in ("F047", "F049", "F051", "F053")]
    slope, start = np.polyfit([float(r["n_gpus"]) for r in found], [float(r["value"]) for r in found], 1)
    source = f"{start:.0f} s + {1e3 * slope:.2f} s per 1,000 accelerators, through arXiv 2602.00277 figure 2"
    return Sourced(float(start + slope * gpus), "modelled", source)


def warm_restart(gpus: int) -> Sourced:
    """As `cold_restart`, on the same hosts and with state still in memory: 10 min where that takes 15 (F055)."""
    cold = cold_restart(gpus)
    return Sourced(cold.value * 10 / 15, "modelled", "2/3 of a cold restart, as at 98,304 (arXiv 2602.00277)")


def communicator_start(gpus: int) -> Sourced:
    """Seconds to set up communicators over `gpus`: a power law through the published times (F048 ... F054)."""
    found = [_rows()[i] for i in ("F048", "F050", "F052", "F054")]
    sizes, seconds = np.log([[float(r["n_gpus"]), float(r["value"])] for r in found]).T
    power, start = np.polyfit(sizes, seconds, 1)
    source = f"n^{power:.2f} through arXiv 2602.00277 figure 2"
    return Sourced(float(np.exp(start + power * np.log(gpus))), "modelled", source)
