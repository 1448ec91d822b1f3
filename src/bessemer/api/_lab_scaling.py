"""The verb `lab scaling-law`."""

from __future__ import annotations

import os
from pathlib import Path

from bessemer.api._extras import need
from bessemer.core.errors import RequestError
from bessemer.core.job import DataSection
from bessemer.core.paths import user_path
from bessemer.keep.records import write_atomically
from bessemer.lab.scaling_driver import train_grid
from bessemer.lab.scaling_grid import DEFAULT_MORE, GridPoint, GridSpec, finished, grid
from bessemer.lab.scaling_page import report_html
from bessemer.lab.scaling_report import ScalingLaw, analyse

__all__ = ["scaling_law"]

DEFAULT = GridSpec()


def scaling_law(
    *,
    runs: str = "runs/scaling-law",
    widths: str = "",
    tokens: str = "",
    formats: str = "",
    probes: bool = True,
    workers: int = 0,
    bootstrap: int = 400,
    fit_only: bool = False,
) -> ScalingLaw:
    """Train a grid of small models over parameters, tokens and precision, and fit two laws of the loss with a
    precision term.

    Tells every constant with a bootstrap interval, or that the grid doesn't determine it, and the precision that is
    best for a given cost of training. Each model is trained in a process of one thread, on bytes of Python's standard
    library; a finished one is a line of results.jsonl and isn't trained again. Writes report.html beside it.

    runs: The folder of results.jsonl and the report.
    widths: Of the models, with commas between them, multiples of 32. Default: 64,96,160,256, which are 0.08 M to 1.3 M
        parameters in the blocks.
    tokens: Bytes that a model is trained on. Default: 100000,200000,400000, and 800000 for the smaller widths.
    formats: Of weights and inputs alike: bf16 or eXmY, where e1mY is an integer. Default: bf16,e2m2,e2m1,e1m1.
    probes: Also train, at the second width, models with one operand rounded, with the bits divided otherwise, with
        scales for blocks of 32, and repetitions with other seeds.
    workers: Processes side by side. Default: one for each core.
    bootstrap: Samples behind an interval.
    fit_only: Train nothing, fit what is finished.
    """
    need("lab scaling-law", "train")
    if bootstrap < 20:
        raise RequestError(f"{bootstrap} samples make no interval", code="lab-bootstrap", fix="--bootstrap 400")
    plain = not (widths or tokens or formats)
    spec = GridSpec(
        widths=_numbers("widths", widths) or DEFAULT.widths,
        tokens=_numbers("tokens", tokens) or DEFAULT.tokens,
        formats=[w.strip() for w in formats.split(",")] if formats else DEFAULT.formats,
        probes=probes,
        more=DEFAULT_MORE if plain and probes else (),
    )
    points, folder = grid(spec), user_path(runs)
    results = folder / "results.jsonl"
    if not fit_only:
        _train(points, results, workers or os.cpu_count() or 1)
    have = finished(results)
    records = [have[p.key] for p in points if p.key in have]
    found = analyse(records, missing=len(points) - len(records), samples=bootstrap, folder=folder)
    write_atomically(folder / "report.html", report_html(found))
    return found


def _train(points: list[GridPoint], results: Path, workers: int) -> None:
    from bessemer.data import prepare

    cache = DataSection().cache
    prepare(points[0].job(cache))  # once, before processes would do it side by side
    train_grid(points, results, cache=cache, workers=workers)


def _numbers(name: str, text: str) -> list[int]:
    """Of "64,96"; RequestError where one is no positive whole number."""
    words = [w.strip().replace("_", "") for w in text.split(",")] if text else []
    if bad := [w for w in words if not w.isdigit() or int(w) == 0]:
        raise RequestError(f"{bad[0]!r} is no number for --{name}", code="lab-numbers", fix=f"--{name} 64,96,160,256")
    return [int(w) for w in words]
