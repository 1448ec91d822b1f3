"""The .jsonl files: torn tails, damage, a full disk, and cutting back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from bessemer.core.errors import CheckpointError, DataError
from bessemer.keep.records import RecordWriter, cut_records, last_record, read_records, write_atomically


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


def lines_to(last: int) -> str:
    return "".join(json.dumps({"step": n, "t": n / 2}) + "\n" for n in range(1, last + 1))


@pytest.mark.parametrize("stays", range(8))
def test_cutting_back_keeps_the_earlier_lines_and_drops_a_torn_one(tmp_path: Path, stays: int) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines_to(7) + '{"step": 8')
    gone = cut_records(path, lambda r: r["step"] > stays)
    assert gone == (7 - stays, None if stays == 7 else {"step": 7, "t": 3.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, stays + 1))
    assert os.listdir(tmp_path) == ["m.jsonl"]


@pytest.mark.parametrize("content", ["", "no newline at all"])
def test_there_may_be_nothing_to_cut(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.jsonl"
    assert cut_records(path, lambda r: True) == (0, None) and last_record(path) is None
    path.write_text(content)
    assert last_record(path) is None
    assert cut_records(path, lambda r: True) == (0, None) and path.read_text() == ""


def test_the_last_record_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for text in ("x" * 70_000, "y" * 200_000, ""):  # lines longer than what is read at once
        path.write_text(json.dumps({"step": 1}) + "\n" + json.dumps({"step": 2, "text": text}) + '\n{"step": 3')
        assert last_record(path) == {"step": 2, "text": text}
        assert cut_records(path, lambda r: r["step"] > 1) == (1, {"step": 2, "text": text})
        assert last_record(path) == {"step": 1}


def test_of_a_long_file_few_lines_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent does this while others wait for its signs of life."""
    path, parsed = tmp_path / "m.jsonl", []
    path.write_text("{damaged, and nobody's business now}\n" + lines_to(50_000))
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or real(text))
    assert cut_records(path, lambda r: r["step"] > 30_000) == (20_000, {"step": 50_000, "t": 25_000.0})
    assert last_record(path) == {"step": 30_000, "t": 15_000.0}
    assert len(parsed) < 50
    with pytest.raises(DataError, match="the line at byte 0"):
        cut_records(path, lambda r: r["step"] > 0)


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


def test_a_line_that_comes_late_takes_its_place_among_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    writer = RecordWriter(path)
    writer.write({"step": 1})
    monkeypatch.setattr(os, "write", full)
    for step in (5, 6, 8):
        writer.write({"step": step})
    for step in (7, 4, 6, 9, 3):
        writer.slip_in({"step": step, "late": True}, by="step")
    monkeypatch.undo()
    writer.close()
    found = list(read_records(path))
    assert [record["step"] for record in found] == [1, 3, 4, 5, 6, 7, 8, 9]
    assert [record["step"] for record in found if "late" in record] == [3, 4, 7, 9]


def test_what_waits_can_be_handed_to_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path / "m.jsonl")
    monkeypatch.setattr(os, "write", full)
    writer.write({"step": 1})
    assert writer.withdraw() == [{"step": 1}] and writer.waiting == 0
    writer.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


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
