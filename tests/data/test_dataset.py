import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from corpus_files import make_job, some_text, write_texts

from bessemer.data import Reader, open_dataset, prepare
from bessemer.data.stream import TokenStream, open_stream


def packed(folder: Path, split: str, val_fraction: float = 0.2) -> list[tuple[int, int]]:
    """(token, document) one after the other, by the simplest code."""
    from bessemer.data.tokenise import split_of

    texts = [p.read_bytes() for p in sorted(folder.iterdir())]
    own = [t for t in texts if split_of(t, val_fraction) == split]
    return [(i, n) for n, t in enumerate(own) for i in (*t, 256)]


@pytest.mark.parametrize("shard_bytes", [900, 1 << 20])
@pytest.mark.parametrize("mask", [True, False])
def test_samples_are_windows_of_the_packed_documents(tmp_path: Path, shard_bytes: int, mask: bool) -> None:
    folder = write_texts(tmp_path / "c", 40, words=12)
    job = make_job(tmp_path, paths=[str(folder)], document_mask=mask)
    data = open_dataset(job, "train", prepare(job, shard_bytes=shard_bytes))
    stream, length = packed(folder, "train"), 32
    assert data.num_samples == (len(stream) - 1) // length and data.vocab_size == 257
    batch = data.batch(range(data.num_samples))
    assert batch.tokens_BS.dtype == batch.labels_BS.dtype == np.int64
    assert (batch.weights_BS.dtype, batch.segments_BS.dtype) == (np.float32, np.int32)
    assert sorted(window for _, window in data.locate(range(data.num_samples))) == list(range(data.num_samples))
    crossing = 0
    for row, (_, window) in enumerate(data.locate(range(data.num_samples))):
        part = stream[window * length : window * length + length + 1]
        assert batch.tokens_BS[row].tolist() == [t for t, _ in part[:-1]]
        assert batch.labels_BS[row].tolist() == [t for t, _ in part[1:]]
        same = [a[1] == b[1] for a, b in itertools.pairwise(part)]
        assert batch.weights_BS[row].tolist() == [float(s or not mask) for s in same]
        assert batch.segments_BS[row].tolist() == [(d - part[0][1]) * mask for _, d in part[:-1]]
        crossing += not all(same)
    assert crossing > 20


def test_ids_go_on_through_epochs_each_in_another_order(tmp_path: Path) -> None:
    job = make_job(tmp_path, paths=[str(write_texts(tmp_path / "c"))])
    data = open_dataset(job, "train")
    n = data.num_samples
    epochs = [[w for _, w in data.locate(range(e * n, (e + 1) * n))] for e in range(3)]
    assert all(sorted(order) == list(range(n)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert data.batch([10**15]).tokens_BS.shape == (1, 32)
    other = open_dataset(job.model_copy(update={"train": job.train.model_copy(update={"seed": 5})}), "train")
    assert [w for _, w in other.locate(range(n))] != epochs[0] and other.fingerprint == data.fingerprint
    with pytest.raises(ValueError, match="start at 0"):
        data.batch([-1])
    with pytest.raises(ValueError, match="split"):
        open_dataset(job, "test")


def test_the_validation_order_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    folder = str(write_texts(tmp_path / "c"))
    jobs = [make_job(tmp_path, paths=[folder], train={"seed": s, "global_batch": 2}) for s in (1, 2)]
    a, b = (open_dataset(job, "val").batch(range(8)).tokens_BS for job in jobs)
    assert np.array_equal(a, b)


def test_mixtures_take_from_each_corpus_in_its_own_order(tmp_path: Path) -> None:
    a, b = write_texts(tmp_path / "a", 20), write_texts(tmp_path / "b", 10, words=300)
    mixture = [{"paths": [str(a)], "weight": 0.7}, {"paths": [str(b)], "weight": 0.3}]
    data = open_dataset(make_job(tmp_path, mixture=mixture), "train")
    singles = [open_dataset(make_job(tmp_path, paths=[str(f)]), "train") for f in (a, b)]
    assert data.num_samples == sum(s.num_samples for s in singles)
    located = data.locate(range(1000))
    assert [c for c, _ in located].count(0) == 700
    for corpus, single in enumerate(singles):
        windows = [w for c, w in located if c == corpus][: single.num_samples]
        assert sorted(windows) == list(range(len(windows))) or len(windows) < single.num_samples
    row = data.batch([3]).tokens_BS[0]
    corpus, window = located[3]
    expected = np.empty(32, np.int64)
    singles[corpus]._streams[0].read(window * 32, expected)
    assert np.array_equal(row, expected)


def test_entropy_and_bytes_per_token_are_the_closed_forms(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 500 + "é" * 10)
    data = open_dataset(make_job(tmp_path, paths=[str(tmp_path / "a.txt")], val_fraction=0), "train")
    total = 1000 + 20 + 1
    counts = [500, 500, 10, 10, 1]
    assert math.isclose(data.unigram_entropy(), -sum(c / total * math.log(c / total) for c in counts))
    assert math.isclose(data.bytes_per_token, 1020 / total)


def test_the_unigram_entropy_of_a_mixture_weighs_its_corpora(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 999)
    (tmp_path / "b.txt").write_text("b" * 99)
    mixture = [{"paths": [str(tmp_path / f"{n}.txt")], "weight": w} for n, w in (("a", 1), ("b", 3))]
    data = open_dataset(make_job(tmp_path, mixture=mixture, val_fraction=0), "train")
    shares = [0.25 * 0.999, 0.75 * 0.99, 0.25 * 0.001 + 0.75 * 0.01]
    assert math.isclose(data.unigram_entropy(), -sum(s * math.log(s) for s in shares))


def test_streams_skip_empty_shards_and_cross_many(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 12, words=4)
    job = make_job(tmp_path, paths=[str(folder)])
    part = prepare(job, shard_bytes=1).parts[0]
    stream: TokenStream = open_stream(part.folder, part.manifest, "train", part.files)
    expected = packed(folder, "train")
    whole = np.empty(stream.num_tokens, np.int64)
    stream.read(0, whole)
    assert whole.tolist() == [t for t, _ in expected]
    starts = [i for i in range(1, len(expected)) if expected[i][1] != expected[i - 1][1]]
    assert stream.document_starts(0, stream.num_tokens - 1).tolist() == starts
    assert stream.counts(257)[256] == len(starts) + 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_readers_give_what_was_asked_for_in_order(tmp_path: Path, workers: int) -> None:
    data = open_dataset(make_job(tmp_path, paths=[str(write_texts(tmp_path / "c"))]), "train")
    wanted = [[i, 3 * i] for i in range(25)]
    with Reader(data, iter(wanted), workers) as reader:
        found = [batch.tokens_BS for batch in reader]
    assert len(found) == 25
    assert all(np.array_equal(f, data.batch(w).tokens_BS) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_raise_at_the_batch_that_failed_and_close_early(tmp_path: Path, workers: int) -> None:
    import threading

    data = open_dataset(make_job(tmp_path, paths=[str(write_texts(tmp_path / "c"))]), "train")
    endless = ([i] if i != 2 else [-1] for i in range(10**9))
    reader = Reader(data, endless, workers)
    next(reader), next(reader)
    with pytest.raises(ValueError, match="start at 0"):
        next(reader)
    reader.close()
    assert list(reader) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("bessemer-data")]
    with pytest.raises(ValueError, match="workers"):
        Reader(data, [], -1)


def test_the_real_standard_library_with_text_beside_it(tmp_path: Path) -> None:
    """The default corpus end to end, cut down to one package of it by path."""
    import json as package

    folder = Path(package.__file__).parent
    (tmp_path / "x.md").write_text(some_text(1, 2000))
    job = make_job(tmp_path, paths=[str(folder), str(tmp_path / "x.md")], tokenizer="bpe-400", seq_len=16)
    data = open_dataset(job, "train")
    assert data.bytes_per_token > 1.5 and 3 < data.unigram_entropy() < math.log(400)
