"""Which files a corpus consists of, and in which order. Looks only at names and sizes; imports neither numpy nor more.

A corpus is `python-stdlib` or a list of paths. A path is, in this order of preference: a file; a directory (everything
below it with a known ending); the prefix of a Megatron pair (`x` for x.bin beside x.idx); or a glob (`**` descends).
Files come in the order of the list, within one path sorted by name; a file named twice counts once. Names that start
with a dot are passed over, as the shell does.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bessemer.core.errors import DataError
from bessemer.core.job import DataSection
from bessemer.core.paths import user_path

__all__ = [
    "CORPORA",
    "KINDS",
    "Kind",
    "Part",
    "SourceFile",
    "files_of",
    "find",
    "iter_stdlib",
    "parts_of",
    "why_nothing",
]

Kind = Literal["text", "python", "jsonl", "parquet", "megatron"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".py": "python",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".bin": "megatron",
}
CORPORA = ("python-stdlib",)
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus. `lenient`: skipped, not refused, when its text can't be decoded (python-stdlib only)."""

    path: Path
    kind: Kind
    lenient: bool = False

    @property
    def index_path(self) -> Path:
        """Of a Megatron pair, the .idx beside the .bin."""
        return self.path.with_suffix(".idx")


@dataclass(frozen=True)
class Part:
    """One corpus of the job: a name or paths, its weight in the mixture, and the dotted field it comes from."""

    corpus: str | None
    paths: tuple[str, ...]
    weight: float
    where: str


def parts_of(data: DataSection) -> list[Part]:
    """The corpora of a job, one unless `mixture` is given; python-stdlib when the job names none."""
    if data.mixture:
        return [Part(c.corpus, c.paths, c.weight, f"data.mixture.{i}") for i, c in enumerate(data.mixture)]
    if data.paths:
        return [Part(None, data.paths, 1.0, "data.paths")]
    return [Part(data.corpus or "python-stdlib", (), 1.0, "data.corpus")]


def files_of(part: Part) -> list[SourceFile]:
    """All files of a corpus in order.

    Raises DataError `paths-empty` for a path without files, `megatron-mixed` for token files beside text, and
    `corpus-unknown`.
    """
    if part.corpus is not None:
        if part.corpus not in CORPORA:
            raise DataError(
                f"{part.where}: there is no corpus {part.corpus!r}",
                code="corpus-unknown",
                fix=f'data.corpus = "{CORPORA[0]}", or data.paths = ["..."]',
            )
        return sorted(iter_stdlib(), key=lambda f: f.path.as_posix())
    files: dict[str, SourceFile] = {}
    for pattern in part.paths:
        found = sorted(find(pattern), key=lambda f: f.path.as_posix())
        if not found:
            why, fix = why_nothing(pattern)
            raise DataError(f"{part.where}: no file for {pattern!r}: {why}", code="paths-empty", fix=fix)
        for file in found:
            files.setdefault(os.path.abspath(file.path), file)
    _refuse_mixed(part, list(files.values()))
    return list(files.values())


def _refuse_mixed(part: Part, files: Sequence[SourceFile]) -> None:
    tokens = [f for f in files if f.kind == "megatron"]
    texts = [f for f in files if f.kind != "megatron"]
    if tokens and texts:
        raise DataError(
            f"{part.where}: {tokens[0].path} holds token ids and {texts[0].path} holds text",
            code="megatron-mixed",
            fix="name them as two parts of data.mixture, each with its weight",
        )


def find(pattern: str) -> Iterator[SourceFile]:
    """The files that one path of the job stands for, unsorted and lazily, so that a caller may stop early."""
    path = user_path(pattern)
    if path.is_file():
        yield from _known(path)
    elif path.is_dir():
        yield from _below(path)
    elif _is_prefix(path):
        yield SourceFile(Path(f"{path}.bin"), "megatron")
    elif glob.has_magic(str(path)):
        seen: set[str] = set()
        for name in glob.iglob(str(path), recursive=True):
            match = Path(name)
            for file in _below(match) if match.is_dir() else _known(match):
                if str(file.path) not in seen:
                    seen.add(str(file.path))
                    yield file


def _known(path: Path) -> Iterator[SourceFile]:
    """The file itself where its ending is known; a .bin counts only with its .idx beside it."""
    kind = KINDS.get(path.suffix)
    if kind is None or (kind == "megatron" and not path.with_suffix(".idx").is_file()):
        return
    yield SourceFile(path, kind)


def _below(folder: Path) -> Iterator[SourceFile]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                yield from _known(Path(root, name))


def _is_prefix(path: Path) -> bool:
    return Path(f"{path}.bin").is_file() and Path(f"{path}.idx").is_file()


def iter_stdlib() -> Iterator[SourceFile]:
    """The .py files of the running interpreter's standard library, without installed packages."""
    for root, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(name for name in folders if name not in _NOT_STDLIB and not name.startswith("."))
        for name in names:
            if name.endswith(".py"):
                yield SourceFile(Path(root, name), "python", lenient=True)


def why_nothing(pattern: str) -> tuple[str, str]:
    """For a path without files: the reason and the fix."""
    path = user_path(pattern)
    endings = " ".join(KINDS)
    if path.is_dir():
        return f"nothing below this folder ends in {endings}", "put text files there, or name another folder"
    if path.is_file():
        if path.suffix == ".bin":
            return f"{path.with_suffix('.idx')} is not beside it", "a Megatron .bin needs the .idx written with it"
        return f"the ending {path.suffix or '(none)'!r} is not one of {endings}", "rename or convert the file"
    here, correct = "", "correct the path"
    if not path.is_absolute():
        here = f"; relative paths are meant from the current directory, {Path.cwd()}"
        correct += ", or type the same command in the directory that it is meant from"
    if glob.has_magic(str(path)):
        return f"no file with a known ending ({endings}) matches{here}", correct
    parent = next(p for p in path.absolute().parents if p.is_dir())
    return f"it does not exist; the last folder on its way that does is {parent}{here}", correct
