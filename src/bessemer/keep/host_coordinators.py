"""The coordinator of a run on several hosts, as the agent of each has it: it follows the one that leads wherever that
is, and has on its own host the first one, a standby when it is asked for one, or one that goes on from the log of
decisions where nobody has led for long.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bessemer.core.errors import PeerLost
from bessemer.keep.coordinators import Coordinators, Post
from bessemer.keep.hosts import Hosts
from bessemer.keep.hub import Hub, Link
from bessemer.keep.links import SECRET, await_challenge, connect, proof
from bessemer.keep.process import Child
from bessemer.keep.wire import Frames, WireError, pack

__all__ = ["HostCoordinators"]

LOOK_S = 0.5
"""To connect with a coordinator and hear its challenge: one host is tried at a time, while the agent waits."""
RECOVER_S = 15.0
"""After so long without one that leads the first host starts one from the log, and each further host as long later."""
GIVE_UP_S = 120.0
QUICK_ENDS = 3
"""After so many ends of this host's within a minute none is started here."""


class HostCoordinators(Coordinators):
    """`founds`: the run begins here, with the first coordinator. `hello` says what an agent tells of itself."""

    def __init__(
        self, run: Path, hosts: Hosts, hub: Hub, *, secret: str, lease_s: float, founds: bool,
        hello: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(run, Path(), hub, secret=secret, lease_s=lease_s)
        self.posts = (Post(hosts.coordinators[hosts.number]),)
        self.term = 0
        """The highest that was heard of."""
        self._hosts, self._founds, self._hello = hosts, founds, hello
        self._stands_by = ""
        self.former: Link | None = None
        """With one that led before; what was heard of it is of no account."""
        self._next = hosts.number if founds else 0  # which host is looked at next

    @property
    def addresses(self) -> str:
        """Of all hosts: the one that leads may be on any, and first comes where it was found."""
        known = self._hosts.coordinators
        return ",".join(known[self._next :] + known[: self._next])

    def start(self) -> None:
        self._sought_since = time.monotonic()
        if self._founds:
            super().start()
        while self.link is None:
            why = self.seek()
            if why:
                raise PeerLost(why, code="coordinator-lost")
            time.sleep(0.02)

    def seek(self) -> str:
        if self.link is not None:
            return ""
        address = self._hosts.coordinators[self._next]
        with suppress(OSError, WireError, KeyError):
            link, frames = connect(address, LOOK_S), Frames()
            challenge = await_challenge(link, frames)
            if int(challenge["term"]) < self.term:
                link.close()
                raise ConnectionError(f"the coordinator at {address} was replaced")
            self.term = int(challenge["term"])
            shown = proof(self._secret, str(challenge["nonce"]))
            link.sendall(pack({"kind": "hello", "role": "agent", "proof": shown, **self._hello()}))
            self.link = self._hub.follow(link)
            for record in self._told.values():
                self.link.send(record)
            return ""
        self._next = (self._next + 1) % self._hosts.count
        alone_s = time.monotonic() - self._sought_since
        if alone_s > GIVE_UP_S:
            return f"no coordinator answers within {GIVE_UP_S:g} s"
        if alone_s > RECOVER_S * (1 + self._hosts.number) and not self.posts[0].runs and not self._worn:
            self._start(self.posts[0], "--recover")
        return ""

    def say(self, record: Mapping[str, Any]) -> bool:
        """Once, to the one that leads now; False where there is none."""
        if self.link is None:
            return False
        self.link.send(record)
        return True

    def drop_link(self) -> None:
        """Look for the one that leads anew."""
        self.former = self.link or self.former
        if self.link is not None:
            self._hub.drop(self.link)
        self.on_link_end()

    def let_end(self, timeout_s: float) -> None:
        """The one of this host has to tell the others that the run is over, before this agent ends what it started."""
        self.drop_link()
        deadline = time.monotonic() + timeout_s
        while self.posts[0].runs and time.monotonic() < deadline:
            time.sleep(0.01)

    def stand_by(self, of: str) -> None:
        """The one that leads, at that address, wants a standby here."""
        post = self.posts[0]
        if not post.runs and not self._worn:
            self._stands_by = of
            self._start(post, "--standby-of", of)
        elif post.child is not None and of != self._stands_by:
            post.child.signal(signal.SIGKILL)  # it stands by another one, or led: it is asked for again

    def on_end(self, post: Post) -> str:
        now = time.monotonic()
        self._ends = [at for at in self._ends if now - at < 60.0] + [now]
        return ""

    @property
    def _worn(self) -> bool:
        return len(self._ends) > QUICK_ENDS and time.monotonic() - self._ends[-1] < 60.0

    def _start(self, post: Post, *how: str) -> None:
        log = self._folder / f"decisions-{self._hosts.number}.jsonl"
        command = [sys.executable, "-m", "bessemer.keep.coordinate", "--address", post.address]
        command += ["--job", str(self._folder / "job.toml"), "--log", str(log)]
        command += ["--hosts", ",".join(self._hosts.coordinators), "--number", str(self._hosts.number)]
        command += ["--lease", f"{self._lease_s:g}", *how]
        post.child = Child(command, {**os.environ, SECRET: self._secret}, self._log(post))
        post.child.start()
        self._hub.watch(post.child.pidfd, post)

    def _log(self, post: Post) -> Path:
        return self._folder / "logs" / f"coordinator-{self._hosts.number}.log"
