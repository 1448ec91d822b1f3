"""How many hosts a job takes, and what files for clusters have in common. No torch.

A cluster's launcher starts one agent where the whole job fits on a host, an agent on each host where the run goes on
while groups of ranks are lost (`keep.host_run`), and else every rank of several hosts (`keep.join`).
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer import __version__
from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.problem import Problem, divisors_near, one_of
from bessemer.core.units import counted

__all__ = ["GRACE_S", "Hosts", "heading", "hosts_of"]

GRACE_S = 180
"""From SIGTERM to SIGKILL: the 120 s that the agent allows for finishing the step and saving (`agent.Timeouts`, which a
base install can't import; a test compares them), and a minute for the vault's last write."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """`count` hosts with `ranks` processes each at most, spares included. `agents`: one on each of several starts
    them."""

    count: int
    ranks: int
    agents: bool = False

    def __str__(self) -> str:
        return f"{counted(self.count, 'host')} of {counted(self.ranks, 'rank')}"


def hosts_of(job: Job, source: str = "the job") -> Hosts:
    """The hosts of a job that `check` has found no fault with.

    Raises ConfigError: launch-mode where a copy of the model doesn't fit on a host of a run that goes on without it, or
    keep.restarts asks for an agent that several hosts don't have; gpus-per-node where ranks don't fill their hosts.
    """
    world, per_host = job.layout.world_size, job.machine.gpus_per_node
    if job.keep.mode == "zero-interruption":
        return _hosts_of_groups(job, source)
    if world <= per_host:
        return Hosts(count=1, ranks=world)
    if world % per_host:
        fix = one_of("machine.gpus_per_node", divisors_near(world, per_host, per_host)[-3:])
        what = f"{counted(world, 'rank')} don't fill hosts of gpus_per_node = {per_host}"
        why = "each host of a run has the same number of ranks"
        problem = Problem(code="gpus-per-node", where="machine.gpus_per_node", what=what, why=why, fix=fix)
        raise ConfigError([problem], source)
    if job.keep.restarts:
        raise ConfigError([_no_agent(job)], source)
    return Hosts(count=world // per_host, ranks=per_host)


def _hosts_of_groups(job: Job, source: str) -> Hosts:
    """As many groups on each host as fit, shared out evenly."""
    groups, block = job.replicas + job.keep.spares, job.layout.world_size // job.replicas
    if block > job.machine.gpus_per_node:
        raise ConfigError([_wide_group(job, block)], source)
    count = -(-groups // (job.machine.gpus_per_node // block))
    if count > 1 and job.keep.restarts:
        raise ConfigError([_no_agent(job)], source)
    return Hosts(count=count, ranks=-(-groups // count) * block, agents=count > 1)


def _wide_group(job: Job, block: int) -> Problem:
    per_host = job.machine.gpus_per_node
    return Problem(
        code="launch-mode",
        where="keep.mode",
        what=f'mode = "zero-interruption" with {counted(block, "rank")} in each copy of the model',
        why=f"a copy is lost and replaced as a whole by the agent of one host, which has gpus_per_node = {per_host}",
        fix=f'keep.mode = "restart", or a layout with at most {counted(per_host, "rank")} in each copy',
    )


def _no_agent(job: Job) -> Problem:
    return Problem(
        code="launch-mode",
        where="keep.restarts",
        what=f"restarts = {job.keep.restarts} would have no effect on several hosts",
        why="ranks are started again in place by the agent of a run on one host",
        fix=f"bessemer launch --restarts {job.keep.restarts} --set keep.restarts=0"
        + (" --set keep.memory_every=0" if job.keep.memory_every else ""),
    )


def heading(job: Job, hosts: Hosts, cluster: str) -> list[str]:
    """The first lines of comment of a file for `cluster`, without the comment sign."""
    lines = [
        f"Run {job.run.name}, job {job.hash}: {hosts}. Written by `bessemer launch --on {cluster}` of {__version__}.",
        "Whether all hosts see one run folder is checked when the ranks have met.",
    ]
    if hosts.count == 1:
        lines.append("One host: an agent starts the ranks and watches them.")
    elif hosts.agents:
        lines.append(
            "Several hosts: an agent on each starts its share of the groups and spares. When a host is lost the"
        )
        lines.append("others go on. Agents and ranks prove to each other that they know BESSEMER_SECRET.")
    else:
        lines.append("Several hosts: each process is a rank. torch's store on the host of rank 0 listens on all of its")
        lines.append("interfaces: use a trusted network.")
    if job.keep.mode == "zero-interruption" and not hosts.agents:
        lines.append(
            "Lost groups are replaced on this host. When the host itself is lost, the run starts again from its"
        )
        lines.append("newest checkpoint.")
    return lines
