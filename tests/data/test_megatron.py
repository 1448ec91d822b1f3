"""Megatron's token files, written here by the published format."""

import struct
from pathlib import Path

import numpy as np
import pytest
from corpus_files import make_job, write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.core.errors import DataError
from bessemer.data import open_dataset, prepare
from bessemer.data.megatron import open_pair
from bessemer.data.prepared import PreparedPart
from bessemer.data.sources import SourceFile
from bessemer.data.stream import TokenStream, open_stream
from bessemer.data.tokenise import split_of


def documents(count: int, seed: int = 0) -> list[list[list[int]]]:
    pick = np.random.default_rng(seed)
    return [
        [pick.integers(0, 256, pick.integers(1, 30)).tolist() for _ in range(pick.integers(1, 4))] for _ in range(count)
    ]


def stream_of(part: PreparedPart, split: str) -> TokenStream:
    return open_stream(part.folder, part.manifest, split, part.files)


@pytest.mark.parametrize("code", [1, 3, 4, 5, 8])
def test_tokens_are_read_as_they_are_in_every_integer_type(tmp_path: Path, code: int) -> None:
    written = documents(60)
    prefix = tmp_path / "m"
    write_megatron(prefix, written, code=code)
    for path in (str(prefix), f"{prefix}.bin", str(tmp_path)):
        part = prepare(make_job(tmp_path, paths=[path])).parts[0]
        assert sorted(p.suffix for p in part.folder.glob("0*")) == [".index", ".index", ".json"], "no copy of tokens"
    itemsize = {1: 1, 3: 2, 4: 4, 5: 8, 8: 2}[code]
    for split in ("train", "val"):
        flat = [[i for s in d for i in s] for d in written]
        own = [d for d in flat if split_of(np.array(d, f"<u{itemsize}").tobytes(), 0.2) == split]
        stream = stream_of(part, split)
        whole = np.empty(stream.num_tokens, np.int64)
        stream.read(0, whole)
        assert whole.tolist() == [i for d in own for i in d]
        assert stream.document_starts(0, whole.size - 1).tolist() == np.cumsum([len(d) for d in own])[:-1].tolist()
        assert 0 < len(own) < 60


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 10**6), size=st.integers(1, 200))
def test_any_range_of_scattered_documents(megatron_part: PreparedPart, start: int, size: int) -> None:
    stream = stream_of(megatron_part, "train")
    whole = np.empty(stream.num_tokens, np.int64)
    stream.read(0, whole)
    start %= stream.num_tokens - size
    out = np.empty(size, np.int64)
    stream.read(start, out)
    assert np.array_equal(out, whole[start : start + size])


@pytest.fixture(scope="module")
def megatron_part(tmp_path_factory: pytest.TempPathFactory) -> PreparedPart:
    folder = tmp_path_factory.mktemp("megatron")
    write_megatron(folder / "m1", documents(40, 1))
    write_megatron(folder / "m2", documents(40, 2), code=8)
    return prepare(make_job(folder, paths=[str(folder)], val_fraction=0.5)).parts[0]


def test_samples_and_mixtures_of_token_files(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[[*b"hello world", 256]]] * 40, code=8)
    (tmp_path / "t.txt").write_text("plain text " * 100)
    mixture = [{"paths": [str(tmp_path / "m")]}, {"paths": [str(tmp_path / "t.txt")]}]
    data = open_dataset(make_job(tmp_path, mixture=mixture, val_fraction=0, seq_len=24), "train")
    batch = data.batch([0, 1])
    row = [corpus for corpus, _ in data.locate([0, 1])].index(0)
    text = bytes(i for i in batch.tokens_BS[row].tolist() if i < 256).decode()
    assert text in "hello world" * 4
    assert batch.weights_BS[row].sum() == 22 and batch.segments_BS[row].max() in (1, 2)
    assert abs(data.bytes_per_token - (11 / 12 + 1100 / 1101) / 2) < 1e-3


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[[1, 2]], [[3, 300]]])
    with pytest.raises(DataError, match=r"token 3 \(in document 1\) is 300, the tokenizer has ids 0 to 256") as caught:
        prepare(make_job(tmp_path, paths=[str(tmp_path / "m")]))
    assert caught.value.code == "megatron-vocab"
    with pytest.raises(DataError) as caught:
        prepare(make_job(tmp_path, paths=[str(tmp_path / "m")], tokenizer="bpe-300"))
    assert caught.value.code == "megatron-tokenizer"


@pytest.mark.parametrize(
    ("harm", "tells"),
    [
        (lambda raw: raw[:20], "MMIDIDX"),
        (lambda raw: b"X" + raw[1:], "MMIDIDX"),
        (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "version 2"),
        (lambda raw: raw[:17] + b"\x07" + raw[18:], "float32"),
        (lambda raw: raw[:17] + b"\x63" + raw[18:], "dtype code 99"),
        (lambda raw: raw[:-8], "ends after"),
        (lambda raw: raw[:34] + struct.pack("<i", 9) + raw[38:], "one behind the other"),
        (lambda raw: raw[:-8] + struct.pack("<q", 1), "don't rise"),
    ],
)
def test_a_damaged_index_is_explained(tmp_path: Path, harm: object, tells: str) -> None:
    path = write_megatron(tmp_path / "m", [[[1, 2]], [[3]]]).with_suffix(".idx")
    path.write_bytes(harm(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=tells) as caught:
        open_pair(SourceFile(tmp_path / "m.bin", "megatron"))
    assert caught.value.code == "megatron-index" and "m.idx" in caught.value.message


def test_a_bin_of_another_length_than_its_index(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "m", [[[1, 2]]])
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="9 bytes, the index tells of 8"):
        open_pair(SourceFile(path, "megatron"))
