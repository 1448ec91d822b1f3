"""Ranks of a tiny model in network namespaces, a host each, whose links can be slowed down one by one (root, `tc`)."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import _context, die_with_the_tests
from train.toy import run_steps, toy_parts

from bessemer.comm import collectives as comm
from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.runtime.recorder import Recorder

NEWNET, NEWUTS = 0x40000000, 0x04000000  # linux/sched.h
REST_S = 0.01  # of a rank between two steps, so that the watch keeps up with its operations


class Wire:
    """`count` network namespaces, joined by one that forwards. Skips the test where they can't be made."""

    def __init__(self, count: int) -> None:
        if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
            pytest.skip("network namespaces need root and the commands `ip` and `tc`")
        prefix = f"bsl{os.getpid()}"
        self.hub, self.names = f"{prefix}-hub", [f"{prefix}-{number}" for number in range(count)]
        self._made: list[str] = []
        try:
            for name in (self.hub, *self.names):
                _run("ip", "netns", "add", name)
                self._made.append(name)
            _run("ip", "netns", "exec", self.hub, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
            for number, name in enumerate(self.names):
                self._join(number, name)
        except OSError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {error}")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        while self._made:
            _run("ip", "netns", "del", self._made.pop())

    def slow(self, one: int, other: int, rate: str) -> None:
        """From now on no more than `rate` ("4mbit") passes between these two, in each direction."""
        for to, of in ((one, other), (other, one)):
            tc = ("tc", "-n", self.hub)
            port = ("dev", f"p{to}")
            _run(*tc, "qdisc", "add", *port, "root", "handle", "1:", "htb", "default", "10")
            _run(*tc, "class", "add", *port, "parent", "1:", "classid", "1:10", "htb", "rate", "10gbit")
            _run(*tc, "class", "add", *port, "parent", "1:", "classid", "1:20", "htb", "rate", rate, "burst", "2k")
            match = ("u32", "match", "ip", "src", f"10.98.{of}.2/32", "flowid", "1:20")
            _run(*tc, "filter", "add", *port, "parent", "1:", "protocol", "ip", *match)

    def _join(self, number: int, name: str) -> None:
        ours, hubs = f"v{number}", f"p{number}"
        _run("ip", "link", "add", ours, "netns", name, "type", "veth", "peer", "name", hubs, "netns", self.hub)
        for space, link, end in ((self.hub, hubs, 1), (name, ours, 2)):
            _run("ip", "-n", space, "addr", "add", f"10.98.{number}.{end}/30", "dev", link)
            _run("ip", "-n", space, "link", "set", link, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "route", "add", "default", "via", f"10.98.{number}.1")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def start_ranks(folder: Path, wire: Wire) -> list[Any]:
    """The ranks of `folder`/job.toml, one in each namespace; they train until they are killed."""
    started = []
    for number, name in enumerate(wire.names):
        process = _context.Process(target=_rank, args=(number, len(wire.names), str(folder), name), daemon=True)
        process.start()
        started.append(process)
    return started


def _rank(number: int, world: int, folder: str, name: str) -> None:
    import time

    import torch
    import torch.distributed as dist

    die_with_the_tests()
    _move_to(number, name)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = f"v{number}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    job: Job = load_job(Path(folder) / "job.toml")
    recorder = Recorder(Path(folder) / "blackbox" / f"rank-{number}", rank=number, world=world, job_hash=job.hash)
    comm.record_to(recorder)
    parts = toy_parts(job, number)
    parts.step.passes.phases.attach(recorder)
    for _ in run_steps(parts, 0, job.train.steps):
        time.sleep(REST_S)


def _move_to(number: int, name: str) -> None:
    """Into the namespace, under a host's name of its own. Before there is a second thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as space:
        if libc.setns(space.fileno(), NEWNET) or libc.unshare(NEWUTS):
            raise OSError(ctypes.get_errno(), f"can't move to {name}")
    socket.sethostname(f"host-{number}")
