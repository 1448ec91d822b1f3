"""What is wrong with a job's [data] table, from names, sizes and headers alone: no corpus is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.core.errors import DataError
from bessemer.core.job import DataSection, Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.paths import user_path
from bessemer.core.problem import Problem, nearest
from bessemer.core.units import counted
from bessemer.data.sources import CORPORA, Part, SourceFile, find, iter_stdlib, parts_of, why_nothing
from bessemer.data.tokenizer_file import BYTES_VOCAB, bpe_size, end_token_of, id_of, vocab_size_of
from bessemer.data.weights import MAX_PERIOD, period_of

__all__ = ["problems"]

_FILES_LOOKED_AT = 2000  # of one path; beyond, the corpus counts as large enough


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """Every fault of the [data] table that shows without reading the corpus."""
    del machine
    data = job.data
    corpora = [*_several(data), *(p for part in parts_of(data) for p in _corpus(part)), *_weights(data)]
    found = [*corpora, *_tokenizer(data, spec), *_validation(job)]
    if not corpora:
        found += [*_megatron(data), *_too_small(job)]
    return found


def _problem(code: str, where: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=where, what=what, why=why, fix=fix)


def _several(data: DataSection) -> Iterator[Problem]:
    given = [name for name in ("corpus", "paths", "mixture") if getattr(data, name)]
    if len(given) > 1:
        yield _problem(
            "corpus-several",
            f"data.{given[1]}",
            f"{' and '.join(given)} are given, the corpus is one of them",
            why="nothing says how much of each to take",
            fix='data.mixture = [{corpus = "...", weight = 1}, {paths = ["..."], weight = 1}], or only one of them',
        )
    for i, part in enumerate(data.mixture):
        if bool(part.corpus) == bool(part.paths):
            yield _problem(
                "mixture-part",
                f"data.mixture.{i}",
                "both corpus and paths are given" if part.corpus else "neither corpus nor paths is given",
                why="a part of a mixture is one corpus",
                fix='{corpus = "python-stdlib", weight = 1} or {paths = ["..."], weight = 1}',
            )


def _corpus(part: Part) -> Iterator[Problem]:
    """An unknown name, or paths that stand for no file."""
    if part.corpus and part.corpus not in CORPORA:
        near = nearest(part.corpus, CORPORA)
        where = part.where if part.where == "data.corpus" else f"{part.where}.corpus"
        yield _problem(
            "corpus-unknown",
            where,
            f"there is no corpus {part.corpus!r}",
            why=f"known: {', '.join(CORPORA)}; your own files are named in paths",
            fix=f'{where} = "{(near or list(CORPORA))[0]}", or paths = ["{part.corpus}"]',
        )
    where = part.where if part.where == "data.paths" else f"{part.where}.paths"
    for pattern in part.paths:
        if next(find(pattern), None) is None:
            why, fix = why_nothing(pattern)
            yield _problem("paths-empty", where, f"{pattern!r} stands for no file", why=why, fix=fix)


def _weights(data: DataSection) -> Iterator[Problem]:
    if not data.mixture:
        return
    weights = [part.weight for part in data.mixture]
    period = period_of(weights)
    if period > MAX_PERIOD:
        total = sum(weights)
        rounded = [max(0.001, round(weight / total, 3)) for weight in weights]
        yield _problem(
            "mixture-weights",
            "data.mixture",
            f"the weights {', '.join(f'{w:g}' for w in weights)} are too fine",
            why=f"their exact mixture repeats only after {period} samples, at most {MAX_PERIOD} are kept in memory",
            fix=f"weights {', '.join(f'{w:g}' for w in rounded)}",
        )


def _tokenizer(data: DataSection, spec: ModelSpec | None) -> Iterator[Problem]:
    name, size = data.tokenizer, bpe_size(data.tokenizer)
    if name == "bytes":
        yield from _vocab(BYTES_VOCAB, "bytes", spec)
    elif size is not None and size < BYTES_VOCAB:
        yield _problem(
            "tokenizer-size",
            "data.tokenizer",
            f"bpe-{size} has no room for the bytes",
            why=f"a byte-level BPE starts from 256 bytes and the end of text, {BYTES_VOCAB} tokens",
            fix=f'data.tokenizer = "bpe-{BYTES_VOCAB}" or more, or "bytes"',
        )
    elif size is not None:
        yield from _vocab(size, name, spec)
    else:
        yield from _tokenizer_file(name, spec)


def _tokenizer_file(name: str, spec: ModelSpec | None) -> Iterator[Problem]:
    path = user_path(name)
    if path.is_dir() or not path.is_file():
        yield _no_such_tokenizer(name, path)
        return
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        size, end = vocab_size_of(content), end_token_of(path, content)
        known = end is not None and id_of(end, content) is not None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield _problem(
            "tokenizer-file",
            "data.tokenizer",
            f"{name} is not a tokenizer.json",
            why=f"{type(error).__name__}: {error}",
            fix='data.tokenizer = "bpe-4096", "bytes" or the path of a tokenizer.json',
        )
        return
    if not known:
        beside = path.with_name("tokenizer_config.json")
        yield _problem(
            "tokenizer-eos",
            "data.tokenizer",
            f"{name} has no end-of-text token " + (f"{end!r}" if end else "with a well-known name"),
            why="every document ends with one, so that the model learns to stop and documents can be told apart",
            fix=f'write {beside} with {{"eos_token": "..."}}',
        )
    yield from _vocab(size, name, spec)


def _no_such_tokenizer(name: str, path: Path) -> Problem:
    near = nearest(name, ("bytes", "bpe-4096"))
    fix = f'data.tokenizer = "{near[0]}"' if near else 'data.tokenizer = "bpe-4096", "bytes" or a path'
    why = 'it is not "bytes", not "bpe-" and a number, and no file has this name'
    if path.is_dir():
        why = "it is a folder"
        if (path / "tokenizer.json").is_file():
            fix = f'data.tokenizer = "{path / "tokenizer.json"}"'
    return _problem("tokenizer-unknown", "data.tokenizer", f"there is no tokenizer {name!r}", why=why, fix=fix)


def _vocab(size: int, name: str, spec: ModelSpec | None) -> Iterator[Problem]:
    if spec is None or size <= spec.vocab_size:
        return
    fix = f"model.vocab_size = {size} or more"
    if bpe_size(name) and spec.vocab_size >= BYTES_VOCAB:
        fix += f', or data.tokenizer = "bpe-{spec.vocab_size}"'
    yield _problem(
        "tokenizer-vocab",
        "data.tokenizer",
        f"{name} has {size} tokens, the model's vocabulary {spec.vocab_size}",
        why="ids beyond the vocabulary have no embedding",
        fix=fix,
    )


def _validation(job: Job) -> Iterator[Problem]:
    if job.data.val_fraction == 0 and job.train.eval_every > 0:
        yield _problem(
            "val-none",
            "data.val_fraction",
            f"val_fraction = 0 leaves nothing to evaluate every {counted(job.train.eval_every, 'step')}",
            why="train.eval_every asks for evaluations on the validation split",
            fix="data.val_fraction = 0.02, or train.eval_every = 0",
        )


def _megatron(data: DataSection) -> Iterator[Problem]:
    """Token files beside text, with a tokenizer they can't have been made with, or unreadable."""
    for part in parts_of(data):
        where = part.where if part.where == "data.paths" else f"{part.where}.paths"
        first = [file for pattern in part.paths if (file := next(find(pattern), None)) is not None]
        kinds = {file.kind == "megatron" for file in first}
        if kinds == {True, False}:
            yield _problem(
                "megatron-mixed",
                where,
                "Megatron token files and text files stand in one corpus",
                why="token ids are used as they are, text is tokenised",
                fix="name them as two parts of data.mixture, each with its weight",
            )
        if True in kinds and bpe_size(data.tokenizer) is not None:
            yield _problem(
                "megatron-tokenizer",
                "data.tokenizer",
                f"{where} holds token ids, {data.tokenizer} would be trained now",
                why="it can't be the tokenizer that the ids were made with",
                fix="data.tokenizer = the tokenizer.json that the files were made with",
            )
        for file in first:
            yield from _megatron_index(file, where)


def _megatron_index(file: SourceFile, where: str) -> Iterator[Problem]:
    if file.kind != "megatron":
        return
    from bessemer.data.megatron import item_bytes

    try:
        item_bytes(file.index_path)
    except DataError as error:
        yield _problem(error.code, where, error.message, why="", fix=error.fix)


def _too_small(job: Job) -> Iterator[Problem]:
    """By a bound: a corpus of so many bytes can't give the tokens of one step. Stops once it is large enough."""
    batch = max([job.train.global_batch, *(size for _, size in job.train.batch_ramp)])
    needed, most = batch * job.data.seq_len + 1, 0
    for part in parts_of(job.data):
        for number, file in enumerate(_files(part)):
            own = _most_tokens(file, job.data.tokenizer)
            if own is None or number >= _FILES_LOOKED_AT:
                return
            most += own
            if most >= needed:
                return
    if not any(_bytes_of(file) for part in parts_of(job.data) for file in _files(part)):
        what, why = "the corpus is empty: no file of it holds a byte", "there is nothing to learn from"
        yield _problem("corpus-empty", "data", what, why=why, fix="name files with text in them in data.paths")
        return
    yield _problem(
        "corpus-small",
        "train.global_batch" if most else "data",
        f"the corpus can't give one batch: at most {counted(most, 'token')}, a step takes {needed - 1:,} and one more",
        why=f"{counted(batch, 'sequence')} of {counted(job.data.seq_len, 'token')} from "
        + _size_words(job.data.tokenizer),
        fix=_smaller(job, most),
    )


def _smaller(job: Job, most: int) -> str:
    fits = (most - 1) // job.data.seq_len
    return (f"train.global_batch = {fits} or less, " if fits > 0 else "") + "a smaller data.seq_len, or more text"


def _bytes_of(file: SourceFile) -> int:
    return file.path.stat().st_size


def _size_words(tokenizer: str) -> str:
    known = tokenizer == "bytes" or bpe_size(tokenizer) is not None
    return "files that hold at most a token a byte" if known else "files that hold at most two tokens a byte"


def _files(part: Part) -> Iterator[SourceFile]:
    if part.corpus is not None:
        yield from iter_stdlib()
    for pattern in part.paths:
        yield from find(pattern)


def _most_tokens(file: SourceFile, tokenizer: str) -> int | None:
    """An upper bound of the tokens in a file; None where its size tells nothing (Parquet is compressed).

    Byte-level tokenizers give at most a token a byte, others may add some (a leading space, decomposed characters):
    they are granted twice as many. Each document has one more, its end; in .jsonl the line's braces make up for it.
    """
    if file.kind == "parquet":
        return None
    try:
        size = file.path.stat().st_size
        if file.kind == "megatron":
            from bessemer.data.megatron import item_bytes

            return size // item_bytes(file.index_path)
    except (OSError, DataError):
        return None
    byte_level = tokenizer == "bytes" or bpe_size(tokenizer) is not None
    return (size if byte_level else 2 * size) + 1
