"""The data room: tokenising against bare `tokenizers`, random access, and the reader.

    python bench/data.py [--json]

Tokenising is the whole `prepare` of python-stdlib with a BPE that is already trained: digesting the files, reading,
decoding, splitting, encoding, writing and flushing shards, checksums and manifest. Its peers encode the same texts,
held in memory, with one call, and throw the result away. All take turns in this process; the best time of each counts.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from table import Row, main
from tokenizers import Tokenizer

from bessemer.core.job import Job
from bessemer.data import Dataset, Reader, open_dataset, prepare
from bessemer.data.corpora import read_documents
from bessemer.data.sources import files_of, parts_of

ROUNDS = 3
SEQ_LEN = 1024
ACCESSES = 4000
READ_BATCHES, BATCH = 400, 16


def rows() -> list[Row]:
    """Tokenising rate, random access and reader throughput; takes about a minute on 2 cores."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job.model_validate({"data": {"cache": folder, "seq_len": SEQ_LEN}})
        dataset = open_dataset(job, "train", prepare(job))
        return [*_tokenising(job), *_access(dataset), *_reading(dataset)]


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU of all threads) of one call."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _tokenising(job: Job) -> list[Row]:
    library = Tokenizer.from_file(str(prepare(job).tokenizer_json))
    files = files_of(parts_of(job.data)[0])
    texts = [document.text for document in read_documents(files, job.data.text_key)]
    text_mb = sum(len(text.encode()) for text in texts) / 1e6

    def whole() -> None:
        for name in ("tokens", "listings"):
            shutil.rmtree(Path(job.data.cache) / name)
        prepare(job)

    calls: dict[str, Callable[[], object]] = {
        "prepare": whole,
        "encode_batch": lambda: library.encode_batch(texts, add_special_tokens=False),
        "encode_batch_fast": lambda: library.encode_batch_fast(texts, add_special_tokens=False),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name].append(_seconds(call))
    wall = {name: min(w for w, _ in times) for name, times in taken.items()}
    cpu = {name: min(c for _, c in times) for name, times in taken.items()}
    spread = {name: max(w for w, _ in times) / wall[name] for name, times in taken.items()}
    notes = {name: f"best of {ROUNDS}, worst x{spread[name]:.2f}; CPU {cpu[name]:.1f} s" for name in calls}
    rates = [
        Row("tokenising, all of it", text_mb / wall["prepare"], "MB/s", "higher", note=notes["prepare"]),
        Row("bare encode_batch", text_mb / wall["encode_batch"], "MB/s", "higher", note=notes["encode_batch"]),
        Row(
            "bare encode_batch_fast",
            text_mb / wall["encode_batch_fast"],
            "MB/s",
            "higher",
            note=notes["encode_batch_fast"],
        ),
    ]
    ratio, ratio_fast = wall["encode_batch"] / wall["prepare"], wall["encode_batch_fast"] / wall["prepare"]
    return [
        *rates,
        Row("tokenising over bare encode_batch", ratio, "x", "higher", 0.9),
        Row("tokenising over bare encode_batch_fast", ratio_fast, "x", "higher", 0.9, "the quicker peer"),
    ]


def _access(dataset: Dataset) -> list[Row]:
    """One sample at a time, at places all over a thousand epochs."""
    ids = np.random.default_rng(0).integers(0, 1000 * dataset.num_samples, ACCESSES).tolist()
    each = []
    for sample_id in ids:
        begin = time.perf_counter()
        dataset.batch([sample_id])
        each.append((time.perf_counter() - begin) * 1e6)
    note = f"{ACCESSES} samples of {SEQ_LEN} tokens; 99 of 100 within {np.percentile(each, 99):.0f} us"
    return [Row("random access to a sample, median", float(np.median(each)), "us", "lower", 50, note)]


def _reading(dataset: Dataset) -> list[Row]:
    wanted = [list(range(i * BATCH, (i + 1) * BATCH)) for i in range(READ_BATCHES)]

    def read(workers: int) -> None:
        with Reader(dataset, wanted, workers) as reader:
            for _ in reader:
                pass

    return [
        _reader_row(workers, [_seconds(lambda w=workers: read(w))[0] for _ in range(ROUNDS)]) for workers in (0, 1, 2)
    ]


def _reader_row(workers: int, seconds: Sequence[float]) -> Row:
    rate = READ_BATCHES * BATCH * SEQ_LEN / min(seconds) / 1e6
    spread = max(seconds) / min(seconds)
    note = f"{READ_BATCHES} batches of {BATCH} x {SEQ_LEN}; best of {len(seconds)}, worst x{spread:.2f}"
    return Row(f"reader with {workers} threads", rate, "M tokens/s", "higher", note=note)


if __name__ == "__main__":
    main(rows)
