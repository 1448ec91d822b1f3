"""Moving the memory of a rank between the vaults of two hosts.

A `Transport` moves the bytes of one generation, the *image*, from memory to memory. `TcpTransport` does it over
sockets; a library for RDMA would register the same memory once and move the same bytes. What an image is, `About` says,
with the checksums that its vault computed; whoever takes an image compares them before it counts.

Over TCP, each connection: challenge{nonce} -> hello{proof, nonce, op, about} -> welcome{proof}; then for `put` an
answer{ok}, the image and another answer, for `get` an answer and the image, for `list` an answer{ok, found}. A refusal
is an answer{ok: false, why, code}. Both sides prove that they know the run's secret.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from bessemer.core.errors import CheckpointError
from bessemer.keep.links import connect, listen_at, proof
from bessemer.keep.memory import COMMITTED, Digest, Geometry, Header
from bessemer.keep.wire import MAX_FRAME_BYTES, pack

__all__ = ["CHUNK_BYTES", "About", "Shelf", "TcpTransport", "Transport"]

CHUNK_BYTES = 16 << 20
TIMEOUT_S = 60.0
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class About:
    """One committed generation of a rank: the room of its memory, its header, its checksums."""

    rank: int
    geometry: Geometry
    header: Header
    digest: Digest

    @property
    def step(self) -> int:
        return self.header.step

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """ValueError, KeyError, TypeError where it isn't one."""
        digest = Digest(int(fields["digest"]["step"]), int(fields["digest"]["meta"]), tuple(fields["digest"]["blocks"]))
        header = Header(**{key: int(value) for key, value in fields["header"].items()})
        geometry = Geometry(**{key: int(value) for key, value in fields["geometry"].items()})
        if header.state != COMMITTED or min(asdict(geometry).values()) < 0:
            raise ValueError("this is no committed generation")
        return cls(int(fields["rank"]), geometry, header, digest)


class Shelf(Protocol):
    """What a vault lets others reach. Called in the transport's threads."""

    def found(self) -> list[About]:
        """What can be had here."""

    def source(self, about: About) -> memoryview:
        """The image; CheckpointError where it has gone."""

    def room(self, about: About) -> memoryview:
        """Where an image that comes goes; until `arrived` it counts for nothing. CheckpointError: no memory."""

    def arrived(self, about: About) -> None:
        """The image is there: verify it. CheckpointError where it isn't what `about` says."""


class Transport(Protocol):
    """Between this vault and others. All but `serve` and `close` raise OSError when the peer is gone, and
    CheckpointError for what it refuses."""

    address: str
    """Where others reach this one."""

    def serve(self, shelf: Shelf) -> None: ...

    def found(self, peer: str) -> list[About]: ...

    def put(self, peer: str, about: About, image: memoryview) -> None: ...

    def get(self, peer: str, about: About, room: memoryview) -> None: ...

    def close(self) -> None: ...


class TcpTransport:
    """At `address` ("tcp:HOST:PORT", port 0: any). `rate` bounds what `put` sends, in bytes a second; 0: it doesn't."""

    def __init__(self, address: str, secret: str, *, rate: float = 0.0) -> None:
        self._server = listen_at(address)
        self._server.setblocking(True)
        self._secret, self._rate = secret, rate
        host, port = self._server.getsockname()[:2]
        self.address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"

    def serve(self, shelf: Shelf) -> None:
        threading.Thread(target=self._serve, args=(shelf,), name="bessemer-peers", daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def found(self, peer: str) -> list[About]:
        with self._open(peer, {"op": "list"}) as link:
            return [About.of_json(fields) for fields in _answer(link)["found"]]

    def put(self, peer: str, about: About, image: memoryview) -> None:
        with self._open(peer, {"op": "put", "about": about.as_json()}) as link:
            _answer(link)  # there is room
            start = time.monotonic()
            for at in range(0, len(image), CHUNK_BYTES):
                link.sendall(image[at : at + CHUNK_BYTES])
                if self._rate:
                    time.sleep(max(0.0, start + (at + CHUNK_BYTES) / self._rate - time.monotonic()))
            _answer(link)

    def get(self, peer: str, about: About, room: memoryview) -> None:
        with self._open(peer, {"op": "get", "about": about.as_json()}) as link:
            _answer(link)
            _into(link, room)

    def _open(self, peer: str, request: Mapping[str, Any]) -> socket.socket:
        link = connect(peer, TIMEOUT_S)
        try:
            nonce = secrets.token_hex(16)
            hello = {"proof": proof(self._secret, _message(link)["nonce"]), "nonce": nonce}
            link.sendall(pack({**hello, **request}))
            if _message(link).get("proof") != proof(self._secret, nonce):
                raise ConnectionError(f"{peer} does not know the run's secret")
        except (OSError, ValueError, KeyError) as error:
            link.close()
            raise ConnectionError(f"{peer}: {error}") from error
        return link

    def _serve(self, shelf: Shelf) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(link, shelf), name="bessemer-peer", daemon=True).start()

    def _take(self, link: socket.socket, shelf: Shelf) -> None:
        """One connection. One that breaks off, or of whom doesn't know the secret, leaves nothing that counts."""
        with link:
            try:
                link.settimeout(TIMEOUT_S)
                nonce = secrets.token_hex(16)
                link.sendall(pack({"nonce": nonce}))
                hello = _message(link)
                if hello["proof"] != proof(self._secret, nonce):
                    return
                link.sendall(pack({"proof": proof(self._secret, hello["nonce"])}))
                _OPS[hello["op"]](link, shelf, hello.get("about"))
            except CheckpointError as error:
                link.sendall(pack({"ok": False, "why": error.message, "code": error.code}))
            except (OSError, ValueError, KeyError, TypeError):
                return


def _list(link: socket.socket, shelf: Shelf, about: Any) -> None:
    del about
    link.sendall(pack({"ok": True, "found": [one.as_json() for one in shelf.found()]}))


def _put(link: socket.socket, shelf: Shelf, fields: Any) -> None:
    about = About.of_json(fields)
    room = shelf.room(about)
    link.sendall(pack({"ok": True}))
    _into(link, room)
    shelf.arrived(about)
    link.sendall(pack({"ok": True}))


def _get(link: socket.socket, shelf: Shelf, fields: Any) -> None:
    image = shelf.source(About.of_json(fields))
    link.sendall(pack({"ok": True}))
    for at in range(0, len(image), CHUNK_BYTES):
        link.sendall(image[at : at + CHUNK_BYTES])


_OPS: dict[str, Callable[[socket.socket, Shelf, Any], None]] = {"list": _list, "put": _put, "get": _get}


def _answer(link: socket.socket) -> dict[str, Any]:
    """CheckpointError for a refusal."""
    message = _message(link)
    if not message["ok"]:
        raise CheckpointError(str(message["why"]), code=str(message["code"]))
    return message


def _message(link: socket.socket) -> dict[str, Any]:
    """The next record, and not a byte more, since an image may follow."""
    head = bytearray(_LENGTH.size)
    _into(link, memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame claims {size} bytes")
    body = bytearray(size)
    _into(link, memoryview(body))
    found: dict[str, Any] = json.loads(body)
    return found


def _into(link: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = link.recv_into(view[at : at + CHUNK_BYTES])
        if not got:
            raise ConnectionError("the other side has gone")
        at += got
