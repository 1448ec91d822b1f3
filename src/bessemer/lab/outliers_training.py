"""Trains the runs of the outlier study in this process, and keeps each in a file when it is done.

Legend: D model, F feed-forward width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bessemer.core.errors import BessemerError, NonFinite, Stopped
from bessemer.core.resolve import resolve_model
from bessemer.data import open_dataset, prepare
from bessemer.keep.hub import signals_raise
from bessemer.keep.records import RecordWriter, read_records
from bessemer.lab.outliers import BASE, CHANNELS, OutlierRun
from bessemer.lab.progress import Progress
from bessemer.models.decoder import Decoder
from bessemer.models.parts import FeedForward
from bessemer.parallel.mesh import build_mesh
from bessemer.train.assembly import assemble
from bessemer.train.evaluate import WholeModel, evaluate, to_tensors
from bessemer.train.step import rank_micro_batches

__all__ = ["Amplified", "train_all", "train_one"]


class Amplified:
    """The loud channels of a model, the first two of each block: made at once, and kept by `restore` after each step.

    The second is the negative of the first: silu lets only one sign grow, so one of them is loud at every token.
    Their gradients are zero: that of a column of `down` would be A^2 times its neighbours' and rule the norm by which
    all are clipped. Weight decay would still move them.
    """

    def __init__(self, model: Decoder, amplification: float) -> None:
        self._kept: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for _, block in model.held_blocks():
            feed = cast(FeedForward, block.mlp)
            packed, down_DF = feed.gate_up.weight, feed.down.weight
            width = down_DF.shape[1]
            loud = torch.zeros(2 * width, 1, dtype=torch.bool, device=packed.device)
            loud[:CHANNELS] = loud[width : width + CHANNELS] = True
            with torch.no_grad():
                packed[0] *= amplification
                packed[1] = -packed[0]
                packed[width : width + CHANNELS] = packed[:CHANNELS]
                down_DF[:, :CHANNELS] /= amplification**2
            self._keep(packed, loud.expand_as(packed))
            self._keep(down_DF, loud[:width, 0].expand_as(down_DF))

    def _keep(self, weight: nn.Parameter, loud: Tensor) -> None:
        self._kept.append((weight, loud, weight.detach()[loud].clone()))
        weight.register_hook(lambda gradient: gradient.masked_fill(loud, 0.0))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def restore(self) -> None:
        for weight, loud, values in self._kept:
            weight[loud] = values


def train_one(run: OutlierRun, tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """The record of a run: `losses` of its steps, `val_loss` after the last, `seconds` that the steps took.
    Where it diverged: the losses up to there, and None."""
    job, start = run.job, time.perf_counter()
    spec = resolve_model(job.model)
    mesh = build_mesh(job, 0, torch.device("cpu"), spec)
    prepared = prepare(job)
    data, held_back = open_dataset(job, "train", prepared), open_dataset(job, "val", prepared)
    parts = assemble(job, spec, mesh)
    loud = Amplified(cast(Decoder, parts.module), run.amplification)
    losses: list[float] = []
    val_loss: float | None = None
    try:
        for step in range(run.steps):
            lists = rank_micro_batches(job, step, 0, 0)
            batches = (to_tensors(data.batch(ids), mesh.device) for ids in lists)
            result = parts.step.run(step, batches, len(lists))
            loud.restore()
            losses.append(result.loss)
            tell({"step": result.step, "loss": result.loss})
        model = WholeModel(parts.module, mesh)
        found = evaluate(model, held_back, sequences=job.train.eval_sequences, micro_batch=16).loss
        val_loss = found if math.isfinite(found) else None
    except NonFinite:
        pass
    return {"losses": losses, "val_loss": val_loss, "seconds": time.perf_counter() - start}


def train_all(runs: Sequence[OutlierRun], file: Path, progress: Progress) -> list[dict[str, Any]]:
    """The record of each run, in order. What stands in `file` already is not trained again; each new record is added
    to it. Stopped on SIGINT or SIGTERM: the run that was at work is begun again by the next call.
    BessemerError `lab-reference-diverged` where a run of bf16 diverged."""
    file.parent.mkdir(parents=True, exist_ok=True)
    there = list(read_records(file))
    found: list[dict[str, Any]] = []
    with RecordWriter(file) as writer, signals_raise() as wishes:
        for number, run in enumerate(runs, 1):
            record = next((r for r in there if r["key"] == run.key), None)
            if record is None:
                progress.begin(number, run)
                record = {"key": run.key, "arm": run.arm, "seed": run.job.train.seed, **train_one(run, progress.tell)}
                writer.write(record)
                if record["val_loss"] is not None:
                    progress.end(run, record["seconds"])
            elif record["val_loss"] is not None:
                progress.reused(number, run, record["seconds"])
            if record["val_loss"] is None:
                _refuse_diverged_base(run)
                progress.diverged(number, run)
            found.append(record)
    if wishes.names:
        raise Stopped(
            f"stopped on request after {len(found)} of {len(runs)} runs, which {file} keeps",
            fix="the same command goes on from there",
        )
    return found


def _refuse_diverged_base(run: OutlierRun) -> None:
    if run.arm == BASE:
        raise BessemerError(
            f"{run.title} diverged, so there is nothing to compare the other arms with",
            code="lab-reference-diverged",
            fix=f"a smaller --amplification than {run.amplification:g}",
        )
