"""Memory checkpoints: anonymous memory that the vault owns and a rank maps, in two generations.

The memory is a `memfd`: it has no name, so nothing is left over when its holders are gone, and the size of /dev/shm
doesn't matter. It is allocated at once, so that a full machine is an error here and not a killed process later. Where
the machine grants huge pages to shared memory (`HUGE_PAGES`) it is made of them: it is copied out a third faster.

    generation g at g * generation_bytes:
      header  (one page)  magic, state, step, how much of layout and meta is used, the layout's hash
      layout  JSON list of {name, global_shape, dtype, global_offset, shape, offset}; `offset` is within data
      meta    JSON, as saved
      data    the tensors' bytes, each from a multiple of 64

The state is COMMITTED only between the end of one copy and the start of the next, whoever dies when.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from bessemer.core.errors import CheckpointError
from bessemer.keep.slices import DTYPE_BYTES, Box
from bessemer.keep.writer import Block

__all__ = [
    "COMMITTED",
    "GENERATIONS",
    "HUGE_PAGES",
    "WRITING",
    "Digest",
    "Entry",
    "Geometry",
    "Header",
    "Memory",
    "available_bytes",
    "digest_of",
    "place",
]

GENERATIONS = 2
EMPTY, WRITING, COMMITTED = 0, 1, 2

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Which shared memory has huge pages: with "[advise]" that of who asks; the usual setting is "[never]"."""

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14: allocate and map the pages now, in one call
_MAGIC = b"BESMEM01"
_HEADER = struct.Struct("<8sQQQQQ")
_ALIGN = 64  # a cache line: each tensor is copied at full speed
_META_ROOM = 64 << 10  # a resolved job is a few thousand bytes
_LEFT_FREE = 256 << 20  # for everything else on the machine


@dataclass(frozen=True)
class Entry:
    """One slice in a generation; `offset` is in bytes from the start of the data."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def place(slices: Sequence[tuple[str, tuple[int, ...], str, Box]]) -> list[Entry]:
    """Where each (name, global shape, dtype, box) goes in the data of a generation."""
    entries: list[Entry] = []
    at = 0
    for name, global_shape, dtype, box in slices:
        entries.append(Entry(name, global_shape, dtype, box.offset, box.shape, at))
        at = _up(at + entries[-1].nbytes, _ALIGN)
    return entries


@dataclass(frozen=True)
class Geometry:
    """The room in each generation, in bytes."""

    layout_bytes: int
    meta_bytes: int
    data_bytes: int

    @classmethod
    def of(cls, entries: Sequence[Entry], layout: bytes, meta: bytes) -> Self:
        data_bytes = max((e.offset + e.nbytes for e in entries), default=0)
        return cls(_up(len(layout), mmap.PAGESIZE), _up(max(2 * len(meta), _META_ROOM), mmap.PAGESIZE),
                   _up(data_bytes, mmap.PAGESIZE))  # fmt: skip

    def holds(self, other: Geometry) -> bool:
        return all(mine >= theirs for mine, theirs in zip(asdict(self).values(), asdict(other).values(), strict=True))

    @property
    def meta_at(self) -> int:
        return mmap.PAGESIZE + self.layout_bytes

    @property
    def data_at(self) -> int:
        return self.meta_at + self.meta_bytes

    @property
    def generation_bytes(self) -> int:
        return self.data_at + self.data_bytes

    @property
    def total_bytes(self) -> int:
        return GENERATIONS * self.generation_bytes


@dataclass(frozen=True)
class Header:
    state: int
    step: int
    layout_used: int
    meta_used: int
    layout_hash: int


@dataclass(frozen=True)
class Digest:
    """The xxh3_64 of what a generation holds at `step`: of layout and meta, and of each block in their order."""

    step: int
    meta: int
    blocks: tuple[int, ...]


def digest_of(block: Block) -> int:
    """The xxh3_64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(block.data)


class Memory:
    """The two generations of one rank, mapped. The vault makes it by `create`, the rank by `attach`."""

    def __init__(self, descriptor: int, geometry: Geometry, mapping: mmap.mmap) -> None:
        self.descriptor = descriptor
        self.geometry = geometry
        self.mapping = mapping
        self._entries: dict[int, list[Entry]] = {}

    @classmethod
    def create(cls, geometry: Geometry) -> Self:
        """Allocate and map; CheckpointError (no-memory) when the machine has less than that available."""
        free = available_bytes()
        if free is not None and geometry.total_bytes + _LEFT_FREE > free:
            raise _no_memory(geometry.total_bytes, free)
        descriptor = os.memfd_create("bessemer-vault", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, geometry.total_bytes)
            mapping = mmap.mmap(descriptor, geometry.total_bytes, flags=mmap.MAP_SHARED)
            if _grants_huge_pages():
                _populate(mapping)
            os.posix_fallocate(descriptor, 0, geometry.total_bytes)
            # Nobody can shorten it under the other's mapping, which would kill the other at its next access.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(descriptor, geometry, mapping)
        except OSError as error:
            os.close(descriptor)
            raise _no_memory(geometry.total_bytes, free, error) from error

    @classmethod
    def attach(cls, descriptor: int, geometry: Geometry, *, at_once: bool = True) -> Self:
        """Map memory that was passed here. at_once: all pages, so that the first save is as fast as the others."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
        return cls(descriptor, geometry, mmap.mmap(descriptor, geometry.total_bytes, flags=flags))

    def header(self, generation: int) -> Header:
        magic, *fields = _HEADER.unpack_from(self.mapping, self._at(generation))
        return Header(*fields) if magic == _MAGIC else Header(EMPTY, 0, 0, 0, 0)

    def begin(self, generation: int, step: int, layout: bytes) -> None:
        """From here until `commit` the generation holds nothing that counts."""
        self._set(generation, Header(WRITING, step, len(layout), 0, xxhash.xxh3_64_intdigest(layout)))
        at = self._at(generation) + mmap.PAGESIZE
        self.mapping[at : at + len(layout)] = layout

    def commit(self, generation: int, meta: bytes) -> None:
        at = self._at(generation) + self.geometry.meta_at
        self.mapping[at : at + len(meta)] = meta
        header = self.header(generation)
        self._set(generation, Header(COMMITTED, header.step, header.layout_used, len(meta), header.layout_hash))

    def data_offset(self, generation: int) -> int:
        return self._at(generation) + self.geometry.data_at

    def offsets(self, generation: int) -> list[int]:
        """Where each block of a committed generation begins, in bytes from the start of the memory."""
        return [self.data_offset(generation) + e.offset for e in self._layout(generation, self.header(generation))]

    def read(self, generation: int) -> tuple[int, dict[str, Any], list[Block]]:
        """Step, meta and blocks of a committed generation; the blocks' bytes are those of this memory, not copies.

        CheckpointError (vault-protocol) when it isn't committed or its layout does not fit the memory.
        """
        header = self.header(generation)
        geometry = self.geometry
        if (
            header.state != COMMITTED
            or header.layout_used > geometry.layout_bytes
            or header.meta_used > geometry.meta_bytes
        ):
            raise CheckpointError(f"generation {generation} is not committed", code="vault-protocol")
        meta_at = self._at(generation) + geometry.meta_at
        meta = json.loads(self.mapping[meta_at : meta_at + header.meta_used])
        entries = self._layout(generation, header)
        data = memoryview(self.mapping)
        start = self.data_offset(generation)
        blocks = [
            Block(e.name, e.global_shape, e.dtype, Box(e.global_offset, e.shape),
                  data[start + e.offset : start + e.offset + e.nbytes])
            for e in entries
        ]  # fmt: skip
        return header.step, meta, blocks

    def digest(self, generation: int) -> Digest | None:
        """The checksums of a committed generation, at about the speed at which memory is read. None where it isn't
        committed, or stops being so meanwhile: its owner goes on and writes there whenever it likes."""
        before = self.header(generation)
        if before.state != COMMITTED:
            return None
        _, _, blocks = self.read(generation)
        found = Digest(before.step, self._meta_digest(generation, before), tuple(map(digest_of, blocks)))
        return found if self.header(generation) == before else None

    def check(self, generation: int, known: Digest) -> Header:
        """The header of a generation that is committed, at the digest's step and with its meta; its data isn't read.
        CheckpointError (checkpoint-damaged)."""
        header = self.header(generation)
        if header.state != COMMITTED or header.step != known.step:
            raise CheckpointError(f"the copy of step {known.step} has gone from the memory", code="checkpoint-damaged")
        if self._meta_digest(generation, header) != known.meta:
            raise CheckpointError(f"what the copy of step {known.step} says of itself is damaged",
                                  code="checkpoint-damaged")  # fmt: skip
        return header

    def image(self, generation: int) -> memoryview:
        """All bytes of a generation but its header: layout, meta and data, as another memory of this geometry has
        them."""
        at = self._at(generation)
        return memoryview(self.mapping)[at + mmap.PAGESIZE : at + self.geometry.generation_bytes]

    def put_header(self, generation: int, header: Header) -> None:
        """Say of a generation what another memory says of its own, whose image is here or on its way."""
        self._set(generation, header)

    def forget(self, generation: int) -> None:
        """What it holds no longer counts."""
        self._set(generation, Header(EMPTY, 0, 0, 0, 0))

    def _meta_digest(self, generation: int, header: Header) -> int:
        """Of layout and meta together."""
        at, geometry = self._at(generation), self.geometry
        found = xxhash.xxh3_64()
        found.update(self.mapping[at + mmap.PAGESIZE : at + mmap.PAGESIZE + header.layout_used])
        found.update(self.mapping[at + geometry.meta_at : at + geometry.meta_at + header.meta_used])
        return found.intdigest()

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last view."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _at(self, generation: int) -> int:
        return generation * self.geometry.generation_bytes

    def _set(self, generation: int, header: Header) -> None:
        _HEADER.pack_into(self.mapping, self._at(generation), _MAGIC, *asdict(header).values())

    def _layout(self, generation: int, header: Header) -> list[Entry]:
        known = self._entries.get(header.layout_hash)
        if known is not None:
            return known
        at = self._at(generation) + mmap.PAGESIZE
        entries = unpack_layout(self.mapping[at : at + header.layout_used])
        for e in entries:
            if not 0 <= e.offset <= e.offset + e.nbytes <= self.geometry.data_bytes:
                raise CheckpointError(f"slice {e.name!r} lies outside the memory", code="vault-protocol")
        self._entries = {header.layout_hash: entries}
        return entries


def _grants_huge_pages() -> bool:
    return any(word in line for line in _lines(HUGE_PAGES) for word in ("[advise]", "[always]", "[within_size]"))


def _populate(mapping: mmap.mmap) -> None:
    """In huge pages, which are allocated for a mapping that asks for them alone. What isn't to be had that way is left
    to whoever allocates what is missing, and says so where there is no room."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(_POPULATE_WRITE)


def pack_layout(entries: Sequence[Entry]) -> bytes:
    return json.dumps([asdict(e) for e in entries], separators=(",", ":")).encode()


def unpack_layout(raw: bytes) -> list[Entry]:
    def entry(fields: Mapping[str, Any]) -> Entry:
        shapes = {key: tuple(fields[key]) for key in ("global_shape", "global_offset", "shape")}
        return Entry(**{**fields, **shapes})

    return [entry(fields) for fields in json.loads(raw)]


def available_bytes() -> int | None:
    """Memory that can be had without swapping: the machine's, or less where a control group limits this process.

    None when the kernel doesn't say."""
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in _lines(Path("/proc/self/cgroup")):
        group = Path("/sys/fs/cgroup") / line.rpartition(":")[2].lstrip("/")
        limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
        if limit and used and limit[0].isdecimal():
            found.append(int(limit[0]) - int(used[0]))
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _no_memory(needed: int, free: int | None, error: OSError | None = None) -> CheckpointError:
    has = f"; {free:,} are available" if free is not None else ""
    has += f" ({error.strerror})" if error is not None else ""
    limited = error is not None and error.errno == errno.EFBIG  # the kernel counts a memfd as a file
    return CheckpointError(
        f"two memory copies of this rank's state need {needed:,} bytes{has}",
        code="no-memory",
        fix="ulimit -f unlimited" if limited else "fewer ranks on this machine, or a smaller model",
    )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
