"""A rank's connection with the coordinator: it votes, and hears of epochs and commits. No torch.

A thread receives, so that a newer epoch is known while the rank computes or waits in a sum. The rank stands at step s
(that many are in its state), has voted for it in epoch e, and asks what came: the commit, or a newer epoch.

When the coordinator is gone the thread looks for the one that takes over, at each of the addresses, and reports where
this rank stands. What was said in vain is not said again: a new coordinator begins with a new epoch. The rank computes
on and parks where it waits for an answer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.core.errors import BessemerError, PeerLost
from bessemer.keep.links import await_challenge, connect, proof
from bessemer.keep.wire import Frames, WireError, pack

__all__ = ["Cohort", "Epoch", "Fenced", "Join", "Released", "Seat"]

_EPOCHS_KEPT = 64
SILENCE_S = 5.0
"""After this long without a word the coordinator is asked whether it lives, and has as long to answer."""
GIVE_UP_S = 120.0
"""How long another coordinator is looked for."""
_CONNECT_S = 2.0
_RETRY_S = 0.05


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
    parked: bool = False
    """Nothing is committed in it."""

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
            parked=bool(record["parked"]),
        )


class Cohort:
    """Connected from its making. `addresses`: of the coordinator and its standbys, with commas between. Every method
    that waits raises Fenced, Released, PeerLost (coordinator-lost) or what the coordinator says has failed."""

    def __init__(
        self,
        addresses: str,
        secret: str,
        seat: Seat,
        *,
        timeout_s: float = 30.0,
        silence_s: float = SILENCE_S,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.seat = seat
        self.committed = -1
        """Steps that are true as far as this rank has heard; -1 before the first epoch."""
        self.share_of: Callable[[int, Epoch], tuple[int, ...]] = lambda step, epoch: ()
        """The units of a step (from 0) that this group may have done or be doing in an epoch; called in a thread."""
        self._secret, self._silence_s, self._give_up_s = secret, silence_s, give_up_s
        self._addresses = addresses.split(",")
        self._term = 0
        self._step: int | None = None
        self._landing = ""
        self._said_hello = self._leaving = self._closed = False
        self._asked_to_conclude = self._over = False
        self._epochs: dict[int, Epoch] = {}
        self._end: BessemerError | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        if not self._find(timeout_s):
            raise PeerLost(f"no coordinator at {' or '.join(self._addresses)}", code="coordinator-lost")

    def hello(self, step: int | None, address: str) -> None:
        """Introduce this rank: the step at which its state stands (None: it has none), and where it takes snapshots."""
        self._step, self._landing = step, address
        with self._sending:
            self._said_hello = True
            with contextlib.suppress(OSError):
                self._introduce(self._link, self._challenge)
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

    def done(self) -> None:
        """This rank has done what its group had to do after the last step."""
        self._send(kind="done")

    def leave(self) -> None:
        """Ask to be let go; the group goes at the next commit, unless it is the last one."""
        with self._sending:
            self._leaving = True
            if not self._said_hello:
                return  # which says so
        self._send(kind="leave")

    # ---- what it hears

    @property
    def address(self) -> str:
        """Of the coordinator that is connected, or was last."""
        return self._addresses[-1]

    @property
    def newest(self) -> int:
        """The number of the newest epoch; 0 before the first."""
        return max(self._epochs, default=0)

    def newer_than(self, epoch: int) -> bool:
        """Whether this rank's work in `epoch` is of no account any more. Never waits."""
        return self._end is not None or self.newest > epoch

    def await_epoch(self, number: int = 0) -> Epoch:
        """Wait for the epoch of that number, or for any where 0 is asked for. Some are kept: the ranks of a group hear
        of the same, but not at the same time. The newest one where this rank never heard of that one, since the
        coordinator died while it told of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self.newest >= max(number, 1))
            if self._end is not None:
                raise self._end
            return self._epochs.get(number) or self._epochs[self.newest]

    def await_outcome(self, epoch: int, step: int) -> bool:
        """After a vote: True once step `step` (from 0) is true, False once a newer epoch wants it done again."""
        with self._changed:
            self._changed.wait_for(lambda: self.committed > step or self.newer_than(epoch))
            if self.committed > step:
                return True
            if self._end is not None:
                raise self._end
            return False

    def await_conclusion(self) -> bool:
        """After the last step: False once all may go, True where this group is to evaluate and save in the place of the
        one that led."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._over or self._asked_to_conclude)
            if self._over:
                return False
            if self._end is not None:
                raise self._end
            self._asked_to_conclude = False
            return True

    def check(self, within_s: float = 0.0) -> None:
        """Raise what ended this rank's part, if anything has, or does soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None, within_s)
            if self._end is not None:
                raise self._end

    def close(self) -> None:
        """Whoever still waits is told that the coordinator is gone."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    # ---- inside

    def _find(self, timeout_s: float) -> bool:
        """Connect with the coordinator that leads or takes over, and introduce this rank if it was before."""
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            for address in self._addresses:
                with contextlib.suppress(OSError, WireError, KeyError):
                    self._open(address)
                    at = self._addresses.index(address) + 1  # when this one is gone it's looked for at the next ones
                    self._addresses = self._addresses[at:] + self._addresses[:at]
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_RETRY_S)
        return False

    def _open(self, address: str) -> None:
        """Raises OSError when there is none, or one that was replaced."""
        link, frames = connect(address, _CONNECT_S), Frames()
        try:
            challenge = {**await_challenge(link, frames), "before": self._term}
            if int(challenge["term"]) < self._term:
                self._introduce(link, challenge)  # by which it learns that it was replaced
                raise ConnectionError(f"the coordinator at {address} was replaced")
            with self._sending:
                if self._said_hello:
                    self._introduce(link, challenge)
                link.settimeout(self._silence_s)
                self._term = int(challenge["term"])
                self._link, self._frames, self._challenge = link, frames, challenge
        except BaseException:
            link.close()
            raise

    def _introduce(self, link: socket.socket, challenge: Mapping[str, Any]) -> None:
        """Say hello, and where this rank stands."""
        seat = self.seat
        with self._changed:
            epoch, step = self._epochs.get(self.newest), self.committed
        hello: dict[str, Any] = {
            "kind": "hello",
            "proof": proof(self._secret, str(challenge["nonce"])),
            "role": "rank",
            "group": seat.group,
            "incarnation": seat.incarnation,
            "place": seat.place,
            "host": seat.host,
            "step": self._step if epoch is None else step,
            "address": self._landing,
            "term": challenge["before"],
            "epoch": 0,
            "state": "spare",
            "share": [],
            "leaving": self._leaving,
        }
        if epoch is not None:
            hello["epoch"] = epoch.number
            if seat.group in epoch.active:
                hello |= {"state": "active", "share": list(self.share_of(step, epoch))}
            elif seat.group in epoch.joining:
                hello["state"] = "joining"
            if epoch.number > int(challenge["epoch"]):
                hello |= {"active": list(epoch.active), "joining": list(epoch.joining)}
        link.sendall(pack(hello))

    def _send(self, **record: Any) -> None:
        """What can't be sent is dropped: the receiving thread sees that the coordinator is gone, and the one that takes
        over begins with a new epoch."""
        self.check()
        with self._sending:
            try:
                self._link.sendall(pack(record | {"term": self._term}))
            except OSError:
                with contextlib.suppress(OSError):
                    self._link.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        """In a thread. However it ends, whoever waits hears of it."""
        try:
            end = self._hear()
        except Exception as error:
            what = f"what came from the coordinator at {self.address} can't be understood: {error!r}"
            end = PeerLost(what, code="coordinator-garbled")
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()

    def _hear(self) -> BessemerError:
        """Take in what coordinators say; returns once there is none any more."""
        asked = False
        while True:
            try:
                data = self._link.recv(1 << 16)
            except TimeoutError:
                data = b""
                if not asked:
                    asked = True
                    with contextlib.suppress(BessemerError):
                        self._send(kind="ping")
                    continue
            except OSError:
                data = b""
            asked = False
            if data:
                with self._changed:
                    for record in self._frames.feed(data):
                        self._take(record)
                    self._changed.notify_all()
                continue
            self._link.close()
            if self._end is not None or not self._find(self._give_up_s):
                return PeerLost("the coordinator is gone", code="coordinator-lost")

    def _take(self, record: Mapping[str, Any]) -> None:
        kind, term = record["kind"], int(record["term"])
        if term < self._term:
            return  # of a coordinator that was replaced
        self._term = term
        if kind == "epoch":
            self._note_epoch(record)
        elif kind == "commit":
            self.committed = max(self.committed, int(record["step"]))
            if record["next"] is not None:
                self._note_epoch(record["next"])
        elif kind == "conclude":
            self._asked_to_conclude = True
        elif kind == "over":
            self._over = True
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
