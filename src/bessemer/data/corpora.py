"""Reads the documents of a corpus in order, from any place on.

A document is a whole file (.txt .md .py), a line (.jsonl) or a row (.parquet). Documents with empty text are passed
over. Text is UTF-8, a byte order mark is dropped; a .py file may declare another encoding (PEP 263). In python-stdlib a
file that can't be decoded as it declares is passed over: CPython's tests hold such files on purpose. Everywhere else
it is an error that names file and place.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bessemer.core.errors import DataError, MissingExtra
from bessemer.data.sources import SourceFile

__all__ = ["MAX_DOCUMENT_BYTES", "Document", "Place", "read_documents"]

MAX_DOCUMENT_BYTES = 1 << 30
"""A whole file is held in memory as one document, hence this limit."""

_BOM = codecs.BOM_UTF8
_CODING = re.compile(rb"coding[=:]")
_ROWS = 1024  # parquet rows decoded at once


class Place(NamedTuple):
    """Where a document starts: the file's number, the byte offset or row in it, the line number (.jsonl, from 1)."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True, slots=True)
class Document:
    """`data` is the text in UTF-8; it comes from file number `file`, of which `consumed` bytes are now read; the next
    document starts at `after`."""

    text: str
    data: bytes
    file: int
    after: Place
    consumed: int


def read_documents(files: Sequence[SourceFile], text_key: str, start: Place = Place()) -> Iterator[Document]:  # noqa: B008
    """The documents of `files` from `start` on.

    Raises DataError `utf8-invalid`, `binary-file`, `jsonl-line`, `parquet-file`, `file-unreadable`, `file-too-large`.
    """
    for number in range(start.file, len(files)):
        place = start if number == start.file else Place(number)
        file = files[number]
        try:
            if file.kind == "jsonl":
                yield from _read_jsonl(file, text_key, place)
            elif file.kind == "parquet":
                yield from _read_parquet(file, text_key, place)
            else:
                yield from _read_whole(file, place)
        except OSError as error:
            raise DataError(
                f"can't read {file.path}: {error.strerror or error}",
                code="file-unreadable",
                fix="make the file readable, or leave it out of data.paths",
            ) from error


def _read_whole(file: SourceFile, place: Place) -> Iterator[Document]:
    size = file.path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{file.path} has {size:,} bytes; a file of this kind is one document and may have {MAX_DOCUMENT_BYTES:,}",
            code="file-too-large",
            fix="cut it into documents: one JSON object a line in a .jsonl file",
        )
    raw = file.path.read_bytes()
    text = _decode(file, raw)
    if text:
        data = raw if text.isascii() and len(text) == len(raw) else text.encode()
        yield Document(text, data, place.file, Place(place.file + 1), len(raw))


def _decode(file: SourceFile, raw: bytes) -> str | None:
    """The text of a whole file; None for a file of the standard library that is undecodable."""
    try:
        if file.kind == "python" and _CODING.search(raw, 0, 400):
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            return raw.decode(encoding)
        _refuse_binary(file.path, raw)
        return _utf8(file.path, raw)
    except (SyntaxError, LookupError, UnicodeDecodeError) as error:
        if file.lenient:
            return None
        raise DataError(
            f"{file.path} can't be decoded as it declares (PEP 263): {error}",
            code="utf8-invalid",
            fix="correct the coding line at the top of the file, or leave it out of data.paths",
        ) from error
    except DataError:
        if file.lenient:
            return None
        raise


def _refuse_binary(path: Path, raw: bytes) -> None:
    at = raw.find(b"\0")
    if at < 0:
        return
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    raise DataError(
        f"{path} is {'UTF-16' if utf16 else 'not text'}: there is a zero byte at byte {at}",
        code="binary-file",
        fix="iconv -f UTF-16 -t UTF-8" if utf16 else "leave it out of data.paths",
    )


def _utf8(path: Path, raw: bytes, *, start: int = 0, line: int | None = None) -> str:
    try:
        return raw.decode("utf-8-sig" if start == 0 and raw.startswith(_BOM) else "utf-8")
    except UnicodeDecodeError as error:
        offset = start + error.start
        if start == 0 and raw.startswith(_BOM):
            offset += len(_BOM)
        where = f"line {line}, byte {offset} of the file" if line is not None else f"byte {offset}"
        raise DataError(
            f"{path} is not valid UTF-8 at {where} (0x{raw[offset - start]:02x}, {error.reason})",
            code="utf8-invalid",
            fix=f"convert it: iconv -f latin1 -t utf-8 {path.name}   (or leave it out of data.paths)",
        ) from error


def _read_jsonl(file: SourceFile, text_key: str, place: Place) -> Iterator[Document]:
    offset, line_number = place.offset, place.line
    with file.path.open("rb") as stream:
        stream.seek(offset)
        for raw in stream:
            text = _jsonl_text(file.path, raw, (offset, line_number), text_key)
            offset, line_number = offset + len(raw), line_number + 1
            if text:
                data = _encode(text, f"{file.path}, line {line_number - 1}")
                yield Document(text, data, place.file, Place(place.file, offset, line_number), offset)


def _jsonl_text(path: Path, raw: bytes, at: tuple[int, int], text_key: str) -> str:
    offset, line_number = at
    if not raw.strip():
        return ""
    _refuse_binary_line(path, raw, at)
    line = _utf8(path, raw, start=offset, line=line_number)
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _bad_line(path, line_number, f"not JSON: {error}", "one JSON object a line") from error
    if not isinstance(value, dict):
        raise _bad_line(path, line_number, f"a JSON {_json_name(value)}, not an object", f'{{"{text_key}": "..."}}')
    if text_key not in value:
        keys = ", ".join(map(repr, list(value)[:8])) or "none"
        raise _bad_line(
            path, line_number, f"no key {text_key!r} (keys: {keys})", 'data.text_key = "the key of the text"'
        )
    text = value[text_key]
    if not isinstance(text, str):
        raise _bad_line(path, line_number, f"{text_key!r} is a JSON {_json_name(text)}, not text", "a string there")
    return text


def _refuse_binary_line(path: Path, raw: bytes, at: tuple[int, int]) -> None:
    zero = raw.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"{path} is not text: there is a zero byte at byte {at[0] + zero} (line {at[1]})",
            code="binary-file",
            fix="leave it out of data.paths, or convert it to UTF-8",
        )


def _bad_line(path: Path, line_number: int, what: str, fix: str) -> DataError:
    return DataError(f"{path}, line {line_number}: {what}", code="jsonl-line", fix=fix)


def _json_name(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "string")


def _encode(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} of the text is half of a surrogate pair, which is no character",
            code="jsonl-line",
            fix=r"write the character itself or both halves of its \u escape",
        ) from error


def _read_parquet(file: SourceFile, text_key: str, place: Place) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtra("train", "parquet", "pyarrow") from error
    try:
        with parquet.ParquetFile(file.path) as table:
            yield from _parquet_rows(table, file, text_key, place)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{file.path} is not a readable Parquet file: {error}",
            code="parquet-file",
            fix="fetch or write the file again, or leave it out of data.paths",
        ) from error


def _parquet_rows(table: Any, file: SourceFile, text_key: str, place: Place) -> Iterator[Document]:
    names = list(table.schema_arrow.names)
    if text_key not in names:
        raise DataError(
            f"{file.path} has no column {text_key!r}",
            code="parquet-file",
            fix=f"data.text_key = one of {', '.join(map(repr, names[:12]))}",
        )
    total, size, row = table.metadata.num_rows, file.path.stat().st_size, 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows <= place.offset:
            row += rows
            continue
        for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[text_key]):
            for text in batch.column(0).to_pylist():
                row += 1
                if row <= place.offset:
                    continue
                if not isinstance(text, str):
                    raise DataError(
                        f"{file.path}, row {row} (from 1): column {text_key!r} holds {type(text).__name__}, not text",
                        code="parquet-file",
                        fix="drop the rows without text, or name another column in data.text_key",
                    )
                if text:
                    yield Document(text, text.encode(), place.file, Place(place.file, row), size * row // total)
