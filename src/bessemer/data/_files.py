"""Durable writing and locking of cache files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bessemer.core.errors import DataError

__all__ = ["cache_errors", "locked", "read_json", "write_durable", "write_json"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


def write_durable(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Writes `path` so that it exists whole or not at all: aside, flushed to the device, renamed, folder flushed."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    write_durable(path, [json.dumps(value, indent=1).encode()])


def read_json(path: Path) -> Any | None:
    """The file's value, or None where it is absent or was damaged (then it is made again)."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, waiting for it. The kernel drops the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def cache_errors(cache: Path) -> Iterator[None]:
    """Turns a full or unwritable cache into a DataError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DataError(
                f"no space left for tokens in {cache} ({error})",
                code="cache-full",
                fix='free some space, or data.cache = "a folder on another disk"; finished shards are kept',
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise DataError(
                f"can't write to the cache {cache} ({error})",
                code="cache-unwritable",
                fix='data.cache = "a folder you may write to"',
            ) from error
        raise
