"""The process of a coordinator, or of a standby that takes over when the coordinator before it ends.

    python -m bessemer.keep.coordinate --job JOB --address unix:DIR/c0 --log FILE
    python -m bessemer.keep.coordinate --job JOB --address unix:DIR/c1 --log FILE --standby-of unix:DIR/c0

A standby listens at its own address only once it takes over, so that nobody mistakes it for the one that leads.
`--hosts` names the addresses of all hosts of the run, of which `--number` is this one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.data.cursor import units_of_step
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.desk import Desk
from bessemer.keep.hosts_coordinator import HostsCoordinator
from bessemer.keep.links import SECRET, listen_at
from bessemer.keep.membership import Membership
from bessemer.keep.takeover import Decision, DecisionLog, stand_by
from bessemer.runtime.host_state import raise_open_files

__all__ = ["PARTING_S", "Post", "main", "membership_of", "serve"]

PARTING_S = 2.0
"""How long the others may take to hear the last of what a coordinator that ends has said."""
_LOGS = "decisions-*.jsonl"


@dataclass(frozen=True)
class Post:
    """Where a coordinator serves. standby_of: it waits until the one at that address ends. recover: it goes on from
    what the log says, since nobody is left who stood by. hosts: by host where a coordinator of its would listen, if the
    run has several; `number` is this one's."""

    address: str
    secret: str
    log: Path
    lease_s: float = 1.5
    standby_of: str = ""
    recover: bool = False
    hosts: tuple[str, ...] = ()
    number: int = 0


def membership_of(job: Job, *, term: int = 1) -> Membership:
    """The membership that the job asks for."""
    layout = job.layout
    return Membership(
        replicas=job.replicas,
        block=layout.world_size // job.replicas,
        steps=job.train.steps,
        minimum=job.keep.min_replicas or 1,
        units_of=lambda step: len(units_of_step(job, step)),
        term=term,
    )


def serve(job: Job, post: Post) -> int:
    """Serve until the run is over; 0, or 4 once a coordinator of a later term leads."""
    known: Decision | None = None
    if post.standby_of:
        known = stand_by(post.standby_of, post.secret, lease_s=post.lease_s)
        if known is None:
            return 0
    elif post.recover:
        known = _newest(post)
    if post.hosts and known is None:
        for other in post.log.parent.glob(_LOGS):
            other.unlink()  # of an earlier attempt
    log = DecisionLog(post.log, anew=known is None)
    server, membership = listen_at(post.address), membership_of(job)
    more: dict[str, Any] = {"secret": post.secret, "lease_s": post.lease_s, "log": log, "takes_over": known}
    if post.hosts:
        desk = Desk(post.number, post.address, job.run.folder.expanduser().absolute(), post.lease_s)
        coordinator: Coordinator = HostsCoordinator(server, membership, desk, post.hosts, **more)
    else:
        coordinator = Coordinator(server, membership, **more)
    try:
        coordinator.run()
        coordinator.let_go(PARTING_S)
    finally:
        coordinator.close()
    if coordinator.superseded:
        print(f"a coordinator of term {coordinator.superseded} leads: this one ends", file=sys.stderr, flush=True)
        return 4
    return 0


def _newest(post: Post) -> Decision:
    """Of all hosts' logs, since each coordinator writes to its own."""
    logs = list(post.log.parent.glob(_LOGS)) if post.hosts else [post.log]
    return max((DecisionLog.read(log) for log in logs), key=lambda d: (d.term, d.epoch, d.step), default=Decision())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bessemer.keep.coordinate", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--address", required=True, help="unix:PATH or tcp:HOST:PORT")
    parser.add_argument("--job", type=Path, required=True, help="the run's job.toml")
    parser.add_argument("--log", type=Path, required=True, help="where decisions are appended")
    parser.add_argument("--lease", type=float, default=1.5, help="seconds that an agent may be silent")
    parser.add_argument("--standby-of", default="", help="the address of the coordinator that leads")
    parser.add_argument("--recover", action="store_true", help="go on from what the log says")
    parser.add_argument("--hosts", default="", help="of a run on several: the addresses of all, with commas between")
    parser.add_argument("--number", type=int, default=0, help="which of them this is, from 0")
    given = parser.parse_args(arguments)
    secret = os.environ.get(SECRET, "")
    if not secret:
        parser.error(f"{SECRET} is not set: without a secret anybody could join")
    hosts = tuple(filter(None, given.hosts.split(",")))
    raise_open_files()
    post = Post(given.address, secret, given.log, given.lease, given.standby_of, given.recover, hosts, given.number)
    return serve(load_job(given.job), post)


if __name__ == "__main__":
    sys.exit(main())
