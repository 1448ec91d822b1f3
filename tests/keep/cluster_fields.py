"""What clusters take: options of sbatch, and fields of Kubernetes objects, as far as a training run may use them.

Sources: the manual page of sbatch (https://slurm.schedmd.com/sbatch.html, 24.11); the Kubernetes API reference
(https://kubernetes.io/docs/reference/kubernetes-api/, 1.33: batch/v1 Job, v1 Pod, Service, ConfigMap) and JobSet's
(https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/). Written down by hand: names, types and what is required.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["FIELDS", "SBATCH_OPTIONS", "faults"]

_COUNT = r"[1-9]\d*"
SBATCH_OPTIONS: dict[str, str | None] = {
    "account": r"[^\s,]+",
    "chdir": r"/\S*",
    "constraint": r"\S+",
    "cpus-per-task": _COUNT,
    "error": r"\S+",
    "exclusive": None,
    "gpus-per-node": r"([a-z0-9_]+:)?[1-9]\d*",
    "job-name": r"\S+",
    "mem": r"\d+[KMGT]?",
    "no-kill": None,
    "nodes": rf"{_COUNT}(-{_COUNT})?",
    "ntasks": _COUNT,
    "ntasks-per-node": _COUNT,
    "open-mode": r"append|truncate",
    "output": r"\S+",
    "partition": r"\S+",
    "qos": r"\S+",
    "requeue": None,
    "signal": r"(R?B?:)?(TERM|INT|USR1|USR2|\d+)(@\d{1,5})?",
    "time": r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}",
}
"""Option -> the form of its value; None: it takes none here."""

FIELDS: dict[str, dict[str, str]] = {
    "ConfigMap": {"apiVersion": "string", "kind": "string", "metadata": "ObjectMeta", "data": "map"},
    "Service": {"apiVersion": "string", "kind": "string", "metadata": "ObjectMeta", "spec": "ServiceSpec"},
    "Job": {"apiVersion": "string", "kind": "string", "metadata": "ObjectMeta", "spec": "JobSpec"},
    "JobSet": {"apiVersion": "string", "kind": "string", "metadata": "ObjectMeta", "spec": "JobSetSpec"},
    "ObjectMeta": {"name": "string", "namespace": "string", "labels": "map", "annotations": "map"},
    "ServiceSpec": {"clusterIP": "string", "selector": "map", "ports": "[ServicePort]", "type": "string",
                    "publishNotReadyAddresses": "boolean"},
    "ServicePort": {"name": "string", "port!": "integer", "protocol": "string"},
    "JobSpec": {"activeDeadlineSeconds": "integer", "backoffLimit": "integer", "backoffLimitPerIndex": "integer",
                "completionMode": "NonIndexed|Indexed", "completions": "integer", "maxFailedIndexes": "integer",
                "parallelism": "integer", "podFailurePolicy": "PodFailurePolicy", "suspend": "boolean",
                "podReplacementPolicy": "TerminatingOrFailed|Failed", "template!": "PodTemplateSpec",
                "ttlSecondsAfterFinished": "integer"},
    "PodFailurePolicy": {"rules!": "[PodFailurePolicyRule]"},
    "PodFailurePolicyRule": {"action!": "Count|FailIndex|FailJob|Ignore",
                             "onExitCodes": "PodFailurePolicyOnExitCodesRequirement",
                             "onPodConditions": "[PodFailurePolicyOnPodConditionsPattern]"},
    "PodFailurePolicyOnExitCodesRequirement": {"containerName": "string", "operator!": "In|NotIn",
                                               "values!": "[integer]"},
    "PodFailurePolicyOnPodConditionsPattern": {"status": "True|False|Unknown", "type!": "string"},
    "JobTemplateSpec": {"metadata": "ObjectMeta", "spec": "JobSpec"},
    "PodTemplateSpec": {"metadata": "ObjectMeta", "spec": "PodSpec"},
    "PodSpec": {"automountServiceAccountToken": "boolean", "containers!": "[Container]", "hostNetwork": "boolean",
                "nodeSelector": "map", "restartPolicy": "Always|OnFailure|Never", "subdomain": "string",
                "terminationGracePeriodSeconds": "integer", "volumes": "[Volume]"},
    "Container": {"args": "[string]", "command": "[string]", "env": "[EnvVar]", "image": "string",
                  "imagePullPolicy": "Always|Never|IfNotPresent", "name!": "string", "workingDir": "string",
                  "resources": "ResourceRequirements", "securityContext": "SecurityContext",
                  "volumeMounts": "[VolumeMount]"},
    "EnvVar": {"name!": "string", "value": "string", "valueFrom": "EnvVarSource"},
    "EnvVarSource": {"fieldRef": "ObjectFieldSelector", "secretKeyRef": "SecretKeySelector"},
    "ObjectFieldSelector": {"apiVersion": "string", "fieldPath!": "string"},
    "SecretKeySelector": {"key!": "string", "name": "string", "optional": "boolean"},
    "ResourceRequirements": {"limits": "map", "requests": "map"},
    "SecurityContext": {"allowPrivilegeEscalation": "boolean", "privileged": "boolean", "runAsNonRoot": "boolean"},
    "VolumeMount": {"mountPath!": "string", "name!": "string", "readOnly": "boolean", "subPath": "string"},
    "Volume": {"configMap": "ConfigMapVolumeSource", "emptyDir": "EmptyDirVolumeSource", "name!": "string",
               "persistentVolumeClaim": "PersistentVolumeClaimVolumeSource"},
    "ConfigMapVolumeSource": {"name": "string", "optional": "boolean"},
    "EmptyDirVolumeSource": {"medium": "string", "sizeLimit": "string"},
    "PersistentVolumeClaimVolumeSource": {"claimName!": "string", "readOnly": "boolean"},
    "JobSetSpec": {"failurePolicy": "FailurePolicy", "network": "Network", "replicatedJobs": "[ReplicatedJob]",
                   "suspend": "boolean", "ttlSecondsAfterFinished": "integer"},
    "Network": {"enableDNSHostnames": "boolean", "publishNotReadyAddresses": "boolean", "subdomain": "string"},
    "FailurePolicy": {"maxRestarts": "integer", "restartStrategy": "Recreate|BlockingRecreate",
                      "rules": "[FailurePolicyRule]"},
    "FailurePolicyRule": {"action!": "FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts", "name!": "string",
                          "onJobFailureReasons": "[Reason]", "targetReplicatedJobs": "[string]"},
    "ReplicatedJob": {"name!": "string", "replicas": "integer", "template!": "JobTemplateSpec"},
}  # fmt: skip
"""Type -> field -> type; ! marks a required field, [] a list, a map is of text to text, | separates words."""

_WORDS = {
    "Reason": "BackoffLimitExceeded|DeadlineExceeded|FailedIndexes|MaxFailedIndexesExceeded|PodFailurePolicy",
}
_VERSIONS = {"ConfigMap": "v1", "Service": "v1", "Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def faults(item: dict[str, Any]) -> list[str]:
    """What of an object has another type, is missing or is not known, as "place: what"."""
    kind = item.get("kind", "")
    if item.get("apiVersion") != _VERSIONS.get(kind):
        return [f"kind: {item.get('apiVersion')} {kind} is not known"]
    name = item.get("metadata", {}).get("name", "")
    wrong = [] if _LABEL.fullmatch(name) else [f"metadata.name: {name!r}"]
    return [*wrong, *_faults(item, kind, "")]


def _faults(value: Any, kind: str, place: str) -> Iterator[str]:
    kind = _WORDS.get(kind, kind)
    if kind.startswith("["):
        if not isinstance(value, list) or not value:
            yield f"{place}: no list"
            return
        for index, part in enumerate(value):
            yield from _faults(part, kind[1:-1], f"{place}[{index}]")
    elif kind in FIELDS:
        if not isinstance(value, dict):
            yield f"{place}: no object"
            return
        known = {name.removesuffix("!"): name for name in FIELDS[kind]}
        below = f"{place}." if place else ""
        yield from (f"{below}{name}: unknown" for name in value.keys() - known.keys())
        yield from (f"{below}{n}: missing" for n, field in known.items() if field.endswith("!") and n not in value)
        for name in value.keys() & known.keys():
            yield from _faults(value[name], FIELDS[kind][known[name]], below + name)
    elif not _is_plain(value, kind):
        yield f"{place}: {value!r} is no {kind}"


def _is_plain(value: Any, kind: str) -> bool:
    if kind == "map":
        return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
    if "|" in kind:
        return value in kind.split("|")
    expected = {"string": str, "integer": int, "boolean": bool}[kind]
    return type(value) is expected
