"""A take-off check of hosts whose ranks another launcher started: they meet in torch's store on the host of rank 0.

    site = meet(launch)
    fleet = check(request, site)             # `takeoff_worker.check`: the record on rank 0, None elsewhere
    code = agree(site, code)                 # rank 0 says how it ended, the others hear it

The store has a prefix of its own. Who trains afterwards keeps the site: torch gives a second store at the same address
the same server as long as that one lives, so that no rank can meet a server that is about to end.
"""

from __future__ import annotations

import datetime
import os
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from bessemer.core.errors import PeerLost, RequestError
from bessemer.inspect.takeoff_records import Hello
from bessemer.inspect.takeoff_worker import Site
from bessemer.keep.join import RENDEZVOUS_S
from bessemer.keep.launch import Launch

__all__ = ["agree", "meet", "several_hosts"]

_LEAVE_S = 30.0  # how long the first rank keeps the store for the others to hear its word


def meet(launch: Launch) -> Site:
    """The place of this rank among all ranks of the launch; those that haven't come yet are not waited for.

    RequestError: no-master where MASTER_ADDR and MASTER_PORT are not set, port-in-use where another program has the
    port; PeerLost ranks-not-met where rank 0 can't be reached.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if launch.world_size > 1 and not (address and port.isdecimal()):
        raise RequestError(
            f"{launch.launcher} started {launch.world_size} processes, but MASTER_ADDR and MASTER_PORT aren't both set",
            code="no-master",
            fix="export MASTER_ADDR=the host of rank 0 MASTER_PORT=29500",
        )
    store = _store(launch, address or "127.0.0.1", int(port or 0))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Site(
        PrefixStore(f"bessemer-takeoff/{attempt}", store),
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
        join_s=RENDEZVOUS_S,
    )


def _store(launch: Launch, address: str, port: int) -> TCPStore:
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own server is there already
    limit = datetime.timedelta(seconds=RENDEZVOUS_S)
    try:
        return TCPStore(
            address, port, launch.world_size, launch.rank == 0 and not of_agent, limit, wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise RequestError(
                f"port {port} of this host is in use by another program, so rank 0 can't meet the others there",
                code="port-in-use",
                fix=f"export MASTER_PORT=another port; `ss -ltnp sport = :{port}` shows who has it",
                rank=launch.rank,
            ) from error
        raise PeerLost(
            f"the ranks did not meet at {address} port {port}: {text.strip().splitlines()[0]}",
            code="ranks-not-met",
            fix=f"see whether rank 0 came up, and its host {address} (MASTER_ADDR) lets port {port} through",
            rank=launch.rank,
        ) from error


def several_hosts(site: Site) -> bool:
    """Whether the ranks are on hosts of more than one name, or some don't come at all: the same answer on all ranks."""
    site.put("name", Hello(rank=site.rank, local_rank=site.local_rank, name=socket.gethostname()))
    if site.rank:
        return site.hear("several", 2 * site.join_s) == "yes"
    told = site.collect("name", range(site.world_size), site.join_s)
    names = {Hello.model_validate_json(text).name for text in told.values()}
    several = len(names) > 1 or len(told) < site.world_size
    site.say("several", "yes" if several else "no")
    return several


def agree(site: Site, code: int | None) -> int:
    """The exit code that rank 0 gives (the others pass None): 1 where it gives none."""
    if site.rank == 0:
        assert code is not None, "rank 0 has a verdict"
        site.say("code", str(code))
        site.collect("heard", range(1, site.world_size), _LEAVE_S)
        return code
    told = site.hear("code", 2 * site.join_s)
    site.put("heard", Hello(rank=site.rank, local_rank=site.local_rank, name=""))
    return 1 if told is None else int(told)
