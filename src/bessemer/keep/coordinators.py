"""The coordinator of a run and its standby, as the agent has them: starts them, follows the one that leads, and starts
another when one ends.

Both have fixed addresses, which every rank knows. A standby takes over by itself; where none is left, a new coordinator
goes on from the log of decisions.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import PeerLost
from bessemer.keep.hub import Hub, Link
from bessemer.keep.links import SECRET, await_challenge, connect, proof
from bessemer.keep.process import Child
from bessemer.keep.wire import Frames, WireError, pack

__all__ = ["Coordinators", "Post"]

START_S = 60.0
"""How long a coordinator may take until it answers."""
QUICK_ENDS = 6
"""After so many ends within a minute no other one is started."""


@dataclass(eq=False)
class Post:
    """One of the two places for a coordinator."""

    address: str
    child: Child | None = None

    @property
    def runs(self) -> bool:
        return self.child is not None and not self.child.has_ended()


class Coordinators:
    """`link`: with the one that leads; None while there is none. `secret` is the run's."""

    def __init__(self, folder: Path, place: Path, hub: Hub, *, secret: str, lease_s: float) -> None:
        self.posts: tuple[Post, ...] = (Post(f"unix:{place}/c0"), Post(f"unix:{place}/c1"))
        self.link: Link | None = None
        self._folder, self._hub, self._secret, self._lease_s = folder, hub, secret, lease_s
        self._lead = 0
        self._sought_since = time.monotonic()
        self._ends: list[float] = []
        self._told: dict[object, dict[str, Any]] = {}

    @property
    def addresses(self) -> str:
        """As the ranks take them."""
        return ",".join(post.address for post in self.posts)

    def start(self) -> None:
        """Returns when the first one answers. Raises PeerLost (coordinator-lost)."""
        self._start(self.posts[0])
        while self.link is None:
            why = self.seek()
            if why or not self.posts[0].runs:
                child = self.posts[0].child
                tail = "" if child is None else "".join(f"\n    | {line}" for line in child.tail())
                raise PeerLost(
                    f"the coordinator did not come up\n  log: {self._log(self.posts[0])}{tail}", code="coordinator-lost"
                )
            time.sleep(0.02)

    def tell(self, about: object, record: Mapping[str, Any]) -> None:
        """Say something that holds from now on: one that takes over hears it too. It replaces what was said before
        about the same."""
        self._told[about] = dict(record)
        if self.link is not None:
            self.link.send(record)

    def fulfilled(self, about: object, record: Mapping[str, Any]) -> None:
        """This was said, and is among the coordinator's decisions: to one that takes over later it would be a wish of
        yesterday."""
        if self._told.get(about) == dict(record):
            del self._told[about]

    def give_sign(self) -> None:
        """A sign of life of this host. A coordinator that was stopped is ended, since nobody else may do it."""
        if self.link is not None:
            self.link.send({"kind": "alive"})
        for post in self.posts:
            if post.child is not None and post.runs and post.child.stopped_s():
                post.child.signal(signal.SIGKILL)

    def on_link_end(self) -> None:
        self.link = None
        self._sought_since = time.monotonic()

    def on_end(self, post: Post) -> str:
        """The process of `post` has ended. Returns why the run can't go on, if it can't."""
        now = time.monotonic()
        self._ends = [at for at in self._ends if now - at < 60.0] + [now]
        assert post.child is not None
        code, lead = post.child.exit_code(), self.posts[self._lead]
        if len(self._ends) > QUICK_ENDS:
            return f"coordinators ended {len(self._ends)} times within a minute, the last with code {code}"
        if post is not lead:
            if self.link is not None:
                self._start(post, "--standby-of", lead.address)
            return ""
        self.link, self._sought_since = None, now
        self._lead = 1 - self._lead
        if not self.posts[self._lead].runs:
            self._start(self.posts[self._lead], "--recover")
        return ""

    def seek(self) -> str:
        """Look once for the one that leads. Returns why the run can't go on, if none was found for too long."""
        if self.link is not None:
            return ""
        lead, frames = self.posts[self._lead], Frames()
        with suppress(OSError, WireError):
            link = connect(lead.address, 5.0)
            challenge = await_challenge(link, frames)
            hello = {"kind": "hello", "role": "agent", "host": socket.gethostname()}
            link.sendall(pack(hello | {"proof": proof(self._secret, challenge["nonce"])}))
            self.link = self._hub.follow(link)
            for record in self._told.values():
                self.link.send(record)
            other = self.posts[1 - self._lead]
            if not other.runs:
                self._start(other, "--standby-of", lead.address)
            return ""
        late = time.monotonic() - self._sought_since > START_S
        return f"no coordinator answers within {START_S:g} s" if late else ""

    def kill(self) -> None:
        for post in self.posts:
            if post.child is not None:
                post.child.kill_session()

    def reap(self) -> None:
        """After `kill`, once the hub doesn't watch them any more."""
        for post in self.posts:
            if post.child is not None:
                post.child.wait(5.0)

    def _start(self, post: Post, *how: str) -> None:
        command = [sys.executable, "-m", "bessemer.keep.coordinate", "--address", post.address]
        command += ["--job", str(self._folder / "job.toml"), "--log", str(self._folder / "decisions.jsonl")]
        command += ["--lease", f"{self._lease_s:g}", *how]
        post.child = Child(command, {**os.environ, SECRET: self._secret}, self._log(post))
        post.child.start()
        self._hub.watch(post.child.pidfd, post)

    def _log(self, post: Post) -> Path:
        return self._folder / "logs" / f"coordinator-{self.posts.index(post)}.log"
