"""New records of a .jsonl file since the last look, without reading what was read before.

tail = Tail(run / "metrics.jsonl")
anew, records = tail.read()      # anew: the file was cut or replaced, and `records` begin with its first line
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from bessemer.keep.records import line_start

__all__ = ["Tail"]


class Tail:
    """Follows one file. A torn last line waits for its end; a damaged line is left out and counted in `damaged`.
    from_end: what is there already isn't read."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.damaged = 0
        self._inode = -1
        self._offset = 0
        if from_end:
            with suppress(FileNotFoundError), path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._inode, self._offset = status.st_ino, line_start(file, status.st_size)

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether it was read from its begin, the whole lines that are new). No file: nothing.

        A start of the run after a fault replaces metrics.jsonl by one that ends earlier, which may have grown beyond
        the old size since: the inode tells.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._inode or status.st_size < self._offset
                if anew:
                    self._inode, self._offset, self.damaged = status.st_ino, 0, 0
                if status.st_size == self._offset:
                    return anew, []
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return False, []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return anew, [record for line in whole.splitlines() if (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            self.damaged += 1
            return None
        return record
