"""A rank's connection with the coordinator: it votes, and hears of epochs and commits. No torch.

A thread receives, so that a newer epoch is known while the rank computes or waits in a sum. The rank stands at step s
(that many are in its state), has voted for it in epoch e, and asks what came: the commit, or a newer epoch.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.core.errors import BessemerError, PeerLost
from bessemer.keep.coordinator import connect, proof
from bessemer.keep.wire import Frames, pack

__all__ = ["Cohort", "Epoch", "Fenced", "Join", "Released", "Seat"]

_EPOCHS_KEPT = 64


class Fenced(BessemerError):
    """This rank's group is no part of the run any more; nothing that it holds counts."""

    code = "fenced"


class Released(BessemerError):
    """A wish to leave was granted, or fewer groups are wanted."""

    code = "released"
    exit_code = 0


@dataclass(frozen=True)
class Seat:
    """Where a rank sits: its group, which of the processes under that name, and its place in the group."""

    group: int
    incarnation: int
    place: int
    host: str


@dataclass(frozen=True)
class Join:
    """A group that takes a snapshot: from which group, of which step, and where its rank of my place listens."""

    donor: int
    step: int
    address: str


@dataclass(frozen=True)
class Epoch:
    term: int
    number: int
    step: int
    active: tuple[int, ...]
    joining: tuple[int, ...]
    shares: Mapping[int, tuple[int, ...]]
    joins: Mapping[int, Join]

    @property
    def members(self) -> tuple[int, ...]:
        """All groups that take part in the sums, ascending."""
        return tuple(sorted(self.active + self.joining))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Epoch:
        return cls(
            term=int(record["term"]),
            number=int(record["epoch"]),
            step=int(record["step"]),
            active=tuple(record["active"]),
            joining=tuple(record["joining"]),
            shares={int(name): tuple(units) for name, units in record["shares"].items()},
            joins={int(name): Join(**join) for name, join in record["joins"].items()},
        )


class Cohort:
    """Connected from its making. Every method that waits raises Fenced, Released, PeerLost (coordinator-lost) or what
    the coordinator says has failed."""

    def __init__(self, address: str, secret: str, seat: Seat, *, timeout_s: float = 30.0) -> None:
        self.seat = seat
        self.committed = -1
        """Steps that are true as far as this rank has heard; -1 before the first epoch."""
        self._secret = secret
        self._epochs: dict[int, Epoch] = {}
        self._end: BessemerError | None = None
        self._changed = threading.Condition()
        self._frames = Frames()
        try:
            self._link = connect(address, timeout_s)
            self._nonce = self._challenge()
        except OSError as error:
            raise PeerLost(f"no coordinator at {address}: {error}", code="coordinator-lost") from error
        self._link.settimeout(None)

    def hello(self, step: int | None, address: str) -> None:
        """Introduce this rank: the step at which its state stands (None: it has none), and where it takes snapshots."""
        seat = self.seat
        self._send(
            kind="hello",
            proof=proof(self._secret, self._nonce),
            role="rank",
            group=seat.group,
            incarnation=seat.incarnation,
            place=seat.place,
            host=seat.host,
            step=step,
            address=address,
        )
        threading.Thread(target=self._receive, name="bessemer-cohort", daemon=True).start()

    # ---- what the rank says

    def vote(self, epoch: int, step: int, digest: str) -> None:
        """This rank has the sum of step `step` (from 0) and would apply it."""
        self._send(kind="vote", epoch=epoch, step=step, digest=digest)

    def synced(self) -> None:
        self._send(kind="synced")

    def stuck(self, epoch: int, why: str) -> None:
        """The sum of that epoch failed here."""
        self._send(kind="stuck", epoch=epoch, why=why)

    def leave(self) -> None:
        self._send(kind="leave")

    # ---- what it hears

    @property
    def newest(self) -> int:
        """The number of the newest epoch; 0 before the first."""
        return max(self._epochs, default=0)

    def newer_than(self, epoch: int) -> bool:
        """Whether this rank's work in `epoch` is of no account any more. Never waits."""
        return self._end is not None or self.newest > epoch

    def await_epoch(self, number: int = 0) -> Epoch:
        """Wait for the epoch of that number, or for any where 0 is asked for. Some are kept: the ranks of a group hear
        of the same, but not at the same time."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self.newest >= max(number, 1))
            if self._end is not None:
                raise self._end
            return self._epochs[number or self.newest]

    def await_outcome(self, epoch: int, step: int) -> bool:
        """After a vote: True once step `step` (from 0) is true, False once a newer epoch wants it done again."""
        with self._changed:
            self._changed.wait_for(lambda: self.committed > step or self.newer_than(epoch))
            if self.committed > step:
                return True
            if self._end is not None:
                raise self._end
            return False

    def check(self) -> None:
        """Raise what ended this rank's part, if anything has."""
        if self._end is not None:
            raise self._end

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    # ---- inside

    def _challenge(self) -> str:
        while True:
            data = self._link.recv(4096)
            if not data:
                raise ConnectionError("it closed the connection")
            for record in self._frames.feed(data):
                return str(record["nonce"])

    def _send(self, **record: Any) -> None:
        try:
            self._link.sendall(pack(record))
        except OSError as error:
            self.check()
            raise PeerLost(f"the coordinator is gone ({error.strerror})", code="coordinator-lost") from error

    def _receive(self) -> None:
        while True:
            try:
                data = self._link.recv(1 << 16)
            except OSError:
                data = b""
            with self._changed:
                if not data:
                    if self._end is None:
                        self._end = PeerLost("the coordinator is gone", code="coordinator-lost")
                    self._changed.notify_all()
                    return
                for record in self._frames.feed(data):
                    self._take(record)
                self._changed.notify_all()

    def _take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "epoch":
            self._note_epoch(record)
        elif kind == "commit":
            self.committed = max(self.committed, int(record["step"]))
            if record["next"] is not None:
                self._note_epoch(record["next"])
        elif kind == "fenced":
            self._end = self._end or Fenced(str(record["why"]))
        elif kind == "released":
            self._end = self._end or Released("this group is not needed any more")
        elif kind == "failed":
            self._end = self._end or BessemerError(str(record["message"]), code=str(record["code"]))

    def _note_epoch(self, record: Mapping[str, Any]) -> None:
        epoch = Epoch.of(record)
        self._epochs[epoch.number] = epoch
        for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
            del self._epochs[old]
        self.committed = max(self.committed, epoch.step)
