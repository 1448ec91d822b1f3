"""`metrics.jsonl` and `events.jsonl`: one JSON object a line, written by one process only, read by anybody.

A writer that dies leaves at most a torn last line. Readers leave it out; the next writer cuts it off.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bessemer.core.errors import CheckpointError, DataError

__all__ = ["RecordWriter", "cut_records", "read_records", "write_atomically"]


_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_WAITING = 100_000
"""Lines that wait for room, of some hundred bytes each."""


class RecordWriter:
    """Appends records to a .jsonl file. Each line is in the page cache when `write` returns; `sync` makes it durable.

    A process that is killed therefore loses no line, and a machine that dies none from before the last `sync`. While
    the disk is full, lines wait in memory, in order; each later `write` tries to get rid of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, _whole_bytes(path))

    def write(self, record: Mapping[str, Any]) -> None:
        """One line. NaN and infinity, which JSON lacks, are written as null. OSError where it can't be written for
        another reason than a full disk, or too many lines wait."""
        line = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False) + "\n"
        self._waiting.append(line.encode())
        self._catch_up()
        if len(self._waiting) > _MOST_WAITING:
            raise self._full()

    @property
    def waiting(self) -> int:
        """How many lines the disk has no room for."""
        return len(self._waiting)

    def sync(self) -> None:
        self._catch_up()
        os.fsync(self._file)

    def close(self) -> None:
        """OSError where lines are left for which there is no room."""
        if self._file >= 0:
            try:
                self.sync()
            finally:
                os.close(self._file)
                self._file = -1
            if self._waiting:
                raise self._full()

    def _catch_up(self) -> None:
        """Write what waits, as far as there is room."""
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._file, line)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                return
            if written != len(line):  # a full disk takes a part: take it back, so that the file stays whole
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                return
            self._waiting.popleft()

    def _full(self) -> OSError:
        return OSError(errno.ENOSPC, f"no space left for {len(self._waiting)} lines of {self.path}")

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file in order; none when it is absent. A torn last line is left out.

    Raises DataError, with file and line number, for a bad line anywhere else: that is damage, not an interruption.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: not a JSON object: {error}",
                    code="damaged-records",
                    fix=f"delete line {number} of {path}, or restore the file",
                ) from error
            yield record


def cut_records(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrites the file with only the records that `keep` accepts; returns how many were dropped.

    Written aside, flushed and renamed, so that a crash leaves the old file or the new one.
    """
    records = list(read_records(path))
    kept = [r for r in records if keep(r)]
    torn = path.exists() and _whole_bytes(path) != path.stat().st_size
    if len(kept) < len(records) or torn:
        write_atomically(path, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in kept))
    return len(records) - len(kept)


def write_atomically(path: Path, text: str) -> None:
    """Aside, flushed, renamed, and the directory flushed: afterwards the file is the new one, whatever happens.

    Raises CheckpointError (disk-full) where no room is left; the old file stays.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CheckpointError(
            f"no space left for {path} ({error.strerror})",
            code="disk-full",
            fix=f"free space on its disk: `df -h {path.parent}`",
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _whole_bytes(path: Path) -> int:
    """The size of the file up to and with its last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
