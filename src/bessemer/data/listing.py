"""What a corpus contains, as one digest for each file, so that changed files never give stale tokens.

The digest is of the file's content. It is stored with the file's size, inode and both times (modification and status
change, in nanoseconds) and taken again only when one of them differs, or when the file was younger than two seconds
while it was read: a change within the clock's granularity of the file system would go unseen.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import DataError, MissingExtra
from bessemer.data._files import read_json, write_json
from bessemer.data.sources import SourceFile

__all__ = ["Listing", "list_contents", "signature"]

_SETTLED_NS = 2_000_000_000
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Listing:
    """The files of a corpus in order, the digest of each, and the signatures of the paths behind it."""

    files: tuple[SourceFile, ...]
    digests: tuple[str, ...]
    signatures: tuple[tuple[list[int], ...], ...]

    @property
    def source_bytes(self) -> int:
        return sum(own[0][0] for own in self.signatures)

    def refuse_changed(self, first: int, last: int) -> None:
        """Raises DataError `corpus-changed` if one of files first..last isn't what was listed."""
        for file, listed in zip(self.files[first : last + 1], self.signatures[first : last + 1], strict=True):
            if tuple(signature(path) for path in _paths(file)) != listed:
                raise DataError(
                    f"{file.path} changed while it was read",
                    code="corpus-changed",
                    fix="start again once nothing writes to the corpus; shards that are finished are kept",
                )


def signature(path: Path) -> list[int]:
    """[size in bytes, inode, modification time, status change time (ns)]."""
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def list_contents(files: Sequence[SourceFile], cache: Path) -> Listing:
    """Digests (XXH3, 128 bits, hex) of all files, of a Megatron pair both in one; kept in `cache`/listings."""
    paths = [path for file in files for path in _paths(file)]
    names = [os.path.abspath(path) for path in paths]
    store = cache / "listings" / f"{hashlib.sha256(chr(0).join(names).encode()).hexdigest()[:32]}.json"
    known = read_json(store) or {}
    found: dict[str, list[Any]] = {}
    for name, path in zip(names, paths, strict=True):
        entry, now = known.get(name), signature(path)
        found[name] = entry if entry and entry[0] == now and entry[2] else _digest_entry(path, now)
    if found != known:
        store.parent.mkdir(parents=True, exist_ok=True)
        write_json(store, found)
    entries = [[found[os.path.abspath(path)] for path in _paths(file)] for file in files]
    return Listing(
        tuple(files),
        tuple("".join(entry[1] for entry in own) for own in entries),
        tuple(tuple(entry[0] for entry in own) for own in entries),
    )


def _paths(file: SourceFile) -> tuple[Path, ...]:
    return (file.path, file.index_path) if file.kind == "megatron" else (file.path,)


def _digest_entry(path: Path, before: list[int]) -> list[Any]:
    """[signature, digest, whether the signature may be trusted from now on]."""
    started = time.time_ns()
    digest = _digest(path)
    settled = max(before[2:]) < started - _SETTLED_NS and signature(path) == before
    return [before, digest, settled]


def _digest(path: Path) -> str:
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise MissingExtra("train", "train", "xxhash") from error
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                state.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from error
    return state.hexdigest()


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"can't read {path}: {error.strerror or error}",
        code="file-unreadable",
        fix="make the file readable, or leave it out of data.paths",
    )
