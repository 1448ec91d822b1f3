"""The sbatch script of a run: one step of all ranks or of an agent on each host, or one agent where the job fits on a
host. No torch.

What srun and sbatch do is said by their manual pages (https://slurm.schedmd.com/srun.html and sbatch.html): srun passes
SIGTERM on to its tasks and returns the highest exit code of them; a signal of `--signal=B:` reaches only the script.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.core.job import Job
from bessemer.core.machine import Machine
from bessemer.keep.launch_hosts import GRACE_S, Hosts, heading

__all__ = ["SlurmRequest", "slurm_script"]


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What the job can't know. `command` is what each rank, or the agent, runs in `directory`; `setup` are lines of
    shell before it; `cpus` of each rank; `restarts` in the same allocation; `spare_nodes` are allocated and stand by.
    None and "" leave the cluster's default."""

    name: str
    command: Sequence[str]
    directory: str
    partition: str = ""
    account: str = ""
    time: str = ""
    setup: Sequence[str] = ()
    cpus: int | None = None
    restarts: int = 0
    spare_nodes: int = 0
    grace_s: int = GRACE_S


def slurm_script(job: Job, machine: Machine, hosts: Hosts, request: SlurmRequest) -> str:
    """The text of the script. Nothing in it is secret: the environment of `sbatch` goes with the job."""
    parts = [
        "#!/bin/bash",
        *(f"# {line}" for line in heading(job, hosts, "slurm")),
        *(f"#SBATCH --{option}" for option in _options(machine, hosts, request)),
        "",
        "set -u",
        *request.setup,
        f"command=({shlex.join(request.command)})",
        f"checkpoints={shlex.quote(str(job.run.folder.expanduser() / 'checkpoints'))}",
        _COMMON,
        _AGENT if hosts.count == 1 else _step(machine, hosts, request),
        _attempts(request),
    ]
    return "\n".join(parts)


def _options(machine: Machine, hosts: Hosts, request: SlurmRequest) -> list[str]:
    options = {
        "job-name": request.name,
        "nodes": hosts.count + request.spare_nodes,
        "ntasks-per-node": 1 if hosts.agents else hosts.ranks,
        "gpus-per-node": hosts.ranks if machine.device != "cpu" else None,
        "cpus-per-task": _cpus(hosts, request),
        "partition": request.partition,
        "account": request.account,
        "time": request.time,
        "signal": f"B:TERM@{request.grace_s}",
        "chdir": request.directory,
        "output": f"{request.name}-%j.out",
        "open-mode": "append",
    }
    words = [f"{name}={value}" for name, value in options.items() if value not in (None, "")]
    return [*words, "requeue", *(["no-kill"] if request.spare_nodes or hosts.agents else [])]


def _cpus(hosts: Hosts, request: SlurmRequest) -> int | None:
    """Of each task."""
    return request.cpus * (hosts.ranks if hosts.agents else 1) if request.cpus else None


_COMMON = """
newest() {  # checkpoint
  local found=("$checkpoints"/step-*)
  printf '%s\\n' "${found[@]}" | sort -V | tail -n 1
}

# A signal cuts `wait` short, so the child is waited for again; bash keeps the status of one that had ended by then.
child=
heard=
asked=
pass_on() {
  heard=1
  asked=1
  [[ -n $child ]] && kill -TERM "$child" 2>/dev/null
}
trap pass_on TERM

wait_for_child() {
  local status
  while true; do
    heard=
    wait "$child"
    status=$?
    [[ $status -ne 127 ]] && code=$status
    [[ -n $heard && $status -ne 127 ]] || break
  done
  child=
}
"""

_AGENT = """
# Without srun: in a batch script `bessemer train` is an agent, not a rank.
attempt() {
  "${command[@]}" &
  child=$!
  wait_for_child
}
"""


def _step(machine: Machine, hosts: Hosts, request: SlurmRequest) -> str:
    pick = _PICK_UP if request.spare_nodes else _PICK_ALL
    tasks, cpus = 1 if hosts.agents else hosts.ranks, _cpus(hosts, request)
    options = [
        f"--nodes={hosts.count}",
        f"--ntasks={hosts.count * tasks}",
        f"--ntasks-per-node={tasks}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),  # srun doesn't take over sbatch's
        *(["--gpu-bind=none"] if machine.device != "cpu" else []),  # a rank picks its device by its local rank
        "--distribution=block",
        "--kill-on-bad-exit=0",
        "--wait=0" if hosts.agents else f"--wait={request.grace_s}",
        *(["--no-kill"] if hosts.agents else []),
    ]
    text = (_AGENTS if hosts.agents else _RANKS).replace("@OPTIONS@", " ".join(options))
    return pick.replace("@HOSTS@", str(hosts.count)) + text


_PICK_ALL = """
pick_hosts() {
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
}
"""

_PICK_UP = """
# The first @HOSTS@ of the allocated hosts that are up: neither down, draining nor silent (marked *).
pick_hosts() {
  local host up
  up=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T' |
    awk '$2 ~ /^(allocated|mixed)[^*]*$/ { print $1 }')
  hosts=()
  while read -r host; do
    grep -qxF "$host" <<<"$up" && hosts+=("$host")
  done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  hosts=("${hosts[@]:0:@HOSTS@}")
  if ((${#hosts[@]} < @HOSTS@)); then
    echo "only ${#hosts[@]} of @HOSTS@ hosts are up"
    return 1
  fi
}
"""

_RANKS = """
# A rank that ends must not take the others with it at once (--kill-on-bad-exit=0), since they may still be saving: a
# stopped rank ends with 3. But they don't outlive it by more than --wait.
attempt() {
  pick_hosts || { code=1; return; }
  export MASTER_ADDR=${hosts[0]}
  # another port for each run on a host and for each attempt, below the ports that the kernel hands out
  export MASTER_PORT=$((20000 + (SLURM_JOB_ID + 101 * ${SLURM_RESTART_COUNT:-0} + tries) % 12000))
  srun --nodelist="$(IFS=,; echo "${hosts[*]}")" @OPTIONS@ \\
    "${command[@]}" &
  child=$!
  wait_for_child
}
"""


_AGENTS = """
# The step outlives a lost node (--no-kill) and agents that have ended (--kill-on-bad-exit=0 --wait=0). It returns the
# highest exit code, also of agents of lost hosts: whether the run itself has finished is in its records.
if [[ -z ${BESSEMER_SECRET:-} ]]; then
  BESSEMER_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')
fi
export BESSEMER_SECRET
attempt() {
  pick_hosts || { code=1; return; }
  export BESSEMER_HOSTS=$(IFS=,; echo "${hosts[*]}")
  # another pair of ports for each run on a host and for each attempt, below the ports that the kernel hands out
  export MASTER_PORT=$((20000 + 2 * ((SLURM_JOB_ID + 101 * ${SLURM_RESTART_COUNT:-0} + tries) % 6000)))
  srun --nodelist="$BESSEMER_HOSTS" @OPTIONS@ \\
    "${command[@]}" &
  child=$!
  wait_for_child
  if tail -n 1 "${checkpoints%/*}/events.jsonl" 2>/dev/null | grep -q '"event":"finished"'; then
    code=0
  fi
}
"""


def _attempts(request: SlurmRequest) -> str:
    return f"""
# 0 done, 2 a wrong request, 3 stopped on request and saved, 4 a host is bad; all else is a failure, of which a new
# attempt goes on from the newest checkpoint.
before=$(newest)
tries=0
code=1
while true; do
  attempt
  case $code in 0 | 2 | 3 | 4) break ;; esac
  [[ -n $asked ]] || ((tries >= {request.restarts})) && break
  tries=$((tries + 1))
  echo "ended with code $code; restart $tries of {request.restarts}"
done

if [[ $code -eq 3 ]]; then
  if [[ $(newest) != "$before" ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "stopped before it saved anything new, so it is not requeued: it would go round in circles"
  fi
fi
exit $code
"""
