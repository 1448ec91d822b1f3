"""Facts about a tokenizer that its name or its tokenizer.json tells. No numpy: `bessemer check` uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["BYTES_VOCAB", "END_OF_TEXT", "bpe_size", "end_token_of", "id_of", "vocab_size_of"]

END_OF_TEXT = "<|endoftext|>"
BYTES_VOCAB = 257
"""The 256 byte values and the end of text."""

_KNOWN_ENDS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)


def bpe_size(name: str) -> int | None:
    """N of "bpe-N", None for any other name."""
    found = re.fullmatch(r"bpe-([0-9]+)", name)
    return int(found[1]) if found else None


def vocab_size_of(content: dict[str, Any]) -> int:
    """One above the largest id in the parsed tokenizer.json. Raises KeyError, TypeError or ValueError if it is none."""
    vocab = content["model"]["vocab"]
    ids = [token["id"] for token in content.get("added_tokens") or []]
    largest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return int(max([largest, *ids])) + 1


def id_of(token: str, content: dict[str, Any]) -> int | None:
    """The id of a token in the parsed tokenizer.json."""
    for added in content.get("added_tokens") or []:
        if added["content"] == token:
            return int(added["id"])
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):
        return next((i for i, piece in enumerate(vocab) if piece[0] == token), None)
    found = vocab.get(token)
    return None if found is None else int(found)


def end_token_of(path: Path, content: dict[str, Any]) -> str | None:
    """The end-of-text token: `eos_token` of the tokenizer_config.json beside it, else a token with a well-known name.

    Well known are GPT-2's, Llama 3's, DeepSeek's, Llama 2's, Gemma's and ChatML's, in this order.
    """
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        try:
            named = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError):
            named = None
        if isinstance(named, dict):
            named = named.get("content")
        if named:
            return str(named)
    present = {token["content"] for token in content.get("added_tokens") or []}
    return next((name for name in _KNOWN_ENDS if name in present), None)
