"""`prepare(job)`: everything between a job's [data] table and token shards in the cache.

    <cache>/listings/      digests of corpus files
    <cache>/tokenizers/    trained tokenizers, each a folder with tokenizer.json
    <cache>/tokens/<key>/  token shards; the key covers corpus content, tokenizer, split and format

Nothing there is ever altered once its manifest is written, and nothing is deleted; each folder may be removed by hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bessemer.core.errors import DataError, MissingExtra
from bessemer.core.job import DataSection, Job
from bessemer.core.paths import user_path
from bessemer.core.units import counted
from bessemer.data._files import cache_errors, locked, read_json, write_durable
from bessemer.data.listing import Listing, list_contents
from bessemer.data.megatron import index_documents
from bessemer.data.shards import FORMAT, MANIFEST, check_sizes, write_manifest
from bessemer.data.sources import Part, SourceFile, files_of, parts_of
from bessemer.data.tokenise import SHARD_BYTES, Progress, Recipe, sample_texts, tokenise
from bessemer.data.tokenizer_file import bpe_size
from bessemer.data.tokenizers import (
    BpeRecipe,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    byte_tokenizer_json,
    dtype_for,
    train_bpe,
)
from bessemer.data.weights import shares_of

__all__ = ["BPE_SAMPLE_BYTES", "Prepared", "PreparedPart", "prepare"]

BPE_SAMPLE_BYTES = 16 << 20
"""Text from which a BPE is trained, at most."""

_VERIFIED_BYTES = 1 << 30  # up to here an open verifies checksums (about 0.1 s a GB in memory), beyond only sizes


@dataclass(frozen=True)
class PreparedPart:
    """One corpus in the cache: its folder, manifest, source files and weight in the mixture."""

    folder: Path
    manifest: dict[str, Any]
    files: tuple[SourceFile, ...]
    weight: float


@dataclass(frozen=True)
class Prepared:
    """The data of a job, ready to be read. `tokenizer_json` is the tokenizer as a file, for exports."""

    parts: tuple[PreparedPart, ...]
    tokenizer: Tokenizer
    tokenizer_json: Path

    def total(self, split: str, what: str) -> int | None:
        """Sum over the corpora of "tokens", "documents" or "text_bytes" (None: unknown, of Megatron files)."""
        values = [part.manifest["splits"][split][what] for part in self.parts]
        return None if None in values else sum(values)


def prepare(job: Job, progress: Progress | None = None, *, shard_bytes: int = SHARD_BYTES) -> Prepared:
    """Tokenises what the cache lacks; afterwards `open_dataset(job, ...)` finds everything there.

    Several processes may call it: one works, the others wait for its lock, which the kernel frees when a process dies;
    the next one goes on behind the finished shards. `progress(done, total)` counts bytes of the corpus.
    Raises DataError (`docs/errors.md` lists the codes) and MissingExtra.
    """
    cache = user_path(job.data.cache)
    parts = parts_of(job.data)
    recipe = Recipe(job.data.text_key, job.data.val_fraction, shard_bytes)
    with cache_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        listings = [list_contents(files_of(part), cache) for part in parts]
        tokenizer_json = _tokenizer_file(job.data, parts, listings, cache, recipe)
        tokenizer = ByteTokenizer() if job.data.tokenizer == "bytes" else FileTokenizer(tokenizer_json)
        total = sum(listing.source_bytes for listing in listings)
        prepared, before = [], 0
        for part, listing in zip(parts, listings, strict=True):
            own = _shifted(progress, before, total)
            prepared.append(_prepare_part(part, listing, tokenizer, recipe, (cache, own)))
            before += listing.source_bytes
    found = Prepared(tuple(prepared), tokenizer, tokenizer_json)
    _refuse_too_small(job, parts, found)
    return found


def _shifted(progress: Progress | None, before: int, total: int) -> Progress:
    """Progress of one corpus as progress of all."""

    def report(done: int, own_total: int) -> None:
        del own_total
        if progress is not None:
            progress(before + done, total)

    return report


def _prepare_part(
    part: Part, listing: Listing, tokenizer: Tokenizer, recipe: Recipe, sink: tuple[Path, Progress]
) -> PreparedPart:
    cache, progress = sink
    megatron = any(file.kind == "megatron" for file in listing.files)
    facts = {
        "kind": "megatron" if megatron else "text",
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": dtype_for(tokenizer.vocab_size).str,
        "text_key": recipe.text_key,
        "val_fraction": recipe.val_fraction,
        "shard_bytes": recipe.shard_bytes,
    }
    kinds = [f"{file.kind}{'?' if file.lenient else ''}" for file in listing.files]
    folder = cache / "tokens" / _key({"format": FORMAT, **facts, "kinds": kinds, "digests": listing.digests})
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        with locked(folder.with_suffix(".lock")):
            manifest = read_json(folder / MANIFEST)
            if manifest is None:
                folder.mkdir(parents=True, exist_ok=True)
                _sweep(folder)
                if megatron:
                    shards = index_documents(folder, listing, tokenizer.vocab_size, recipe.val_fraction, progress)
                else:
                    shards = tokenise(folder, listing, tokenizer, recipe, progress)
                if not any(split["documents"] for shard in shards for split in shard["splits"].values()):
                    raise _empty(part)
                manifest = write_manifest(folder, facts, shards)
    progress(listing.source_bytes, listing.source_bytes)
    check_sizes(folder, manifest, _VERIFIED_BYTES)
    return PreparedPart(folder, manifest, listing.files, part.weight)


def _sweep(folder: Path) -> None:
    """Removes what a killed process left half written. The caller holds the lock."""
    for left in folder.glob("*.tmp"):
        left.unlink()


def _key(decides: Any) -> str:
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _empty(part: Part) -> DataError:
    named = part.corpus or ", ".join(part.paths)
    return DataError(
        f"{part.where}: the corpus {named} holds no document with text",
        code="corpus-empty",
        fix="name files with text in them",
    )


def _tokenizer_file(
    data: DataSection, parts: Sequence[Part], listings: Sequence[Listing], cache: Path, recipe: Recipe
) -> Path:
    """The path of the job's tokenizer.json, which is trained or written here if the cache lacks it."""
    size = bpe_size(data.tokenizer)
    if size is None and data.tokenizer != "bytes":
        return user_path(data.tokenizer)
    if size is None:
        path = cache / "tokenizers" / "bytes" / "tokenizer.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durable(path, [byte_tokenizer_json().encode()])
        return path
    for part, listing in zip(parts, listings, strict=True):
        if any(file.kind == "megatron" for file in listing.files):
            raise DataError(
                f"{part.where} holds token ids; a tokenizer trained now can't be the one they were made with",
                code="megatron-tokenizer",
                fix="data.tokenizer = the tokenizer.json that the files were made with",
            )
    return _trained(BpeRecipe(size), parts, listings, cache, recipe)


def _trained(bpe: BpeRecipe, parts: Sequence[Part], listings: Sequence[Listing], cache: Path, recipe: Recipe) -> Path:
    shares = shares_of([part.weight for part in parts])
    decides = {
        "bpe": [bpe.size, bpe.min_count, BPE_SAMPLE_BYTES, _library_version()],
        "text_key": recipe.text_key,
        "val_fraction": recipe.val_fraction,
        "parts": [[str(share), listing.digests] for share, listing in zip(shares, listings, strict=True)],
    }
    path = cache / "tokenizers" / f"bpe-{bpe.size}-{_key(decides)}" / "tokenizer.json"
    if path.is_file():
        return path
    with locked(path.parent.with_suffix(".lock")):
        if not path.is_file():
            texts: list[str] = []
            for part, listing, share in zip(parts, listings, shares, strict=True):
                own = sample_texts(listing, recipe, int(BPE_SAMPLE_BYTES * share))
                if not own:
                    raise _empty(part)
                texts += own
            content = train_bpe(texts, bpe)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durable(path, [content.encode()])
    return path


def _library_version() -> str:
    try:
        return version("tokenizers")
    except ModuleNotFoundError as error:
        raise MissingExtra("train", "train", "tokenizers") from error


def _refuse_too_small(job: Job, parts: Sequence[Part], prepared: Prepared) -> None:
    """Raises DataError `split-empty` or `corpus-small`; a failed one shows before any model is built."""
    length = job.data.seq_len
    for split in ("train", "val") if job.data.val_fraction else ("train",):
        windows = []
        for part, own in zip(parts, prepared.parts, strict=True):
            tokens = own.manifest["splits"][split]["tokens"]
            windows.append((tokens - 1) // length if tokens else 0)
            if windows[-1] < 1:
                raise _split_empty(job, part, split, own.manifest)
        batch = max([job.train.global_batch, *(size for _, size in job.train.batch_ramp)])
        if split == "train" and sum(windows) < batch:
            raise DataError(
                f"the training split gives {counted(sum(windows), 'sample')} of {counted(length, 'token')}, "
                f"one step takes {batch}",
                code="corpus-small",
                fix=f"train.global_batch = {sum(windows)} or less, a smaller data.seq_len, or more text",
            )


def _split_empty(job: Job, part: Part, split: str, manifest: dict[str, Any]) -> DataError:
    own, length = manifest["splits"][split], job.data.seq_len
    documents = sum(manifest["splits"][name]["documents"] for name in manifest["splits"])
    fixes = ["more text"]
    if own["tokens"] > 1:
        fixes.append(f"data.seq_len = {own['tokens'] - 1} or less")
    if own["documents"] < documents:
        fraction = job.data.val_fraction
        fixes.append("data.val_fraction = 0 (no validation)")
        fixes.append(f"a {'larger' if split == 'val' else 'smaller'} one than {fraction:g}")
    fix = ", ".join(fixes[:-1]) + f" or {fixes[-1]}" if len(fixes) > 1 else fixes[0]
    return DataError(
        f"{part.where}: the {split} split has {counted(own['tokens'], 'token')} in {own['documents']} of "
        f"{counted(documents, 'document')}, "
        f"one sample needs {length + 1}",
        code="split-empty",
        fix=fix,
    )
