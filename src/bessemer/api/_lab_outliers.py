"""The verb `lab outliers`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.api._extras import need
from bessemer.core.paths import user_path
from bessemer.keep.records import write_atomically
from bessemer.lab.outliers import Outliers, difference_of, gather, study
from bessemer.lab.progress import Progress

__all__ = ["OutliersReport", "outliers"]

GEMM_AMPLIFICATIONS = (1.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class OutliersReport:
    """The study, and the folder of its files."""

    found: Outliers
    folder: Path

    def as_json(self) -> dict[str, Any]:
        return {**self.found.as_json(), "folder": str(self.folder)}

    def __str__(self) -> str:
        return f"{self.found}\n\nplot: {self.folder / 'outliers.svg'}"


def outliers(
    *, amplification: float = 1024.0, steps: int = 100, seeds: int = 5, runs: str = "runs/lab-outliers"
) -> OutliersReport:
    """What a loud channel of SwiGLU does under FP8, and whether Smooth-SwiGLU mends it.

    First the error of a down projection, then training: in every block two channels have gate and up scaled by A and
    their column of the down projection divided by A^2, and a small model is trained in bf16, with one scale per
    tensor (fp8-current, fp8-delayed), and with Smooth-SwiGLU. Differences are taken between runs of the same seed.
    Finished runs are kept in runs.jsonl and used again.

    amplification: A of the training runs.
    steps: Steps of each run.
    seeds: How many seeds.
    runs: The folder of runs.jsonl, outliers.json and the plot.
    """
    need("lab outliers", "train")
    series = study(amplification, steps, seeds)
    from bessemer.lab.outliers_training import train_all
    from bessemer.precision.outliers import amplified_layer, down_errors

    folder = user_path(runs)
    records = train_all(series, folder / "runs.jsonl", Progress(series))
    found = gather(series, records, {a: down_errors(*amplified_layer(a)) for a in GEMM_AMPLIFICATIONS})
    write_atomically(folder / "outliers.json", json.dumps(found.as_json(), indent=1) + "\n")
    write_atomically(folder / "outliers.svg", difference_of(found))
    return OutliersReport(found, folder)
