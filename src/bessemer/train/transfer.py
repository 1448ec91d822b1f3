"""A rank's whole state on its way to the rank at the same place of another group, while both go on.

The donor copies its tensors, which takes as long as a copy in memory, and sends them in a thread; the joiner takes them
in a thread. Both hold tensors of the same names, shapes and types, since they sit at the same place. One connection a
transfer: a challenge, a JSON header {proof, donor, step, tensors: [[name, dtype, shape]], checksum}, then the bytes,
and one byte back once they have arrived whole. Without that byte the donor sends its copy again.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from bessemer.core.errors import CheckpointError
from bessemer.keep.cohort import Join
from bessemer.keep.links import connect, listen_at, proof
from bessemer.models.canonical import local
from bessemer.models.quantise import refresh_amax
from bessemer.models.watched import refresh_fallen
from bessemer.train.assembly import Assembly

__all__ = ["Landing", "Snapshot", "deliver", "held_state", "send"]

_CHUNK = 4 << 20
_LENGTH = struct.Struct(">I")
_TIMEOUT_S = 30.0
_AGAIN_S, _AGAIN_AT_MOST_S = 0.1, 5.0
"""Between two transfers of the same snapshot, at first and as the most that this doubles to."""


def held_state(parts: Assembly) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's own tensor) of all that decides how its part of the run goes on."""
    for name, param in parts.optimizer.params.items():
        yield f"param/{name}", local(param.detach())
    for name, buffer in parts.module.named_buffers():
        if not name.endswith(".seen"):  # a rank's notes of the step that is under way
            yield f"buffer/{name}", buffer
    for index, tensor in enumerate(parts.optimizer.kept()):
        yield f"moment/{index}", local(tensor)


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state that stands at `step`, as `donor` had it."""

    donor: int
    step: int
    tensors: list[tuple[str, Tensor]]

    @classmethod
    def take(cls, parts: Assembly, donor: int, step: int) -> Snapshot:
        return cls(donor, step, [(n, t.detach().to("cpu", copy=True)) for n, t in held_state(parts)])

    def put(self, parts: Assembly) -> None:
        """Fill this rank's tensors. CheckpointError (other-state) where they aren't those of the donor's place."""
        own = dict(held_state(parts))
        if [(n, t.shape, t.dtype) for n, t in self.tensors] != [(n, t.shape, t.dtype) for n, t in own.items()]:
            raise CheckpointError(f"group {self.donor} sent a state of other tensors than this rank has",
                                  code="other-state")  # fmt: skip
        with torch.no_grad():
            for name, tensor in self.tensors:
                own[name].copy_(tensor)
        parts.optimizer.set_steps(self.step)
        refresh_amax(parts.module)
        refresh_fallen(parts.module)


def deliver(
    snapshot: Snapshot, join: Join, secret: str, *, wanted: Callable[[], bool], tell: Callable[[OSError], None]
) -> None:
    """Send until it has arrived whole, or isn't `wanted` any more, as when the joiner is lost. `tell` hears why a
    transfer was broken off."""
    pause_s = _AGAIN_S
    while True:
        try:
            send(snapshot, join, secret)
        except OSError as error:
            tell(error)
        else:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _AGAIN_AT_MOST_S)
        if not wanted():
            return


def send(snapshot: Snapshot, join: Join, secret: str) -> None:
    """Raises OSError when the joiner is gone, or doesn't take it."""
    with connect(join.address, _TIMEOUT_S) as link:
        nonce = _exactly(link, 32).decode()
        listed = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in snapshot.tensors]
        views = [memoryview(_bytes_of(t)) for _, t in snapshot.tensors]
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        header = {"proof": proof(secret, nonce), "donor": snapshot.donor, "step": snapshot.step, "tensors": listed}
        raw = json.dumps(header | {"checksum": digest.hexdigest()}).encode()
        link.sendall(_LENGTH.pack(len(raw)) + raw)
        for view in views:
            for at in range(0, len(view), _CHUNK):
                link.sendall(view[at : at + _CHUNK])
        _exactly(link, 1)  # it has arrived whole


class Landing:
    """Where a joiner's rank takes snapshots, at `address`; `arrived` is the latest one that came whole."""

    def __init__(self, address: str, secret: str) -> None:
        self._server = listen_at(address)
        self._server.setblocking(True)
        self._secret = secret
        self.arrived: Snapshot | None = None
        name = self._server.getsockname()
        self.address = address if address.startswith("unix:") else f"tcp:{name[0]}:{name[1]}"
        threading.Thread(target=self._serve, name="bessemer-landing", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                time.sleep(_AGAIN_S)  # too many open files, as it may be
                continue
            threading.Thread(target=self._take, args=(link,), name="bessemer-landing", daemon=True).start()

    def _take(self, link: socket.socket) -> None:
        """One transfer. One that breaks off, or isn't what was announced, leaves no trace: the donor tries again."""
        with link:
            try:
                link.settimeout(_TIMEOUT_S)
                nonce = secrets.token_hex(16)
                link.sendall(nonce.encode())
                header = json.loads(_exactly(link, _LENGTH.unpack(_exactly(link, 4))[0]))
                if header["proof"] != proof(self._secret, nonce):
                    return
                digest, tensors = xxhash.xxh3_64(), []
                for name, dtype, shape in header["tensors"]:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                    view = memoryview(_bytes_of(tensor))
                    _into(link, view)
                    digest.update(view)
                    tensors.append((name, tensor))
                if digest.hexdigest() != header["checksum"]:
                    return
                self.arrived = Snapshot(int(header["donor"]), int(header["step"]), tensors)
                link.sendall(b"!")
            except (OSError, ValueError, KeyError, struct.error):
                return

    def close(self) -> None:
        self._server.close()


def _bytes_of(tensor: Tensor) -> bytearray:
    """The tensor's own memory."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else bytearray()  # type: ignore[return-value]


def _exactly(link: socket.socket, count: int) -> bytes:
    into = bytearray(count)
    _into(link, memoryview(into))
    return bytes(into)


def _into(link: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = link.recv_into(view[at : at + _CHUNK])
        if not got:
            raise ConnectionError("the other side has gone")
        at += got
