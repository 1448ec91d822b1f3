"""Starts the ranks of one host under a launcher that starts one process a host, as Kubernetes does.

    python -m bessemer.keep.pod JOB --host 1 --hosts 4 --ranks 8

Each rank is `bessemer train JOB` with RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set; MASTER_ADDR and
MASTER_PORT come from the environment. SIGTERM and SIGINT are passed on. It ends after all that the ranks started,
which includes the host's services (`keep.host`): the end of a container's first process is that of all others.

Exit code: 0 when all ranks are done, 3 when they were stopped on request and saved, 2 when one found the request wrong,
else 1. When a rank fails the others get `Timeouts.grace_s` to end by themselves, then SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from bessemer.keep.agent import Timeouts
from bessemer.keep.process import Child, exit_text

__all__ = ["main", "run"]

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 0.1


def run(command: Sequence[str], *, host: int, hosts: int, ranks: int, timeouts: Timeouts | None = None) -> int:
    """Runs `command` as `ranks` ranks of host `host`, and returns the exit code of all."""
    timeouts = timeouts or Timeouts()
    _adopt_orphans()
    first = host * ranks
    children = {first + local: _rank(command, first + local, local, hosts, ranks) for local in range(ranks)}

    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for child in children.values():
            child.signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    for child in children.values():
        child.start()
    codes = _watch(children, timeouts)
    _await_orphans(timeouts.vault_s)
    if asked:  # a rank that was asked to stop before it had set up its own handler
        codes = [3 if code in (-signal.SIGTERM, -signal.SIGINT) else code for code in codes]
    if all(code in (0, 3) for code in codes):
        return max(codes)
    return next((code for code in (2, 4) if code in codes), 1)


def _rank(command: Sequence[str], rank: int, local: int, hosts: int, ranks: int) -> Child:
    place = {"RANK": rank, "WORLD_SIZE": hosts * ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}
    return Child(command, {**os.environ, **{name: str(value) for name, value in place.items()}})


def _watch(children: dict[int, Child], timeouts: Timeouts) -> list[int]:
    """The exit codes of all, after the last has ended."""
    codes: list[int] = []
    left = dict(children)
    due: list[tuple[float, signal.Signals]] = []
    while left:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        select.select([child.pidfd for child in left.values()], [], [], wait_s)
        for rank, child in list(left.items()):
            code = child.exit_code()
            if code is None:
                continue
            del left[rank]
            codes.append(code)
            if code not in (0, 3):
                print(f"rank {rank} {exit_text(code)}", file=sys.stderr, flush=True)
                if not due:
                    at = time.monotonic() + timeouts.grace_s
                    due = [(at, signal.SIGTERM), (at + timeouts.kill_s, signal.SIGKILL)]
        while due and due[0][0] <= time.monotonic():
            _, number = due.pop(0)
            for child in left.values():
                child.signal(number)
    return codes


def _adopt_orphans() -> None:
    """What a rank started and left becomes a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _await_orphans(limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(_LOOK_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bessemer.keep.pod", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("job", help="the job file")
    parser.add_argument("--host", type=int, required=True, help="number of this host, from 0")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each host")
    given = parser.parse_args(arguments)
    command = [sys.executable, "-m", "bessemer.cli", "train", given.job]
    return run(command, host=given.host, hosts=given.hosts, ranks=given.ranks)


if __name__ == "__main__":
    sys.exit(main())
