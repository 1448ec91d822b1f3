"""Taking part in a run on several hosts with this one: finding the run or beginning it, and the end.

code = run_on_host(job, options, hosts)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.core.errors import PeerLost, RequestError
from bessemer.core.job import Job
from bessemer.keep.agent import Options
from bessemer.keep.elastic_agent import CONTROL
from bessemer.keep.host_agent import MEET_S, HostAgent
from bessemer.keep.host_journal import HostJournal
from bessemer.keep.hosts import Hosts, find_lead, secret_of
from bessemer.keep.hub import signals_raise
from bessemer.keep.progress import Printer
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.signs import Signs, give_signs
from bessemer.keep.wire import private_dir, short_temp_dir

__all__ = ["run_on_host"]

LEFT_LEASES = 4
"""An agent that begins a run in which one has not ended looks for so many leases whether it goes on elsewhere: whether
a coordinator answers, or another host gives a sign of life in the run folder."""
_LOOK_S = 0.3


def run_on_host(job: Job, options: Options, hosts: Hosts) -> int:
    """Takes part in the run with this host, and returns the exit code: 0 done, 1 failed, 3 stopped on request.

    Raises RequestError (secret-missing, hosts-idle, hosts-restarts), RunFolderError (in use, another job's,
    other-folder), and PeerLost where the first host doesn't come up.
    """
    secret_of()
    _check(job, hosts)
    folder = RunFolder(job)
    with signals_raise() as wishes:
        lead = _find(folder, hosts)
    if wishes.names:
        return 3
    founds = not lead
    lock = -1
    if founds:
        lock = folder.lock()
        claimed = folder.claim()
    try:
        printer = Printer(job.train.steps, quiet=options.quiet or not founds, bar=founds)
        journal = HostJournal(folder, printer)
        if founds:
            journal.event("start", job_hash=job.hash, identity=job.identity, world_size=job.layout.world_size,
                          attempt=claimed["attempt"], host=socket.gethostname(), hosts=hosts.count)  # fmt: skip
        else:
            journal.event("host_started", host=hosts.name, number=hosts.number)
        try:
            with signals_raise() as wishes:
                if options.prepare is not None:
                    options.prepare(printer)
            if wishes.names:
                return 3
            with _workplace(folder, hosts) as place, give_signs(folder.path, hosts.number):
                return HostAgent(hosts, founds, folder, journal, options, place, lock if founds else None).run()
        finally:
            journal.close()
    finally:
        folder.unlock()


def _check(job: Job, hosts: Hosts) -> None:
    groups = job.replicas + job.keep.spares
    if hosts.count > groups:
        raise RequestError(
            f"{hosts.count} hosts share {groups} groups of ranks, spares included: some would have none",
            code="hosts-idle",
            fix=f"keep.spares = {hosts.count - job.replicas}, or fewer hosts",
        )
    if job.keep.restarts:
        raise RequestError(
            f"keep.restarts = {job.keep.restarts} is for one host: on several nobody starts all ranks again in place",
            code="hosts-restarts",
            fix="keep.restarts = 0 and keep.memory_every = 0; the launcher may start the run again",
        )


def _find(folder: RunFolder, hosts: Hosts) -> str:
    """Where a coordinator leads; empty where this host is to begin the run."""
    start = quiet_since = time.monotonic()
    begins, signs, alive = hosts.number == 0, Signs(folder.path, hosts.number, hosts.count), []  # type: bool, Signs, list[int]
    left_s = LEFT_LEASES * (folder.job.keep.lease_s or 1.5) if (folder.path / CONTROL).exists() else 0.0
    while time.monotonic() - start < MEET_S:
        if begins and time.monotonic() - quiet_since >= left_s:
            return ""
        lead = find_lead(hosts)
        if lead:
            return lead
        time.sleep(_LOOK_S)
        fresh = signs.fresh()
        if fresh:
            quiet_since, alive = time.monotonic(), fresh
    where = f"port {hosts.port} of {', '.join(hosts.names[:4])}"
    if begins and not alive:
        return ""
    if begins:
        goes_on = f"host {alive[0]} gives signs of life in {folder.path}"
        raise PeerLost(
            f"the run goes on elsewhere ({goes_on}), but no coordinator answers at {where}",
            code="coordinator-lost",
            fix="see whether this host reaches the others, or end what still runs there",
        )
    raise PeerLost(
        f"no coordinator answers at {where} within {MEET_S:g} s",
        code="coordinator-lost",
        fix="see what the agent of the first host printed, and whether its port is open to the others",
    )


@contextmanager
def _workplace(folder: RunFolder, hosts: Hosts) -> Iterator[Path]:
    """A directory for the sockets of this host's part of the run; only this user can enter it."""
    key = hashlib.sha256(f"{folder.path}\n{hosts.number}\n{hosts.name}".encode()).hexdigest()[:12]
    place = private_dir(short_temp_dir() / f"bessemer-{os.getuid()}") / key
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
