"""The "hosts" of a run under chaos, all on this machine: each is an agent with all that it starts. Several are at
loopback addresses of their own, or in network namespaces whose links can be taken down (root).

    with Hosts.on_loopback(3) as hosts:
        for number in range(3):
            hosts.start(number, [sys.executable, "-m", "bessemer.cli", "train", "job.toml"], log)
        hosts.signal(1, signal.SIGKILL)          # everything on it
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from bessemer.core.errors import RequestError
from bessemer.keep.hosts import HOSTS
from bessemer.keep.links import SECRET

__all__ = ["Hosts", "Namespaces", "process_tree"]


class Hosts:
    """`names` are their addresses, `inside` the words before each host's commands."""

    def __init__(self, names: Sequence[str], inside: Sequence[Sequence[str]], port: int) -> None:
        self.names, self.inside, self.port = list(names), list(inside), port
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._secret = secrets.token_hex(32)

    @classmethod
    def on_loopback(cls, count: int) -> Hosts:
        names = [f"127.0.0.{number + 1}" for number in range(count)]
        return cls(names, [()] * count, _free_port(names))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        for agent in self.agents.values():
            agent.wait()

    def kill_all(self) -> None:
        for number in self.agents:
            self.signal(number, signal.SIGKILL)

    def start(self, number: int, command: Sequence[str], log: Path) -> None:
        """The agent of a host, which has none or had one that has ended; what it prints is added to `log`."""
        if number in self.agents:
            self.agents[number].wait()
        ours = {
            "RANK": str(number),
            "WORLD_SIZE": str(len(self.names)),
            "MASTER_PORT": str(self.port),
            HOSTS: ",".join(self.names),
            SECRET: self._secret,
        }
        if len(self.names) == 1:
            ours = {}
        with log.open("ab") as output:
            self.agents[number] = subprocess.Popen(
                [*self.inside[number], *command],
                env={**os.environ, **ours}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def running(self) -> list[int]:
        """The hosts whose agent goes on."""
        return [number for number, agent in self.agents.items() if agent.poll() is None]

    def signal(self, number: int, what: int) -> None:
        """To all processes of a host, the agent first."""
        agent = self.agents.get(number)
        for pid in () if agent is None or agent.returncode is not None else process_tree(agent.pid):
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue


_NUMBERS = itertools.count()


class Namespaces(Hosts):
    """Each host in a network namespace of its own, all joined by one that forwards."""

    def __init__(self, count: int) -> None:
        """RequestError (chaos-namespaces) where this process may not make any."""
        self._prefix = f"bsm{os.getpid()}.{next(_NUMBERS)}"
        names = [f"10.99.{number}.2" for number in range(count)]
        inside = [("ip", "netns", "exec", f"{self._prefix}-{number}") for number in range(count)]
        super().__init__(names, inside, 29500)
        self._made: list[str] = []
        try:
            self._add("hub")
            _ip("netns", "exec", f"{self._prefix}-hub", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
            for number in range(count):
                self._add_host(number)
        except BaseException as error:
            self._remove()
            if not isinstance(error, OSError):
                raise
            raise RequestError(
                f"hosts that can be cut off need network namespaces, which can't be made here: {error}",
                code="chaos-namespaces",
                fix="run it as root, with the ip command installed; or leave out faults of kind cut",
            ) from error

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._remove()

    def cut(self, number: int) -> None:
        """Nothing passes between this host and the others until `mend`."""
        _ip("-n", f"{self._prefix}-hub", "link", "set", f"p{number}", "down")

    def mend(self, number: int) -> None:
        _ip("-n", f"{self._prefix}-hub", "link", "set", f"p{number}", "up")

    def _remove(self) -> None:
        while self._made:
            with contextlib.suppress(OSError):
                _ip("netns", "del", self._made.pop())

    def _add(self, name: str) -> str:
        _ip("netns", "add", f"{self._prefix}-{name}")
        self._made.append(f"{self._prefix}-{name}")
        return self._made[-1]

    def _add_host(self, number: int) -> None:
        hub, host = f"{self._prefix}-hub", self._add(str(number))
        _ip("link", "add", f"v{number}", "netns", host, "type", "veth", "peer", "name", f"p{number}", "netns", hub)
        for space, link, end in ((hub, f"p{number}", 1), (host, f"v{number}", 2)):
            _ip("-n", space, "addr", "add", f"10.99.{number}.{end}/30", "dev", link)
            _ip("-n", space, "link", "set", link, "up")
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "route", "add", "default", "via", f"10.99.{number}.1")


def _ip(*words: str) -> None:
    """OSError says what went wrong."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"ip {' '.join(words)} ended with {done.returncode}")


def _free_port(names: Sequence[str]) -> int:
    """One that is free at all these addresses."""
    while True:
        with socket.socket() as first:
            first.bind((names[0], 0))
            port = int(first.getsockname()[1])
            try:
                for name in names[1:]:
                    with socket.socket() as other:
                        other.bind((name, port))
            except OSError:
                continue
            return port


def process_tree(root: int) -> Iterator[int]:
    """The process and all that descend from it, itself first."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            below.setdefault(int(fields[1]), []).append(int(entry.name))
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        todo += below.get(pid, [])
