"""How processes talk: JSON objects, each behind its length in four bytes. Nothing is unpickled.

The sockets of `listen` are for the processes of one host: they lie in a directory that only their owner can enter.
Between hosts `links.py` lets nobody in who doesn't know the run's secret.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.core.errors import BessemerError

__all__ = ["MAX_FRAME_BYTES", "Frames", "WireError", "listen", "pack", "private_dir", "short_temp_dir"]

MAX_FRAME_BYTES = 4 << 20
"""A record is a few hundred bytes; a traceback a few thousand. More means that the stream is out of step."""

_SOCKET_PATH_BYTES = 100  # sun_path holds 108 with its final zero; the names that we append are short
_LENGTH = struct.Struct(">I")


class WireError(BessemerError):
    """What came over a socket is not a record."""

    code = "wire"


def pack(record: Mapping[str, Any]) -> bytes:
    """One record as it travels. NaN and infinity are legal: a loss may be either, and must reach the agent."""
    body = json.dumps(record, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a record of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream back into records; keeps what is not complete yet."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The records that `data` completes, in order. Raises WireError for anything that is not a JSON object."""
        if not self._rest and len(data) > _LENGTH.size and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size:
            return [_parse(data[_LENGTH.size :])]  # one whole frame, as nearly all are
        self._rest += data
        records: list[dict[str, Any]] = []
        at = 0
        while len(self._rest) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest, at)
            if size > MAX_FRAME_BYTES:
                raise WireError(f"a frame claims {size} bytes; the limit is {MAX_FRAME_BYTES}")
            if len(self._rest) - at < _LENGTH.size + size:
                break
            start = at + _LENGTH.size
            records.append(_parse(bytes(self._rest[start : start + size])))
            at = start + size
        del self._rest[:at]
        return records


def _parse(body: bytes) -> dict[str, Any]:
    try:
        record = json.loads(body.decode())
    except ValueError as error:
        raise WireError(f"a frame is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise WireError(f"a frame holds a {type(record).__name__} where a JSON object belongs")
    return record


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, which must not exist yet (FileExistsError). Whoever sees it may connect: it
    gets that name once it listens."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.setblocking(False)
    aside = path.with_name(f"{path.name}.{os.getpid() % 100_000}")
    server.bind(str(aside))
    try:
        server.listen(128)
        os.link(aside, path)
    except OSError:
        server.close()
        raise
    finally:
        aside.unlink()
    return server


def short_temp_dir() -> Path:
    """The temporary directory, or /tmp where its path is too long for a Unix socket inside it."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) + 50 <= _SOCKET_PATH_BYTES else Path("/tmp")


def private_dir(path: Path) -> Path:
    """Creates `path` for this user alone, or checks that it is so. Raises WireError when somebody else owns it."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WireError(
            f"{path} is not a directory that only you can enter",
            code="unsafe-directory",
            fix=f"remove {path}, or set TMPDIR to a directory of your own",
        )
    return path
