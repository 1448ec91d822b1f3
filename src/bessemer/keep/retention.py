"""Which checkpoints stay. Older ones go only after a newer one is durable and verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bessemer.core.errors import CheckpointError
from bessemer.keep.manifest import step_folder, steps_in
from bessemer.keep.reader import Checkpoint
from bessemer.keep.writer import WriteOptions, remove

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_last`, and for ever those of steps divisible by `keep_every` (0: none)."""

    keep_last: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(
                f"keep_last = {self.keep_last} must be at least 1, keep_every = {self.keep_every} at least 0"
            )

    def apply(self, root: Path, verified: int, options: WriteOptions) -> list[int]:
        """Delete what may go now that step `verified` is durable and verified; returns the deleted steps, ascending.

        Only steps before `verified` go. A checkpoint whose manifest or files are unsound does not count as one of the
        `keep_last`, so that damage never pushes out a good one.
        """
        kept, doomed = 0, []
        for step in reversed([s for s in steps_in(root) if s <= verified]):
            if kept >= self.keep_last:
                if not self.keep_every or step % self.keep_every:
                    doomed.append(step)
            elif step == verified or _is_sound(root, step):
                kept += 1
        doomed.reverse()
        for step in doomed:
            remove(root, step, options)
        return doomed


def _is_sound(root: Path, step: int) -> bool:
    try:
        Checkpoint.open(root / step_folder(step)).close()
    except CheckpointError:
        return False
    return True
