"""Reading a shard back and comparing it with the manifest's checksums.

Bytes are read by `pread`, not through a mapping, so that an unreadable block is an error and not a killed process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from bessemer.keep.manifest import StoredFile, StoredSlice, damaged

__all__ = ["check_file", "check_slices"]

_CHUNK_BYTES = 4 << 20
_THREADS = 2


def check_file(folder: Path, stored: StoredFile) -> None:
    """Size and header of a shard; CheckpointError (checkpoint-damaged) that names the file and what is wrong."""
    path = folder / stored.file
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != stored.size:
                raise damaged(f"{path}: {size} bytes, the manifest says {stored.size}")
            header = os.pread(file.fileno(), stored.header_bytes, 0)
    except OSError as error:
        raise damaged(f"{path}: can't be read ({error.strerror})") from error
    if xxhash.xxh3_64_hexdigest(header) != stored.header_checksum:
        raise damaged(f"{path}: its header does not match its checksum")


def check_slices(folder: Path, slices: Iterable[StoredSlice], *, from_disk: bool = False) -> None:
    """Compare the bytes of every slice with its checksum; the first that differs is a CheckpointError naming file
    and tensor. `from_disk` first asks the kernel to forget its cached pages, so that what the disk holds is read."""
    by_file: dict[str, list[StoredSlice]] = {}
    for s in slices:
        by_file.setdefault(s.file, []).append(s)
    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(_check_in_file, folder / name, group, from_disk) for name, group in by_file.items()]:
            done.result()


def _check_in_file(path: Path, slices: list[StoredSlice], from_disk: bool) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            if from_disk:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            for s in slices:
                found = _checksum(file.fileno(), s, buffer)
                if found != s.checksum:
                    raise damaged(
                        f"{path}: tensor {s.name!r} {s.box} does not match its checksum "
                        f"(stored {s.checksum}, read {found})"
                    )
    except OSError as error:
        raise damaged(f"{path}: can't be read ({error.strerror})") from error


def _checksum(descriptor: int, stored: StoredSlice, buffer: memoryview) -> str:
    hasher = xxhash.xxh3_64()
    at, end = stored.byte_offset, stored.byte_offset + stored.nbytes
    while at < end:
        count = os.preadv(descriptor, [buffer[: min(_CHUNK_BYTES, end - at)]], at)
        if count == 0:
            break  # shorter than it was a moment ago: the checksum will differ
        hasher.update(buffer[:count])
        at += count
    return hasher.hexdigest()
