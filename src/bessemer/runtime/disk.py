"""What a folder takes: how fast a file is written and made durable, how much room there is."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Disk", "measure_disk", "nearest_folder"]

_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Disk:
    """`folder`: where the test file was. `fsync_s`: of one small file, created, written and made durable, the median
    of five. `free_inodes`: None where the filesystem has no fixed number of them. `fault`: "" or what failed."""

    folder: str
    write_bytes_per_s: float
    fsync_s: float
    free_bytes: int
    free_inodes: int | None
    fault: str = ""


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    while not path.is_dir():
        path = path.parent
    return path


def measure_disk(folder: Path, size_bytes: int) -> Disk:
    """Writes `size_bytes` into a temporary file of `folder` (or the nearest one above it), makes it durable, reads the
    first and last piece back, removes it. An error of the system is the `fault` and no exception: it is a finding."""
    folder = nearest_folder(folder)
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    inodes = room.f_favail if room.f_files else None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".takeoff-") as file:
            rate, fault = _write(file.fileno(), size_bytes)
        pauses = sorted(_small_file_s(folder) for _ in range(5))
    except OSError as error:
        return Disk(str(folder), 0.0, 0.0, free, inodes, f"{error.strerror or error}")
    return Disk(str(folder), rate, pauses[2], free, inodes, fault)


def _write(file: int, size_bytes: int) -> tuple[float, str]:
    """(bytes/s with the fsync, "" or what came back wrong)."""
    piece = os.urandom(_PIECE_BYTES)  # a filesystem that compresses gains nothing
    start = time.perf_counter()
    written = 0
    while written < size_bytes:
        written += os.write(file, piece)
    os.fsync(file)
    rate = written / (time.perf_counter() - start)
    short = min(_PIECE_BYTES, written)
    back = os.pread(file, short, 0)
    return rate, "" if back == piece[:short] else "what was written did not come back"


def _small_file_s(folder: Path) -> float:
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".takeoff-") as file:
        file.write(b"durable\n")
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start
