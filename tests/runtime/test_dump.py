"""Dumps: bounded in number and bytes, whole or not there, readable without pickle, and silent about data if asked."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bessemer.core.errors import RequestError
from bessemer.runtime.dump import Bag, packed_call, read_dump, without_texts, write_dump
from bessemer.runtime.dump_folder import RECORD, TENSORS, core_file, dump_notes, publish
from bessemer.runtime.first_bad import FirstBad


def fill(attempt: str = "now", rank: int = 0) -> object:
    def write(folder: Path) -> None:
        bag = Bag(1e6)
        bag.add("x", torch.arange(3.0))
        write_dump(folder, {"kind": "exception", "t": time.time(), "rank": rank, "what": "x", "attempt": attempt}, bag)

    return write


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    bag = Bag(1e6)
    values = {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16), "c": torch.tensor([1, 2, 3])}
    values["a"][1, 2] = float("nan")
    for name, tensor in values.items():
        assert bag.add(name, tensor)
    path = publish(
        tmp_path / "dumps", 2, "now", lambda to: write_dump(to, {"kind": "exception", "loss": float("inf")}, bag)
    )
    assert path == tmp_path / "dumps" / "dump-1"
    record, tensors = read_dump(path)
    assert record["loss"] == "inf" and record["tensors"]["a"]["first_bad"] == [1, 2]
    assert all(torch.equal(tensors[n], t) for n, t in values.items() if n != "a")
    json.loads((path / RECORD).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert [p.name for p in path.parent.iterdir()] == ["dump-1"]


def test_bytes_are_bounded_and_what_is_left_out_is_described(tmp_path: Path) -> None:
    bag = Bag(100)
    assert bag.add("small", torch.zeros(20))
    assert not bag.add("large", torch.full((20,), float("nan")))
    assert set(bag.kept) == {"small"}
    assert bag.described["large"]["nan"] == 20 and "80 bytes" in bag.described["large"]["why"]
    write_dump(tmp_path, {}, bag)
    assert (tmp_path / TENSORS).stat().st_size < 400


def test_the_number_is_bounded_and_an_earlier_attempt_gives_way(tmp_path: Path) -> None:
    for _ in range(2):
        assert publish(tmp_path, 2, "first", fill("first")) is not None
    assert publish(tmp_path, 2, "first", fill("first")) is None, "the first faults of an attempt stay"
    assert publish(tmp_path, 2, "second", fill("second")) == tmp_path / "dump-1"
    assert publish(tmp_path, 2, "second", fill("second")) == tmp_path / "dump-2"
    assert publish(tmp_path, 2, "second", fill("second")) is None
    assert {note.attempt for note in dump_notes(tmp_path)} == {"second"}


def claim(folder: str, rank: int, start: float) -> None:
    while time.time() < start:
        time.sleep(0.001)
    publish(Path(folder), 3, "now", fill("now", rank))


def test_ranks_that_fail_together_share_the_places(tmp_path: Path) -> None:
    start = time.time() + 0.5
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=claim, args=(str(tmp_path), rank, start)) for rank in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    notes = dump_notes(tmp_path)
    assert len(notes) == 3 and len({note.rank for note in notes}) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"dump-1", "dump-2", "dump-3"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def on_full_disk(folder: Path) -> None:
        (folder / RECORD).symlink_to("/dev/full")
        write_dump(folder, {"kind": "exception"}, Bag(10))

    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, 2, "now", on_full_disk)
    assert list(tmp_path.iterdir()) == []
    assert publish(tmp_path, 2, "now", fill()) is not None, "the place is free again"


def test_a_place_whose_writer_died_is_taken_again(tmp_path: Path) -> None:
    (tmp_path / "dump-1.part").mkdir()
    assert publish(tmp_path, 1, "now", fill()) is None
    os.utime(tmp_path / "dump-1.part", (0, 0))
    assert publish(tmp_path, 1, "now", fill()) == tmp_path / "dump-1"


def test_redaction_replaces_whole_numbers_and_quoted_texts() -> None:
    bag = Bag(1e6, redact=True)
    assert not bag.add("batch.tokens_BS", torch.tensor([[7, 8, 9]]))
    assert bag.add("weight", torch.ones(2))
    assert bag.kept["batch.tokens_BS"].tolist() == [[0, 0, 0]] and bag.described["batch.tokens_BS"]["redacted"]
    assert without_texts("KeyError: 'a secret'") == "KeyError: '[redacted]'"
    table = torch.full((10, 2), float("inf"))
    with FirstBad(nn.Identity()) as watch:
        (torch.nn.functional.embedding(torch.tensor([3]), torch.ones(10, 2)) * table[0]).sum()
    assert packed_call(watch.calls[0], bag)["whole"], "an operator without ids can be replayed"


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        read_dump(tmp_path)
    assert refused.value.code == "dump-unreadable"
    (tmp_path / RECORD).write_text('{"version": 99}')
    with pytest.raises(RequestError, match="version 99"):
        read_dump(tmp_path)
    (tmp_path / RECORD).write_text('{"version": 1, "tensors": {"x": {"kept": true}}}')
    (tmp_path / TENSORS).write_bytes(b"torn")
    with pytest.raises(RequestError, match="copy the dump again"):
        read_dump(tmp_path)


def test_a_core_file_of_the_process_is_found(tmp_path: Path) -> None:
    pattern = str(tmp_path / "core.%h.%p.%t")
    (tmp_path / "core.node7.41.1700000000").write_bytes(b"x" * 5)
    (tmp_path / "core.node7.42.1700000000").write_bytes(b"x" * 9)
    found = core_file(pattern, pid=41, host="node7", since_t=0.0)
    assert found is not None and found["bytes"] == 5 and found["path"].endswith("core.node7.41.1700000000")
    assert core_file(pattern, pid=41, host="node7", since_t=time.time() + 60) is None, "of an earlier process"
    assert core_file(pattern, pid=43, host="node7", since_t=0.0) is None
