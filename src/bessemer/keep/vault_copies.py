"""The memory that a vault holds for the ranks of its host: who has it, which of its copies can be relied on.

Checksums are computed here, in a thread of the vault, as soon as a rank has committed a copy. The rank doesn't wait for
them: where it writes to a copy again before its checksums are there, that copy simply never gets any.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from bessemer.core.errors import BessemerError
from bessemer.keep.memory import COMMITTED, GENERATIONS, Digest, Geometry, Memory
from bessemer.keep.vault_steps import MemoryCopy, Seat

__all__ = ["Copies"]

_THREADS = 2


class Copies:
    """By rank. Used by the vault's loop alone; `post` has something run there from a thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._by_rank: dict[int, MemoryCopy] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="digest")
        self._running = 0
        self._when_idle: list[Callable[[], None]] = []
        self.on_digest: Callable[[int, MemoryCopy, int, Digest], None] | None = None
        """Told of each generation that can be relied on: rank, memory, generation, checksums."""

    def __getitem__(self, rank: int) -> MemoryCopy:
        return self._by_rank[rank]

    def close(self) -> None:
        self._pool.shutdown()

    def reserve(self, seat: Seat, wanted: Geometry, step: int) -> MemoryCopy:
        """Memory for the client, which stands at `step`; that of its predecessor where it is large enough."""
        copy = self._by_rank.get(seat.rank)
        if copy is None or not copy.memory.geometry.holds(wanted):
            self.forget(seat.rank)
            copy = self._by_rank[seat.rank] = MemoryCopy(Memory.create(wanted), seat)
        copy.owner = seat
        copy.drop_after(step)
        return copy

    def room(self, rank: int, geometry: Geometry, step: int) -> tuple[MemoryCopy, int] | None:
        """Where a copy of `step` from elsewhere can go: memory that no client has, and the generation. None where this
        vault has that step or newer ones. CheckpointError (no-memory)."""
        copy = self._by_rank.get(rank)
        if copy is not None and (copy.owner is not None or copy.memory.geometry != geometry):
            return None
        if copy is None:
            copy = self._by_rank[rank] = MemoryCopy(Memory.create(geometry), None)
        steps = [copy.digests[g].step if g in copy.digests else -1 for g in range(GENERATIONS)]
        free = [g for g in range(GENERATIONS) if g not in copy.busy and steps[g] < step]
        if step in steps or not free:
            return None
        generation = min(free, key=lambda g: steps[g])
        copy.digests.pop(generation, None)
        return copy, generation

    def forget(self, rank: int) -> None:
        """Let go of a rank's memory; a write from it holds on to it until its end."""
        copy = self._by_rank.pop(rank, None)
        if copy is not None:
            copy.owner = None
            copy.memory.close()

    def committed(self, copy: MemoryCopy, generation: int) -> None:
        """Start on the checksums of a copy that its rank has committed. ValueError: there is no such generation."""
        if not 0 <= generation < GENERATIONS:
            raise ValueError(f"there is no generation {generation}")
        copy.digests.pop(generation, None)
        self._running += 1

        def compute() -> None:
            try:
                found = copy.memory.digest(generation)
            except (BessemerError, ValueError, TypeError):  # its rank writes there again
                found = None
            self._post(lambda: self._computed(copy, generation, found))

        self._pool.submit(compute)

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run `action` once no checksum is under way."""
        if self._running:
            self._when_idle.append(action)
        else:
            action()

    def ranks(self) -> list[int]:
        """Of which there is something to rely on."""
        return sorted(rank for rank, copy in self._by_rank.items() if self.sound(copy))

    def sound(self, copy: MemoryCopy) -> dict[int, Digest]:
        """By generation: what is committed and has its checksums. A copy that was torn since then has none."""
        return {
            generation: digest
            for generation, digest in copy.digests.items()
            if (header := copy.memory.header(generation)).state == COMMITTED and header.step == digest.step
        }

    def describe(self, rank: int) -> dict[str, object]:
        """A rank's memory as a message; KeyError where there is none."""
        copy = self._by_rank[rank]
        digests = [{"generation": g, **asdict(d)} for g, d in sorted(self.sound(copy).items())]
        return {"rank": rank, **asdict(copy.memory.geometry), "digests": digests}

    def _computed(self, copy: MemoryCopy, generation: int, found: Digest | None) -> None:
        self._running -= 1
        if found is not None and generation not in copy.stale:
            copy.digests[generation] = found
            rank = next((r for r, c in self._by_rank.items() if c is copy), None)
            if self.on_digest is not None and rank is not None:
                self.on_digest(rank, copy, generation, found)
        if not self._running:
            waiting, self._when_idle = self._when_idle, []
            for action in waiting:
                action()
