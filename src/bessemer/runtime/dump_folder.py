"""The folder `dumps/` of a run: a bounded number of dumps, each written aside and renamed, by any rank. No torch.

    dumps/dump-1/dump.json             what failed, where, and what each tensor is
    dumps/dump-1/tensors.safetensors   the tensors that fitted

A place is claimed by making `dump-1.part`, which only one process can; it becomes `dump-1` when all is on the disk.
Where all places are taken, the oldest dump of an earlier attempt of the run gives way; within one attempt the first
faults are kept, since the later ones follow from them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import RequestError

__all__ = ["RECORD", "TENSORS", "DumpNote", "as_json", "core_file", "dump_notes", "publish", "read_record"]

RECORD, TENSORS = "dump.json", "tensors.safetensors"
VERSION = 1
STALE_S = 600.0
"""A place that was claimed so long ago belongs to a process that died while it wrote."""


@dataclass(frozen=True)
class DumpNote:
    """A dump, in short."""

    path: Path
    t: float  # unix seconds
    rank: int
    step: int | None
    kind: str  # "non-finite", "exception" or "kernel"
    operator: str  # or the part of the model, or the line of code, as far as it is known
    what: str
    attempt: str


def publish(folder: Path, most: int, attempt: str, write: Callable[[Path], None]) -> Path | None:
    """Have `write` fill a new dump in `folder`; where it then lies, or None where all `most` places are taken.

    Whatever goes wrong is raised, and then nothing of the dump is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, most + 1):
        part = folder / f"dump-{number}.part"
        if (folder / f"dump-{number}").exists():
            continue
        if _claim(part):
            return _filled(part, write)
    for note in sorted(dump_notes(folder), key=lambda note: note.t):
        if note.attempt != attempt:
            part = note.path.with_name(note.path.name + ".part")
            try:
                note.path.rename(part)
            except OSError:  # another rank was faster
                continue
            shutil.rmtree(part)
            if _claim(part):
                return _filled(part, write)
    return None


def _claim(part: Path) -> bool:
    try:
        part.mkdir()
    except FileExistsError:
        try:
            stale = time.time() - part.stat().st_mtime > STALE_S
        except FileNotFoundError:
            return False
        if not stale:
            return False
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
        except FileExistsError:
            return False
    return True


def _filled(part: Path, write: Callable[[Path], None]) -> Path:
    whole = part.with_suffix("")
    try:
        write(part)
        for path in (*part.iterdir(), part):
            _flush(path)
        part.rename(whole)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _flush(whole.parent)
    return whole


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def dump_notes(folder: Path) -> list[DumpNote]:
    """The whole dumps in a run's `dumps` folder, oldest first; what can't be read is left out."""
    found = []
    for path in sorted(folder.glob("dump-*")):
        if path.suffix == ".part":
            continue
        try:
            record = read_record(path)
        except RequestError:
            continue
        operator = record.get("operator") or {}
        found.append(
            DumpNote(
                path=path,
                t=float(record["t"]),
                rank=int(record["rank"]),
                step=record.get("step"),
                kind=str(record["kind"]),
                operator=str(operator.get("name") or record.get("module") or ""),
                what=str(record["what"]),
                attempt=str(record.get("attempt", "")),
            )
        )
    return sorted(found, key=lambda note: note.t)


def read_record(path: Path) -> dict[str, Any]:
    """The record of a dump. RequestError where `path` is none."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        version = record["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} can't be read as a dump: {error}",
            code="dump-unreadable",
            fix="name a folder such as runs/NAME/dumps/dump-1",
        ) from error
    if version != VERSION:
        raise RequestError(
            f"{path} is a dump of version {version}, and this one reads version {VERSION}",
            code="dump-unreadable",
            fix="replay it with the bessemer that wrote it: its version is in dump.json",
        )
    return dict(record)


def as_json(record: dict[str, Any]) -> str:
    """A record as strict JSON: NaN and infinities, which it lacks, as the words "nan", "inf" and "-inf"."""
    return json.dumps({"version": VERSION, **_worded(record)}, indent=1, allow_nan=False)


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _worded(v) for k, v in value.items()}
    return [_worded(v) for v in value] if isinstance(value, list | tuple) else value


def core_file(pattern: str, *, pid: int, host: str, since_t: float) -> dict[str, Any] | None:
    """The newest core dump that CUDA wrote for this process: its path, bytes and time; None where there is none.

    pattern: as in CUDA_COREDUMP_FILE, with %p for the process, %h for the host and %t for the time; without one
    CUDA writes core_%t_%h_%p.nvcudmp into the current directory.
    """
    named = pattern or "core_%t_%h_%p.nvcudmp"
    path = Path(named.replace("%p", str(pid)).replace("%h", host))
    found = [p for p in path.parent.glob(path.name.replace("%t", "*")) if p.stat().st_mtime >= since_t]
    newest = max(found, key=lambda p: p.stat().st_mtime, default=None)
    if newest is None:
        return None
    status = newest.stat()
    return {"path": str(newest.absolute()), "bytes": status.st_size, "t": status.st_mtime}
