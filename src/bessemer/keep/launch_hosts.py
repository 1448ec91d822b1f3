"""How many hosts a job takes, and what files for clusters have in common. No torch.

A cluster's launcher starts either one agent, where the whole job fits on a host, or every rank of several hosts
(`keep.join`). A run that goes on while groups of ranks are lost has an agent that works on one host so far.
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
    """`count` hosts with `ranks` processes each, spares included."""

    count: int
    ranks: int

    def __str__(self) -> str:
        return f"{counted(self.count, 'host')} of {counted(self.ranks, 'rank')}"


def hosts_of(job: Job, source: str = "the job") -> Hosts:
    """The hosts of a job that `check` has found no fault with.

    Raises ConfigError: launch-mode where the job needs an agent (keep.mode = "zero-interruption", keep.restarts) and
    doesn't fit on one host, gpus-per-node where ranks don't fill their hosts.
    """
    world, per_host = job.layout.world_size, job.machine.gpus_per_node
    if job.keep.mode == "zero-interruption":
        ranks = world + job.keep.spares * (world // job.replicas)
        if ranks <= per_host:
            return Hosts(count=1, ranks=ranks)
        raise ConfigError([_several_hosts(job, ranks)], source)
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


def _several_hosts(job: Job, ranks: int) -> Problem:
    per_host, spares = job.machine.gpus_per_node, job.keep.spares
    what = f'mode = "zero-interruption" with {counted(ranks, "rank")}'
    what += f" ({counted(spares, 'spare group')} included)" if spares else ""
    return Problem(
        code="launch-mode",
        where="keep.mode",
        what=f"{what} takes more than one host of gpus_per_node = {per_host}",
        why="its agent starts and watches the groups of one host; on several nobody would replace a lost one",
        fix='keep.mode = "restart"' + (" without keep.spares" if spares else "") + f", or at most {per_host} ranks",
    )


def _no_agent(job: Job) -> Problem:
    return Problem(
        code="launch-mode",
        where="keep.restarts",
        what=f"restarts = {job.keep.restarts} would have no effect on several hosts",
        why="an agent starts ranks again in place, and under a cluster's launcher there is one on a single host only",
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
    else:
        lines.append("Several hosts: each process is a rank. torch's store on the host of rank 0 listens on all of its")
        lines.append("interfaces: use a trusted network.")
    if job.keep.mode == "zero-interruption":
        lines.append(
            "Lost groups are replaced on this host. When the host itself is lost, the run starts again from its"
        )
        lines.append("newest checkpoint: groups on several hosts are not supported yet.")
    return lines
