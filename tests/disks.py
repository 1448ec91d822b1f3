"""Disks of tests that become full."""

from __future__ import annotations

from pathlib import Path


def fill_up(file: Path) -> None:
    """Let `file` take all the room that its disk has left."""
    with file.open("wb", buffering=0) as out:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while out.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
