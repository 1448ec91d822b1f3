"""A rank of a take-off check: what it finds itself, then with the others. The first rank makes the fleet's record.

    python -m bessemer.inspect.takeoff_worker FOLDER --rank 1 --ranks 4     # one of this host, started by `takeoff`

Ranks tell each other what they found through torch's store, as JSON. One that falls silent is named: nobody waits for
it longer than a limit, and no exchange begins without it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from bessemer.comm import collectives as comm
from bessemer.core.errors import RequestError
from bessemer.core.model import Frozen
from bessemer.inspect.takeoff_exchange import measure_clocks, measure_collectives, measure_pairs
from bessemer.inspect.takeoff_local import check_host, check_rank, effort_of, set_threads
from bessemer.inspect.takeoff_records import Exchanged, Fleet, Hello, HostState, RankState, Request
from bessemer.inspect.takeoff_rounds import partners
from bessemer.runtime.device import Device, pick_device

__all__ = ["Site", "check", "main"]

GROUP_S = 30.0
"""How long one message may take."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class Site:
    """Where this rank is, and how it reaches the others. `folder`: of a check on one host; the one who started the
    ranks leaves word there of those that ended. `join_s`: how long ranks may start apart."""

    store: Any
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    folder: Path | None = None
    join_s: float = 90.0

    def of_round(self, number: int) -> Site:
        """The same place with keys of its own, for a check that is repeated."""
        return replace(self, store=PrefixStore(f"round-{number}", self.store))

    def put(self, key: str, record: Frozen) -> None:
        self.store.set(f"{key}/{self.rank}", record.model_dump_json())

    def collect(self, key: str, ranks: Sequence[int], limit_s: float) -> dict[int, str]:
        """The JSON texts of those of `ranks` that give one in time; those that are known to have ended have none."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + limit_s
        missing = list(ranks)
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if self.store.check([f"{key}/{rank}"]):
                    found[rank] = self.store.get(f"{key}/{rank}").decode()
                    missing.remove(rank)
                elif self.ended(rank):
                    missing.remove(rank)
            if missing:
                time.sleep(_LOOK_S)
        return found

    def ended(self, rank: int) -> str:
        """How a rank ended, where that is known."""
        note = None if self.folder is None else self.folder / f"ended-{rank}"
        return note.read_text(encoding="utf-8") if note is not None and note.is_file() else ""

    def say(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def hear(self, key: str, limit_s: float) -> str | None:
        """What the first rank said; None where it says nothing in time."""
        try:
            self.store.wait([key], datetime.timedelta(seconds=limit_s))
        except RuntimeError:  # torch's DistStoreError is one
            return None
        return str(self.store.get(key).decode())


def check(request: Request, site: Site) -> Fleet | None:
    """All checks of this rank; the fleet's record on the first rank, None on the others."""
    start = time.perf_counter()
    place = Hello(rank=site.rank, local_rank=site.local_rank, name=socket.gethostname())
    site.put("hello", place)
    device = pick_device(request.device, site.local_rank)
    set_threads(device, site.local_world_size)
    site.put("rank", check_rank(request, device, place))
    if site.local_rank == 0:
        site.put("host", check_host(request, "", range(site.rank, site.rank + site.local_world_size)))
    limit_s = site.join_s + 3 * effort_of(request).seconds
    if site.rank > 0:
        told = site.hear("hosts", limit_s + site.join_s)
        if told:  # empty: somebody is missing, and nothing more is measured
            site.put("exchanged", _exchange(device, site, request, json.loads(told)))
        return None
    everyone = range(site.world_size)
    ranks = {
        rank: RankState.model_validate_json(text) for rank, text in site.collect("rank", everyone, limit_s).items()
    }
    hello = {r: Hello.model_validate_json(text) for r, text in site.collect("hello", everyone, 0.1).items()}
    hosts = _hosts(site, hello, site.local_world_size)
    silent = {rank: site.ended(rank) or _last_seen(rank, hello) for rank in everyone if rank not in ranks}
    fleet = Fleet(hosts=tuple(hosts), ranks=tuple(ranks.values()), silent=silent, minutes=request.minutes)
    site.say("hosts", "" if silent else json.dumps([state.ranks for state in hosts]))
    if not silent and site.world_size > 1:
        fleet = _with_exchanges(fleet, device, site, request)
    return fleet.model_copy(update={"seconds": time.perf_counter() - start})


def _last_seen(rank: int, hello: dict[int, Hello]) -> str:
    return f"it came, and then fell silent on {hello[rank].name}" if rank in hello else "it never came"


def _hosts(site: Site, hello: dict[int, Hello], usual: int) -> list[HostState]:
    """All hosts in order of rank. Two that bear one name, as in tests, are told apart by their first rank; of a host
    that gave no answer only its ranks are known."""
    first = {r: _leader(r, hello) if r in hello else r - r % usual for r in range(site.world_size)}
    leaders = sorted(set(first.values()))
    names = {at: hello[at].name if at in hello else f"host-of-rank-{at}" for at in leaders}
    doubled = {name for name in names.values() if list(names.values()).count(name) > 1}
    told = site.collect("host", leaders, GROUP_S if len(hello) == site.world_size else 1.0)
    found = []
    for at in leaders:
        label = f"{names[at]}/{at}" if names[at] in doubled else names[at]
        ranks = tuple(r for r in range(site.world_size) if first[r] == at)
        state = (
            HostState.model_validate_json(told[at]) if at in told else HostState(host=label, name=names[at], ranks=())
        )
        found.append(state.model_copy(update={"host": label, "ranks": ranks}))
    return found


def _leader(rank: int, hello: dict[int, Hello]) -> int:
    """The first rank of this one's host: where hosts have ranks in a row, so many ranks before it; where ranks are
    dealt to the hosts in turn, the nearest before it that is the first of a host of that name."""
    own, in_a_row = hello[rank], rank - hello[rank].local_rank
    there = hello.get(in_a_row)
    if there is not None and (there.name, there.local_rank) == (own.name, 0):
        return in_a_row
    firsts = [r for r, other in hello.items() if (other.name, other.local_rank) == (own.name, 0) and r <= rank]
    return max(firsts, default=in_a_row)


def _exchange(device: Device, site: Site, request: Request, hosts: Sequence[Sequence[int]]) -> Exchanged:
    """Pairs, clocks and collectives, as far as this rank has a part in them."""
    rounds, _ = partners(hosts, effort_of(request).rounds)
    try:
        dist.init_process_group(
            device.backend,
            store=PrefixStore("group", site.store),
            rank=site.rank,
            world_size=site.world_size,
            timeout=datetime.timedelta(seconds=GROUP_S),
        )
        pairs = measure_pairs(device, site.rank, rounds)
        clocks = measure_clocks(device, site.rank, [ranks[0] for ranks in hosts])
        sums = tuple(measure_collectives(device, site.rank, site.world_size))
        dist.destroy_process_group()
        comm.reset_collected()  # training counts its own
    except RuntimeError as error:  # of a peer that is gone, or that doesn't answer in time
        return Exchanged(error=str(error).strip().splitlines()[0][:200])
    told = sums if site.rank == 0 else tuple(found for found in sums if found.fault)
    return Exchanged(pairs=tuple(pairs), collectives=told, clocks=clocks)


def _with_exchanges(fleet: Fleet, device: Device, site: Site, request: Request) -> Fleet:
    """The fleet's record with what all ranks exchanged."""
    hosts = [state.ranks for state in fleet.hosts]
    site.put("exchanged", _exchange(device, site, request, hosts))
    texts = site.collect("exchanged", range(site.world_size), 2 * GROUP_S)
    found = {rank: Exchanged.model_validate_json(text) for rank, text in texts.items()}
    clocks = {0: (0.0, 0.0), **found[0].clocks} if len(hosts) > 1 and 0 in found else {}
    timed = tuple(_with_clock(state, clocks.get(state.ranks[0])) for state in fleet.hosts)
    _, taken = partners(hosts, effort_of(request).rounds)
    return fleet.model_copy(
        update={
            "hosts": timed,
            "pairs": tuple(pair for one in found.values() for pair in one.pairs),
            "collectives": tuple(sums for one in found.values() for sums in one.collectives),
            "errors": {rank: one.error for rank, one in found.items() if one.error},
            "silent": {
                r: site.ended(r) or "it fell silent in an exchange" for r in range(site.world_size) if r not in found
            },
            "rounds": taken,
        }
    )


def _with_clock(state: HostState, clock: tuple[float, float] | None) -> HostState:
    return state if clock is None else state.model_copy(update={"clock_s": clock[0], "clock_error_s": clock[1]})


def main(arguments: Sequence[str] | None = None) -> int:
    """A rank of one host. The first one writes fleet.json into the folder, where request.json is."""
    parser = argparse.ArgumentParser(prog="python -m bessemer.inspect.takeoff_worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    given = parser.parse_args(arguments)
    request = Request.model_validate_json((given.folder / "request.json").read_text(encoding="utf-8"))
    store = FileStore(str(given.folder / "store"), given.ranks)
    site = Site(store, given.rank, given.ranks, given.rank, given.ranks, given.folder)
    try:
        fleet = check(request, site)
    except RequestError as error:
        said = {"message": error.message, "code": error.code, "fix": error.fix, "rank": given.rank}
        _write(given.folder / "refused.json", json.dumps(said))
        return error.exit_code
    if fleet is not None:
        _write(given.folder / "fleet.json", fleet.model_dump_json())
    return 0


def _write(file: Path, text: str) -> None:
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


if __name__ == "__main__":
    sys.exit(main())
