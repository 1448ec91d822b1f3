"""Where a run goes on from: copies in memory where ranks were started again, the newest checkpoint that verifies, a
named one, published weights, or the seed."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from bessemer.core.errors import CheckpointError
from bessemer.core.job import Job
from bessemer.core.paths import user_path
from bessemer.keep.checkpoint import Checkpoint, CheckpointFolder
from bessemer.keep.memory_copies import settled
from bessemer.keep.slices import Slice, dtype_name, torch_dtype
from bessemer.models.quantise import refresh_amax
from bessemer.models.watched import refresh_fallen
from bessemer.train.assembly import Assembly
from bessemer.train.restore_memory import fetch_from_peers, from_memory
from bessemer.train.state import FALL_BACK_PREFIX, HISTORY_PREFIX, OPTIMIZER_PREFIX, filled_slices, state_names

__all__ = ["Origin", "Restored", "checkpoint_meta", "restore"]

_SCALING = (HISTORY_PREFIX, FALL_BACK_PREFIX)
"""Of states that a run may lack which goes on from another recipe's."""


@dataclass(frozen=True)
class Origin:
    """Where to look, as the agent says. `vault`: the socket of this host's vault, whose memory comes first where ranks
    were started again; None: not there. `skip`: so many of the newest sound checkpoints are passed over. `settle`: the
    vault may still be writing for ranks that have died."""

    vault: Path | None = None
    skip: int = 0
    settle: Path | None = None

    @classmethod
    def of_environment(cls, vault: Path | None) -> Self:
        """BESSEMER_RESTORE: empty at a first start, else "memory", "disk", or "older:N"."""
        where, _, count = os.environ.get("BESSEMER_RESTORE", "").partition(":")
        return cls(vault if where == "memory" else None, int(count or 0), vault if where else None)


@dataclass(frozen=True)
class Restored:
    """`step` committed steps are in the state; `why` is the run's first log line. `source`: "memory", "peer"
    (another host's memory), "disk", "weights" or "seed". `path` is that of a checkpoint or of weights."""

    step: int
    source: str
    path: str | None
    why: str

    def told(self) -> dict[str, Any]:
        """The fields of the event `loaded`."""
        return {"step": self.step, "source": self.source, "path": self.path, "why": self.why}


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


def restore(parts: Assembly, run_folder: Path, data_fingerprint: str, origin: Origin = Origin()) -> Restored:
    """Fill the state of `parts` on every rank from the memory of the vault or where `run.resume` says; rank 0 chooses
    for all.

    CheckpointError: a named checkpoint that is missing or damaged, checkpoints of which none verifies, another data
    set or seed than the one that the cursor was counted in; memory-damaged where copies in memory were the only ones.
    """
    job, mesh = parts.job, parts.mesh
    refused, spoilt = "", False
    if origin.vault is not None:
        newest = CheckpointFolder(run_folder / "checkpoints").steps()[-1:] or [0]
        for source in ("memory", "peer"):
            problems = fetch_from_peers(origin.vault) if source == "peer" else ""
            found = from_memory(parts, origin.vault, at_least=newest[0])
            if found.step is not None:
                _check_meta(found.meta, job, data_fingerprint, "the memory of this host's vault")
                _take_in(parts, found.step)
                return Restored(found.step, source, None, found.why + refused + problems)
            refused, spoilt = f"{refused}; {found.why}{problems}", spoilt or found.spoilt
    choice = json.loads(mesh.broadcast_text(json.dumps(_choose(job, run_folder, origin) if mesh.rank == 0 else {})))
    why = choice["why"] + refused
    if choice["path"] is None:
        if spoilt:
            raise CheckpointError(f"there is no checkpoint on disk{refused}", code="memory-damaged")
        if job.model.weights is not None:
            return Restored(0, "weights", job.model.weights, "the job's weights; no step of this run is saved yet")
        return Restored(0, "seed", None, why)
    with Checkpoint.open(Path(choice["path"])) as checkpoint:
        _check_meta(checkpoint.meta, job, data_fingerprint, choice["path"])
        with filled_slices(parts.module, parts.optimizer) as slices:
            differs = _read(checkpoint, slices, _names(parts))
    _take_in(parts, checkpoint.step)
    told = [_recipe_changed(checkpoint.meta, job), differs]
    return Restored(checkpoint.step, "disk", choice["path"], "; ".join([why, *filter(None, told)]))


def _recipe_changed(meta: dict[str, Any], job: Job) -> str:
    before = meta.get("job", {}).get("precision", {}).get("recipe", job.precision.recipe)
    return "" if before == job.precision.recipe else f"trained under {before} so far, {job.precision.recipe} from here"


def _names(parts: Assembly) -> list[str]:
    """Of the whole state over all ranks."""
    return state_names(parts.spec, parts.job.train, parts.step.passes.amax_names, _fall_back_names(parts))


def _take_in(parts: Assembly, step: int) -> None:
    """What follows from a state that has been filled."""
    refresh_amax(parts.module)
    refresh_fallen(parts.module)
    parts.optimizer.set_steps(step)


def _fall_back_names(parts: Assembly) -> tuple[str, ...]:
    watching = parts.step.passes.watching
    return watching.names if watching is not None and watching.fall_back else ()


def _read(checkpoint: Checkpoint, slices: list[Slice], names: list[str]) -> str:
    """Fill the slices, and say what differs: a run may go on under another recipe. Moments that were kept in another
    type (`precision.moments`) are converted, one at a time."""
    stored = {name: checkpoint.info(name) for name in checkpoint.names()}
    note, odd = _scaling_differs(stored, slices, names)
    extra = [name for name in stored if name.startswith(_SCALING) and name not in names]
    expected = [name for name in names if name in stored or not name.startswith(_SCALING)] + extra
    own = [s for s in slices if s.name not in odd]
    other = [_other_type(stored, s) for s in own]
    checkpoint.read_into([s for s, differs in zip(own, other, strict=True) if not differs], expected=expected)
    for s in itertools.compress(own, other):
        read = torch.empty_like(s.tensor, dtype=torch_dtype(stored[s.name].dtype))
        checkpoint.read_into([replace(s, tensor=read)], partial=True)
        s.tensor.copy_(read)
    for s in (s for s in slices if s.name in odd and s.name in stored):
        kept = checkpoint.read_tensor(s.name)
        steps = min(kept.shape[-1], s.tensor.shape[-1])
        s.tensor.zero_()
        s.tensor[..., :steps] = kept[..., :steps]  # the newest
    return note


def _other_type(stored: Mapping[str, Any], s: Slice) -> bool:
    """Whether a moment is kept in another of the two types than this run's."""
    if not s.name.startswith(OPTIMIZER_PREFIX) or s.name not in stored:
        return False
    return {stored[s.name].dtype, dtype_name(s.tensor.dtype)} == {"F32", "BF16"}


def _scaling_differs(stored: Mapping[str, Any], slices: list[Slice], names: list[str]) -> tuple[str, set[str]]:
    """In words what the checkpoint has of scaling and this run doesn't, or the other way round; and the names of those
    slices here that it lacks (they begin as in a new run) or keeps for another number of steps."""
    told = []
    for prefix, what in ((HISTORY_PREFIX, "histories of amaxes"), (FALL_BACK_PREFIX, "layers' fall-backs")):
        has = any(name.startswith(prefix) for name in stored)
        wants = any(name.startswith(prefix) for name in names)
        if has != wants:
            told.append(f"{what} are " + ("left out: this run has none" if has else "begun: it has none"))
    scaling = [s for s in slices if s.name.startswith(_SCALING)]
    lacking = {s.name for s in scaling if s.name not in stored}
    longer = {s.name for s in scaling if s.name in stored and tuple(stored[s.name].shape) != tuple(s.global_shape)}
    told += ["histories of another length are cut or filled up"] if longer else []
    return "; ".join(told), lacking | longer


def _choose(job: Job, run_folder: Path, origin: Origin) -> dict[str, str | None]:
    """The run's own newest checkpoint goes before one named by `run.resume`, from which the run once began."""
    if origin.settle is not None:
        settled(origin.settle)
    folder = CheckpointFolder(run_folder / "checkpoints")
    found = folder.newest_verified()
    for _ in range(origin.skip):
        if found.checkpoint is not None:
            found = folder.newest_verified(before=found.checkpoint.step)
    if found.checkpoint is not None:
        older = f"an older checkpoint, verified; {origin.skip} newer passed over, from which the run has failed"
        return {"path": str(found.checkpoint.path), "why": older if origin.skip else found.why}
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
