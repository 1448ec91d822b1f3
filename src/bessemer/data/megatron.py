"""Megatron's token files (.bin beside .idx), read as they are.

The .idx, all little-endian: the magic "MMIDIDX" and two zero bytes; version 1 (uint64); a dtype code (uint8); the
numbers of sequences and of document bounds (uint64 each); then for each sequence its length in tokens (int32) and its
place in the .bin in bytes (int64); then the document bounds (int64): document i is the sequences from bound i up to
bound i + 1. Format: Megatron-LM, megatron/core/datasets/indexed_dataset.py.

Nothing is copied: for each split the cache holds only where its documents lie. Documents are told apart by the index,
so whether they end with an end-of-text token makes no difference here.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.core.errors import DataError
from bessemer.data._files import write_durable, write_json
from bessemer.data.listing import Listing
from bessemer.data.shards import SPLITS, map_file, xxh3_64
from bessemer.data.sources import SourceFile
from bessemer.data.tokenise import Progress, split_of

__all__ = ["HEADER", "MegatronFile", "index_documents", "item_bytes", "open_pair"]

HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True)
class MegatronFile:
    """`tokens`: all ids of the .bin, memory-mapped. `bounds`: int64, where documents start in it, and the end."""

    tokens: npt.NDArray[Any]
    bounds: npt.NDArray[np.int64]


def _bad(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} is not a Megatron index that can be read: {what}",
        code="megatron-index",
        fix="write the pair again with Megatron's preprocess_data.py (IndexedDataset, version 1)",
    )


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(dtype of the ids, sequences, document bounds) of an .idx. Raises DataError `megatron-index`."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(HEADER.size)
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error
    if len(raw) < HEADER.size or raw[:9] != _MAGIC:
        raise _bad(path, "it doesn't start with MMIDIDX")
    _, version, code, sequences, bounds = HEADER.unpack(raw)
    if version != 1:
        raise _bad(path, f"version {version}; 1 is known")
    if code not in _DTYPES:
        raise _bad(path, f"dtype code {code} ({_FLOATS.get(code, 'unknown')}) is no integer type of token ids")
    return np.dtype(_DTYPES[code]), sequences, bounds


def item_bytes(path: Path) -> int:
    """Bytes of one token id, from the .idx alone. Raises DataError `megatron-index`."""
    return _read_header(path)[0].itemsize


def open_pair(file: SourceFile) -> MegatronFile:
    """Maps a pair and checks that index and tokens fit together. Raises DataError `megatron-index`."""
    path = file.index_path
    dtype, num_sequences, num_bounds = _read_header(path)
    need = HEADER.size + 12 * num_sequences + 8 * num_bounds
    raw = map_file(path, np.dtype(np.uint8))
    if raw.size < need:
        raise _bad(path, f"it ends after {raw.size} bytes, {need} are announced")
    at = HEADER.size
    lengths = np.frombuffer(raw, "<i4", num_sequences, at)
    pointers = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(raw, "<i8", num_bounds, at + 12 * num_sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    if num_sequences and not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        raise _bad(path, "its sequences don't lie one behind the other")
    if num_bounds < 1 or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise _bad(path, f"its document bounds don't rise from 0 to {num_sequences}")
    size = file.path.stat().st_size
    if size != starts[-1] * dtype.itemsize:
        raise _bad(path, f"{file.path} has {size} bytes, the index tells of {starts[-1] * dtype.itemsize}")
    return MegatronFile(map_file(file.path, dtype), starts[bounds])


def index_documents(
    folder: Path, listing: Listing, vocab_size: int, val_fraction: float, progress: Progress
) -> list[dict[str, Any]]:
    """Writes for each pair and split which documents belong to it; returns descriptions in the form of shards.

    `NNNNN.train.index` is int64 [2, documents]: where each document starts in the .bin and where it ends in the split's
    own stream, in tokens. Every id is checked against the vocabulary: DataError `megatron-vocab`.
    """
    shards, done = [], 0
    for number, file in enumerate(listing.files):
        pair = open_pair(file)
        _refuse_strange_ids(file, pair, vocab_size)
        sides = _sides(pair, val_fraction)
        described: dict[str, Any] = {"number": number, "content": listing.digests[number], "splits": {}}
        starts, lengths = pair.bounds[:-1], np.diff(pair.bounds)
        for code, name in enumerate(SPLITS):
            own = np.flatnonzero((sides == code) & (lengths > 0))
            index = np.array([starts[own], np.cumsum(lengths[own])], "<i8")
            data = memoryview(index).cast("B") if index.size else memoryview(b"")
            path = folder / f"{number:05d}.{name}.index"
            write_durable(path, [data])
            described["splits"][name] = {
                "tokens": int(lengths[own].sum()),
                "documents": int(own.size),
                "text_bytes": None,
                "files": {path.name: [len(data), f"{xxh3_64(data):016x}"]},
            }
        listing.refuse_changed(number, number)
        write_json(folder / f"{number:05d}.json", described)
        shards.append(described)
        done += listing.signatures[number][0][0]
        progress(done, listing.source_bytes)
    return shards


def _sides(pair: MegatronFile, val_fraction: float) -> npt.NDArray[np.int8]:
    """0 (train) or 1 (val) for each document."""
    bounds = pair.bounds.tolist()
    sides = (
        SPLITS.index(split_of(memoryview(pair.tokens[start:end]).cast("B"), val_fraction)) if end > start else 0
        for start, end in itertools.pairwise(bounds)
    )
    return np.fromiter(sides, np.int8, len(bounds) - 1)


def _refuse_strange_ids(file: SourceFile, pair: MegatronFile, vocab_size: int) -> None:
    for start in range(0, pair.tokens.size, _SCAN_TOKENS):
        piece = pair.tokens[start : start + _SCAN_TOKENS]
        if int(piece.max()) < vocab_size and int(piece.min()) >= 0:
            continue
        at = start + int(np.flatnonzero((piece >= vocab_size) | (piece < 0))[0])
        document = int(np.searchsorted(pair.bounds, at, "right")) - 1
        raise DataError(
            f"{file.path}: token {at} (in document {document}) is {int(pair.tokens[at])}, "
            f"the tokenizer has ids 0 to {vocab_size - 1}",
            code="megatron-vocab",
            fix="data.tokenizer = the tokenizer.json that the file was made with",
        )
