"""A fleet whose coordinators are processes: one that leads and one that stands by. They can be killed and stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ranks
from train.fleet import SECRET, STILL_S, Fleet, patient

from bessemer.core.job import Job
from bessemer.keep.coordinate import Post, serve
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.links import await_challenge, connect, proof
from bessemer.keep.wire import Frames, pack

LEASE_S = 1.5


def coordinate(job: Job, post: Post, dies: tuple[str, int, int] | None) -> None:
    ranks.die_with_the_tests()
    if dies is not None:
        _die_telling(*dies)
    for name in ("stdout", "stderr"):
        setattr(sys, name, open(f"{post.address.removeprefix('unix:')}.{name}", "a"))  # noqa: SIM115
    sys.exit(serve(job, post))


def _die_telling(what: str, count: int, told: int) -> None:
    """Die once so many steps ("step") or epochs ("epoch") are true by the log and the standby, and that many ranks have
    been told."""
    keep, post, left = Coordinator._keep, Coordinator._post, [-1]

    def keeping(self: Coordinator, m: Any) -> None:
        keep(self, m)
        if getattr(m, what) == count and left[0] < 0:
            left[0] = told

    def posting(self: Coordinator, peer: Any, frame: bytes) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        post(self, peer, frame)
        left[0] -= left[0] > 0

    Coordinator._keep, Coordinator._post = keeping, posting  # type: ignore[method-assign]


class Staffed(Fleet):
    """`lead` says which of the two addresses leads. This process is the agent, at the coordinator that leads; it tells
    of no deaths but those in `dead`. `dies`: the first coordinator, as it tells of a commit or an epoch."""

    dies: tuple[str, int, int] | None = None

    def __enter__(self) -> Staffed:
        (self.folder / "out").mkdir(parents=True, exist_ok=True)
        self.slots = [f"unix:{self.folder}/c0", f"unix:{self.folder}/c1"]
        self.address = ",".join(self.slots)
        self.lease_s = patient(LEASE_S)
        self.lead, self.posts = 0, {}  # type: int, dict[int, Any]
        self.dead: list[int] = []
        self.view = SimpleNamespace(step=0, epoch=0, term=0, active=[], joining=[])
        self._link: socket.socket | None = None
        self.post(0)
        self._until_there(self.slots[0])
        self.post(1, standby_of=self.slots[0])
        import threading

        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._done.set()
        self._thread.join()
        for process in [*self._processes.values(), *self.posts.values()]:
            process.kill()
        for process in [*self._processes.values(), *self.posts.values()]:
            process.join()

    def post(self, slot: int, *, standby_of: str = "", recover: bool = False) -> None:
        post = Post(self.slots[slot], SECRET, self.folder / "log", self.lease_s, standby_of, recover)
        dies = self.dies if not standby_of else None
        process = self.posts[slot] = ranks._context.Process(target=coordinate, args=(self.job, post, dies), daemon=True)
        process.start()

    @property
    def membership(self) -> Any:
        return self.view

    def lost(self, group: int, incarnation: int, why: str) -> None:
        self.dead.append(group)
        self._say({"kind": "lost", "group": group, "incarnation": incarnation, "why": why})

    def _told(self) -> str:
        """What the coordinators said on their way, too."""
        logs = [f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("c*.std*"))]
        return "\n".join([super()._told(), *logs])

    def scale(self, replicas: int) -> None:
        self._say({"kind": "scale", "replicas": replicas})

    def signal_lead(self, number: int) -> None:
        self.signal_slot(self.lead, number)

    def signal_slot(self, slot: int, number: int) -> None:
        os.kill(self.posts[slot].pid, number)
        if number == signal.SIGKILL:
            self.posts[slot].join()

    def until_led_by(self, slot: int) -> None:
        self.until(lambda m: self.lead == slot)

    def until_stopped(self, group: int) -> None:
        """Wait until a rank of the group has stopped itself."""
        self.until(lambda m: any(key[0] == group for key in list(self._stopped)))

    def kill(self, group: int) -> None:
        for (name, _, _), process in self._processes.items():
            if name == group:
                process.kill()

    def _until_there(self, address: str) -> None:
        deadline = time.monotonic() + patient(STILL_S)
        while not Path(address.removeprefix("unix:")).exists():
            assert time.monotonic() < deadline, f"nobody listens at {address}"
            time.sleep(0.01)

    def _say(self, record: dict[str, Any]) -> None:
        with suppress(OSError, AttributeError):
            self._link.sendall(pack(record))  # type: ignore[union-attr]

    def _serve(self) -> None:
        """An agent: always at the coordinator that leads."""
        while not self._done.is_set():
            for slot in (self.lead, 1 - self.lead):
                with suppress(OSError):
                    self._attend(slot)
            time.sleep(0.02)

    def _attend(self, slot: int) -> None:
        frames = Frames()
        with connect(self.slots[slot], 1.0) as link:
            challenge = await_challenge(link, frames)
            link.sendall(pack({"kind": "hello", "role": "agent", "host": "here",
                               "proof": proof(SECRET, challenge["nonce"])}))  # fmt: skip
            self._link, self.lead = link, slot
            for group in self.dead:
                self._say({"kind": "lost", "group": group, "incarnation": 0, "why": "it is dead"})
            link.settimeout(0.1)
            heard = time.monotonic()
            while not self._done.is_set():
                self._say({"kind": "alive"})
                self._watch()
                try:
                    data = link.recv(1 << 16)
                except TimeoutError:
                    if time.monotonic() - heard < 4 * self.lease_s:
                        continue
                    return
                heard = time.monotonic()
                if not data:
                    return
                for record in frames.feed(data):
                    if record["kind"] == "event":
                        self._note(record["event"], record["fields"])

    def _note(self, event: str, fields: dict[str, Any]) -> None:
        self.events.append({"event": event, **fields})
        for name in vars(self.view):
            if event in ("epoch", "commit") and name in fields:
                setattr(self.view, name, fields[name])
