"""Writing a checkpoint: shards aside, flushed and read back, the manifest last, then one rename.

    checkpoints/.step-N.tmp-TOKEN/    while it is being written; readers never look there
    checkpoints/.step-N.old-TOKEN/    an earlier step-N for the moment in which it is replaced
    checkpoints/.step-N.gone-TOKEN/   an earlier step-N while it is deleted
    checkpoints/step-N/               complete

The token names the writer, so that what a dead writer left is told from what a living one is writing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer.core.errors import CheckpointError
from bessemer.keep.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    StoredSlice,
    coverage_faults,
    step_folder,
)
from bessemer.keep.slices import DTYPE_BYTES, Box
from bessemer.keep.verify import check_file, check_slices

__all__ = [
    "Block",
    "Fault",
    "Shards",
    "Space",
    "WriteOptions",
    "aside_folder",
    "clean_leftovers",
    "finalise",
    "own_token",
    "remove",
    "write_errors",
    "write_shards",
    "write_sealed",
]

SHARD_BYTES = 4 << 30
"""A file of this size is written and read in seconds; more files only lengthen the manifest."""

_CHUNK_BYTES = 4 << 20  # hashed, then written while still in the cache
_ASIDE = re.compile(r"\.step-(0|[1-9][0-9]*)\.(tmp|old|gone)-(.+)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Block:
    """A slice to be written: where it belongs, its safetensors dtype, and its bytes in memory."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    data: memoryview


@dataclass
class Fault:
    """For tests only: where the writing process dies as if by kill -9.

    `after_bytes`: once that many bytes of shards and manifest are written in all. `at`: when it reaches that point of
    `finalise` or of a deletion: before-manifest, before-rename, between-renames, after-rename, before-delete.
    """

    after_bytes: int | None = None
    at: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def write(self, descriptor: int, data: memoryview) -> None:
        if self.after_bytes is None:
            _write_all(descriptor, data)
            return
        with self._lock:
            _write_all(descriptor, data[: self.after_bytes])
            self.after_bytes -= len(data)
            if self.after_bytes <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, point: str) -> None:
        if self.at == point:
            os.kill(os.getpid(), signal.SIGKILL)


class Space:
    """Free bytes of a file system, less what writers of this process have claimed and not written yet."""

    def __init__(self) -> None:
        self._claimed = 0
        self._lock = threading.Lock()

    def claim(self, folder: Path, size: int) -> None:
        """CheckpointError (disk-full) when `size` more bytes don't fit."""
        with self._lock:
            info = os.statvfs(folder)
            free = info.f_bavail * info.f_frsize - self._claimed
            if size > free:
                raise CheckpointError(
                    f"{folder.parent}: {size:,} bytes are needed and {max(free, 0):,} are free",
                    code="disk-full",
                    fix="free space there, or keep fewer checkpoints (keep.keep_last, keep.keep_every)",
                )
            self._claimed += size

    def release(self, size: int) -> None:
        with self._lock:
            self._claimed -= size


@dataclass(frozen=True)
class WriteOptions:
    """How to write: the largest shard file, the writer's token, the common free space, and a fault for tests."""

    token: str
    shard_bytes: int = SHARD_BYTES
    space: Space = field(default_factory=Space)
    fault: Fault = field(default_factory=Fault)


@dataclass(frozen=True)
class Shards:
    """What one rank wrote; all of it durable and read back."""

    files: tuple[StoredFile, ...] = ()
    slices: tuple[StoredSlice, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(f.size for f in self.files)


def own_token() -> str:
    """A token that says which process of which host writes, so that a later start can tell whether it still lives."""
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid())}"


def aside_folder(root: Path, step: int, token: str, kind: str = "tmp") -> Path:
    return root / f".step-{step}.{kind}-{token}"


def write_shards(aside: Path, rank: int, blocks: Sequence[Block], options: WriteOptions) -> Shards:
    """Write the blocks of one rank into `aside` (which exists), flush them, read them back and compare.

    Files are `rank-R.safetensors`, or `rank-R-0.safetensors`, `rank-R-1...` when they exceed `options.shard_bytes`.
    CheckpointError: disk-full before the first byte or while writing; checkpoint-damaged if the disk returns
    something else than was written. OSError for anything else.
    """
    groups = _group(blocks, options.shard_bytes)
    names = (
        [f"rank-{rank}.safetensors"]
        if len(groups) == 1
        else [f"rank-{rank}-{i}.safetensors" for i in range(len(groups))]
    )
    headers = [_header(group) for group in groups]
    size = sum(len(h) for h in headers) + sum(len(b.data) for b in blocks)
    options.space.claim(aside, size)
    try:
        results = [
            _write_file(aside / name, header, group, options)
            for name, header, group in zip(names, headers, groups, strict=True)
        ]
    finally:
        options.space.release(size)
    shards = Shards(tuple(f for f, _ in results), tuple(s for _, stored in results for s in stored))
    for stored in shards.files:
        check_file(aside, stored)
    check_slices(aside, shards.slices, from_disk=True)
    return shards


def finalise(root: Path, step: int, manifest: Manifest, options: WriteOptions) -> Path:
    """Complete the checkpoint whose shards lie aside: coverage, manifest, rename. Returns its folder.

    CheckpointError (checkpoint-coverage) lists every tensor that the shards do not tile exactly.
    """
    faults = coverage_faults(manifest.slices)
    if faults:
        raise CheckpointError(
            f"the slices handed in for step {step} are not one whole state:" + "".join(f"\n    {t}" for t in faults),
            code="checkpoint-coverage",
            step=step,
        )
    aside, target = aside_folder(root, step, options.token), root / step_folder(step)
    options.fault.reach("before-manifest")
    write_sealed(aside / MANIFEST, manifest.to_bytes(), options)
    options.fault.reach("before-rename")
    replaced = aside_folder(root, step, options.token, "old")
    if target.exists():
        os.rename(target, replaced)
        options.fault.reach("between-renames")
    os.rename(aside, target)
    _sync_folder(root)
    options.fault.reach("after-rename")
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def write_sealed(path: Path, content: bytes, options: WriteOptions) -> None:
    """Write a whole file beside its name, flush it, rename it into place, flush the folder."""
    beside = path.with_name(path.name + ".new")
    with _created(beside) as descriptor:
        options.fault.write(descriptor, memoryview(content))
        os.fsync(descriptor)
    os.rename(beside, path)
    _sync_folder(path.parent)


def remove(root: Path, step: int, options: WriteOptions) -> None:
    """Delete `step-N` so that no moment shows half of it: renamed aside first."""
    gone = aside_folder(root, step, options.token, "gone")
    os.rename(root / step_folder(step), gone)
    _sync_folder(root)
    options.fault.reach("before-delete")
    shutil.rmtree(gone)


def clean_leftovers(root: Path, token: str) -> list[str]:
    """Clear what dead writers left in `root`; returns the names. Folders of `token` and of living writers of this host
    stay. A checkpoint that was being replaced when its writer died goes back to its place."""
    cleaned: list[str] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _ASIDE.fullmatch(path.name)
        if match is None or match[3] == token or _lives(match[3]):
            continue
        target = root / step_folder(int(match[1]))
        if match[2] == "old" and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)
        cleaned.append(path.name)
    return cleaned


@contextlib.contextmanager
def write_errors(step: int) -> Iterator[None]:
    """Turns what goes wrong while writing step `step` into a CheckpointError: disk-full or checkpoint-write."""
    try:
        yield
    except CheckpointError as error:
        error.step = step
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in _FULL
        raise CheckpointError(
            f"{where}{error.strerror or error}",
            code="disk-full" if full else "checkpoint-write",
            fix="free space there, or keep fewer checkpoints (keep.keep_last, keep.keep_every)" if full else "",
            step=step,
        ) from error


def _group(blocks: Sequence[Block], limit: int) -> list[list[Block]]:
    """Files of at most `limit` bytes (a larger block has its own). Wide dtypes come first: so each block begins at a
    multiple of its element size without padding, which the format forbids."""
    groups: list[list[Block]] = []
    size = 0
    for block in sorted(blocks, key=lambda b: -DTYPE_BYTES[b.dtype]):
        if not groups or size + len(block.data) > limit:
            groups.append([])
            size = 0
        groups[-1].append(block)
        size += len(block.data)
    return groups


def _header(blocks: Sequence[Block]) -> bytes:
    """The safetensors header: its length in 8 bytes, then JSON, padded with spaces to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for b in blocks:
        key = b.name if b.box.shape == b.global_shape else f"{b.name}{b.box}"
        entries[key] = {"dtype": b.dtype, "shape": b.box.shape, "data_offsets": [at, at + len(b.data)]}
        at += len(b.data)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(
    path: Path, header: bytes, blocks: Sequence[Block], options: WriteOptions
) -> tuple[StoredFile, list[StoredSlice]]:
    stored: list[StoredSlice] = []
    at = len(header)
    with _created(path) as descriptor:
        options.fault.write(descriptor, memoryview(header))
        for b in blocks:
            hasher = xxhash.xxh3_64()
            for start in range(0, len(b.data), _CHUNK_BYTES):
                chunk = b.data[start : start + _CHUNK_BYTES]
                hasher.update(chunk)
                options.fault.write(descriptor, chunk)
            place = (b.name, b.global_shape, b.dtype, b.box.offset, b.box.shape)
            stored.append(StoredSlice(*place, path.name, at, hasher.hexdigest()))
            at += len(b.data)
        os.fsync(descriptor)
    return StoredFile(path.name, at, len(header), xxhash.xxh3_64_hexdigest(header)), stored


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """A new file's descriptor; OSErrors from writing to it carry its path."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _start_time(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def _lives(token: str) -> bool:
    host, _, rest = token.partition("-")
    pid, _, start = rest.partition("-")
    return host == _host() and pid.isdecimal() and start.isdecimal() and _start_time(int(pid)) == int(start)
