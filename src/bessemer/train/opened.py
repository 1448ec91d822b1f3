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
from bessemer.keep.records import write_atomically
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.train.assembly import COMPUTE_DTYPES
from bessemer.train.state import state_slices

__all__ = ["TOKENIZER_FILE", "Trained", "keep_tokenizer", "open_trained"]

TOKENIZER_FILE = "tokenizer.json"
"""In the run folder, so that a model can be used and exported where its corpus and cache are not."""


@dataclass(frozen=True)
class Trained:
    """A verified checkpoint, the job that wrote it, and the run folder that it lies in."""

    job: Job
    spec: ModelSpec
    checkpoint: Checkpoint
    run_folder: Path

    @property
    def step(self) -> int:
        return int(self.checkpoint.meta["step"])

    @property
    def tokenizer_file(self) -> Path:
        """The run's tokenizer.json; CheckpointError where it is missing."""
        path = self.run_folder / TOKENIZER_FILE
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing: the run's tokenizer",
                code="no-tokenizer",
                fix=f"copy the tokenizer.json of the same run to {path}",
            )
        return path

    def module(self, device: torch.device | str = "cpu") -> Decoder:
        """The model with this checkpoint's weights, whole, on `device`."""
        dtype = COMPUTE_DTYPES[self.job.precision.recipe]
        module = build(self.spec, seed=self.job.train.seed, device=device, compute_dtype=dtype)
        self.checkpoint.read_into(state_slices(module, None), partial=True)
        return module.eval()


def open_trained(path: str | Path) -> Trained:
    """The newest checkpoint that verifies in the run folder `path`, or exactly `path` if it is a checkpoint.

    RequestError when `path` is neither; CheckpointError when nothing there verifies.
    """
    where = Path(path).absolute()
    if (where / "manifest.json").exists():
        checkpoint, run_folder = CheckpointFolder(where.parent).open(where), where.parent.parent
    elif (where / "checkpoints").is_dir():
        found = CheckpointFolder(where / "checkpoints").newest_verified()
        if found.checkpoint is None:
            raise CheckpointError(f"no checkpoint in {where} yet", code="no-checkpoint", fix="train first, or wait")
        checkpoint, run_folder = found.checkpoint, where
    else:
        raise RequestError(
            f"{where} is neither a run folder nor a checkpoint",
            code="no-run",
            fix="name a folder such as runs/first-heat or runs/first-heat/checkpoints/step-100",
        )
    job = Job.model_validate(checkpoint.meta["job"])
    return Trained(job, resolve_model(job.model), checkpoint, run_folder)


def keep_tokenizer(run_folder: Path, tokenizer_json: Path) -> None:
    """Copy the run's tokenizer into its folder, whole or not at all."""
    target = run_folder / TOKENIZER_FILE
    if not target.exists():
        write_atomically(target, tokenizer_json.read_text(encoding="utf-8"))
