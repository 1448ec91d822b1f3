"""torch's flight-recorder tool, for tests."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from ranks import run_ranks

__all__ = ["said_by_torch"]


def said_by_torch(folder: Path) -> str:
    """What `torchfrtrace folder` prints."""
    return run_ranks(1, _main, str(folder))[0]


def _main(rank: int, world_size: int, folder: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        from torch.distributed.flight_recorder.fr_trace import main

        main([folder])
    return said.getvalue()
