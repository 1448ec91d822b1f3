"""New records of a file that grows, is cut or replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bessemer.keep.record_tail import Tail


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": s}) + "\n" for s in steps)


def test_a_tail_gives_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.read() == (False, [])
    tail.path.write_text(lines(1, 2) + '{"st')
    assert tail.read() == (True, [{"step": 1}, {"step": 2}])
    assert tail.read() == (False, [])
    with tail.path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.read() == (False, [{"step": 3}])


def test_a_tail_reads_no_byte_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(lines(*range(1000)))
    tail.read()
    asked: list[int] = []
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda line: asked.append(1) or parse(line))
    with tail.path.open("a") as file:
        file.write(lines(1000))
    assert tail.read()[1] == [{"step": 1000}]
    assert len(asked) == 1


def test_a_tail_begins_anew_with_a_file_that_was_cut_or_replaced(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(lines(1, 2, 3))
    tail.read()
    aside = tmp_path / "aside"
    aside.write_text(lines(1, 2, 3, 4, 5))  # longer than before: only the inode tells
    aside.replace(tail.path)
    assert tail.read() == (True, [{"step": s} for s in (1, 2, 3, 4, 5)])
    os.truncate(tail.path, len(lines(1)))
    assert tail.read() == (True, [{"step": 1}])


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text('{"step": 1}\nnot JSON\n[2]\n{"step": 3}\n')
    assert tail.read()[1] == [{"step": 1}, {"step": 3}]
    assert tail.damaged == 2


def test_what_is_there_already_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    later = Tail(path, from_end=True)
    path.write_text(lines(1) + '{"step": ')
    assert later.read() == (True, [{"step": 1}]), "it wasn't there yet"
    later = Tail(path, from_end=True)
    with path.open("a") as file:
        file.write("2}\n" + lines(3))
    assert later.read() == (False, [{"step": 2}, {"step": 3}])
