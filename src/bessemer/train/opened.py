"""A trained model as it lies on disk: from a run folder or one of its checkpoints to a module ready for use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bessemer.core.errors import CheckpointError, RequestError
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.keep.checkpoint import Checkpoint, CheckpointFolder
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.train.assembly import COMPUTE_DTYPES
from bessemer.train.state import OPTIMIZER_PREFIX, state_slices

__all__ = ["Trained", "open_trained"]


@dataclass(frozen=True)
class Trained:
    """A verified checkpoint and the job that wrote it."""

    job: Job
    spec: ModelSpec
    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        return int(self.checkpoint.meta["step"])

    def module(self, device: torch.device | str = "cpu") -> Decoder:
        """The model with this checkpoint's weights, whole, on `device`."""
        dtype = COMPUTE_DTYPES[self.job.precision.recipe]
        module = build(self.spec, seed=self.job.train.seed, device=device, compute_dtype=dtype)
        self.checkpoint.read_into(state_slices(module, None), ignore=(OPTIMIZER_PREFIX,))
        return module.eval()


def open_trained(path: str | Path) -> Trained:
    """The newest checkpoint that verifies in the run folder `path`, or exactly `path` if it is a checkpoint.

    RequestError when `path` is neither; CheckpointError when nothing there verifies.
    """
    where = Path(path)
    if (where / "manifest.json").exists():
        checkpoint = CheckpointFolder(where.parent).open(where)
    elif (where / "checkpoints").is_dir():
        found = CheckpointFolder(where / "checkpoints").newest_verified()
        if found.checkpoint is None:
            raise CheckpointError(f"no checkpoint in {where} yet", code="no-checkpoint", fix="train first, or wait")
        checkpoint = found.checkpoint
    else:
        raise RequestError(
            f"{where} is neither a run folder nor a checkpoint",
            code="no-run",
            fix="name a folder such as runs/first-heat or runs/first-heat/checkpoints/step-100",
        )
    job = Job.model_validate(checkpoint.meta["job"])
    return Trained(job, resolve_model(job.model), checkpoint)
