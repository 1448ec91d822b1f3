"""Which files and documents a corpus has, and what is said of those that can't be read."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from corpus_files import write_megatron
from pyarrow import parquet

from bessemer.core.errors import DataError
from bessemer.data import corpora
from bessemer.data.corpora import Place, read_documents
from bessemer.data.sources import Part, SourceFile, files_of


def paths_part(*paths: Path | str) -> Part:
    return Part(None, tuple(map(str, paths)), 1.0, "data.paths")


def texts(*paths: Path | str, key: str = "text") -> list[str]:
    return [d.text for d in read_documents(files_of(paths_part(*paths)), key)]


def refusal(*paths: Path | str, key: str = "text") -> DataError:
    with pytest.raises(DataError) as caught:
        texts(*paths, key=key)
    assert caught.value.fix
    return caught.value


def test_the_standard_library_is_found_without_packages_and_read_whole() -> None:
    files = files_of(Part("python-stdlib", (), 1.0, "data.corpus"))
    names = [f.path.as_posix() for f in files]
    assert names == sorted(names) and any(n.endswith("/dataclasses.py") for n in names)
    assert not any("site-packages" in n or "dist-packages" in n for n in names)
    documents = list(read_documents(files, "text"))
    assert all(d.text for d in documents) and len(documents) > 300
    assert next(d for d in documents if files[d.file].path.name == "dataclasses.py").text.startswith("import re")


def test_a_folder_gives_everything_known_below_it_and_a_glob_its_matches(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("a/b/x.txt", "a/y.md", "z.py", "skipped.rst", ".hidden.txt", ".git/config.txt"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/b/x.txt", "a/y.md", "z.py"]
    assert texts(tmp_path / "**/*.txt") == ["a/b/x.txt"]
    assert texts(tmp_path / "*") == ["a/b/x.txt", "a/y.md", "z.py"]
    assert texts(tmp_path / "z.py", tmp_path) == ["z.py", "a/b/x.txt", "a/y.md"], "named twice counts once"


@pytest.mark.parametrize(
    ("pattern", "tells"),
    [
        ("none/*.txt", "no file with a known ending"),
        ("none", "does not exist"),
        ("odd.csv", "'.csv'"),
        ("empty", ".txt"),
    ],
)
def test_paths_without_files_are_refused(tmp_path: Path, pattern: str, tells: str) -> None:
    (tmp_path / "odd.csv").write_text("1,2")
    (tmp_path / "empty").mkdir()
    error = refusal(tmp_path / pattern)
    assert error.code == "paths-empty" and tells in error.message


def test_invalid_utf8_names_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine \xc3\xa9 then \xff bad")
    error = refusal(tmp_path)
    assert error.code == "utf8-invalid" and "a.txt" in error.message and "byte 13" in error.message
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffine \xff")
    assert "byte 8" in refusal(tmp_path).message


def test_binary_files_are_refused_and_utf16_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"PK\x03\x04\0\0\0")
    error = refusal(tmp_path)
    assert error.code == "binary-file" and "byte 4" in error.message
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    assert "UTF-16" in refusal(tmp_path).message


def test_byte_order_marks_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three"}\r\n\r\n{"text": ""}\n{"text": "four"}')
    assert texts(tmp_path) == ["one\r\ntwo", "three", "four"]


def test_python_files_declare_their_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\n'é'\n".encode("latin-1"))
    assert texts(tmp_path)[0].endswith("'é'\n")
    (tmp_path / "a.py").write_bytes(b"# coding: no-such\n")
    assert refusal(tmp_path).code == "utf8-invalid"
    lenient = SourceFile(tmp_path / "a.py", "python", lenient=True)
    assert list(read_documents([lenient], "text")) == []


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        (b'{"txt": "x"}', "no key 'text' (keys: 'txt')"),
        (b'{"text": null}', "null, not text"),
        (b'{"text": 3}', "number, not text"),
        (b'["x"]', "array, not an object"),
        (b'{"text": "x"', "not JSON"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_jsonl_line_without_text_names_file_and_line(tmp_path: Path, line: bytes, tells: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    error = refusal(tmp_path)
    assert error.code == "jsonl-line" and "a.jsonl, line 3" in error.message and tells in error.message


def test_invalid_utf8_in_a_jsonl_line_names_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    error = refusal(tmp_path)
    assert error.code == "utf8-invalid" and "line 2, byte 27" in error.message
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\0\0\0')
    error = refusal(tmp_path)
    assert error.code == "binary-file" and "byte 17" in error.message


def test_reading_goes_on_from_any_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(7)))
    (tmp_path / "b.txt").write_text("whole")
    parquet.write_table(pa.table({"text": [f"row {i}" for i in range(9)]}), tmp_path / "c.parquet", row_group_size=4)
    files = files_of(paths_part(tmp_path))
    whole = list(read_documents(files, "text"))
    assert [d.text for d in whole][-1] == "row 8" and len(whole) == 17
    for i, document in enumerate(whole):
        assert list(read_documents(files, "text", Place(*document.after))) == whole[i + 1 :]
        assert 0 < document.consumed <= files[document.file].path.stat().st_size


def test_parquet_that_can_not_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"body": ["x"]}), path)
    error = refusal(path)
    assert error.code == "parquet-file" and "'body'" in error.fix
    assert texts(path, key="body") == ["x"]
    parquet.write_table(pa.table({"text": ["x", None]}), path)
    assert "row 2" in refusal(path).message
    path.write_bytes(path.read_bytes()[:-3])
    assert refusal(path).code == "parquet-file"


def test_token_files_beside_text_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[[1, 2]]])
    (tmp_path / "b.txt").write_text("text")
    assert refusal(tmp_path).code == "megatron-mixed"
    (tmp_path / "alone.bin").write_bytes(b"x")
    assert ".idx" in refusal(tmp_path / "alone.bin").message


def test_a_file_too_large_for_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MAX_DOCUMENT_BYTES", 10)
    (tmp_path / "a.txt").write_text("eleven byte")
    assert refusal(tmp_path).code == "file-too-large"


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    os.symlink(tmp_path / "gone", tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt") as caught:
        list(read_documents([SourceFile(tmp_path / "a.txt", "text")], "text"))
    assert caught.value.code == "file-unreadable"
