"""The vault: one process a host that holds the ranks' memory copies and writes them out as checkpoints.

    python -m bessemer.keep.vault --socket DIR/vault --run runs/NAME        with standard input a pipe

Ranks connect over a Unix socket (`VaultClient`), are given memory, copy their state in and say so; the vault writes
each rank's shard as soon as it is handed in, and the manifest when all ranks have. It imports no torch and runs niced.
It ends by itself when standard input has ended (its parent closed it, or is gone), no client is connected and nothing
is left to write. Signals that a whole job is sent are ignored, since ranks still save after them.

Messages (JSON behind its length, see `wire.py`):
    rank -> vault   hello{protocol, rank, world_size, local_world_size}
                    reserve{step, layout_bytes, meta_bytes, data_bytes}
                    save{step, generation}   hold{step, generation}   (layout, meta and tensors lie in the memory
                    itself, committed; what is held stays there and isn't written)
    vault -> rank   welcome{}   memory{..., busy} with the descriptor   refused{code, message}   free{generation}
                    saved{step, path, seconds, bytes, deleted}   failed{step, code, message, fix}   dropped{step}
Whoever wants to read copies needs no hello: copies{} -> copies{ranks} once all checksums are there,
copy{rank} -> copy{rank, ..., digests} with the descriptor, settle{} -> settled{} once nothing is being written,
fetch{} -> fetched{ranks, refused} once what peers have is here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import tomllib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.errors import BessemerError, CheckpointError
from bessemer.keep.links import SECRET
from bessemer.keep.memory import Geometry
from bessemer.keep.peers import TcpTransport
from bessemer.keep.replicas import Replicas
from bessemer.keep.retention import Retention
from bessemer.keep.vault_copies import Copies
from bessemer.keep.vault_steps import Seat, StepOptions, Steps, say
from bessemer.keep.wire import Frames, WireError, listen, pack
from bessemer.keep.writer import SHARD_BYTES, Fault, WriteOptions, clean_leftovers, own_token

__all__ = ["PROTOCOL", "Vault", "main"]

PROTOCOL = 2
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # Slurm may send any of these


@dataclass
class _Client:
    link: socket.socket
    seat: Seat | None = None  # once it has said hello
    frames: Frames = field(default_factory=Frames)
    out: deque[bytes] = field(default_factory=deque)


class Vault:
    """The event loop: connections, memory, and the end. `given` holds the command line's values."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.socket: Path = given.socket
        fault = Fault(given.fail_after_bytes, given.fail_at)
        self.options = StepOptions(
            folder=given.run / "checkpoints",
            retention=Retention(given.keep_last, given.keep_every),
            write=WriteOptions(given.token or own_token(), given.shard_bytes, fault=fault),
            send=self._send_to,
            parts_timeout_s=given.parts_timeout,
        )
        self._steps = Steps(self.options)
        self._selector = selectors.DefaultSelector()
        self._server = listen(self.socket)
        self._connections: set[socket.socket] = set()
        self._clients: dict[int, _Client] = {}  # by rank
        self._copies = Copies(self._steps.post)
        self._replicas = None if given.listen is None else _replicas(given, self._copies, self._steps)
        self._unsettled: list[_Client] = []  # who wants to hear that nothing is being written
        self._parent, self._parent_gone = sys.stdin.fileno(), False

    def run(self) -> None:
        """Serve until nobody can ask for anything any more and all is written; then remove the socket."""
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self.options.folder.mkdir(parents=True, exist_ok=True)
        for name in clean_leftovers(self.options.folder, self.options.write.token):
            say(f"cleared {name}, left by a writer that died")
        for source in (self._server, self._steps.wake, self._parent):
            self._selector.register(source, selectors.EVENT_READ)
        try:
            while not self._parent_gone or self._connections or self._steps.busy:
                # Clients before the server: the end of a rank is seen before its successor's hello.
                for key, mask in sorted(self._selector.select(), key=lambda event: event[0].fileobj is self._server):
                    self._handle(key, mask)
        finally:
            if self._replicas is not None:
                self._replicas.close()
            self._copies.close()
            self._steps.close()
            self._selector.close()
            for link in (*self._connections, self._server):
                link.close()
            self.socket.unlink(missing_ok=True)

    def _handle(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._steps.wake:
            self._steps.drain()
            self._tell_settled()
        elif key.fileobj == self._parent:
            if not os.read(self._parent, 4096):
                self._parent_gone = True
                self._selector.unregister(self._parent)
        elif key.fileobj is self._server:
            link, _ = self._server.accept()
            link.setblocking(False)
            self._connections.add(link)
            self._selector.register(link, selectors.EVENT_READ, _Client(link))
        elif key.data.link in self._connections:  # else another event of this round has ended it
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if mask & selectors.EVENT_READ:
                self._read(key.data)

    def _read(self, client: _Client) -> None:
        try:
            data = client.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._part_from(client)
            return
        try:
            for message in client.frames.feed(data):
                self._answer(client, message)
        except (BessemerError, KeyError, TypeError, ValueError) as error:
            known = error if isinstance(error, BessemerError) else CheckpointError(repr(error), code="vault-protocol")
            reply = {"op": "refused", "code": known.code, "message": known.message, "fix": known.fix}
            self._send(client, reply)
            if isinstance(error, WireError):
                self._part_from(client)  # the stream is out of step

    def _send(self, client: _Client, message: dict[str, Any], descriptor: int | None = None) -> None:
        frame = pack(message)
        if descriptor is not None:
            with contextlib.suppress(BlockingIOError, OSError):  # a client that is gone is seen when it is read from
                sent = socket.send_fds(client.link, [frame], [descriptor])
                frame = frame[sent:]
        client.out.append(frame)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            while client.out:
                sent = client.link.send(client.out[0])
                if sent < len(client.out[0]):
                    client.out[0] = client.out[0][sent:]
                else:
                    client.out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            client.out.clear()
        if client.link in self._connections:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
            self._selector.modify(client.link, events, client)

    def _send_to(self, seat: Seat, message: dict[str, Any]) -> bool:
        client = self._clients.get(seat.rank)
        if client is None or client.seat is not seat:
            return False
        self._send(client, message)
        return True

    def _part_from(self, client: _Client) -> None:
        self._selector.unregister(client.link)
        self._connections.discard(client.link)
        client.link.close()
        if client.seat is not None and self._clients.get(client.seat.rank) is client:
            del self._clients[client.seat.rank]
            self._steps.lost(client.seat.rank)

    # ---- what ranks ask

    def _answer(self, client: _Client, message: dict[str, Any]) -> None:
        op, seat = message["op"], client.seat
        if op == "hello":
            self._hello(client, message)
        elif op in ("copies", "copy", "settle", "fetch"):
            self._show(client, message)
        elif seat is None:
            raise ValueError(f"{op!r} before hello")
        elif op == "reserve":
            self._reserve(client, seat, message)
        elif op in ("save", "hold"):
            copy, generation = self._copies[seat.rank], int(message["generation"])
            if op == "save":
                self._steps.hand_in(seat, copy, int(message["step"]), generation)
            self._copies.committed(copy, generation)  # what was held may be another step by now
        else:
            raise ValueError(f"unknown op {op!r}")

    def _show(self, client: _Client, message: dict[str, Any]) -> None:
        """What somebody who reads copies asks."""
        if message["op"] == "copies":
            self._copies.when_idle(lambda: self._send(client, {"op": "copies", "ranks": self._copies.ranks()}))
        elif message["op"] == "copy":
            rank = int(message["rank"])
            descriptor = self._copies[rank].memory.descriptor
            self._send(client, {"op": "copy", **self._copies.describe(rank)}, descriptor)
        elif message["op"] == "fetch":
            self._fetch(client)
        else:
            self._unsettled.append(client)
            self._tell_settled()

    def _fetch(self, client: _Client) -> None:
        """In a thread, which itself needs this loop."""

        def fetch() -> None:
            ranks, refused = ([], []) if self._replicas is None else self._replicas.fetch()
            self._steps.post(lambda: self._send(client, {"op": "fetched", "ranks": ranks, "refused": refused}))

        threading.Thread(target=fetch, name="fetch", daemon=True).start()

    def _tell_settled(self) -> None:
        if not self._steps.busy:
            waiting, self._unsettled = self._unsettled, []
            for client in waiting:
                self._send(client, {"op": "settled"})

    def _hello(self, client: _Client, message: dict[str, Any]) -> None:
        if message["protocol"] != PROTOCOL:
            raise ValueError(f"protocol {message['protocol']}, this vault speaks {PROTOCOL}")
        seat = Seat(*(int(message[key]) for key in ("rank", "world_size", "local_world_size")))
        if not 0 <= seat.rank < seat.world_size or not 0 < seat.local_world_size <= seat.world_size:
            raise ValueError(f"{seat} is not a place in a run")
        earlier = self._clients.get(seat.rank)
        if earlier is not None:
            self._copies.forget(seat.rank)  # the earlier one may still write there: the newcomer gets memory of its own
            self._part_from(earlier)
        self._steps.renew()
        client.seat = seat
        self._clients[seat.rank] = client
        self._send(client, {"op": "welcome"})

    def _reserve(self, client: _Client, seat: Seat, message: dict[str, Any]) -> None:
        wanted = Geometry(*(int(message[key]) for key in ("layout_bytes", "meta_bytes", "data_bytes")))
        copy = self._copies.reserve(seat, wanted, int(message["step"]))
        reply = {"op": "memory", **asdict(copy.memory.geometry), "busy": sorted(copy.busy)}
        self._send(client, reply, copy.memory.descriptor)


def _replicas(given: argparse.Namespace, copies: Copies, steps: Steps) -> Replicas:
    transport = TcpTransport(given.listen, os.environ[SECRET], rate=given.peer_rate * 1e6)
    say(f"peers reach this host's memory at {transport.address}")
    return Replicas(transport, given.peer, copies, steps.post)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit 2 when standard input is no pipe or job.toml can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m bessemer.keep.vault", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--socket", type=Path, required=True, help="to be created, in a directory of mode 0700")
    parser.add_argument(
        "--run", type=Path, required=True, help="the run folder; job.toml and run.json in it give defaults"
    )
    parser.add_argument("--keep-last", type=int, help="default: keep.keep_last of the job, else 3")
    parser.add_argument("--keep-every", type=int, help="default: keep.keep_every of the job, else 0")
    parser.add_argument("--token", help="of this attempt, the same on all hosts; default: that of run.json")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="the largest file")
    parser.add_argument("--parts-timeout", type=float, default=600.0, help="seconds to wait for other hosts")
    parser.add_argument("--listen", help="where vaults of other hosts reach this one: tcp:HOST:PORT; needs the secret")
    parser.add_argument("--peer", action="append", default=[], help="a vault of another host that gets copies")
    parser.add_argument("--peer-rate", type=float, default=0.0, help="of sending to it, in MB/s; 0: no limit")
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--fail-after-bytes", type=int, help="for tests: die by SIGKILL after writing so many bytes")
    parser.add_argument("--fail-at", help="for tests: die by SIGKILL at this point of a save (see writer.Fault)")
    given = parser.parse_args(arguments)
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        parser.error("standard input must be a pipe: its end is the sign that no more ranks will come")
    try:
        _fill_from_run(given)
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"{given.run}: {error}")
    os.nice(given.nice)
    Vault(given).run()
    return 0


def _fill_from_run(given: argparse.Namespace) -> None:
    """What the command line left out, from the run's own files where they are."""
    job, run = given.run / "job.toml", given.run / "run.json"
    keep = tomllib.loads(job.read_text()).get("keep", {}) if job.exists() else {}
    if given.keep_last is None:
        given.keep_last = int(keep.get("keep_last", 3))
    if given.keep_every is None:
        given.keep_every = int(keep.get("keep_every", 0))
    if given.token is None and run.exists():
        given.token = str(json.loads(run.read_text()).get("token", ""))


if __name__ == "__main__":
    sys.exit(main())
