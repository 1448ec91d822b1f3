"""Reading what ranks left in the memory of their host's vault: the state of a step, put together from all of them.

    with MemoryCopies(socket) as copies:
        step = max(copies.steps(slices))
        copies.read_into(step, slices)

Ranks that hold the same tensors share them out when they save, so a rank reads from the memory of others too. Every
block that is read is compared with the checksum that the vault computed when it was saved.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import xxhash

from bessemer.core.errors import CheckpointError
from bessemer.keep.memory import Digest, Geometry, Memory
from bessemer.keep.slices import Slice, dtype_name, intersect, torch_dtype
from bessemer.keep.wire import Frames, pack
from bessemer.keep.writer import Block

__all__ = ["MemoryCopies", "fetch", "settled"]

_CHUNK = 2 << 20  # copied, and hashed while it is still in the cache; smaller ones have threads wait for each other


@dataclass(frozen=True)
class _Piece:
    """One block in the memory of one rank, and its checksum."""

    block: Block
    digest: int
    rank: int
    descriptor: int
    offset: int


class MemoryCopies:
    """The committed copies of all ranks of one host. CheckpointError (vault-lost) when no vault answers at `path`."""

    def __init__(self, path: Path | str, *, timeout_s: float = 600.0) -> None:
        self._memories: dict[int, Memory] = {}
        self._digests: dict[int, dict[int, Digest]] = {}  # by rank and generation
        try:
            with _Asker(path, timeout_s) as vault:
                for rank in vault.ask({"op": "copies"})["ranks"]:
                    reply = vault.ask({"op": "copy", "rank": rank})
                    geometry = Geometry(**{key: int(reply[key]) for key in asdict(Geometry(0, 0, 0))})
                    self._memories[rank] = Memory.attach(vault.descriptor(), geometry, at_once=False)
                    self._digests[rank] = {int(d["generation"]): _digest(d) for d in reply["digests"]}
        except OSError as error:
            raise CheckpointError(f"the vault at {path} does not answer: {error}", code="vault-lost") from error

    def steps(self, slices: Sequence[Slice]) -> list[int]:
        """The steps, ascending, of which every element of `slices` is held. Nothing is verified yet."""
        held = {digest.step for digests in self._digests.values() for digest in digests.values()}
        return sorted(step for step in held if not self.missing(step, slices))

    def missing(self, step: int, slices: Sequence[Slice]) -> list[str]:
        """The names of `slices` of which some element isn't held, or in another shape or type."""
        pieces = self._pieces(step)
        return [s.name for s in slices if sum(common.volume for _, common in _meets(s, pieces)) < s.box.volume]

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """The step and each block of all that is held; their bytes are those in the vault's memory."""
        for rank, digests in sorted(self._digests.items()):
            for generation, digest in digests.items():
                yield from ((digest.step, block) for block in self._memories[rank].read(generation)[2])

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the tensors. CheckpointError (checkpoint-damaged)."""
        for rank, generation, digest in self._of(step):
            self._memories[rank].check(generation, digest)
            return self._memories[rank].read(generation)[1]
        raise CheckpointError(f"no copy of step {step} is held", code="checkpoint-missing", step=step)

    def read_into(self, step: int, slices: Sequence[Slice], *, threads: int = 1) -> None:
        """Fill the slices. CheckpointError (checkpoint-damaged) when bytes don't have their checksum: the slices then
        hold what nobody can use; (checkpoint-keys) when something isn't there."""
        if missing := self.missing(step, slices):
            raise CheckpointError(f"step {step} lacks {missing[0]} and {len(missing) - 1} more", code="checkpoint-keys")
        for rank, generation, digest in self._of(step):
            self._memories[rank].check(generation, digest)
        pieces = self._pieces(step)
        work = [(s, piece, common) for s in slices for piece, common in _meets(s, pieces)]
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda item: _take(step, *item), work):
                pass
        for rank, generation, digest in self._of(step):  # nobody has begun to write there meanwhile
            self._memories[rank].check(generation, digest)

    def close(self) -> None:
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, step: int) -> list[tuple[int, int, Digest]]:
        return [(rank, generation, digest) for rank, digests in sorted(self._digests.items())
                for generation, digest in digests.items() if digest.step == step]  # fmt: skip

    def _pieces(self, step: int) -> dict[str, list[_Piece]]:
        """By name."""
        found: dict[str, list[_Piece]] = {}
        for rank, generation, digest in self._of(step):
            try:
                _, _, blocks = self._memories[rank].read(generation)
            except CheckpointError:
                continue  # it is being written again
            memory = self._memories[rank]
            for block, checksum, offset in zip(blocks, digest.blocks, memory.offsets(generation), strict=True):
                found.setdefault(block.name, []).append(_Piece(block, checksum, rank, memory.descriptor, offset))
        return found


def settled(path: Path | str, *, timeout_s: float = 600.0) -> None:
    """Return when the vault writes nothing any more: what it was still writing for ranks that have ended is durable."""
    try:
        with _Asker(path, timeout_s) as vault:
            vault.ask({"op": "settle"})
    except OSError as error:
        raise CheckpointError(f"the vault at {path} does not answer: {error}", code="vault-lost") from error


def fetch(path: Path | str, *, timeout_s: float = 600.0) -> tuple[list[int], list[str]]:
    """Have the vault take what its peers on other hosts hold and it doesn't. Returns the ranks of which something came,
    and what was refused."""
    try:
        with _Asker(path, timeout_s) as vault:
            reply = vault.ask({"op": "fetch"})
            return list(reply["ranks"]), list(reply["refused"])
    except OSError as error:
        raise CheckpointError(f"the vault at {path} does not answer: {error}", code="vault-lost") from error


def _meets(s: Slice, pieces: Mapping[str, list[_Piece]]) -> list[tuple[_Piece, Any]]:
    """The pieces of which `s` has a part, and the common boxes."""
    dtype, shape = dtype_name(s.tensor.dtype), tuple(s.global_shape)
    alike = [p for p in pieces.get(s.name, []) if (p.block.dtype, p.block.global_shape) == (dtype, shape)]
    return [(p, common) for p in alike if (common := intersect(s.box, p.block.box)) is not None]


def _take(step: int, s: Slice, piece: _Piece, common: Any) -> None:
    """Verify a piece and copy what `s` has of it."""
    block = piece.block
    found = xxhash.xxh3_64()
    if common == s.box == block.box and s.tensor.is_contiguous() and s.tensor.device.type == "cpu":
        # read, not copied from a mapping: its pages would first have to be mapped, which costs as much as the copy
        target = s.tensor.detach().view(-1).view(torch.uint8).numpy().data
        for at in range(0, len(target), _CHUNK):
            chunk = target[at : at + _CHUNK]
            if os.preadv(piece.descriptor, [chunk], piece.offset + at) != len(chunk):
                raise CheckpointError("the memory of the vault has another size than it says", code="vault-protocol")
            found.update(chunk)
    else:
        found.update(block.data)
        count = math.prod(block.box.shape)
        whole = torch.frombuffer(block.data, dtype=torch_dtype(block.dtype), count=count).view(block.box.shape)
        with torch.no_grad():
            s.tensor[common.within(s.box)].copy_(whole[common.within(block.box)])
    if found.intdigest() != piece.digest:
        raise CheckpointError(
            f"the copy of {block.name} {block.box} at step {step} in the memory of rank {piece.rank} is damaged: its "
            "checksum differs",
            code="checkpoint-damaged",
            step=step,
        )


def _digest(fields: Mapping[str, Any]) -> Digest:
    return Digest(int(fields["step"]), int(fields["meta"]), tuple(fields["blocks"]))


class _Asker:
    """One connection to the vault that only asks. OSError when it ends or times out."""

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.settimeout(timeout_s)
        self._frames = Frames()
        self._descriptors: list[int] = []
        try:
            self._link.connect(str(path))
        except OSError:
            self._link.close()
            raise

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer; CheckpointError where it is a refusal."""
        self._link.sendall(pack(question))
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._link, 1 << 16, 4)
            self._descriptors += descriptors
            if not data:
                raise ConnectionError("it has ended")
            for message in self._frames.feed(data):
                if message["op"] == "refused":
                    raise CheckpointError(str(message["message"]), code=str(message["code"]))
                return message

    def descriptor(self) -> int:
        """What came with the last answer."""
        return self._descriptors.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._link.close()
