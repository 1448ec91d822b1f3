"""The Kubernetes manifest of a run: an Indexed Job with one pod a host, inside a JobSet where it is to be restarted
whole. No torch.

Fields are those of batch/v1, v1 (https://kubernetes.io/docs/reference/kubernetes-api/; backoffLimitPerIndex needs 1.29)
and jobset.x-k8s.io/v1alpha2 (https://jobset.sigs.k8s.io). Each object is written as JSON, which YAML contains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.keep.hosts import HOSTS
from bessemer.keep.launch_hosts import GRACE_S, Hosts, heading
from bessemer.keep.links import SECRET

__all__ = ["SECRET_KEY", "KubernetesRequest", "kubernetes_manifest", "objects"]

SECRET_KEY = "secret"
"""The key of the Secret object that holds the run's secret."""

PORT = 29500
"""Of torch's store, or of the coordinator; a pod has its own network address, so any port is free."""

_JOB_FILE = "/etc/bessemer/job.toml"
_GROUP = "hosts"  # the name of the JobSet's only part

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KubernetesRequest:
    """What the job can't know. `gpu_resource` is the name under which the cluster counts devices ("" on CPUs), `claim`
    the PersistentVolumeClaim that is mounted at `mount`, where relative paths of the job begin; `cpus` of each rank,
    `memory` of each host; `secret` names a Secret object. None and "" leave the cluster's default."""

    name: str
    image: str
    claim: str
    mount: str
    gpu_resource: str = ""
    namespace: str = ""
    secret: str = ""
    cpus: int | None = None
    memory: str = ""
    restarts: int = 0
    grace_s: int = GRACE_S


def kubernetes_manifest(job: Job, hosts: Hosts, request: KubernetesRequest) -> str:
    """The text of the manifest: comments, then the objects of `objects`."""
    lines = heading(job, hosts, "kubernetes") + _how_it_ends(hosts, request)
    documents = [json.dumps(item, indent=2, ensure_ascii=False) for item in objects(job, hosts, request)]
    return "\n".join(f"# {line}" for line in lines) + "".join(f"\n---\n{text}" for text in documents) + "\n"


def objects(job: Job, hosts: Hosts, request: KubernetesRequest) -> list[Object]:
    """ConfigMap with the resolved job; for several hosts a headless Service, which a JobSet makes itself; Job or
    JobSet."""
    config = _object("v1", "ConfigMap", request, data={"job.toml": dump_job(job)})
    spec = _job_spec(job, hosts, request)
    if hosts.count == 1:
        return [config, _object("batch/v1", "Job", request, spec=spec)]
    if hosts.agents or not request.restarts:
        return [config, _service(request), _object("batch/v1", "Job", request, spec=spec)]
    return [config, _job_set(spec, request)]


def _how_it_ends(hosts: Hosts, request: KubernetesRequest) -> list[str]:
    if hosts.agents:
        return [
            "A pod that was evicted is replaced, and its host comes back into the run; so is one that failed, up to",
            f"{request.restarts} times. When all were stopped and saved (exit code 3), all are replaced and go on. A",
            "wrong request (exit code 2) ends the Job.",
        ]
    if hosts.count == 1:
        return [
            "A pod that was stopped and saved (exit code 3) or evicted is replaced and goes on; so is one that failed,",
            f"up to backoffLimit = {request.restarts} times. A wrong request (exit code 2) ends the Job.",
        ]
    if request.restarts:
        return [
            "Needs the JobSet controller. All pods start again together: whenever they were stopped and saved (exit",
            f"code 3), and up to {request.restarts} times after a failure or a lost node.",
        ]
    return [
        "The Job ends when a pod fails, and when all were stopped and saved (exit code 3); `kubectl replace --force`",
        "goes on from the newest checkpoint. `bessemer launch --restarts` writes a JobSet, which does that itself.",
    ]


def _object(version: str, kind: str, request: KubernetesRequest, **fields: Any) -> Object:
    metadata: Object = {"name": request.name, "labels": _labels(request)}
    if request.namespace:
        metadata["namespace"] = request.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _labels(request: KubernetesRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "bessemer", "app.kubernetes.io/instance": request.name}


def _service(request: KubernetesRequest) -> Object:
    """Names for pods that aren't ready: rank 0 is looked for while it starts."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(request),
        "ports": [{"name": "store", "port": PORT}],
    }
    return _object("v1", "Service", request, spec=spec)


def _job_set(spec: Object, request: KubernetesRequest) -> Object:
    """Restarts only whole, and only after the last pod of the attempt before is gone. Pods that were stopped fail each
    on its own index, so that none is killed while it saves: the Job ends as FailedIndexes."""
    resumed = {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["FailedIndexes"],
    }
    policy = {"maxRestarts": request.restarts, "restartStrategy": "BlockingRecreate", "rules": [resumed]}
    part = {"name": _GROUP, "replicas": 1, "template": {"spec": spec}}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    fields = {"failurePolicy": policy, "network": network, "replicatedJobs": [part]}
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", request, spec=fields)


def _job_spec(job: Job, hosts: Hosts, request: KubernetesRequest) -> Object:
    spec: Object = {
        "completionMode": "Indexed",
        "completions": hosts.count,
        "parallelism": hosts.count,
        "podReplacementPolicy": "Failed",  # never two pods for one host
    }
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    if hosts.count == 1 or hosts.agents:
        spec["backoffLimitPerIndex" if hosts.agents else "backoffLimit"] = request.restarts
        rules = [
            {"action": "Ignore", "onExitCodes": _codes("In", 3)},
            {"action": "FailJob", "onExitCodes": _codes("In", 2)},
            {"action": "Ignore", "onPodConditions": disrupted},
        ]
    else:
        spec["backoffLimitPerIndex"] = 0
        rules = [
            {"action": "FailIndex", "onExitCodes": _codes("In", 3)},
            {"action": "FailJob", "onExitCodes": _codes("NotIn", 3)},
            {"action": "FailJob", "onPodConditions": disrupted},
        ]
    spec["podFailurePolicy"] = {"rules": rules}
    spec["template"] = {"metadata": {"labels": _labels(request)}, "spec": _pod(job, hosts, request)}
    return spec


def _codes(operator: str, code: int) -> Object:
    return {"containerName": "bessemer", "operator": operator, "values": [code]}


def _pod(job: Job, hosts: Hosts, request: KubernetesRequest) -> Object:
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace_s,
        "automountServiceAccountToken": False,  # a run asks nothing of the cluster
        "containers": [_container(hosts, request)],
        "volumes": [
            {"name": "job", "configMap": {"name": request.name}},
            {"name": "run", "persistentVolumeClaim": {"claimName": request.claim}},
            # NCCL's shared memory between the ranks of a host; a container's own /dev/shm has 64 MiB
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if hosts.agents or (hosts.count > 1 and not request.restarts):
        pod["subdomain"] = request.name
    return pod


def _container(hosts: Hosts, request: KubernetesRequest) -> Object:
    command = ["python", "-m", "bessemer.cli", "train", _JOB_FILE]
    if hosts.count > 1 and not hosts.agents:
        command = ["python", "-m", "bessemer.keep.pod", _JOB_FILE, "--host", "$(JOB_COMPLETION_INDEX)"]
        command += ["--hosts", str(hosts.count), "--ranks", str(hosts.ranks)]
    container: Object = {
        "name": "bessemer",
        "image": request.image,
        "command": command,
        "workingDir": request.mount,
        "env": _environment(hosts, request),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "job", "mountPath": _JOB_FILE.rpartition("/")[0], "readOnly": True},
            {"name": "run", "mountPath": request.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    amounts = _amounts(hosts, request)
    if amounts:
        container["resources"] = {"requests": amounts, "limits": amounts}
    return container


def _environment(hosts: Hosts, request: KubernetesRequest) -> list[Object]:
    variables: list[Object] = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    if request.secret:
        reference = {"secretKeyRef": {"name": request.secret, "key": SECRET_KEY}}
        variables.append({"name": SECRET, "valueFrom": reference})
    if hosts.agents:
        return variables + _of_agent(hosts, request)
    if hosts.count > 1:
        first = f"{request.name}-{_GROUP}-0-0" if request.restarts else f"{request.name}-0"
        attempt = "metadata.labels['batch.kubernetes.io/controller-uid']"
        variables += [
            {"name": "MASTER_ADDR", "value": f"{first}.{request.name}"},
            {"name": "MASTER_PORT", "value": str(PORT)},
            # tells one attempt's half-written files from another's: each attempt is a Job of its own
            {"name": "TORCHELASTIC_RUN_ID", "valueFrom": {"fieldRef": {"fieldPath": attempt}}},
        ]
    return variables


def _of_agent(hosts: Hosts, request: KubernetesRequest) -> list[Object]:
    """Which host this is, and where all are."""
    number = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    names = [f"{request.name}-{n}.{request.name}" for n in range(hosts.count)]
    return [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": number}}},
        {"name": "WORLD_SIZE", "value": str(hosts.count)},
        {"name": HOSTS, "value": ",".join(names)},
        {"name": "MASTER_PORT", "value": str(PORT)},
    ]


def _amounts(hosts: Hosts, request: KubernetesRequest) -> Mapping[str, str]:
    """The same as requests and limits, so that a pod is the last to be evicted."""
    amounts = {
        request.gpu_resource: str(hosts.ranks),
        "cpu": str(request.cpus * hosts.ranks) if request.cpus else "",
        "memory": request.memory,
    }
    return {name: amount for name, amount in amounts.items() if name and amount}
