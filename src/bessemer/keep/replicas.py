"""Copies of other hosts' memory in this host's vault, and of this host's memory in that of another.

Each time the checksums of a generation are there, it is sent to the peer, the newest of each rank first: a generation
that was replaced meanwhile is skipped. It arrives whole or not at all, since it is compared with its checksums before
its header says that it is committed; the peer has two generations of each rank too, and writes to the older.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from bessemer.core.errors import CheckpointError
from bessemer.keep.memory import COMMITTED, GENERATIONS, WRITING, Digest, Header, Memory
from bessemer.keep.peers import About, Transport
from bessemer.keep.vault_copies import Copies
from bessemer.keep.vault_steps import MemoryCopy, say

__all__ = ["Replicas"]

T = TypeVar("T")
LOOP_S = 60.0


class Replicas:
    """Of one vault. `post` has something run in the vault's loop, where alone `copies` may be used. `peers` are the
    addresses of the vaults to which this host's memory goes, and from which it is fetched."""

    def __init__(
        self, transport: Transport, peers: Sequence[str], copies: Copies, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._transport, self._peers, self._copies, self._post = transport, tuple(peers), copies, post
        self._held: dict[int, MemoryCopy] = {}  # of other hosts' ranks
        self._guard = threading.Lock()
        self._wanted: dict[int, tuple[MemoryCopy, int, Digest]] = {}  # by rank, to be sent
        self._fetching = threading.Lock()
        self._news = threading.Condition()
        transport.serve(self)
        if self._peers:
            copies.on_digest = self._on_digest
            threading.Thread(target=self._send_all, name="replicate", daemon=True).start()

    def close(self) -> None:
        self._transport.close()

    # ---- what others reach

    def found(self) -> list[About]:
        """What this vault has: its own ranks' memory, and that of others."""
        with self._guard:
            others = [_about(rank, copy, g, d) for rank, copy in self._held.items() for g, d in copy.digests.items()]
        return others + self._in_loop(self._own)

    def source(self, about: About) -> memoryview:
        memory, generation = self._find(about)
        return memory.image(generation)

    def room(self, about: About) -> memoryview:
        """In the older generation of the memory for that rank."""
        with self._guard:
            copy = self._held.get(about.rank)
            if copy is None or copy.memory.geometry != about.geometry:
                self._forget(about.rank)
                copy = self._held[about.rank] = MemoryCopy(Memory.create(about.geometry), None)
            for generation in [g for g, d in copy.digests.items() if d.step >= about.step]:  # the run went back
                del copy.digests[generation]
            generation = min(range(GENERATIONS), key=lambda g: copy.digests[g].step if g in copy.digests else -1)
            copy.digests.pop(generation, None)
            begin(copy.memory, generation, about)
            return copy.memory.image(generation)

    def arrived(self, about: About) -> None:
        with self._guard:
            copy = self._held[about.rank]
        for generation in range(GENERATIONS):
            header = copy.memory.header(generation)
            if header.state == WRITING and header.step == about.step:
                accept(copy.memory, generation, about)
                with self._guard:
                    copy.digests[generation] = about.digest
                return
        raise CheckpointError("another image came in between", code="checkpoint-damaged")

    # ---- bringing back

    def fetch(self) -> tuple[list[int], list[str]]:
        """Take from the peers what they have and this vault hasn't, each verified. Returns the ranks of which something
        came, and what was refused and why. Not in the vault's loop."""
        with self._fetching:
            return self._fetch()

    def _fetch(self) -> tuple[list[int], list[str]]:
        came, refused = set(), []
        for peer in self._peers:
            try:
                for about in self._transport.found(peer):
                    try:
                        if self._take(peer, about):
                            came.add(about.rank)
                    except CheckpointError as error:
                        refused.append(f"step {about.step} of rank {about.rank} at {peer}: {error.message}")
            except OSError as error:
                refused.append(f"{peer}: {error}")
        return sorted(came), refused

    def _take(self, peer: str, about: About) -> bool:
        memory = self._in_loop(lambda: self._copies.room(about.rank, about.geometry, about.step))
        if memory is None:
            return False
        copy, generation = memory
        begin(copy.memory, generation, about)
        self._transport.get(peer, about, copy.memory.image(generation))
        accept(copy.memory, generation, about)
        self._in_loop(lambda: copy.digests.update({generation: about.digest}))
        return True

    # ---- sending

    def _on_digest(self, rank: int, copy: MemoryCopy, generation: int, digest: Digest) -> None:
        with self._news:
            self._wanted[rank] = (copy, generation, digest)
            self._news.notify()

    def _send_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: bool(self._wanted))
                rank = min(self._wanted, key=lambda r: self._wanted[r][2].step)
                copy, generation, digest = self._wanted.pop(rank)
            about = _about(rank, copy, generation, digest)
            for peer in self._peers:
                if copy.memory.header(generation) != about.header or about.step != digest.step:
                    break  # a newer one follows
                try:
                    self._transport.put(peer, about, copy.memory.image(generation))
                except (OSError, CheckpointError) as error:
                    say(f"step {digest.step} of rank {rank} is not copied to {peer}: {error}")

    # ---- inside

    def _forget(self, rank: int) -> None:
        copy = self._held.pop(rank, None)
        if copy is not None:
            copy.memory.close()

    def _own(self) -> list[About]:
        return [
            _about(rank, copy, generation, digest)
            for rank in self._copies.ranks()
            for copy in [self._copies[rank]]
            for generation, digest in self._copies.sound(copy).items()
        ]

    def _find(self, about: About) -> tuple[Memory, int]:
        with self._guard:
            held = self._held.get(about.rank)
        own = self._in_loop(lambda: self._copies[about.rank] if about.rank in self._copies.ranks() else None)
        for copy in (held, own):
            for generation, digest in list(copy.digests.items()) if copy is not None else ():
                if copy is not None and digest == about.digest:
                    return copy.memory, generation
        raise CheckpointError(f"step {about.step} of rank {about.rank} has gone", code="checkpoint-missing")

    def _in_loop(self, action: Callable[[], T]) -> T:
        """The result of `action`, run in the vault's loop. CheckpointError of it is raised here."""
        results: SimpleQueue[T | CheckpointError] = SimpleQueue()

        def run() -> None:
            try:
                results.put(action())
            except CheckpointError as error:
                results.put(error)

        self._post(run)
        result = results.get(timeout=LOOP_S)
        if isinstance(result, CheckpointError):
            raise result
        return result


def begin(memory: Memory, generation: int, about: About) -> None:
    """Until `accept` the generation holds nothing that counts."""
    memory.put_header(generation, Header(WRITING, about.step, 0, 0, 0))


def accept(memory: Memory, generation: int, about: About) -> None:
    """The image is there: let it count if it is what its checksums say. CheckpointError (checkpoint-damaged)."""
    memory.put_header(generation, about.header)
    try:
        same = memory.digest(generation) == about.digest
    except (CheckpointError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        memory.forget(generation)
        raise CheckpointError(f"the copy of step {about.step} of rank {about.rank} is damaged: its checksums differ",
                              code="checkpoint-damaged")  # fmt: skip


def _about(rank: int, copy: MemoryCopy, generation: int, digest: Digest) -> About:
    header = copy.memory.header(generation)
    return About(rank, copy.memory.geometry, Header(COMMITTED, *_rest(header)), digest)


def _rest(header: Header) -> tuple[int, int, int, int]:
    return header.step, header.layout_used, header.meta_used, header.layout_hash
