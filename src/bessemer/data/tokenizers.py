"""Text to token ids and back: bytes, a byte-level BPE trained on the corpus, or any tokenizer.json.

Every document ends with the tokenizer's end-of-text token, appended as an id: the characters of a special token inside
a text are encoded like any other characters, so that no document can forge the end of one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.core.errors import DataError, MissingExtra
from bessemer.data.tokenizer_file import BYTES_VOCAB, END_OF_TEXT, end_token_of, id_of, vocab_size_of

__all__ = [
    "BpeRecipe",
    "ByteTokenizer",
    "FileTokenizer",
    "Tokenizer",
    "byte_tokenizer_json",
    "dtype_for",
    "train_bpe",
]

_PIECE_CHARS = 1 << 17
_CUT = re.compile(r"(?<=\S)\n(?=\S)")

Ids = npt.NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """What the rest of the room needs. Ids are uint16 where the vocabulary fits it, else uint32."""

    @property
    def vocab_size(self) -> int:
        """One above the largest id."""

    @property
    def eos_token(self) -> str:
        """How the end of text is written in tokenizer.json."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """Hex digest over everything that decides the ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without the end of text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text behind ids; the end of text and other special tokens give nothing."""


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which ids below `vocab_size` are stored: little-endian uint16 or uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ByteTokenizer:
    """Ids 0-255 are the bytes of the UTF-8 text, 256 ends it. Needs no package."""

    vocab_size = BYTES_VOCAB
    eos_token = END_OF_TEXT
    eos_id = 256
    fingerprint = "bytes-1"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text as uint16 ids."""
        return [np.frombuffer(text.encode(), np.uint8).astype("<u2") for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 (a sample may end inside a character) become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by the package `tokenizers`, whose threads encode a batch in parallel.

    `eos` names the end-of-text token; see `end_token_of`. Raises DataError `tokenizer-file` and `tokenizer-eos`,
    MissingExtra without the
    package. The package is loaded at the first use.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = _read_text(path)
        try:
            content = json.loads(self._text)
            self.vocab_size: int = vocab_size_of(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_a_tokenizer(path, error) from error
        end = end_token_of(path, content)
        eos_id = None if end is None else id_of(end, content)
        if end is None or eos_id is None:
            raise _no_end(path, end)
        self.eos_token: str = end
        self.eos_id: int = eos_id
        self._dtype = dtype_for(self.vocab_size)
        self._cuts = _may_be_cut(content)

    @cached_property
    def fingerprint(self) -> str:
        """Over the file, the end-of-text token and the version of the package `tokenizers`."""
        decides = f"{self._text}\0{self.eos_token}\0{_library().__version__}"
        return hashlib.sha256(decides.encode()).hexdigest()

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            tokenizer = _library().Tokenizer.from_str(self._text)
        except MissingExtra:
            raise
        except Exception as error:  # the package raises bare Exception for a file it can't read
            raise _not_a_tokenizer(self._path, error) from error
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text. Long texts are cut where that changes no id, so that all threads have work."""
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            own = _cut(text) if self._cuts and len(text) > 2 * _PIECE_CHARS else [text]
            pieces += own
            counts.append(len(own))
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        arrays = [np.array(e.ids, self._dtype) for e in encoded]
        if len(pieces) == len(texts):
            return arrays
        ends = np.cumsum(counts).tolist()
        return [np.concatenate(arrays[e - n : e]) for e, n in zip(ends, counts, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; special tokens give nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _library() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise MissingExtra("train", "train", "tokenizers") from error
    return tokenizers


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"can't read the tokenizer {path}: {error}",
            code="tokenizer-file",
            fix='data.tokenizer = "bpe-4096", "bytes" or the path of a tokenizer.json',
        ) from error


def _not_a_tokenizer(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is not a tokenizer.json that the package `tokenizers` reads: {error!r}",
        code="tokenizer-file",
        fix='data.tokenizer = "bpe-4096", or the path of a tokenizer.json',
    )


def _no_end(path: Path, end: str | None) -> DataError:
    what = f"its end-of-text token {end!r} is not in its vocabulary" if end else "no end-of-text token is known for it"
    return DataError(
        f"{path}: {what}",
        code="tokenizer-eos",
        fix=f'write {path.with_name("tokenizer_config.json")} with {{"eos_token": "..."}}',
    )


def _cut(text: str) -> list[str]:
    """Pieces of about 128 Ki characters, each but the last ending with a newline between two visible characters.

    GPT-2's splitting never joins such a newline with what follows, so the pieces have the ids of the whole.
    """
    pieces, start = [], 0
    while found := _CUT.search(text, start + _PIECE_CHARS):
        pieces.append(text[start : found.end()])
        start = found.end()
    return [*pieces, text[start:]]


def _may_be_cut(content: dict[str, Any]) -> bool:
    """Whether cutting before a line changes no id: plain GPT-2 splitting, and no normaliser that sees across."""
    splitter = content.get("pre_tokenizer") or {}
    plain = splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True)
    added = [token["content"] for token in content.get("added_tokens") or [] if not token.get("special")]
    return plain and not splitter.get("add_prefix_space", True) and not content.get("normalizer") and not added


@dataclass(frozen=True)
class BpeRecipe:
    """Decides the trained BPE together with the texts: vocabulary size with the 256 bytes and the end of text."""

    size: int
    min_count: int = 2


def train_bpe(texts: Sequence[str], recipe: BpeRecipe) -> str:
    """The tokenizer.json of a byte-level BPE with `recipe.size` tokens, the end of text being 0.

    Deterministic in the texts, whatever the number of threads. Raises DataError `bpe-too-large` when the texts don't
    hold enough repeated pairs for that many tokens.
    """
    library = _library()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.size,
        min_frequency=recipe.min_count,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != recipe.size:
        raise DataError(
            f"the corpus gives only {size} BPE tokens, {recipe.size} were asked for: no further pair of tokens "
            f"occurs {recipe.min_count} times in the {sum(map(len, texts)):,} characters of the sample",
            code="bpe-too-large",
            fix=f'data.tokenizer = "bpe-{size}" (or "bytes"), or more text',
        )
    return str(tokenizer.to_str(pretty=True))


def byte_tokenizer_json() -> str:
    """A tokenizer.json with the ids of ByteTokenizer, for exports: a byte-level BPE without merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table: these stand for themselves
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256,
                "content": END_OF_TEXT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letters[b]: b for b in range(256)} | {END_OF_TEXT: 256},
            "merges": [],
        },
    }
    return json.dumps(content, indent=1, ensure_ascii=False)
