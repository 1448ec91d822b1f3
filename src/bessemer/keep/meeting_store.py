"""A meeting at the coordinator as torch's process groups use it: a `Store` without a server of its own.

torch's TCPStore listens on all interfaces and asks for no secret, and a FileStore needs one host. This one lives where
all ranks already have a way to, and they prove there that they know the run's secret.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bessemer.keep.links import await_challenge, connect, proof
from bessemer.keep.wire import Frames, pack

__all__ = ["MeetingStore"]


class MeetingStore(dist.Store):  # type: ignore[name-defined,misc]
    """The meeting `name` at the first of `addresses` (commas between) that a coordinator answers at. Raises OSError
    when none does; whoever waits longer than `timeout_s` gets TimeoutError."""

    def __init__(self, addresses: str, secret: str, name: str, *, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s, self._frames = timeout_s, Frames()
        self._came: list[dict[str, Any]] = []
        error: OSError = ConnectionError("no address")
        for address in addresses.split(","):
            try:
                self._link = connect(address, 2.0)
                challenge = await_challenge(self._link, self._frames)
                break
            except OSError as refused:
                error = refused
        else:
            raise error
        hello = {"kind": "hello", "role": "meet", "proof": proof(secret, str(challenge["nonce"])), "meeting": name}
        self._link.sendall(pack(hello))

    def set(self, key: str, value: Any) -> None:
        raw = value if isinstance(value, bytes) else str(value).encode()
        self._link.sendall(pack({"kind": "set", "key": key, "value": raw.hex()}))

    def get(self, key: str) -> bytes:
        value = self._ask({"kind": "get", "key": key}, self._timeout_s)
        return str(value).encode() if isinstance(value, int) else bytes.fromhex(value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"kind": "add", "key": key, "by": amount}, self._timeout_s))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask({"kind": "check", "keys": keys}, self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._ask({"kind": "get", "key": key}, self._timeout_s if timeout is None else timeout.total_seconds())

    def close(self) -> None:
        self._link.close()

    def _ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        self._link.sendall(pack(request))
        while not self._came:
            self._link.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._link.recv(1 << 16)
            if not data:
                raise ConnectionError("the coordinator closed the meeting")
            self._came += self._frames.feed(data)
        return self._came.pop(0)["value"]
