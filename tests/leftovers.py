"""What a test leaves behind: processes, names in /dev/shm, memory without a name. A fixture that fails the test which
left something, and ends what it left, so that the next one begins on clean ground.

    from leftovers import nothing_is_left        # in a conftest.py: holds for every test of its folder
"""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

TOKEN = "BESSEMER_TESTS_OF"
"""In the environment of whatever a test starts, also of what outlives its parent: the number of the tests' process."""
GRACE_S = 20.0
"""A killed process takes a while to go where cores are few; only what is still there then was left."""

os.environ[TOKEN] = str(os.getpid())  # before the fork server starts, whose ranks have its environment


@dataclass(frozen=True)
class Standing:
    """What is there: processes by number and start (numbers come back), names in /dev/shm, memory files of this
    process."""

    processes: dict[tuple[int, str], str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    memory: frozenset[str] = frozenset()

    @classmethod
    def now(cls) -> Standing:
        return cls(_processes(), frozenset(os.listdir("/dev/shm")), _memory_files())

    def since(self, before: Standing) -> list[str]:
        """In words what is there and wasn't before."""
        new = [text for key, text in self.processes.items() if key not in before.processes]
        shared = [f"/dev/shm/{name}" for name in self.shared - before.shared if not _is_others(name)]
        return new + sorted(shared) + sorted(self.memory - before.memory)


def _processes() -> dict[tuple[int, str], str]:
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid, os.getpid()}  # type: ignore[attr-defined]
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid in servers or not _is_ours(pid):
            continue
        with suppress(OSError):
            state, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state not in "ZX":
                found[pid, rest[18]] = f"process {pid} ({state}): {command[:200]}"
    return found


def _is_ours(pid: int) -> bool:
    with suppress(OSError):
        return f"{TOKEN}={os.getpid()}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _is_others(name: str) -> bool:
    """Whether a process that no test of ours started has it open or mapped. A semaphore is mapped under a name that it
    had before, so that the inode tells."""
    path = f"/dev/shm/{name}"
    try:
        inode = str(os.stat(path).st_ino)
    except OSError:
        return True  # it's gone
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and not _is_ours(int(folder.name)):
                mapped = [line.split() for line in (folder / "maps").read_text().splitlines() if "/dev/shm/" in line]
                if any(os.readlink(entry) == path for entry in (folder / "fd").iterdir()) or any(
                    fields[4] == inode for fields in mapped
                ):
                    return True
    return False


def _memory_files() -> frozenset[str]:
    """Memory without a name that this process has mapped or open, by inode."""
    found = set()
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/memfd:bessemer" in line:
                found.add(f"{line.split()[5]} (inode {line.split()[4]}) is mapped")
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if re.match("/memfd:bessemer", os.readlink(f"/proc/self/fd/{entry}")):
                found.add(f"a memory file (inode {os.stat(f'/proc/self/fd/{entry}').st_ino}) is open")
    return frozenset(found)


def left_since(before: Standing, grace_s: float = GRACE_S) -> list[str]:
    """In words what was left, once it has had time to go."""
    deadline = time.monotonic() + grace_s
    while left := Standing.now().since(before):
        gc.collect()
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def end(before: Standing) -> None:
    """Kill the processes that weren't there before, and remove what they left in /dev/shm."""
    now = Standing.now()
    for pid, _ in now.processes.keys() - before.processes.keys():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for name in now.shared - before.shared:
        if not _is_others(name):
            with suppress(OSError):
                os.unlink(f"/dev/shm/{name}")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = Standing.now()
    yield
    left = left_since(before)
    if left:
        end(before)
        pytest.fail("left behind:\n  " + "\n  ".join(left))
