"""The .jsonl files: torn tails, damage, a full disk, and cutting back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from bessemer.core.errors import CheckpointError, DataError
from bessemer.keep.records import RecordWriter, cut_records, read_records, write_atomically


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with RecordWriter(path) as writer:
        for n in range(3):
            writer.write({"step": n, "loss": float("inf"), "deep": {"x": [float("nan"), 1.5]}})
    assert list(read_records(path)) == [{"step": n, "loss": None, "deep": {"x": [None, 1.5]}} for n in range(3)]


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"{", b'{"step": 3}', b"x" * 200_000])
def test_a_torn_tail_is_left_out_and_cut_by_the_next_writer(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + tail)
    assert [r["step"] for r in read_records(path)] == [1, 2]
    RecordWriter(path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"no newline at all"])
def test_a_file_without_a_whole_line_becomes_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    assert list(read_records(path)) == []
    RecordWriter(path).close()
    assert path.read_bytes() == b""


def test_damage_in_the_middle_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\x00p": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"m\.jsonl, line 2"):
        list(read_records(path))


def test_cutting_back_keeps_the_earlier_lines_and_drops_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 8)) + '{"step": 8')
    assert cut_records(path, lambda r: r["step"] <= 4) == 3
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    writer = RecordWriter(path)
    writer.write({"step": 1})
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:5]))
    writer.write({"step": 2})
    assert writer.waiting == 1 and path.read_text() == '{"step":1}\n'
    monkeypatch.setattr(os, "write", full)
    writer.write({"step": 3})
    writer.sync()
    assert writer.waiting == 2
    monkeypatch.undo()
    writer.write({"step": 4})
    assert writer.waiting == 0
    writer.close()
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4]


def test_lines_that_find_no_room_to_the_end_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path / "f.jsonl")
    monkeypatch.setattr(os, "write", full)
    writer.write({"step": 1})
    with pytest.raises(OSError, match="no space left for 1 line") as caught:
        writer.close()
    assert caught.value.errno == errno.ENOSPC


def test_another_error_of_a_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path / "f.jsonl")

    def broken(handle: int, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(OSError, match="Input/output"):
        writer.write({"step": 1})
    monkeypatch.undo()
    writer.close()


def full(handle: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        write_atomically(path, "new")
    assert (caught.value.code, caught.value.fix) == ("disk-full", f"free space on its disk: `df -h {tmp_path}`")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]
