"""The rank's side of the vault: `save` copies the state into the vault's memory and returns; the vault writes it."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from bessemer.core.errors import CheckpointError
from bessemer.keep.checkpoint import is_empty
from bessemer.keep.memory import COMMITTED, GENERATIONS, Geometry, Memory, pack_layout, place
from bessemer.keep.slices import Slice, dtype_name, torch_dtype
from bessemer.keep.vault import PROTOCOL
from bessemer.keep.wire import Frames, pack

__all__ = ["VaultClient"]


@dataclass(frozen=True)
class _Plan:
    """What one set of slices looks like in memory."""

    key: tuple[tuple[object, ...], ...]
    layout: bytes
    views: tuple[tuple[torch.Tensor, ...], ...]  # of each generation, in the order of the slices that aren't empty


class VaultClient:
    """One rank's connection. CheckpointError (vault-lost) when no vault listens or it dies.

    `local_world_size` ranks of this host hand in each step; with fewer than `world_size`, the vaults of the other
    hosts write the rest into the same folder. `patience_s`: how long a vault that is just starting is waited for.
    """

    def __init__(
        self,
        socket_path: Path | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_world_size: int | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 30.0,
    ) -> None:
        self.rank = rank
        self.timeout_s = timeout_s  # the longest that `save` waits for memory, and a start for the vault
        self.dropped: list[int] = []  # steps given up since a rank of this host went away before it had handed in
        self._path = Path(socket_path)
        self._frames = Frames()
        self._descriptors: list[int] = []
        self._inbox: list[dict[str, Any]] = []
        self._asking = False
        self._saved: list[dict[str, Any]] = []
        self._errors: list[CheckpointError] = []
        self._pending: list[int] = []
        self._memory: Memory | None = None
        self._plan: _Plan | None = None
        self._busy: set[int] = set()
        self._link = _connect(self._path, min(timeout_s, patience_s))
        self._poller = select.poll()  # not select(), which can't watch descriptors above 1023
        self._poller.register(self._link, select.POLLIN)
        seat = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size or world_size}
        try:
            self._ask({"op": "hello", "protocol": PROTOCOL, **seat}, "welcome")
        except CheckpointError:
            self._link.close()
            raise

    def reserve(self, slices: Sequence[Slice], meta: Mapping[str, Any]) -> None:
        """Have the memory for such saves allocated, mapped and faulted in: seconds for large states, once, so that it
        is better done before the first step than in the first `save`. What an earlier client of this rank has left
        there of steps beyond `meta["step"]` (0 where it has none) is dropped. CheckpointError (no-memory)."""
        owned = [s for s in slices if not is_empty(s)]
        described = [(s.name, tuple(s.global_shape), dtype_name(s.tensor.dtype), s.box) for s in owned]
        entries = place(described)
        layout = pack_layout(entries)
        geometry = Geometry.of(entries, layout, _meta_bytes(meta, 0))
        if self._memory is None or not self._memory.geometry.holds(geometry):
            self._plan = None
            stands = int(meta.get("step", 0))
            reply = self._ask({"op": "reserve", "step": stands, **asdict(geometry)}, "memory")
            descriptor = self._descriptors.pop(0)
            held = Geometry(**{key: int(reply[key]) for key in asdict(geometry)})
            self._memory = Memory.attach(descriptor, held)
            self._memory.close()  # the mapping stays
            self._busy = set(reply["busy"])
        memory = self._memory
        views = tuple(
            tuple(
                torch.frombuffer(
                    memory.mapping,
                    dtype=torch_dtype(e.dtype),
                    count=e.nbytes // torch_dtype(e.dtype).itemsize,
                    offset=memory.data_offset(generation) + e.offset,
                ).view(e.shape)
                if e.nbytes
                else torch.empty(e.shape, dtype=torch_dtype(e.dtype))
                for e in entries
            )
            for generation in range(GENERATIONS)
        )
        self._plan = _Plan(_key(owned), layout, views)

    def save(self, step: int, slices: Sequence[Slice], meta: Mapping[str, Any]) -> float:
        """Copy the slices into the vault's memory and let it write them as `step-N`; returns the seconds this took.

        `meta` is JSON (no NaN) and must agree over the ranks. Blocks for the copy only, unless both generations of
        this rank are still being written: then for the older of these writes too. CheckpointError: what `poll`
        raises; vault-busy when no generation came free in `timeout_s`; no-memory.
        """
        start = time.perf_counter()
        self._receive()
        self._raise_failures()
        deadline = time.monotonic() + self.timeout_s
        while len(self._busy) == GENERATIONS:
            self._block(deadline, f"no memory came free for step {step} in {self.timeout_s:g} s: the disk is too slow")
            self._raise_failures()
        generation = self._copy(step, slices, meta)
        self._busy.add(generation)
        self._pending.append(step)
        self._send({"op": "save", "step": step, "generation": generation})
        return time.perf_counter() - start

    def hold(self, step: int, slices: Sequence[Slice], meta: Mapping[str, Any]) -> float:
        """Copy the slices into the vault's memory, from where ranks that are started again go on (`MemoryCopies`);
        nothing is written. Returns the seconds this took. While both generations are still being written there is no
        room and nothing is copied: these two are newer than what is durable. CheckpointError as of `save`."""
        start = time.perf_counter()
        self._receive()
        self._raise_failures()
        if len(self._busy) < GENERATIONS:
            self._send({"op": "hold", "step": step, "generation": self._copy(step, slices, meta)})
        return time.perf_counter() - start

    def _copy(self, step: int, slices: Sequence[Slice], meta: Mapping[str, Any]) -> int:
        """Into the generation that this returns; one of them is free."""
        packed = _meta_bytes(meta, step)
        owned = [s for s in slices if not is_empty(s)]
        memory, plan = self._memory, self._plan
        if memory is None or plan is None or plan.key != _key(owned) or len(packed) > memory.geometry.meta_bytes:
            self.reserve(slices, {**meta, "step": step})
            memory, plan = self._memory, self._plan
            assert memory is not None
            assert plan is not None
        generation = self._free_generation(memory)
        memory.begin(generation, step, plan.layout)
        with torch.no_grad():
            for target, s in zip(plan.views[generation], owned, strict=True):
                target.copy_(s.tensor)
        memory.commit(generation, packed)
        return generation

    def poll(self) -> list[dict[str, Any]]:
        """The saves that became durable and verified since the last call; never blocks.

        Each is {step, path, seconds, bytes, deleted}: seconds from its first hand-in, bytes of this host, deleted the
        steps that retention removed after it. CheckpointError of a write that failed: disk-full, checkpoint-write,
        checkpoint-coverage, checkpoint-damaged, checkpoint-parts, vault-lost.
        """
        self._receive()
        self._raise_failures()
        saved, self._saved = self._saved, []
        return saved

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Block until every save handed in here is durable; returns and raises as `poll`, and CheckpointError
        checkpoint-dropped for a step that a lost rank made impossible, vault-busy after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._receive()
        while self._pending and not self._errors:
            self._block(deadline, f"step {self._pending[0]} is not durable yet after {timeout_s} s")
        if self.dropped and not self._errors:
            step = self.dropped.pop(0)
            raise CheckpointError(
                f"step {step} was not saved: a rank of this host went away before it had handed in its part",
                code="checkpoint-dropped",
                step=step,
            )
        return self.poll()

    def close(self) -> None:
        """Leave; the vault finishes what was handed in."""
        self._link.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._plan = None
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _free_generation(self, memory: Memory) -> int:
        """The one that is torn or, so that the newest copy stays as long as it can, the older."""

        def age(generation: int) -> int:
            header = memory.header(generation)
            return header.step if header.state == COMMITTED else -1

        return min(set(range(GENERATIONS)) - self._busy, key=age)

    # ---- the connection

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._link.sendall(pack(message))
        except OSError as error:
            raise _lost(self._path) from error

    def _receive(self, timeout_s: float | None = 0) -> None:
        """Take in what the vault sent, waiting for the first of it up to `timeout_s` (None: for ever)."""
        while self._poller.poll(None if timeout_s is None else timeout_s * 1000):
            timeout_s = 0
            try:
                data, descriptors, _, _ = socket.recv_fds(self._link, 1 << 16, 4)
            except OSError as error:
                raise _lost(self._path) from error
            self._descriptors += descriptors
            if not data:
                raise _lost(self._path)
            for message in self._frames.feed(data):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        op, step = message.get("op"), message.get("step")
        if op in ("saved", "failed", "dropped") and step in self._pending:
            self._pending.remove(step)
        if op == "saved":
            self._saved.append({key: message[key] for key in ("step", "path", "seconds", "bytes", "deleted")})
        elif op == "failed":
            self._errors.append(_error_of(message))
        elif op == "dropped":
            self.dropped.append(message["step"])
        elif op == "free":
            self._busy.discard(message["generation"])
        elif self._asking:
            self._inbox.append(message)
        else:
            self._errors.append(_error_of(message))

    def _ask(self, question: Mapping[str, Any], op: str) -> dict[str, Any]:
        """Send a question and wait for its answer, which is of kind `op` or an error."""
        deadline = time.monotonic() + self.timeout_s
        self._asking = True
        self._send(question)
        while not self._inbox:
            self._block(deadline, f"the vault at {self._path} does not answer")
        self._asking = False
        message = self._inbox.pop(0)
        if message.get("op") != op:
            raise _error_of(message)
        return message

    def _block(self, deadline: float | None, message: str) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise CheckpointError(message, code="vault-busy", rank=self.rank)
        self._receive(left)

    def _raise_failures(self) -> None:
        if self._errors:
            raise self._errors.pop(0)


def _key(slices: Sequence[Slice]) -> tuple[tuple[object, ...], ...]:
    return tuple((s.name, tuple(s.global_shape), s.box, s.tensor.dtype) for s in slices)


def _meta_bytes(meta: Mapping[str, Any], step: int) -> bytes:
    return json.dumps({**meta, "step": step}, separators=(",", ":"), allow_nan=False).encode()


def _connect(path: Path, patience_s: float) -> socket.socket:
    """Connect, waiting for a vault that is just starting."""
    deadline = time.monotonic() + patience_s
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(str(path))
        except OSError as error:
            link.close()
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError) or time.monotonic() > deadline:
                raise _lost(path) from error
            time.sleep(0.01)
        else:
            return link


def _lost(path: Path) -> CheckpointError:
    return CheckpointError(
        f"no vault answers at {path}: it was not started, or it died and took unfinished saves with it",
        code="vault-lost",
        fix="see logs/vault.log in the run folder; the same command goes on from the last checkpoint",
    )


def _error_of(message: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        str(message.get("message", f"unexpected {message.get('op')!r} from the vault")),
        code=str(message.get("code", "vault-protocol")),
        fix=str(message.get("fix", "")),
        step=message.get("step"),
    )
