"""Who started this process: our agent, or another launcher, from the variables that each of them sets.

torchrun, Kubernetes and the like   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
Slurm (srun)                        SLURM_PROCID SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID
Open MPI                            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
MPICH, Intel MPI                    PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bessemer.core.errors import RequestError

__all__ = ["Launch", "find_launch"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of a process in its run. `identity` differs between two launches that might meet on one host."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    identity: str = ""

    def __post_init__(self) -> None:
        for name, value, count in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < count:
                raise RequestError(
                    f"{self.launcher} says {name} {value} of {count}",
                    code="bad-launch",
                    fix="see which variables the launcher set: env | grep -E 'RANK|WORLD|SLURM|OMPI|PMI'",
                )


_KINDS = (
    # launcher, rank, world size, local rank, local world size: the first name that is set counts
    ("env", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    ("mpi", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
     ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
    ("mpi", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
)  # fmt: skip

_IDENTITY = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR",
             "MASTER_PORT")  # fmt: skip


def find_launch(env: Mapping[str, str] | None = None) -> Launch | None:
    """The launch that the environment describes; None when this process was started by hand.

    Raises RequestError for half a description: a rank without a world size, or a number that isn't one.
    """
    env = os.environ if env is None else env
    for launcher, rank, world, local, local_world in _KINDS:
        if rank[0] not in env or (launcher == "slurm" and _is_batch_script(env)):
            continue
        if launcher == "env" and "WORLD_SIZE" not in env and any(k[1][0] in env for k in _KINDS[1:]):
            continue
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in env else launcher
        world_size = _number(env, world, name)
        if launcher == "slurm":
            local_size = _slurm_local_size(env, world_size)
        else:
            local_size = _number(env, local_world, name, default=1)
        return Launch(
            launcher=name,
            rank=_number(env, rank, name),
            world_size=world_size,
            local_rank=_number(env, local, name, default=0),
            local_world_size=local_size,
            identity="/".join(env.get(k, "") for k in _IDENTITY),
        )
    return None


def _is_batch_script(env: Mapping[str, str]) -> bool:
    """Whether this is an sbatch script or an salloc shell: Slurm sets SLURM_PROCID = 0 there without a task of srun."""
    started_by_srun = "SLURM_STEP_NUM_TASKS" in env
    return not started_by_srun and (
        env.get("ENVIRONMENT") == "BATCH" or env.get("SLURM_JOB_NAME") in ("interactive", "bash")
    )


def _number(env: Mapping[str, str], names: tuple[str, ...], launcher: str, default: int | None = None) -> int:
    for name in names:
        if name in env:
            if not env[name].isdecimal():
                raise RequestError(
                    f"{name} = {env[name]!r} is not a whole number from 0 up", code="bad-launch", fix=f"set {name}"
                )
            return int(env[name])
    if default is None:
        raise RequestError(
            f"{launcher} set a rank, but not {' or '.join(names)}",
            code="bad-launch",
            fix=f"export {names[0]}=N, or start through torchrun, srun or mpirun",
        )
    return default


def _slurm_local_size(env: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node: the entry of SLURM_NODEID in a list such as "2(x3),1"."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        counts: list[int] = []
        for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get(name, "")):
            counts += [int(count)] * int(repeat or 1)
        node = int(env.get("SLURM_NODEID", "0"))
        if node < len(counts):
            return counts[node]
    if env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")) == "1":
        return world_size
    return _number(env, ("SLURM_NTASKS_PER_NODE",), "slurm")
