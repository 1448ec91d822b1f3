"""The process of a coordinator, or of a standby that takes over when the coordinator before it ends.

    python -m bessemer.keep.coordinate --job JOB --address unix:DIR/c0 --log FILE
    python -m bessemer.keep.coordinate --job JOB --address unix:DIR/c1 --log FILE --standby-of unix:DIR/c0

A standby listens at its own address only once it takes over, so that nobody mistakes it for the one that leads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.data.cursor import units_of_step
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.links import SECRET, listen_at
from bessemer.keep.membership import Membership
from bessemer.keep.takeover import Decision, DecisionLog, stand_by

__all__ = ["Post", "main", "membership_of", "serve"]


@dataclass(frozen=True)
class Post:
    """Where a coordinator serves. standby_of: it waits until the one at that address ends. recover: it goes on from
    what the log says, since nobody is left who stood by."""

    address: str
    secret: str
    log: Path
    lease_s: float = 1.5
    standby_of: str = ""
    recover: bool = False


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
        known = DecisionLog.read(post.log)
    log = DecisionLog(post.log, anew=known is None)
    coordinator = Coordinator(
        listen_at(post.address), membership_of(job), secret=post.secret, lease_s=post.lease_s, log=log, takes_over=known
    )
    try:
        coordinator.run()
    finally:
        coordinator.close()
    if coordinator.superseded:
        print(f"a coordinator of term {coordinator.superseded} leads: this one ends", file=sys.stderr, flush=True)
        return 4
    return 0


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
    given = parser.parse_args(arguments)
    secret = os.environ.get(SECRET, "")
    if not secret:
        parser.error(f"{SECRET} is not set: without a secret anybody could join")
    post = Post(given.address, secret, given.log, given.lease, given.standby_of, given.recover)
    return serve(load_job(given.job), post)


if __name__ == "__main__":
    sys.exit(main())
