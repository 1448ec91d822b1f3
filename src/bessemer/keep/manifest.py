"""The manifest of a checkpoint: which slices lie where, with checksums, and the meta data of the step.

A sealed file is one JSON object whose last key is the xxh3_64 checksum of every byte before it, so that a flipped or
missing bit anywhere in it is seen. `manifest.json` is sealed, and so are the parts that several hosts write.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer import __version__
from bessemer.core.errors import CheckpointError
from bessemer.keep.slices import DTYPE_BYTES, Box, tiling_faults

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "StoredFile",
    "StoredSlice",
    "coverage_faults",
    "damaged",
    "seal",
    "step_of",
    "steps_in",
    "step_folder",
    "unseal",
]

FORMAT = "bessemer-checkpoint-1"
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_SEAL = b',"checksum":"'


@dataclass(frozen=True)
class StoredSlice:
    """One block of one tensor in one file. `byte_offset` counts from the start of the file; `checksum` is the hex
    xxh3_64 of its bytes."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    byte_offset: int
    checksum: str

    @property
    def box(self) -> Box:
        return Box(self.global_offset, self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredFile:
    """A shard: its size, and the length and checksum of its safetensors header (length prefix included)."""

    file: str
    size: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the tensors' bytes. `meta` is what the trainer saved beside them."""

    meta: dict[str, Any]
    files: tuple[StoredFile, ...]
    slices: tuple[StoredSlice, ...]
    created: float = field(default_factory=time.time)  # unix seconds

    def to_bytes(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "bessemer": __version__,
                "created": self.created,
                "meta": self.meta,
                "files": [asdict(f) for f in self.files],
                "slices": [asdict(s) for s in self.slices],
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Read and check a manifest; CheckpointError (checkpoint-damaged) naming `where` when it can't be trusted."""
        body = unseal(raw, where)
        if body.get("format") != FORMAT:
            raise CheckpointError(
                f"{where}: format {body.get('format')!r} is not known here, only {FORMAT!r}",
                code="checkpoint-format",
                fix="read it with the version of bessemer that wrote it",
            )
        try:
            files = tuple(StoredFile(**f) for f in body["files"])
            slices = tuple(slice_from_json(s) for s in body["slices"])
            manifest = cls(dict(body["meta"]), files, slices, float(body["created"]))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"{where}: an entry is malformed ({error})") from error
        manifest._check_files(where)
        return manifest

    def _check_files(self, where: str) -> None:
        sizes = {f.file: f for f in self.files}
        for name in sizes:
            if not _FILE_NAME.fullmatch(name):
                raise damaged(f"{where}: {name!r} is not the name of a shard")
        for s in self.slices:
            held = sizes.get(s.file)
            if held is None or not held.header_bytes <= s.byte_offset <= s.byte_offset + s.nbytes <= held.size:
                raise damaged(f"{where}: tensor {s.name!r} does not lie within {s.file}")


def slice_from_json(fields: Mapping[str, Any]) -> StoredSlice:
    """A StoredSlice from its JSON form (lists become tuples)."""
    shapes = {key: tuple(int(x) for x in fields[key]) for key in ("global_shape", "global_offset", "shape")}
    return StoredSlice(**{**fields, **shapes})


def seal(body: Mapping[str, Any]) -> bytes:
    """One line of JSON that ends in its own checksum. ValueError for values that JSON has no form for (NaN)."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return text + _SEAL + xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n'


def unseal(raw: bytes, where: str) -> dict[str, Any]:
    """The body of a sealed file; CheckpointError (checkpoint-damaged) if any byte of it is not as it was sealed."""
    text, mark, tail = raw.rpartition(_SEAL)
    if not mark or tail != xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n':
        raise damaged(f"{where}: torn or altered ({len(raw)} bytes; its checksum does not match its content)")
    body: dict[str, Any] = json.loads(text + b"}")
    return body


def damaged(message: str) -> CheckpointError:
    return CheckpointError(message, code="checkpoint-damaged")


def coverage_faults(slices: Sequence[StoredSlice]) -> list[str]:
    """Every tensor whose stored slices disagree or do not tile it exactly, one line each fault; empty when all do."""
    by_name: dict[str, list[StoredSlice]] = defaultdict(list)
    for s in slices:
        by_name[s.name].append(s)
    faults: list[str] = []
    for name, group in by_name.items():
        kinds = sorted({f"{s.dtype} {list(s.global_shape)}" for s in group})
        if len(kinds) > 1:
            faults.append(f"tensor {name!r} is stored as {' and as '.join(kinds)}")
            continue
        found = tiling_faults(group[0].global_shape, ((s.box, s.file) for s in group))
        faults.extend(f"tensor {name!r}: {text}" for text in found)
    return faults


def step_folder(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder's name, or None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def steps_in(root: Path) -> list[int]:
    """The steps that have a folder in `root`, ascending; what is in the folders was not looked at."""
    if not root.is_dir():
        return []
    return sorted(step for path in root.iterdir() if (step := step_of(path.name)) is not None and path.is_dir())
