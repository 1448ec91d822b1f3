"""Small corpora and jobs for the data tests."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.core.job import Job

WORDS = ["iron", "steel", "furnace", "air", "blast", "charge", "slag", "ladle", "ingot", "carbon", "heat", "blow"]


def some_text(seed: int, words: int = 200) -> str:
    """Text of about seven bytes a word, with lines and an odd character now and then."""
    pick = random.Random(seed)
    return "".join(pick.choice(WORDS) + pick.choice((" ", " ", "\n", ", ", " é", "\n    ")) for _ in range(words))


def write_texts(folder: Path, count: int = 40, words: int = 200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(some_text(i, words), encoding="utf-8")
    return folder


def make_job(tmp_path: Path, **data: Any) -> Job:
    """A job with its cache in tmp_path; bytes, 32 tokens a sample, batches of 2 unless told otherwise."""
    train = data.pop("train", {"global_batch": 2, "micro_batch": 2})
    fields = {"cache": str(tmp_path / "cache"), "tokenizer": "bytes", "seq_len": 32, "val_fraction": 0.2}
    return Job.model_validate({"data": {**fields, **data}, "train": train})


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], *, code: int = 4, version: int = 1
) -> Path:
    """A Megatron pair by the published format: documents of sequences of ids. Returns the .bin."""
    dtype = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 6: "<f8", 7: "<f4"}[code]
    sequences = [np.array(s, dtype) for document in documents for s in document]
    bounds = np.cumsum([0] + [len(document) for document in documents])
    lengths = [s.size for s in sequences]
    pointers = np.cumsum([0] + [s.nbytes for s in sequences])[:-1]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", version, code, len(sequences), len(bounds))
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + bounds.astype("<i8").tobytes()
    )
    return prefix.with_suffix(".bin")
