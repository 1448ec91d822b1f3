"""The checkpoints that a vault is putting together: shards as ranks hand in, then manifest, rename and retention.

Shards are written as they come, in a pool. Checkpoints are completed one at a time and the lowest step first: so they
become durable in order, no two deletions meet, and vaults of several hosts can't wait for each other crosswise.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.errors import CheckpointError
from bessemer.keep.gather import give_up, wait_for_manifest, wait_for_parts, write_part
from bessemer.keep.manifest import Manifest
from bessemer.keep.memory import GENERATIONS, Digest, Memory
from bessemer.keep.retention import Retention
from bessemer.keep.writer import Shards, WriteOptions, aside_folder, finalise, write_errors, write_shards

__all__ = ["MemoryCopy", "Seat", "StepOptions", "Steps", "say"]

_WRITERS = 4  # more threads than that gain nothing on one disk
_AGREE = ("step", "cursor", "seed", "job_hash", "identity", "data_fingerprint")  # meta that no two ranks may differ in


@dataclass(frozen=True, eq=False)
class Seat:
    """A client's rank, and how many there are in all and on this host. A rank's next client has another seat."""

    rank: int
    world_size: int
    local_world_size: int


@dataclass
class MemoryCopy:
    """The memory of a rank, which of its generations are being written, and the client that has it mapped now."""

    memory: Memory
    owner: Seat | None
    busy: set[int] = field(default_factory=set)
    digests: dict[int, Digest] = field(default_factory=dict)  # by generation, once they are computed
    stale: set[int] = field(default_factory=set)  # of those being written: what the run has gone back behind

    def drop_after(self, step: int) -> None:
        """The run has gone back to `step`: copies of later ones are no longer part of it."""
        for generation in range(GENERATIONS):
            if self.memory.header(generation).step > step:
                if generation in self.busy:
                    self.stale.add(generation)
                else:
                    self.memory.forget(generation)
                self.digests.pop(generation, None)

    def written(self, generation: int) -> None:
        """A write from it has ended."""
        self.busy.discard(generation)
        if generation in self.stale:
            self.stale.discard(generation)
            self.memory.forget(generation)

    def expect(self, step: int, generation: int) -> None:
        """ValueError, CheckpointError (vault-protocol) unless a client has just committed the step there."""
        if not 0 <= generation < GENERATIONS or generation in self.busy:
            raise ValueError(f"generation {generation} is being written")
        held_step, _, _ = self.memory.read(generation)
        if held_step != step:
            raise ValueError(f"generation {generation} holds step {held_step}, not {step}")


@dataclass(frozen=True)
class StepOptions:
    """Where and how checkpoints are written. `send(seat, message)` tells a client something; False if it is gone."""

    folder: Path
    retention: Retention
    write: WriteOptions
    send: Callable[[Seat, dict[str, Any]], bool]
    parts_timeout_s: float = 600.0


@dataclass(frozen=True)
class _HandIn:
    seat: Seat
    copy: MemoryCopy
    step: int
    generation: int


@dataclass
class _Step:
    """A checkpoint that is being put together."""

    step: int
    world_size: int
    local_world_size: int
    seats: dict[int, Seat] = field(default_factory=dict)  # by rank, of the clients that have handed in
    metas: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    shards: dict[int, Shards] = field(default_factory=dict)  # of the ranks whose part is durable
    running: int = 0  # jobs of it in the pool
    completing: bool = False
    orphaned: bool = False  # a client has gone that had handed in
    error: CheckpointError | None = None
    dropped: bool = False
    start: float = field(default_factory=time.monotonic)


class Steps:
    """Used by the vault's loop alone; `wake` becomes readable when `drain` has something to do."""

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        self.wake, self._waker = socket.socketpair()
        self._steps: dict[int, _Step] = {}
        self._held: list[_HandIn] = []  # of a step that is still being written
        self._given_up: set[int] = set()  # with other hosts: steps whose folder is still to be removed
        self._done: deque[Callable[[], None]] = deque()
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="write")

    @property
    def busy(self) -> bool:
        return any(work.running for work in self._steps.values()) or bool(self._done)

    def close(self) -> None:
        self._pool.shutdown()
        self._clear_given_up(None)
        self.wake.close()
        self._waker.close()

    def drain(self) -> None:
        """Take in what the pool has finished."""
        while self._done:
            self.wake.recv(1)  # one byte was sent for each
            self._done.popleft()()

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` run in the loop's thread; may be called in any."""
        self._done.append(action)
        self._waker.send(b"\0")

    def lost(self, rank: int) -> None:
        """A rank is gone: what it handed in is still written; the steps that wait for it never come."""
        for held in [h for h in self._held if h.seat.rank == rank]:
            self._held.remove(held)
            held.copy.written(held.generation)
        for work in self._steps.values():
            work.orphaned |= rank in work.metas
        self._drop_without(rank, before=None)

    def renew(self) -> None:
        """A client has come: what one before it had handed in and others of its time have not is given up, or a
        checkpoint would come from two attempts, and whoever handed in again would wait for the others."""
        for work in self._steps.values():
            if work.orphaned and len(work.metas) < work.local_world_size and work.error is None:
                work.error = CheckpointError("a rank went away", code="checkpoint-dropped", step=work.step)
                work.dropped = True
        self._go_on()

    def hand_in(self, seat: Seat, copy: MemoryCopy, step: int, generation: int) -> None:
        """Write what a rank has committed in a generation of its memory as its part of a step. ValueError,
        CheckpointError (vault-protocol): there is no such thing."""
        copy.expect(step, generation)
        copy.busy.add(generation)
        self._begin(_HandIn(seat, copy, step, generation))

    def _begin(self, new: _HandIn) -> None:
        seat, step, rank = new.seat, new.step, new.seat.rank
        work = self._steps.get(step)
        if work is not None and (rank in work.metas or work.error is not None):
            self._held.append(new)
            return
        _, meta, blocks = new.copy.memory.read(new.generation)
        aside = self._aside(step)
        if work is None:
            work = self._steps[step] = _Step(step, seat.world_size, seat.local_world_size)
            if seat.local_world_size == seat.world_size:  # with other hosts, they may be writing there already
                shutil.rmtree(aside, ignore_errors=True)
        work.seats[rank] = seat
        work.metas[rank] = meta

        def written(result: Shards | None) -> None:
            blocks.clear()
            new.copy.written(new.generation)
            if new.copy.owner is not None:
                self.options.send(new.copy.owner, {"op": "free", "generation": new.generation})
            if result is not None:
                work.shards[rank] = result

        self._submit(work, lambda: write_shards(_made(aside), rank, blocks, self.options.write), written)
        self._drop_without(rank, before=step)

    def _drop_without(self, rank: int, *, before: int | None) -> None:
        """Give up the steps (before one, or all) that lack this rank: it is gone, or has gone on without them."""
        for work in self._steps.values():
            if rank not in work.metas and work.error is None and (before is None or work.step < before):
                work.error = CheckpointError(f"rank {rank} did not hand in", code="checkpoint-dropped", step=work.step)
                work.dropped = True
        self._go_on()

    def _submit(self, work: _Step, job: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `job` in the pool, then `then(result)` in the loop's thread, with None after a failure."""

        def run() -> None:
            result, error = None, None
            try:
                with write_errors(work.step):
                    result = job()
            except CheckpointError as found:
                error = found
            except Exception as found:  # whatever it is, the ranks must hear of it
                error = CheckpointError(f"{type(found).__name__}: {found}", code="checkpoint-write", step=work.step)
            self.post(lambda: finish(result, error))

        def finish(result: Any, error: CheckpointError | None) -> None:
            work.running -= 1
            work.error = work.error or error
            then(result)
            self._go_on()

        work.running += 1
        self._pool.submit(run)

    def _go_on(self) -> None:
        """Give up what failed, and complete the lowest step if all its shards are there."""
        while (failed := self._failed()) is not None:
            self._give_up(failed)
        if not self._steps or any(w.completing for w in self._steps.values()):
            return
        work = self._steps[min(self._steps)]
        if work.error is None and len(work.shards) == work.local_world_size:
            work.completing = True
            self._submit(work, lambda: self._complete(work), lambda result: self._completed(work, result))

    def _failed(self) -> _Step | None:
        return next((w for w in self._steps.values() if w.error is not None and not w.running), None)

    def _complete(self, work: _Step) -> tuple[Path, list[int], int]:
        """In the pool: manifest, rename, retention. Returns the folder, the steps deleted and the bytes written."""
        root, write, step = self.options.folder, self.options.write, work.step
        _check_agreement(work)
        shards = [work.shards[rank] for rank in sorted(work.shards)]
        size = sum(s.nbytes for s in shards)
        if work.local_world_size < work.world_size:
            aside = self._aside(step)
            write_part(aside, work.shards, write)
            if 0 not in work.shards:
                return wait_for_manifest(root, step, work.shards, write, self.options.parts_timeout_s), [], size
            shards = [wait_for_parts(aside, work.world_size, self.options.parts_timeout_s)]
        files = tuple(f for s in shards for f in s.files)
        slices = tuple(x for s in shards for x in s.slices)
        path = finalise(root, step, Manifest(work.metas[min(work.metas)], files, slices), write)
        return path, self._delete_old(step), size

    def _delete_old(self, verified: int) -> list[int]:
        """The steps deleted. What can't be deleted is no reason to call the new checkpoint unsaved."""
        try:
            return self.options.retention.apply(self.options.folder, verified, self.options.write)
        except OSError as error:
            say(f"step {verified} is saved, but an older one can't be deleted: {error}")
            return []

    def _completed(self, work: _Step, result: tuple[Path, list[int], int] | None) -> None:
        work.completing = False
        if result is not None:
            path, deleted, size = result
            self._clear_given_up(work.step)
            seconds = time.monotonic() - work.start
            self._end(work, {"op": "saved", "path": str(path), "seconds": seconds, "bytes": size, "deleted": deleted})

    def _give_up(self, work: _Step) -> None:
        assert work.error is not None
        e = work.error
        if work.local_world_size == work.world_size:
            shutil.rmtree(self._aside(work.step), ignore_errors=True)
        else:
            give_up(self._aside(work.step), work.metas, e.message)
            if 0 in work.metas:
                self._given_up.add(work.step)  # the folder stays a while, so that the other hosts see the mark in it
        told = self._end(
            work,
            {"op": "dropped"} if work.dropped else {"op": "failed", "code": e.code, "message": e.message, "fix": e.fix},
        )
        if not told:
            say(f"step {work.step} was not saved: {e}")

    def _aside(self, step: int) -> Path:
        return aside_folder(self.options.folder, step, self.options.write.token)

    def _clear_given_up(self, before: int | None) -> None:
        """Remove folders of failed steps: once a later one is complete, every host has gone on from them."""
        for step in [s for s in self._given_up if before is None or s < before]:
            shutil.rmtree(self._aside(step), ignore_errors=True)
            self._given_up.discard(step)

    def _end(self, work: _Step, message: dict[str, Any]) -> bool:
        """The end of a checkpoint, to the ranks that handed in; whether any of them is still there."""
        del self._steps[work.step]
        told = [self.options.send(seat, {"step": work.step, **message}) for seat in work.seats.values()]
        held, self._held = self._held, []
        for new in held:
            self._begin(new)
        return any(told)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _check_agreement(work: _Step) -> None:
    """No two ranks may hand in different meta data under one step."""
    for key in _AGREE:
        values = {rank: meta.get(key) for rank, meta in sorted(work.metas.items())}
        if len(set(map(repr, values.values()))) > 1:
            raise CheckpointError(f"the ranks disagree on {key}: {values}", code="checkpoint-coverage")


def say(text: str) -> None:
    print(f"vault: {text}", file=sys.stderr, flush=True)
