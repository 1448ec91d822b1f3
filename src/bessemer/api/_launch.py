"""The verb `launch`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bessemer.api._check import check
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.job import Job
from bessemer.core.machine import Machine, load_machine
from bessemer.core.problem import Problem
from bessemer.core.units import counted
from bessemer.keep.launch_hosts import GRACE_S, Hosts, hosts_of
from bessemer.keep.launch_kubernetes import KubernetesRequest, kubernetes_manifest
from bessemer.keep.launch_slurm import SlurmRequest, slurm_script

__all__ = ["Launched", "launch"]

Cluster = Literal["slurm", "kubernetes"]

_MOUNT = "/workspace"
_ONLY: dict[str, Cluster] = {
    "partition": "slurm",
    "account": "slurm",
    "time": "slurm",
    "setup": "slurm",
    "spare_nodes": "slurm",
    "image": "kubernetes",
    "claim": "kubernetes",
    "mount": "kubernetes",
    "namespace": "kubernetes",
    "secret": "kubernetes",
    "gpu_resource": "kubernetes",
    "memory": "kubernetes",
}
_WORD = r"[A-Za-z0-9][A-Za-z0-9._,+@-]*"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_PATTERNS = {
    "partition": (_WORD, "letters, digits and . _ , + @ -", "--partition gpu"),
    "account": (_WORD, "letters, digits and . _ , + @ -", "--account my-project"),
    "time": (r"\d+|\d+(:\d\d){1,2}|\d+-\d+(:\d\d){0,2}", "minutes, HH:MM:SS or D-HH:MM:SS", "--time 1-00:00:00"),
    "image": (r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*", "the name of an image", "--image registry.example/bessemer:1"),
    "claim": (rf"{_LABEL}(\.{_LABEL})*", "a name of Kubernetes", "--claim runs"),
    "secret": (rf"{_LABEL}(\.{_LABEL})*", "a name of Kubernetes", "--secret bessemer"),
    "namespace": (_LABEL, "a name of Kubernetes", "--namespace training"),
    "mount": (r"(/[A-Za-z0-9._-]+)+", "an absolute path", f"--mount {_MOUNT}"),
    "memory": (r"\d+(\.\d+)?([KMGTPE]i?|k)?", "an amount of Kubernetes", "--memory 512Gi"),
    "gpu_resource": (
        r"[a-z0-9.-]+/[A-Za-z0-9._-]+",
        "domain/name",
        "--gpu-resource the name that `kubectl describe node` lists",
    ),
}
_LONGEST_NAME = 40  # of Kubernetes' 63 characters; JobSet and Job append -hosts-0-123-abcde to it


@dataclass(frozen=True)
class Launched:
    """The file's text, where it was written (None: nowhere), and how it is used."""

    cluster: Cluster
    text: str
    hosts: Hosts
    out: str | None
    start: str

    def as_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "hosts": self.hosts.count,
            "ranks_per_host": self.hosts.ranks,
            "out": self.out,
            "start": self.start,
            "text": self.text,
        }

    def __str__(self) -> str:
        return self.text.rstrip("\n") if self.out is None else f"wrote {self.out}: {self.hosts}\n  -> {self.start}"


def launch(  # noqa: PLR0913
    job_path: str,
    sets: Sequence[str] = (),
    *,
    on: Cluster,
    out: str | None = None,
    name: str | None = None,
    cpus: int | None = None,
    restarts: int = 0,
    grace: int = GRACE_S,
    partition: str = "",
    account: str = "",
    time: str = "",
    setup: Sequence[str] = (),
    spare_nodes: int = 0,
    image: str = "",
    claim: str = "",
    mount: str = "",
    namespace: str = "",
    secret: str = "",
    gpu_resource: str = "",
    memory: str = "",
) -> Launched:
    """Write the file that starts a job on a cluster: an sbatch script or a Kubernetes manifest.

    The layout says how many ranks there are, machine.gpus_per_node how many a host has. Starts nothing itself.

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=50. May be repeated.
    on: The cluster's scheduler.
    out: The file to write; without it the text is printed.
    name: What the cluster calls the run; default: run.name.
    cpus: CPU cores of each rank; default: the cluster's own.
    restarts: How often the run starts again after a failure; on Kubernetes several hosts then need JobSet, unless each
        has an agent: then how often each comes back.
    grace: Seconds for finishing a step and saving, from SIGTERM to SIGKILL.
    partition: Slurm: the partition.
    account: Slurm: the account.
    time: Slurm: the time limit (minutes, HH:MM:SS, D-HH:MM:SS); the run saves before it and is queued again.
    setup: Slurm: a line of shell before the run, such as "source .venv/bin/activate". May be repeated.
    spare_nodes: Slurm: nodes that are allocated beside those of the layout, for restarts without a lost one.
    image: Kubernetes: the container image, with Bessemer installed.
    claim: Kubernetes: the PersistentVolumeClaim for the run folder, which all hosts can write.
    mount: Kubernetes: where the claim is mounted and relative paths of the job begin; default: /workspace.
    namespace: Kubernetes: the namespace; default: kubectl's.
    secret: Kubernetes: the Secret object whose key "secret" holds the run's secret.
    gpu_resource: Kubernetes: what the cluster calls a device; default for CUDA: nvidia.com/gpu.
    memory: Kubernetes: memory of each host, such as 512Gi.
    """
    flags: dict[str, Any] = {"partition": partition, "account": account, "time": time, "setup": setup}
    flags |= {"image": image, "claim": claim, "mount": mount, "namespace": namespace, "secret": secret}
    flags |= {"gpu_resource": gpu_resource, "memory": memory, "spare_nodes": spare_nodes}
    given = {flag: value for flag, value in flags.items() if value not in ("", [], (), 0)}
    job = _checked(job_path, sets)
    common = {"name": job.run.name if name is None else name, "cpus": cpus, "restarts": restarts, "grace_s": grace}
    hosts = hosts_of(job, job_path)
    text = _text(job, hosts, on, common, given, _train(job_path, sets))
    if out is not None:
        _write(Path(out), text)
    return Launched(on, text, hosts, out, f"{'sbatch' if on == 'slurm' else 'kubectl apply -f'} {out or 'FILE'}")


def _checked(job_path: str, sets: Sequence[str]) -> Job:
    checked = check(job_path, sets)
    if checked.problems:
        raise ConfigError(checked.problems, job_path)
    assert checked.job is not None, "a job without problems was read"
    return checked.job


def _train(job_path: str, sets: Sequence[str]) -> list[str]:
    """The command of each rank."""
    return ["bessemer", "train", str(Path(job_path).absolute()), *(w for text in sets for w in ("--set", text))]


def _text(
    job: Job, hosts: Hosts, on: Cluster, common: dict[str, Any], given: dict[str, Any], command: list[str]
) -> str:
    machine = load_machine(job.machine.name)
    problems = [*_common(common, given, on)]
    problems += _of_slurm(hosts, common, given) if on == "slurm" else _of_kubernetes(job, machine, common, given)
    if on == "kubernetes" and hosts.agents and "secret" not in given:
        why = "the agents of several hosts prove to each other that they know it"
        problems.append(
            _problem("launch-missing", "secret", "--secret is missing", why=why, fix=_PATTERNS["secret"][2])
        )
    if problems:
        raise ConfigError(problems, f"the request for run {job.run.name}")
    if on == "slurm":
        slurm = SlurmRequest(command=command, directory=str(Path.cwd()), **common, **given)
        return slurm_script(job, machine, hosts, slurm)
    defaults = {"mount": _MOUNT, "gpu_resource": "nvidia.com/gpu" if machine.device == "cuda" else ""}
    return kubernetes_manifest(job, hosts, KubernetesRequest(**{**defaults, **common, **given}))


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RequestError(f"{path} exists already", code="exists", fix=f"another --out, or remove {path}") from error
    except OSError as error:
        raise RequestError(f"can't write {path}: {error.strerror}", code="launch-out", fix="--out a file") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _problem(code: str, name: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=_flag(name), what=what, why=why, fix=fix)


def _common(common: dict[str, Any], given: dict[str, Any], on: Cluster) -> list[Problem]:
    """Flags of the other cluster, and values that can't be read."""
    found = []
    for name, value in given.items():
        if _ONLY[name] != on:
            what = f"{_flag(name)} has no meaning on {on}"
            fix = f"delete it, or --on {_ONLY[name]}"
            found.append(_problem("launch-flag", name, what, why="a file would silently lack it", fix=fix))
        elif name in _PATTERNS and not re.fullmatch(_PATTERNS[name][0], value):
            _, form, example = _PATTERNS[name]
            found.append(_problem("launch-value", name, f"{value!r} is not {form}", why="", fix=example))
    least = {"cpus": 1, "restarts": 0, "grace": 1, "spare_nodes": 0}
    values = {"cpus": common["cpus"], "restarts": common["restarts"], "grace": common["grace_s"]}
    values["spare_nodes"] = given.get("spare_nodes", 0)
    for name, value in values.items():
        if value is not None and value < least[name]:
            fix = f"{_flag(name)} {least[name]} or more"
            found.append(_problem("launch-value", name, f"{value} is less than {least[name]}", why="", fix=fix))
    for line in given.get("setup", ()):
        if "\n" in line:
            found.append(_problem("launch-value", "setup", "a line holds a line break", why="", fix="several --setup"))
    return found


def _of_kubernetes(job: Job, machine: Machine, common: dict[str, Any], given: dict[str, Any]) -> list[Problem]:
    found = [*_name_of_pods(common["name"]), *_needed(job, machine, given)]
    return [*found, *_folder(job, given.get("mount") or _MOUNT)]


def _of_slurm(hosts: Hosts, common: dict[str, Any], given: dict[str, Any]) -> list[Problem]:
    name, restarts = common["name"], common["restarts"]
    found = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        found.append(_problem("launch-name", "name", f"{name!r} is no job name", why="", fix="letters, digits, . _ -"))
    if re.search(r"[\s\"'\\#]", str(Path.cwd())):
        what = f"the current directory {str(Path.cwd())!r} can't be written into an #SBATCH line"
        found.append(_problem("launch-folder", "on", what, why="", fix="start from a folder without blanks and quotes"))
    if given.get("spare_nodes", 0) > 0 and (hosts.count == 1 or not restarts):
        what = f"{counted(given['spare_nodes'], 'spare node')} would never be used"
        why = "a restart in the same allocation takes them, and only a run on several hosts has one there"
        fix = "delete it" if hosts.count == 1 else "--restarts 3, or delete it"
        found.append(_problem("launch-flag", "spare_nodes", what, why=why, fix=fix))
    limit_s = _seconds(given.get("time", ""))
    if limit_s is not None and limit_s <= common["grace_s"]:
        what = f"a limit of {limit_s} s leaves no time before the {common['grace_s']} s of --grace"
        found.append(_problem("launch-value", "time", what, why="", fix="a longer --time, or a shorter --grace"))
    return found


def _seconds(time: str) -> int | None:
    """Of a time limit as sbatch reads it; None where there is none, or it can't be read."""
    if not time or not re.fullmatch(_PATTERNS["time"][0], time):
        return None
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _name_of_pods(name: str) -> list[Problem]:
    if re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) <= _LONGEST_NAME:
        return []
    simple = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    fix = f"--name {simple if simple[:1].isalpha() else f'run-{simple}'[:_LONGEST_NAME].rstrip('-')}"
    why = f"a Service has lower-case letters, digits and -, begins with a letter, and has room for {_LONGEST_NAME} here"
    return [_problem("launch-name", "name", f"{name!r} can't name a Service", why=why, fix=fix)]


def _needed(job: Job, machine: Machine, given: dict[str, Any]) -> list[Problem]:
    found = []
    needed = {
        "image": "nothing says where Bessemer is installed",
        "claim": "a run folder inside a pod would be lost with it",
    }
    if machine.device not in ("cpu", "cuda"):
        needed["gpu_resource"] = f"what a cluster calls a device of {machine.name} isn't known"
    for name, why in needed.items():
        if name not in given:
            found.append(_problem("launch-missing", name, f"{_flag(name)} is missing", why=why, fix=_PATTERNS[name][2]))
    if "secret" in given and job.keep.mode == "restart":
        why = 'only the coordinator of keep.mode = "zero-interruption" asks for one'
        found.append(_problem("launch-flag", "secret", "nothing would read the secret", why=why, fix="delete it"))
    if "gpu_resource" in given and machine.device == "cpu":
        what = f"the job runs on {machine.name}, which has no accelerator"
        found.append(_problem("launch-flag", "gpu_resource", what, why="", fix="delete it, or another machine.name"))
    return found


def _folder(job: Job, mount: str) -> list[Problem]:
    """The run folder lies on the claim: below its mount, or relative to it."""
    folder = Path(job.run.dir)
    if not str(folder).startswith("~") and (not folder.is_absolute() or folder.is_relative_to(mount)):
        return []
    what = f"run.dir = {job.run.dir!r} doesn't lie on the claim at {mount}"
    why = "the run folder would be lost with the pod, or differ between hosts"
    return [_problem("launch-folder", "mount", what, why=why, fix=f'--set run.dir="{mount}/runs", or another --mount')]
