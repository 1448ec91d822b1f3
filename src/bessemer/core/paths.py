"""Paths as people write them in a job."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["user_path"]


def user_path(text: str | os.PathLike[str]) -> Path:
    """`text` as a path, with a leading "~" or "~name" as that home folder; other names that begin with "~" stay."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises where there is no such user
