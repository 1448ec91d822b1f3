"""The checkpoints of a run: find the newest that verifies, open one by name, write one without the vault.

folder = CheckpointFolder(run / "checkpoints")
found = folder.newest_verified()
print(found.line)
if found.checkpoint is not None:
    found.checkpoint.read_into(slices)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bessemer.core.errors import CheckpointError
from bessemer.keep.manifest import Manifest, step_folder, steps_in
from bessemer.keep.reader import Checkpoint, Differences, TensorInfo
from bessemer.keep.retention import Retention
from bessemer.keep.slices import Slice, dtype_name
from bessemer.keep.writer import (
    Block,
    WriteOptions,
    aside_folder,
    clean_leftovers,
    finalise,
    own_token,
    remove,
    write_errors,
    write_shards,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Differences",
    "Found",
    "Refused",
    "Retention",
    "Slice",
    "TensorInfo",
    "write_checkpoint",
]


class Refused(NamedTuple):
    """A checkpoint that can't be used, and why."""

    step: int
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{step_folder(self.step)}: {self.reason}"


class Found(NamedTuple):
    """What to start from: a verified checkpoint or None, and the newer ones that were refused."""

    checkpoint: Checkpoint | None
    refused: tuple[Refused, ...]

    @property
    def why(self) -> str:
        """The reason for this choice, for the log line and the event `loaded`."""
        if self.checkpoint is None:
            return "there is no checkpoint yet"
        if not self.refused:
            return "the newest checkpoint, verified"
        return "the newest that verifies; refused " + "; ".join(map(str, self.refused))

    @property
    def line(self) -> str:
        """The first log line: what was loaded, from where and why."""
        if self.checkpoint is None:
            return f"starting at step 0: {self.why}"
        return f"loaded step {self.checkpoint.step} from {self.checkpoint.path}: {self.why}"


class CheckpointFolder:
    """`runs/<name>/checkpoints`; it need not exist yet."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def steps(self) -> list[int]:
        """The steps that have a folder, ascending; none was verified."""
        return steps_in(self.root)

    def newest_verified(self, *, before: int | None = None) -> Found:
        """The newest checkpoint (of a step below `before`, if given) of which every byte verifies, and the refused.

        CheckpointError (checkpoint-none) when there are some and none verifies, with the reason for each.
        """
        refused: list[Refused] = []
        for step in reversed(self.steps()):
            if before is not None and step >= before:
                continue
            path = self.root / step_folder(step)
            try:
                checkpoint = Checkpoint.open(path)
                checkpoint.verify()
            except CheckpointError as error:
                refused.append(Refused(step, path, error.message))
                continue
            return Found(checkpoint, tuple(refused))
        if refused:
            raise CheckpointError(
                f"none of the {len(refused)} checkpoints in {self.root} can be used:"
                + "".join(f"\n    {r}" for r in refused),
                code="checkpoint-none",
                fix="put back a copy of one, or start a run of its own: --set run.name=NAME",
            )
        return Found(None, ())

    def open(self, which: int | str | Path, *, verify: bool = True) -> Checkpoint:
        """The checkpoint of a step of this folder, or at a path. Nothing else is tried in its place.

        With `verify` every byte is compared with its checksum now; without, `read_into` does so for what it reads.
        CheckpointError (checkpoint-missing) lists the steps that are there.
        """
        path = self.root / step_folder(which) if isinstance(which, int) else Path(which)
        checkpoint = Checkpoint.open(path)
        if verify:
            checkpoint.verify()
        return checkpoint

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step, crash-safe. The caller knows that it is not needed."""
        remove(self.root, step, WriteOptions(own_token()))

    def clean(self, token: str | None = None) -> list[str]:
        """Clear what dead writers left (not folders of `token`); returns the names. The vault does so at its start."""
        return clean_leftovers(self.root, token or own_token())


def write_checkpoint(
    root: Path | str,
    step: int,
    slices: Sequence[Slice],
    meta: Mapping[str, Any],
    *,
    options: WriteOptions | None = None,
    retention: Retention | None = None,
) -> Path:
    """Write `root/step-N` from this process alone, without the vault, and return it once it is durable and verified.

    `slices` tile every tensor; `meta` gets `step`. CheckpointError: disk-full, checkpoint-write, checkpoint-coverage,
    checkpoint-damaged (the disk returned other bytes); nothing torn is left and nothing older is lost.
    """
    root = Path(root)
    options = options or WriteOptions(own_token())
    with write_errors(step):
        root.mkdir(parents=True, exist_ok=True)
        aside = aside_folder(root, step, options.token)
        shutil.rmtree(aside, ignore_errors=True)
        os.mkdir(aside)
        try:
            shards = write_shards(aside, 0, [_block(s) for s in slices if not is_empty(s)], options)
            manifest = Manifest({**meta, "step": step}, shards.files, shards.slices)
            path = finalise(root, step, manifest, options)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if retention is not None:
            retention.apply(root, step, options)
    return path


def is_empty(s: Slice) -> bool:
    """Whether a rank owns nothing of a tensor that has elements: then there is nothing to store."""
    return s.box.volume == 0 and 0 not in s.global_shape


def _block(s: Slice) -> Block:
    return Block(s.name, tuple(s.global_shape), dtype_name(s.tensor.dtype), s.box, _bytes_of(s.tensor))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
