"""The packed tokens of one split as one long array, over memory-mapped files, with random access."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.megatron import MegatronFile, open_pair
from bessemer.data.shards import map_file
from bessemer.data.sources import SourceFile

__all__ = ["TokenStream", "open_stream"]

_CHUNK_TOKENS = 1 << 22


class _Shard:
    """Tokens of one file in stream order. `ends`: where each document ends, in tokens from the start of the shard."""

    def __init__(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        self.tokens, self.ends = tokens, ends
        self.num_tokens = int(tokens.size)

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        out[:] = self.tokens[start : start + out.size]


class _Documents:
    """Documents that lie anywhere in a token file: document i starts at `starts[i]` there, ends at `ends[i]` here."""

    def __init__(self, pair: MegatronFile, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self.tokens, self.starts, self.ends = pair.tokens, starts, ends
        self.num_tokens = int(ends[-1]) if ends.size else 0

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        first, last = self.ends.searchsorted((start, start + out.size - 1), "right").tolist()
        skipped = start - (int(self.ends[first - 1]) if first else 0)
        source = int(self.starts[first]) + skipped
        if self._in_one_piece(first, last):
            out[:] = self.tokens[source : source + out.size]
            return
        at = 0
        for document in range(first, last + 1):
            count = min(int(self.ends[document]) - (start + at), out.size - at)
            out[at : at + count] = self.tokens[source : source + count]
            at += count
            if document < last:
                source = int(self.starts[document + 1])

    def _in_one_piece(self, first: int, last: int) -> bool:
        """Whether documents first..last follow each other in the file as they do here."""
        if first == last:
            return True
        here = int(self.ends[last - 1]) - (int(self.ends[first - 1]) if first else 0)
        return int(self.starts[last]) - int(self.starts[first]) == here


class TokenStream:
    """The shards of a split, one behind the other; empty ones left out."""

    def __init__(self, shards: Sequence[_Shard | _Documents]) -> None:
        self._shards = [shard for shard in shards if shard.num_tokens]
        self._starts = [0]
        for shard in self._shards:
            self._starts.append(self._starts[-1] + shard.num_tokens)
        self.num_tokens = self._starts[-1]

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fills `out` with the tokens from `start` on; start + out.size must be at most num_tokens."""
        for shard, at, first, last in self._pieces(start, start + out.size):
            self._shards[shard].read(first, out[at : at + last - first])

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where documents start within start < position <= stop, relative to `start`, ascending."""
        found = []
        for shard, at, first, last in self._pieces(start, stop):
            ends = self._shards[shard].ends
            low, high = ends.searchsorted((first, last), "right").tolist()
            if high > low:
                found.append(ends[low:high] - first + at)
        if not found:
            return _NONE
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, offset in the asked-for range, first and last + 1 in the shard) for each shard of the range."""
        shard = bisect.bisect_right(self._starts, start) - 1
        at = start
        while at < stop:
            base, end = self._starts[shard], min(stop, self._starts[shard + 1])
            yield shard, at - start, at - base, end - base
            at, shard = end, shard + 1

    def counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each id occurs; reads the whole split."""
        total = np.zeros(vocab_size, np.int64)
        for chunk in self.chunks():
            total += np.bincount(chunk, minlength=vocab_size)
        return total

    def chunks(self) -> Iterator[npt.NDArray[np.int64]]:
        """The tokens in order, some millions at a time."""
        for start in range(0, self.num_tokens, _CHUNK_TOKENS):
            out = np.empty(min(_CHUNK_TOKENS, self.num_tokens - start), np.int64)
            self.read(start, out)
            yield out


_NONE = np.empty(0, np.int64)


def open_stream(folder: Path, manifest: Mapping[str, Any], split: str, files: Sequence[SourceFile]) -> TokenStream:
    """The stream of a split of a prepared corpus. `files` are the corpus's, of which Megatron's hold the tokens."""
    shards: list[_Shard | _Documents] = []
    for shard in manifest["shards"]:
        number = shard["number"]
        index = map_file(folder / f"{number:05d}.{split}.index", np.dtype("<i8")).reshape(2, -1)
        if manifest["kind"] == "megatron":
            shards.append(_Documents(open_pair(files[number]), index[0], index[1]))
        else:
            dtype = np.dtype(manifest["dtype"])
            shards.append(_Shard(map_file(folder / f"{number:05d}.{split}.tokens", dtype), index[0]))
    return TokenStream(shards)
