"""Corpus -> token shards: reading, encoding and writing overlap; the bytes don't depend on how many threads there are.

A shard ends with the first document that brings its text to `shard_bytes`, so its content follows from the corpus
alone; a process that is killed leaves finished shards, and the next one goes on behind them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.corpora import Document, Place, read_documents
from bessemer.data.listing import Listing
from bessemer.data.shards import SPLITS, SplitTokens, finished_shards, write_shard, xxh3_64
from bessemer.data.tokenizers import Tokenizer, dtype_for

__all__ = ["SHARD_BYTES", "Progress", "Recipe", "sample_texts", "split_of", "tokenise"]

SHARD_BYTES = 64 << 20
_BATCH_BYTES_A_CORE = 512 << 10
_MAX_BATCH_BYTES = 16 << 20
_UNDER_WAY = 3  # batches with the encoder: while one ends on few cores, the next fills the others

Progress = Callable[[int, int], None]
"""Called with (bytes of the corpus done, bytes in all), never from two threads at once."""


@dataclass(frozen=True)
class Recipe:
    """What decides the shards beside corpus and tokenizer."""

    text_key: str
    val_fraction: float
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class _Work:
    """Consecutive documents to encode at once; `closes`: the shard ends behind them. `done` bytes of the corpus."""

    documents: list[Document]
    closes: bool
    done: int


def split_of(data: Any, val_fraction: float) -> str:
    """ "train" or "val", from a hash of the document's content alone: equal documents fall on the same side."""
    return "val" if xxh3_64(data) < int(Fraction(repr(val_fraction)) * (1 << 64)) else "train"


def tokenise(
    folder: Path, listing: Listing, tokenizer: Tokenizer, recipe: Recipe, progress: Progress
) -> list[dict[str, Any]]:
    """Writes the shards that `folder` lacks; returns the descriptions of all. `progress` is called for each batch."""
    filler = _Filler(folder, listing, finished_shards(folder))
    with ThreadPoolExecutor(_UNDER_WAY) as encoders, ThreadPoolExecutor(1) as writer:
        under_way: deque[tuple[_Work, Future[dict[str, SplitTokens]]]] = deque()

        def finish_oldest() -> None:
            work, encoded = under_way.popleft()
            filler.add(work, encoded.result(), writer)
            progress(work.done, listing.source_bytes)

        for work in _works(listing, recipe, filler.start):
            under_way.append((work, encoders.submit(_encode, work.documents, tokenizer, recipe.val_fraction)))
            if len(under_way) > _UNDER_WAY:
                finish_oldest()
        while under_way:
            finish_oldest()
        filler.await_written()
    return filler.shards


class _Filler:
    """Gathers encoded documents and has each full shard written while the next one fills."""

    def __init__(self, folder: Path, listing: Listing, finished: list[dict[str, Any]]) -> None:
        self.shards = finished
        self.start = Place(*finished[-1]["after"]) if finished else Place()
        self._folder, self._listing = folder, listing
        self._writing: Future[dict[str, Any]] | None = None
        self._open(self.start.file)

    def _open(self, first_file: int) -> None:
        self._first_file = first_file
        self._splits = {name: SplitTokens() for name in SPLITS}

    def add(self, work: _Work, encoded: dict[str, SplitTokens], writer: ThreadPoolExecutor) -> None:
        """Appends one batch; hands the shard to the writer if it ends here."""
        for name, tokens in encoded.items():
            self._splits[name].extend(tokens)
        if not work.closes:
            return
        after = work.documents[-1].after
        self._listing.refuse_changed(self._first_file, work.documents[-1].file)
        self.await_written()
        self._writing = writer.submit(write_shard, self._folder, len(self.shards), self._splits, after)
        self._open(after.file)

    def await_written(self) -> None:
        """Returns once the shard under way is durable. Raises what its writing raised."""
        if self._writing is not None:
            self.shards.append(self._writing.result())
            self._writing = None


def _works(listing: Listing, recipe: Recipe, start: Place) -> Iterator[_Work]:
    """The corpus from `start` on in batches. Only where shards end shows in the result, not where batches do."""
    before = list(accumulate((own[0][0] for own in listing.signatures), initial=0))
    batch_limit = min(_MAX_BATCH_BYTES, _BATCH_BYTES_A_CORE * (os.cpu_count() or 1))
    documents: list[Document] = []
    batch_bytes = shard_bytes = 0
    for document in read_documents(listing.files, recipe.text_key, start):
        if batch_bytes >= batch_limit:
            yield _Work(documents, False, before[documents[-1].file] + documents[-1].consumed)
            documents, batch_bytes = [], 0
        documents.append(document)
        batch_bytes += len(document.data)
        shard_bytes += len(document.data)
        if shard_bytes >= recipe.shard_bytes:
            yield _Work(documents, True, before[document.file] + document.consumed)
            documents, batch_bytes, shard_bytes = [], 0, 0
    if documents:
        yield _Work(documents, True, listing.source_bytes)


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, val_fraction: float) -> dict[str, SplitTokens]:
    """Token ids of the documents by split, the end of text after each. Runs in a thread; `tokenizers` frees the GIL."""
    end = np.array([tokenizer.eos_id], dtype_for(tokenizer.vocab_size))
    splits = {name: SplitTokens() for name in SPLITS}
    encoded = tokenizer.encode_batch([document.text for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        split = splits[split_of(document.data, val_fraction)]
        split.tokens += (ids, end)
        split.lengths.append(len(ids) + 1)
        split.text_bytes.append(len(document.data))
    for split in splits.values():
        split.tokens = [np.concatenate(split.tokens)] if split.tokens else []
    return splits


def sample_texts(listing: Listing, recipe: Recipe, limit_bytes: int) -> list[str]:
    """Training texts of about `limit_bytes`, spread over the corpus, for training a tokenizer.

    The files come in the order of their digests (an order without meaning), and none gives more than its share of the
    limit or 1 MiB, whichever is more.
    """
    share = max(limit_bytes // max(1, len(listing.files)), 1 << 20)
    texts, total = [], 0
    for number in sorted(range(len(listing.files)), key=lambda i: (listing.digests[i], i)):
        own = 0
        for document in read_documents(listing.files[number : number + 1], recipe.text_key):
            if split_of(document.data, recipe.val_fraction) == "train":
                texts.append(document.text[: limit_bytes - total])
                own += len(document.data)
                total += len(document.data)
            if own >= share or total >= limit_bytes:
                break
        if total >= limit_bytes:
            break
    return texts
