"""The hosts of a run whose groups are on several: which one this is, and where the others are.

A launcher starts one process a host, the agent, with the variables that it sets for ranks (`launch.py`): RANK is the
number of this host, WORLD_SIZE how many there are. Beside them:

BESSEMER_HOSTS    the hosts' names or addresses, with commas between, in the order of their numbers, alike on all
MASTER_PORT       where coordinators listen on each host
BESSEMER_SECRET   known to all of them and to nobody else
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from bessemer.core.errors import RequestError
from bessemer.core.units import counted
from bessemer.keep.launch import Launch
from bessemer.keep.links import SECRET, await_challenge, connect
from bessemer.keep.wire import Frames, WireError

__all__ = ["HOSTS", "LEAST_SECRET", "Hosts", "address_of", "find_lead", "hosts_of_launch", "secret_of"]

HOSTS = "BESSEMER_HOSTS"
LEAST_SECRET = 16
"""Characters."""
_LOOK_S = 1.0


@dataclass(frozen=True)
class Hosts:
    """`number`: of this host, from 0."""

    number: int
    names: tuple[str, ...]
    port: int

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def name(self) -> str:
        return self.names[self.number]

    @property
    def coordinators(self) -> tuple[str, ...]:
        """By host the address at which a coordinator listens there, if one does."""
        return tuple(address_of(name, self.port) for name in self.names)

    def share_of(self, groups: int) -> int:
        """How many of the groups 0, 1, ... this host has: those whose number leaves its own when divided by `count`."""
        return len(range(self.number, groups, self.count))


def address_of(name: str, port: int) -> str:
    """Of a host's name or address, as `links.py` takes it; port 0: any that is free."""
    return f"tcp:[{name}]:{port}" if ":" in name else f"tcp:{name}:{port}"


def hosts_of_launch(launch: Launch, env: Mapping[str, str] | None = None) -> Hosts:
    """The hosts that a launch describes. RequestError: agent-per-host, no-hosts."""
    env = os.environ if env is None else env
    if launch.local_world_size != 1:
        raise RequestError(
            f"{launch.launcher} started {launch.local_world_size} processes on this host; with keep.mode = "
            '"zero-interruption" there is one, the agent, which starts the ranks',
            code="agent-per-host",
            fix="srun --ntasks-per-node=1, torchrun --nproc-per-node=1 or mpirun --npernode 1",
        )
    names = tuple(name.strip() for name in env.get(HOSTS, "").split(",") if name.strip())
    port = env.get("MASTER_PORT", "")
    if len(names) != launch.world_size or len(set(names)) != len(names) or not port.isdecimal():
        hosts = counted(launch.world_size, "host")
        what = f"{HOSTS} names {counted(len(set(names)), 'host')}" if port.isdecimal() else "MASTER_PORT is not set"
        names_fix = "host-0,host-1,..."
        if launch.launcher == "slurm":
            names_fix = "$(scontrol show hostnames $SLURM_JOB_NODELIST | paste -sd,)"
        raise RequestError(
            f"{launch.launcher} started {counted(launch.world_size, 'agent')}, but {what}: agents of {hosts} must know "
            "where the others are",
            code="no-hosts",
            fix=f"export {HOSTS}={names_fix} MASTER_PORT=29500, alike on all hosts",
        )
    return Hosts(launch.rank, names, int(port))


def secret_of(env: Mapping[str, str] | None = None) -> str:
    """The run's secret. RequestError (secret-missing)."""
    secret = (os.environ if env is None else env).get(SECRET, "")
    if len(secret) < LEAST_SECRET:
        raise RequestError(
            f"the run's secret has {len(secret)} characters: without one anybody could join; short ones are guessed",
            code="secret-missing",
            fix=f"{SECRET}=$(openssl rand -hex 32), alike on all hosts, with {LEAST_SECRET} characters or more",
        )
    return secret


def find_lead(hosts: Hosts) -> str:
    """The address at which a coordinator answers, of the highest term where several do; empty if there is none."""
    found: dict[int, str] = {}
    for address in hosts.coordinators:
        with suppress(OSError, WireError, KeyError), connect(address, _LOOK_S) as link:
            found[int(await_challenge(link, Frames())["term"])] = address
    return found[max(found)] if found else ""
