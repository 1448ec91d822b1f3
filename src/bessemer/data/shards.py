"""Token shards on disk: how they are written, verified and found again.

A folder holds, for each shard and split, `NNNNN.train.tokens` (the ids one after the other, little-endian uint16 or
uint32, each document ending with the end of text) and `NNNNN.train.index` (int64 [2, documents]: where each document
ends, in tokens from the start of this file, and its text's bytes), then `NNNNN.json` with counts, checksums (XXH3) and
the place where the next shard starts. `manifest.json` comes last; a folder without it is unfinished.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.core.errors import DataError, MissingExtra
from bessemer.data._files import read_json, write_durable, write_json
from bessemer.data.corpora import Place

__all__ = [
    "FORMAT",
    "MANIFEST",
    "SPLITS",
    "SplitTokens",
    "check_sizes",
    "damaged_files",
    "finished_shards",
    "map_file",
    "write_manifest",
    "write_shard",
    "xxh3_64",
]

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "val")


@dataclass
class SplitTokens:
    """Documents of one split on their way to a shard: token arrays, then tokens and text bytes of each document."""

    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)

    def extend(self, other: SplitTokens) -> None:
        self.tokens += other.tokens
        self.lengths += other.lengths
        self.text_bytes += other.text_bytes


def xxh3_64(data: Any) -> int:
    """XXH3 (64 bits) of a bytes-like object."""
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise MissingExtra("train", "train", "xxhash") from error
    return int(xxhash.xxh3_64_intdigest(data))


def write_shard(folder: Path, number: int, splits: Mapping[str, SplitTokens], after: Place) -> dict[str, Any]:
    """Writes one shard durably, its description last; returns the description."""
    described: dict[str, Any] = {"number": number, "after": list(after), "splits": {}}
    for name in SPLITS:
        split = splits[name]
        index = np.array([np.cumsum(split.lengths, dtype=np.int64), split.text_bytes], "<i8")
        tokens = np.concatenate(split.tokens) if split.tokens else np.empty(0, np.uint16)
        files = {}
        for kind, array in (("tokens", tokens), ("index", index)):
            data = memoryview(np.ascontiguousarray(array)).cast("B") if array.size else memoryview(b"")
            path = folder / f"{number:05d}.{name}.{kind}"
            write_durable(path, [data])
            files[path.name] = [len(data), f"{xxh3_64(data):016x}"]
        described["splits"][name] = {
            "tokens": int(tokens.size),
            "documents": len(split.lengths),
            "text_bytes": sum(split.text_bytes),
            "files": files,
        }
    write_json(folder / f"{number:05d}.json", described)
    return described


def finished_shards(folder: Path) -> list[dict[str, Any]]:
    """The shards of an unfinished folder that are whole, from the first on; each byte of them is verified."""
    shards: list[dict[str, Any]] = []
    while True:
        described = read_json(folder / f"{len(shards):05d}.json")
        if described is None or damaged_files(folder, described, contents=True):
            return shards
        shards.append(described)


def damaged_files(folder: Path, described: Mapping[str, Any], *, contents: bool) -> list[Path]:
    """The files of a shard that are missing or differ in size (with `contents`, in their checksum too)."""
    damaged = []
    for split in described["splits"].values():
        for name, (size, digest) in split["files"].items():
            path = folder / name
            whole = path.is_file() and path.stat().st_size == size
            if whole and contents:
                whole = f"{xxh3_64(map_file(path, np.dtype(np.uint8))):016x}" == digest
            if not whole:
                damaged.append(path)
    return damaged


def map_file(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The file as a read-only memory-mapped array. A plain ndarray: each view of a np.memmap costs microseconds."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


def write_manifest(folder: Path, facts: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Writes and returns the manifest: `facts`, the shards and, for each split, totals and a digest of its content."""
    totals = {}
    for name in SPLITS:
        own = [shard["splits"][name] for shard in shards]
        checksums = [digest for split in own for _, digest in split["files"].values()]
        checksums += [shard["content"] for shard in shards if "content" in shard]
        known = all(split["text_bytes"] is not None for split in own)
        totals[name] = {
            "tokens": sum(split["tokens"] for split in own),
            "documents": sum(split["documents"] for split in own),
            "text_bytes": sum(split["text_bytes"] for split in own) if known else None,
            "digest": hashlib.sha256(" ".join(checksums).encode()).hexdigest(),
        }
    manifest = {"format": FORMAT, **facts, "splits": totals, "shards": list(shards)}
    write_json(folder / MANIFEST, manifest)
    return manifest


def check_sizes(folder: Path, manifest: Mapping[str, Any], contents_up_to: int) -> None:
    """Raises DataError `shard-damaged` for a missing or altered file of a finished folder.

    Checksums are compared when the folder holds at most `contents_up_to` bytes; else only sizes, which takes no time.
    """
    splits = [split for shard in manifest["shards"] for split in shard["splits"].values()]
    total = sum(size for split in splits for size, _ in split["files"].values())
    for shard in manifest["shards"]:
        damaged = damaged_files(folder, shard, contents=total <= contents_up_to)
        if damaged:
            raise DataError(
                f"the token file {damaged[0]} is missing or differs from its checksum",
                code="shard-damaged",
                fix=f"rm -r {folder}   (it is made again from the corpus)",
            )
