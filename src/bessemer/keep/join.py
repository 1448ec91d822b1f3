"""A rank under somebody else's launcher: it finds, or as local rank 0 starts, the services of its host.

The services (`bessemer.keep.host`) are what the agent is to a local run, without the ranks: they take records, run
the vault, and on the host of global rank 0 hold the run folder's lock and write its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from bessemer.core.errors import BessemerError, PeerLost, RequestError, Stopped
from bessemer.core.units import counted
from bessemer.keep.launch import Launch
from bessemer.keep.wire import private_dir, short_temp_dir

if TYPE_CHECKING:
    from bessemer.core.job import Job
    from bessemer.keep.member import Member

__all__ = ["host_place", "is_listening", "join_host", "rendezvous"]

SERVICES_S = 120.0
"""How long the host's services may take to come up; they wait that long, too, for ranks that never come."""

RENDEZVOUS_S = 300.0
"""How long ranks wait for each other at the start: hosts of a large job start minutes apart."""

_LOOK_UP_S = 0.5  # how soon a rank that waits for the others hears of a stop


def join_host(kind: type[Member], launch: Launch, job: Job, vault: bool = True) -> Member:
    """The connected member of a rank that a launcher started. See `Member.from_environment` for what it raises."""
    if launch.world_size != job.layout.world_size:
        raise RequestError(
            f"{launch.launcher} started {counted(launch.world_size, 'process')}; the layout has "
            f"{counted(job.layout.world_size, 'rank')}",
            code="world-size",
            fix=f"start {counted(job.layout.world_size, 'process')}, or change layout.dp",
        )
    if launch.world_size > 1:
        _check_master(launch)
    place = host_place(launch, job)
    services = _start_services(launch, job, place, vault) if launch.local_rank == 0 else None
    member = kind(launch, agent=place / "agent")
    member.run_folder = job.run.folder.expanduser().absolute()
    member.services = services
    deadline = time.monotonic() + SERVICES_S
    while not is_listening(place / "agent"):
        if services is not None and services.poll() is not None:
            raise PeerLost(
                f"the services of {socket.gethostname()} ended with code {services.returncode}; their error is above",
                code="services-lost",
                rank=launch.rank,
            )
        if time.monotonic() > deadline:
            raise PeerLost(
                f"the services of {socket.gethostname()} did not come up within {SERVICES_S:g} s at {place / 'agent'}; "
                f"local rank 0 starts them",
                code="services-lost",
                fix="see what local rank 0 printed; LOCAL_RANK must be 0 for one process of each host",
                rank=launch.rank,
            )
        time.sleep(0.05)
    member.connect()
    member.await_welcome(max(1.0, deadline - time.monotonic()))
    return member


def host_place(launch: Launch, job: Job) -> Path:
    """The directory of this launch's sockets on this host: the same for all its ranks, another for any other launch."""
    run = str(job.run.folder.expanduser().absolute())
    key = hashlib.sha256(f"{run}\n{launch.identity}\n{launch.world_size}".encode()).hexdigest()[:12]
    base = private_dir(short_temp_dir() / f"bessemer-{os.getuid()}")
    return private_dir(base / key)


def rendezvous(member: Member) -> dict[str, Any]:
    """The keywords with which `init_process_group` makes the ranks meet (a store; rank and world size come beside it).

    A file under our agent, since a TCP store listens on all interfaces; MASTER_ADDR and MASTER_PORT elsewhere.
    Raises RequestError (port-in-use) when another program has rank 0's port, or whatever wrong request another rank
    found; PeerLost when the ranks don't meet in time; Stopped when a stop was asked for meanwhile.
    """
    import torch.distributed as dist

    if member.store is not None:
        return {"store": dist.FileStore(str(member.store), member.world_size)}
    try:
        store = _store_elsewhere(member)
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise _not_met(member, error) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # keys of a dead attempt must not be found again
    return {"store": dist.PrefixStore(f"bessemer/{attempt}", store)}


def _store_elsewhere(member: Member) -> Any:
    """The store at MASTER_ADDR. torch waits for it without looking up, so that is left to a thread, while this one
    hears of a stop or of another rank's failure. After either the thread ends with the process."""
    import torch.distributed as dist

    met: SimpleQueue[Any] = SimpleQueue()

    def meet() -> None:
        limit = timedelta(seconds=RENDEZVOUS_S)
        try:
            met.put(next(dist.rendezvous("env://", member.rank, member.world_size, timeout=limit))[0])
        except BaseException as error:  # raised again in the waiting thread
            met.put(error)

    threading.Thread(target=meet, name="bessemer-rendezvous", daemon=True).start()
    while True:
        with contextlib.suppress(Empty):
            outcome = met.get(timeout=_LOOK_UP_S)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        if member.stop_requested:
            raise Stopped("stopped on request before the ranks had met", rank=member.rank)


def _not_met(member: Member, error: RuntimeError) -> BessemerError:
    address, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
    if "address already in use" in str(error).lower() or "EADDRINUSE" in str(error):
        return RequestError(
            f"port {port} of this host is in use by another program, so rank 0 can't meet the others there",
            code="port-in-use",
            fix=f"export MASTER_PORT=another port; `ss -ltnp sport = :{port}` shows who has it",
            rank=member.rank,
        )
    return PeerLost(
        f"the ranks did not meet at {address} port {port}: {str(error).strip().splitlines()[0]}",
        code="ranks-not-met",
        fix=f"see whether rank 0 came up, and whether MASTER_ADDR={address} is its host and lets port {port} through",
        rank=member.rank,
    )


def _check_master(launch: Launch) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if not missing:
        return
    host = "the host of rank 0"
    if launch.launcher == "slurm":
        host = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    raise RequestError(
        f"{launch.launcher} started {launch.world_size} processes, but {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set, so they can't find rank 0",
        code="no-master",
        fix=f"export MASTER_ADDR={host} MASTER_PORT=29500",
    )


def _start_services(launch: Launch, job: Job, place: Path, vault: bool) -> subprocess.Popen[bytes]:
    """Starts `bessemer.keep.host` in a session of its own and gives it the job. It shares this rank's output."""
    from bessemer.core.job_file import dump_job

    command = [sys.executable, "-m", "bessemer.keep.host", "--place", str(place), "--rank", str(launch.rank)]
    command += ["--ranks", str(launch.local_world_size), *([] if vault else ["--no-vault"])]
    if launch.local_world_size < launch.world_size:
        command += ["--token", hashlib.sha256(launch.identity.encode()).hexdigest()[:12]]
    services = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert services.stdin is not None
    with services.stdin as pipe:
        pipe.write(dump_job(job).encode())
    return services


def is_listening(path: Path) -> bool:
    """Whether somebody accepts connections there; a socket file alone may be left of a dead launch."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
