import json
import random
from pathlib import Path

import numpy as np
import pytest
from corpus_files import some_text
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.core.errors import DataError
from bessemer.data import tokenizers as room
from bessemer.data.tokenizer_file import END_OF_TEXT, end_token_of, vocab_size_of
from bessemer.data.tokenizers import BpeRecipe, ByteTokenizer, FileTokenizer, byte_tokenizer_json, train_bpe


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe([some_text(i) for i in range(20)], BpeRecipe(300)), encoding="utf-8")
    return FileTokenizer(path)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_comes_back(bpe: FileTokenizer, text: str) -> None:
    for tokenizer in (bpe, ByteTokenizer()):
        (ids,) = tokenizer.encode_batch([text])
        assert ids.dtype == np.uint16 and tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eos_id not in ids


def test_bytes_as_a_file_gives_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_tokenizer_json(), encoding="utf-8")
    file, plain = FileTokenizer(path), ByteTokenizer()
    text = "".join(map(chr, range(1, 0x300))) + "😀 <|endoftext|>"
    assert np.array_equal(file.encode_batch([text])[0], plain.encode_batch([text])[0])
    assert (file.vocab_size, file.eos_id, file.eos_token) == (plain.vocab_size, plain.eos_id, plain.eos_token)
    assert plain.decode([104, 105, 256, 0xC3]) == "hi\N{REPLACEMENT CHARACTER}"


def test_text_can_not_forge_the_end_of_a_document(bpe: FileTokenizer) -> None:
    (ids,) = bpe.encode_batch([f"a {END_OF_TEXT} b"])
    assert bpe.eos_id not in ids and bpe.decode(ids.tolist()) == f"a {END_OF_TEXT} b"


@pytest.fixture(scope="module")
def blank_bpe(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """Has merged many runs of blanks, so that a wrong cut between them shows in the ids."""
    pick = random.Random(1)
    texts = ["".join(pick.choices("ab\n \t'1.", (2, 2, 4, 4, 1, 1, 1, 1), k=2000)) for _ in range(10)]
    path = tmp_path_factory.mktemp("blank") / "tokenizer.json"
    path.write_text(train_bpe(texts, BpeRecipe(440)), encoding="utf-8")
    return FileTokenizer(path)


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet="ab\n \t'\r\x1c1.é", min_size=30, max_size=300), size=st.integers(1, 12))
def test_cutting_long_texts_changes_no_id(blank_bpe: FileTokenizer, text: str, size: int) -> None:
    whole = blank_bpe.encode_batch([text])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_PIECE_CHARS", size)
        assert np.array_equal(blank_bpe.encode_batch(["x", text, "y"])[1], whole)


def test_long_texts_are_cut_only_where_it_is_safe(bpe: FileTokenizer) -> None:
    assert room._cut("a\nb\n\nc\nd") == ["a\nb\n\nc\nd"]
    content = json.loads(bpe._text)
    assert room._may_be_cut(content)
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}},
        {"added_tokens": [{"id": 1, "content": "a\nb", "special": False}]},
    ):
        assert not room._may_be_cut(content | change)


def test_training_is_deterministic_and_exact_in_size() -> None:
    texts = [some_text(i) for i in range(8)]
    assert train_bpe(texts, BpeRecipe(280)) == train_bpe(texts, BpeRecipe(280))
    assert vocab_size_of(json.loads(train_bpe(texts, BpeRecipe(257)))) == 257
    with pytest.raises(DataError, match="gives only") as caught:
        train_bpe(["short text, short text"], BpeRecipe(5000))
    assert caught.value.code == "bpe-too-large" and '"bpe-2' in caught.value.fix


def test_the_end_of_text_is_found_beside_or_by_name(bpe: FileTokenizer, tmp_path: Path) -> None:
    content = json.loads(bpe._text)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert end_token_of(path, content) == END_OF_TEXT
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert FileTokenizer(path).eos_id == content["model"]["vocab"]["a"]
    beside.write_text(json.dumps({"eos_token": "</nowhere>"}))
    with pytest.raises(DataError, match="not in its vocabulary") as caught:
        FileTokenizer(path)
    assert caught.value.code == "tokenizer-eos" and "tokenizer_config.json" in caught.value.fix
    beside.unlink()
    content["added_tokens"][0]["content"] = "<odd>"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="no end-of-text token"):
        FileTokenizer(path)


@pytest.mark.parametrize(
    "content", ["not json", "[]", '{"model": {}}', '{"model": {"vocab": {"a": 0}}, "added_tokens": 3}']
)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        FileTokenizer(path)
    assert caught.value.code == "tokenizer-file" and str(path) in caught.value.message


def test_a_tokenizer_file_that_the_library_refuses(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps({"model": {"type": "Odd", "vocab": {"</s>": 0}}, "added_tokens": [{"id": 0, "content": "</s>"}]})
    )
    with pytest.raises(DataError) as caught:
        FileTokenizer(path).encode_batch(["a"])
    assert caught.value.code == "tokenizer-file"


def test_large_vocabularies_get_wider_ids() -> None:
    assert room.dtype_for(1 << 16) == np.dtype("<u2") and room.dtype_for((1 << 16) + 1) == np.dtype("<u4")
    assert vocab_size_of({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 9}]}) == 10
