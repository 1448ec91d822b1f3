"""The take-off check of this host: starts its ranks, judges what they found. Imports no torch: the ranks do.

fleet = check_this_host(request, ranks=4)
takeoff = Takeoff(fleet, verdict)            # what `bessemer takeoff` prints
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import RequestError
from bessemer.core.units import counted, format_rate, format_seconds
from bessemer.inspect.takeoff_records import Fleet, HostState, Request
from bessemer.inspect.takeoff_verdict import EXIT_BAD, Verdict
from bessemer.keep.process import Child, exit_text, usable_cores
from bessemer.keep.wire import short_temp_dir

__all__ = ["Takeoff", "check_this_host", "hosts_text", "summary"]

_WORKER = "bessemer.inspect.takeoff_worker"
START_S = 90.0
"""How long the ranks of a host may take to start on a busy computer."""


@dataclass(frozen=True)
class Takeoff:
    """A check and its verdict."""

    fleet: Fleet
    verdict: Verdict

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict.ok else EXIT_BAD

    def as_json(self) -> dict[str, Any]:
        """The form of `bessemer takeoff --json`."""
        return {"verdict": self.verdict.as_json(), **self.fleet.model_dump(mode="json")}

    def __rich__(self) -> Any:
        from bessemer.inspect.takeoff_table import takeoff_table

        return takeoff_table(self)


def summary(takeoff: Takeoff) -> list[str]:
    """A few lines: how many hosts are good, the slowest rates, what is bad."""
    fleet, verdict = takeoff.fleet, takeoff.verdict
    count = f"{counted(len(fleet.hosts), 'host')}, {counted(sum(len(s.ranks) for s in fleet.hosts), 'rank')}"
    state = "all good" if verdict.ok else f"bad: {', '.join(verdict.bad) or 'the fleet as a whole'}"
    lines = [f"take-off: {count}, {state} ({format_seconds(fleet.seconds)})"]
    slowest: dict[str, float] = {}
    for product in (p for rank in fleet.ranks for p in rank.products if p.rate):
        slowest[product.format] = min(product.rate, slowest.get(product.format, product.rate))
    if slowest and verdict.ok:
        rates = ", ".join(f"{name} {format_rate(rate, 'op')}" for name, rate in slowest.items())
        lines.append(f"  slowest rank: {rates}; every repetition gave the same bits")
    return lines + [f"  {f.host or 'fleet'}: {f.check}: {f.what}" for f in verdict.findings if f.bad]


def hosts_text(verdict: Verdict) -> str:
    """The hosts that the job gets, one a line: what a launcher reads."""
    return "".join(f"{host}\n" for host in verdict.chosen)


def check_this_host(request: Request, ranks: int) -> Fleet:
    """Starts `ranks` ranks here and returns what they found. A rank that dies is silent in the record, and no error;
    RequestError where a rank finds the request wrong (no such device)."""
    with tempfile.TemporaryDirectory(prefix="takeoff-", dir=short_temp_dir()) as name:
        folder = Path(name)
        (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", _WORKER, name, "--ranks", str(ranks)]
        # as the agent sets them for training, where the user doesn't
        usual = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)), "GLOO_SOCKET_IFNAME": "lo"}
        children = {
            rank: Child([*command, "--rank", str(rank)], {**usual, **os.environ}, folder / f"log-{rank}")
            for rank in range(ranks)
        }
        try:
            for child in children.values():
                child.start()
            ended = _watch(children, folder, START_S + 60 * 5 * (request.minutes or 1.0))
        finally:
            for child in children.values():
                child.kill_session()
                child.wait(10.0)
        return _read(folder, ranks, ended)


def _watch(children: Mapping[int, Child], folder: Path, limit_s: float) -> dict[int, str]:
    """Until the first rank has ended: how the others ended that did so by an error, which the first one reads too."""
    deadline = time.monotonic() + limit_s
    ended: dict[int, str] = {}
    left = dict(children)
    while 0 in left and time.monotonic() < deadline:
        select.select([child.pidfd for child in left.values()], [], [], max(0.0, deadline - time.monotonic()))
        for rank, child in list(left.items()):
            code = child.exit_code()
            if code is None:
                continue
            del left[rank]
            if code:
                last = (child.tail(1) or [""])[0]
                ended[rank] = exit_text(code) + (f": {last}" if last else "")
                aside = folder / f"ended-{rank}.part"
                aside.write_text(ended[rank], encoding="utf-8")
                aside.replace(folder / f"ended-{rank}")
    if 0 in left:
        ended[0] = f"it was not done after {format_seconds(limit_s)}"
    return ended


def _read(folder: Path, ranks: int, ended: Mapping[int, str]) -> Fleet:
    refusal = folder / "refused.json"
    if refusal.is_file():
        said = json.loads(refusal.read_text(encoding="utf-8"))
        raise RequestError(said["message"], code=said["code"], fix=said["fix"], rank=said["rank"])
    record = folder / "fleet.json"
    if record.is_file():
        return Fleet.model_validate_json(record.read_text(encoding="utf-8"))
    name = socket.gethostname()
    host = HostState(host=name, name=name, ranks=tuple(range(ranks)))
    return Fleet(hosts=(host,), ranks=(), silent=dict(ended) or {0: "it left no record"})
