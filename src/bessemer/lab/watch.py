"""What the precision watch noted in a run, and which way of scaling each tensor asks for.

Legend: S samples, N logical tensors, B bins of exponents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.inspect.run_records import RunRecords, read_run
from bessemer.keep.records import read_records

__all__ = ["FIGURES", "ROLES", "Watched", "read_watch", "split_name"]

ROLES = ("x", "weight", "grad")
FIGURES = ("amax", "scale_low", "scale_high", "saturated", "flushed", "error", "spread", "jump", "burst")
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Watched:
    """The samples of a run. figures: by role and figure (`precision.watch.Figures`) [S, N], NaN where nothing was
    counted; results [S, N]; histograms: by role [N, B], the mean share of the samples, bins from `exponents[0]` on;
    fallen: the step after which a tensor went on without quantising, and why."""

    folder: Path
    job: Job
    names: tuple[str, ...]
    every: int
    exponents: tuple[int, int]
    steps: NDArray[np.int64]
    figures: dict[str, dict[str, Floats]]
    results: Floats
    histograms: dict[str, Floats]
    fallen: dict[str, tuple[int, str]]

    @property
    def settled(self) -> NDArray[np.bool_]:
        """[S]: the samples that count for advice: after the warm-up, in which amaxes move with the learning rate and
        histories are short; all of them where less than three came later."""
        later: NDArray[np.bool_] = self.steps > self.job.train.warmup
        return later if later.sum() >= 3 else np.ones_like(later)


def read_watch(folder: Path) -> Watched:
    """The samples in the run folder. RequestError `no-run` where it is none, `no-watch` where it has no samples."""
    run = read_run(folder)
    told = _newest(run, "watch")
    if told is None:
        off = run.job.precision.watch_every == 0
        raise RequestError(
            f"{folder} was not watched: " + ("precision.watch_every = 0" if off else "no rank has got that far"),
            code="no-watch",
            fix="a run with --set precision.watch_every=10 (and a quantised recipe)",
        )
    names = tuple(told["names"])
    by_step = {int(r["step"]): r["precision"] for r in read_records(folder / "metrics.jsonl") if "precision" in r}
    if not by_step:
        raise RequestError(
            f"no sample is in {folder} yet: every {told['every']} steps there is one",
            code="no-watch",
            fix="ask again later, or a smaller precision.watch_every",
        )
    steps = sorted(by_step)
    samples = [by_step[step] for step in steps]
    first, stop = told["exponents"]
    return Watched(
        folder=folder,
        job=run.job,
        names=names,
        every=int(told["every"]),
        exponents=(int(first), int(stop)),
        steps=np.array(steps, dtype=np.int64),
        figures={
            role: {key: _column((s[role].get(key) for s in samples), len(names)) for key in FIGURES} for role in ROLES
        },
        results=_column((s["result"] for s in samples), len(names)),
        histograms={role: _histogram([s[role]["histogram"] for s in samples], int(first), int(stop)) for role in ROLES},
        fallen=_falls(run),
    )


def _newest(run: RunRecords, name: str) -> Mapping[str, Any] | None:
    found = [event for attempt in run.attempts for event in attempt.named(name)]
    return found[-1] if found else None


def _falls(run: RunRecords) -> dict[str, tuple[int, str]]:
    """Of the steps that count in the end: what a later attempt did again may not have fallen."""
    done = max((s.step for s in run.steps), default=0)
    found: dict[str, tuple[int, str]] = {}
    for attempt in run.attempts:
        for event in attempt.named("warning"):
            if "fall_back" in event and event["step"] <= done:
                found |= {name: (int(event["step"]), str(event["why"])) for name in event["fall_back"]}
    return found


def _column(values: Iterable[list[float | None] | None], count: int) -> Floats:
    rows = [[np.nan if v is None else v for v in row] if row is not None else [np.nan] * count for row in values]
    return np.array(rows, dtype=np.float64)


def _histogram(samples: list[list[list[int] | None]], first: int, stop: int) -> Floats:
    total = np.zeros((len(samples[0]), stop - first))
    seen = np.zeros(len(samples[0]))
    for sample in samples:
        for n, row in enumerate(sample):
            if row is not None:
                at = row[0] - first
                total[n, at : at + len(row) - 1] += row[1:]
                seen[n] += 1
    return total / 1e4 / np.maximum(seen, 1)[:, None]


def split_name(name: str, num_layers: int) -> tuple[int, str]:
    """(layer, kind) of `layers.3.attn.q`: (3, "attn.q"). The blocks of multi-token prediction come after the last."""
    head, number, kind = name.split(".", 2)
    return int(number) + (num_layers if head == "mtp" else 0), kind
