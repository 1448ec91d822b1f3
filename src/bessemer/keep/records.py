"""`metrics.jsonl` and `events.jsonl`: one JSON object a line, written by one process only, read by anybody.

A writer that dies leaves at most a torn last line. Readers leave it out; the next writer cuts it off.
"""

from __future__ import annotations

import errno
import json
import math
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from bessemer.core.errors import CheckpointError, DataError

__all__ = ["RecordWriter", "cut_records", "last_record", "line_start", "read_records", "write_atomically"]


_FULL = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 1 << 16
_MOST_WAITING = 100_000
"""Lines that wait for room, of some hundred bytes each."""


class RecordWriter:
    """Appends records to a .jsonl file. Each line is in the page cache when `write` returns; `sync` makes it durable.

    A process that is killed therefore loses no line, and a machine that dies none from before the last `sync`. While
    the disk is full, lines wait in memory, in order; each later `write` tries to get rid of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[tuple[Mapping[str, Any], bytes]] = deque()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with path.open("rb") as file:
            os.ftruncate(self._file, line_start(file, os.fstat(self._file).st_size))

    def write(self, record: Mapping[str, Any]) -> None:
        """One line. NaN and infinity, which JSON lacks, are written as null. OSError where it can't be written for
        another reason than a full disk, or too many lines wait."""
        self._waiting.append((record, _line_of(record)))
        self._catch_up()
        if len(self._waiting) > _MOST_WAITING:
            raise self._full()

    @property
    def waiting(self) -> int:
        """How many lines the disk has no room for."""
        return len(self._waiting)

    def slip_in(self, record: Mapping[str, Any], by: str) -> None:
        """A line that comes late: among those that wait, which ascend in the field `by`. Nothing happens where one of
        the same waits."""
        at = bisect_left(self._waiting, record[by], key=lambda waiting: waiting[0][by])
        if at == len(self._waiting) or self._waiting[at][0][by] != record[by]:
            self._waiting.insert(at, (record, _line_of(record)))

    def withdraw(self) -> list[Mapping[str, Any]]:
        """What waits: from now on somebody else's to write."""
        records = [record for record, _ in self._waiting]
        self._waiting.clear()
        return records

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
            _, line = self._waiting[0]
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


def last_record(path: Path) -> dict[str, Any] | None:
    """The record of the last whole line, which alone is read; None where there is none. DataError for a bad one."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = line_start(file, os.fstat(file.fileno()).st_size)
        return None if end == 0 else _line_at(file, end - 1)[0]


def cut_records(path: Path, goes: Callable[[dict[str, Any]], bool]) -> tuple[int, dict[str, Any] | None]:
    """Cuts the file before the first record that `goes`, as have to all that follow it; a torn last line goes too.
    Returns how many went and the last of them.

    Of a file of any length a few lines are parsed, since the place is searched for by halves; those that go are counted
    by their ends. DataError for a bad line among the parsed ones.
    """
    if not path.exists():
        return 0, None
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        low, high = 0, line_start(file, size)
        end = high
        while low < high:  # both are starts of lines: what lies before `low` stays, what lies from `high` on goes
            record, start, after = _line_at(file, (low + high) // 2)
            if goes(record):
                high = start
            else:
                low = after
        last = None if low == end else _line_at(file, end - 1)[0]
        count = sum(block.count(b"\n") for block in _blocks(file, low, end))
        if low < size:
            os.ftruncate(file.fileno(), low)
    return count, last


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


def line_start(file: BinaryIO, at: int) -> int:
    """Where the line begins in which the byte `at` lies: behind the last newline before it."""
    while at > 0:
        start = max(0, at - _BLOCK)
        newline = os.pread(file.fileno(), at - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        at = start
    return 0


def _line_at(file: BinaryIO, at: int) -> tuple[dict[str, Any], int, int]:
    """The record of the line in which the byte `at` lies, which has a newline; where it begins, and where the next
    one does."""
    start = line_start(file, at)
    file.seek(start)
    line = file.readline()
    try:
        return json.loads(line), start, start + len(line)
    except ValueError as error:
        raise DataError(
            f"{file.name}, the line at byte {start}: not a JSON object: {error}",
            code="damaged-records",
            fix=f"delete that line of {file.name}, or restore the file",
        ) from error


def _blocks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The bytes from `start` to `end`."""
    file.seek(start)
    while start < end and (block := file.read(min(_BLOCK * 16, end - start))):
        yield block
        start += len(block)


def _line_of(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(_finite(record), separators=(",", ":"), allow_nan=False) + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
