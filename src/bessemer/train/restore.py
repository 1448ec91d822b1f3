"""Where a run goes on from: the newest checkpoint that verifies, a named one, published weights, or the seed."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bessemer.core.errors import CheckpointError
from bessemer.core.job import Job
from bessemer.core.paths import user_path
from bessemer.keep.checkpoint import Checkpoint, CheckpointFolder
from bessemer.keep.slices import Slice, dtype_name, torch_dtype
from bessemer.models.quantise import refresh_amax
from bessemer.models.watched import refresh_fallen
from bessemer.train.assembly import Assembly
from bessemer.train.state import OPTIMIZER_PREFIX, filled_slices, state_names

__all__ = ["Restored", "checkpoint_meta", "restore"]


@dataclass(frozen=True)
class Restored:
    """`step` committed steps are in the state; `why` is the run's first log line, `path` None at a fresh start."""

    step: int
    path: str | None
    why: str


def checkpoint_meta(job: Job, step: int, data_fingerprint: str) -> dict[str, Any]:
    """What a checkpoint says of itself beside its tensors: one committed unit with them."""
    return {
        "step": step,
        "cursor": job.samples_before(step),
        "seed": job.train.seed,
        "job_hash": job.hash,
        "identity": job.identity,
        "job": job.model_dump(mode="json"),
        "data_fingerprint": data_fingerprint,
        "world_size": job.layout.world_size,
        "torch": torch.__version__,
    }


def restore(parts: Assembly, run_folder: Path, data_fingerprint: str) -> Restored:
    """Fill the state of `parts` on every rank from where `run.resume` says; rank 0 chooses for all.

    CheckpointError: a named checkpoint that is missing or damaged, checkpoints of which none verifies, another data
    set or seed than the one that the cursor was counted in.
    """
    job, mesh = parts.job, parts.mesh
    choice = json.loads(mesh.broadcast_text(json.dumps(_choose(job, run_folder) if mesh.rank == 0 else {})))
    if choice["path"] is None:
        if job.model.weights is not None:
            return Restored(0, job.model.weights, "the job's weights; no step of this run is saved yet")
        return Restored(0, None, choice["why"])
    with Checkpoint.open(Path(choice["path"])) as checkpoint:
        _check_meta(checkpoint.meta, job, data_fingerprint, choice["path"])
        names = state_names(parts.spec, job.train, parts.step.passes.amax_names, _fall_back_names(parts))
        with filled_slices(parts.module, parts.optimizer) as slices:
            _read(checkpoint, slices, names)
    refresh_amax(parts.module)
    refresh_fallen(parts.module)
    parts.optimizer.set_steps(checkpoint.step)
    return Restored(checkpoint.step, choice["path"], choice["why"])


def _fall_back_names(parts: Assembly) -> tuple[str, ...]:
    watching = parts.step.passes.watching
    return watching.names if watching is not None and watching.fall_back else ()


def _read(checkpoint: Checkpoint, slices: list[Slice], names: list[str]) -> None:
    """Fill the slices. Moments that were kept in another type (`precision.moments`) are converted, one at a time."""
    stored = {name: checkpoint.info(name).dtype for name in checkpoint.names() if name.startswith(OPTIMIZER_PREFIX)}
    own = [dtype_name(s.tensor.dtype) for s in slices]
    other = [{stored.get(s.name, dtype), dtype} == {"F32", "BF16"} for s, dtype in zip(slices, own, strict=True)]
    checkpoint.read_into([s for s, differs in zip(slices, other, strict=True) if not differs], expected=names)
    for s in itertools.compress(slices, other):
        read = torch.empty_like(s.tensor, dtype=torch_dtype(stored[s.name]))
        checkpoint.read_into([replace(s, tensor=read)], partial=True)
        s.tensor.copy_(read)


def _choose(job: Job, run_folder: Path) -> dict[str, str | None]:
    """The run's own newest checkpoint goes before one named by `run.resume`, from which the run once began."""
    folder = CheckpointFolder(run_folder / "checkpoints")
    found = folder.newest_verified()
    if found.checkpoint is not None:
        return {"path": str(found.checkpoint.path), "why": found.why}
    if job.run.resume not in ("auto", "never"):
        checkpoint = folder.open(user_path(job.run.resume))
        return {"path": str(checkpoint.path), "why": "named by run.resume"}
    return {"path": None, "why": found.why}


def _check_meta(meta: dict[str, Any], job: Job, data_fingerprint: str, path: str) -> None:
    """A cursor means something only in the data and the order it was counted in."""
    if meta["data_fingerprint"] != data_fingerprint:
        raise CheckpointError(
            f"{path} was trained on other data (fingerprint {meta['data_fingerprint']}, now {data_fingerprint}): "
            "its cursor would point at other samples",
            code="other-data",
            fix="restore the corpus and the [data] fields, or start a new run from its weights: "
            "bessemer export, then model.weights = FOLDER",
        )
    if meta["seed"] != job.train.seed:
        raise CheckpointError(
            f"{path} was trained with train.seed = {meta['seed']}, this job has {job.train.seed}: the order of the "
            "samples follows from it, so its cursor would point at other samples",
            code="other-seed",
            fix=f"train.seed = {meta['seed']}, or start a new run from its weights: bessemer export, then "
            "model.weights = FOLDER",
        )
    if int(meta["step"]) > job.train.steps:
        raise CheckpointError(
            f"{path} stands at step {meta['step']}, beyond the {job.train.steps} steps of this job",
            code="beyond-the-end",
            fix=f"train.steps above {meta['step']}, or an earlier checkpoint",
        )
    cursor, expected = int(meta["cursor"]), job.samples_before(int(meta["step"]))
    if cursor != expected:
        raise CheckpointError(
            f"{path} stands at sample {cursor} after {meta['step']} steps; this job's batch sizes would put it at "
            f"{expected}",
            code="other-cursor",
            fix="give train.global_batch and train.batch_ramp the values of the checkpoint's job",
        )
