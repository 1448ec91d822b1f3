"""Samples of a split: windows of the packed tokens, in the order of a permutation, from one corpus or a mixture.

Window k of a corpus is its tokens k S .. k S + S (S = data.seq_len): the first S are the inputs, the last S their
labels. What is left after the last whole window isn't used. Sample ids count from 0 without end; epoch after epoch
goes through all windows, each epoch in another order.
"""

# B batch, S sequence
# ruff: noqa: N815  (fields with shape suffixes)

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bessemer.core.errors import DataError
from bessemer.core.job import Job
from bessemer.data.mixture import Mixture
from bessemer.data.order import Order
from bessemer.data.prepared import Prepared, prepare
from bessemer.data.stream import open_stream
from bessemer.data.weights import shares_of

__all__ = ["Batch", "Dataset", "open_dataset"]

_DECODED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens_BS, labels_BS int64; weights_BS float32; segments_BS int32, which number a row's documents from 0.

    labels are the tokens one further on. With `data.document_mask`, a label that belongs to another document than its
    input has weight 0; without it all weights are 1 and all segments 0.
    """

    tokens_BS: npt.NDArray[np.int64]
    labels_BS: npt.NDArray[np.int64]
    weights_BS: npt.NDArray[np.float32]
    segments_BS: npt.NDArray[np.int32]


def open_dataset(job: Job, split: str, prepared: Prepared | None = None) -> Dataset:
    """The "train" or "val" split of the job's data, which is prepared first if it wasn't yet.

    The order depends on train.seed for "train"; "val" always has the same.
    Raises DataError `val-none` for "val" with data.val_fraction = 0, and what `prepare` raises.
    """
    if split not in ("train", "val"):
        raise ValueError(f'split must be "train" or "val", not {split!r}')
    if split == "val" and job.data.val_fraction == 0:
        raise DataError(
            "there is no validation split: data.val_fraction is 0",
            code="val-none",
            fix="data.val_fraction = 0.02",
        )
    return Dataset(job, split, prepared or prepare(job))


class Dataset:
    """Random access to the samples of a split by id. Safe to use from several threads."""

    def __init__(self, job: Job, split: str, prepared: Prepared) -> None:
        self.seq_len = job.data.seq_len
        self.split = split
        self.vocab_size = prepared.tokenizer.vocab_size
        self._document_mask = job.data.document_mask
        self._prepared = prepared
        self._streams = [open_stream(p.folder, p.manifest, split, p.files) for p in prepared.parts]
        windows = [(stream.num_tokens - 1) // self.seq_len for stream in self._streams]
        self.num_samples = sum(windows)
        seed = job.train.seed if split == "train" else 0
        self._orders = [Order(count, (seed << 16) + part) for part, count in enumerate(windows)]
        self._weights = [part.weight for part in prepared.parts]
        self._mixture = Mixture(self._weights)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest over tokenizer, tokens and documents of the split, weights of the mixture and seq_len."""
        decides = {
            "tokenizer": self._prepared.tokenizer.fingerprint,
            "parts": [part.manifest["splits"][self.split]["digest"] for part in self._prepared.parts],
            "weights": [str(share) for share in shares_of(self._weights)],
            "split": self.split,
            "seq_len": self.seq_len,
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]

    def batch(self, ids: Sequence[int]) -> Batch:
        """The samples `ids` (each >= 0) in this order."""
        rows, length = len(ids), self.seq_len
        window_BS = np.empty((rows, length + 1), np.int64)
        weights_BS = np.ones((rows, length), np.float32)
        segments_BS = np.zeros((rows, length), np.int32)
        for row, (corpus, window) in enumerate(self.locate(ids)):
            stream, start = self._streams[corpus], window * length
            stream.read(start, window_BS[row])
            if self._document_mask:
                starts = stream.document_starts(start, start + length)
                if starts.size:
                    weights_BS[row, starts - 1] = 0
                    segments_BS[row, starts[:-1] if starts[-1] == length else starts] = 1
        if self._document_mask:
            np.cumsum(segments_BS, axis=1, out=segments_BS)
        return Batch(window_BS[:, :-1].copy(), window_BS[:, 1:].copy(), weights_BS, segments_BS)

    def locate(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """(corpus, window in it) of each sample id."""
        if len(ids) and min(ids) < 0:
            raise ValueError(f"sample ids start at 0, got {min(ids)}")
        if len(self._orders) == 1:
            return [(0, window) for window in self._orders[0].samples(ids).tolist()]
        places = [self._mixture.locate(sample_id) for sample_id in ids]
        return [(corpus, self._orders[corpus].sample(place)) for corpus, place in places]

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes of UTF-8 text behind a token, the ends of texts counted as tokens; corpora weighted as they are mixed.

        So loss / ln 2 / bytes_per_token is bits per byte. Of a Megatron corpus, which holds no text, the first 2^20
        tokens are decoded.
        """
        ratios = []
        for part, stream in zip(self._prepared.parts, self._streams, strict=True):
            text_bytes, tokens = part.manifest["splits"][self.split]["text_bytes"], stream.num_tokens
            if text_bytes is None:
                ids = np.empty(min(_DECODED_TOKENS, tokens), np.int64)
                stream.read(0, ids)
                text_bytes, tokens = len(self._prepared.tokenizer.decode(ids.tolist()).encode()), ids.size
            ratios.append(text_bytes / tokens)
        return float(sum(share * ratio for share, ratio in zip(shares_of(self._weights), ratios, strict=True)))

    def unigram_entropy(self) -> float:
        """Entropy in nats per token of the ids' frequencies in this split, mixed by weight. Reads the whole split.

        The loss of a model that knows only how often each token occurs; a trained one must be well under it.
        """
        frequency_V = np.zeros(self.vocab_size)
        for share, stream in zip(shares_of(self._weights), self._streams, strict=True):
            frequency_V += float(share) * stream.counts(self.vocab_size) / stream.num_tokens
        seen = frequency_V[frequency_V > 0]
        return float(-(seen * np.log(seen)).sum())
