"""What the steps of a run take on one node: measured by a reference run, or modelled, or (one node) the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.inspect.run_records import Attempt, RunRecords, StepRecord

__all__ = ["OneNode", "one_node"]

SAME = (
    ("model", None),
    ("data", "seq_len"),
    ("data", "document_mask"),
    ("precision", None),
    ("train", "optimizer"),
    ("train", "micro_batch"),
    ("train", "compile"),
    ("train", "recompute"),
    ("train", "recompute_layers"),
    ("train", "recompute_modules"),
    ("train", "recompute_gb"),
    ("machine", "name"),
    ("machine", "gpus_per_node"),
    ("layout", "tp"),
    ("layout", "pp"),
    ("layout", "cp"),
    ("layout", "ep"),
    ("layout", "etp"),
)
"""Fields in which the job of a reference run must agree: they decide the work of a device and its kind."""


@dataclass(frozen=True)
class OneNode:
    """`step_s(attempt, step)`: seconds that this step takes on one node. `reason` says where that comes from; `itself`:
    the run is on one node, so that nothing is compared."""

    step_s: Callable[[Attempt, StepRecord], float]
    kind: str
    reason: str
    notes: list[str] = field(default_factory=list)
    itself: bool = False


def one_node(run: RunRecords, reference: RunRecords | None) -> OneNode:
    """The one-node step time of `run`. RequestError `reference-differs` where the reference did other work."""
    if reference is not None:
        return _measured(run, reference)
    nodes = max(_nodes(run.job, a) for a in run.attempts)
    if nodes == 1:
        return OneNode(lambda _, step: step.step_s, "measured", "", itself=True)
    reason = f"{nodes} nodes, no reference run: a step on one node is modelled as step_s - comm_s"
    note = "cluster efficiency is modelled; `--reference RUN`, a one-node run of the same work a device, measures it"
    return OneNode(_without_waiting(run.job), "modelled", reason, [note])


def _without_waiting(job: Job) -> Callable[[Attempt, StepRecord], float]:
    """All exposed waiting for other ranks taken as waiting for other nodes; nothing is taken off on one node."""

    def step_s(attempt: Attempt, step: StepRecord) -> float:
        return step.step_s - (step.comm_s if _nodes(job, attempt) > 1 else 0.0)

    return step_s


def _measured(run: RunRecords, reference: RunRecords) -> OneNode:
    """The median of the reference's steps with as many samples a device."""
    times: dict[float, list[float]] = {}
    for attempt in reference.attempts:
        for step in attempt.steps:
            times.setdefault(step.samples / attempt.world_size, []).append(step.step_s)
    _check_same(run, reference, set(times))
    medians = {samples: median(seconds) for samples, seconds in times.items()}
    count = sum(map(len, times.values()))
    reason = f"median step of {reference.folder} ({count} steps on one node)"
    return OneNode(lambda attempt, step: medians[step.samples / attempt.world_size], "measured", reason)


def _check_same(run: RunRecords, reference: RunRecords, per_device: set[float]) -> None:
    differ = [f"{name}: {ours!r} here, {theirs!r} there" for name, ours, theirs in _fields(run.job, reference.job)]
    for world in sorted({a.world_size for a in reference.attempts if a.steps}):
        if world != (full := min(run.job.machine.gpus_per_node, run.job.layout.world_size)):
            differ.append(f"devices: a node of this run has {full}, the reference ran on {world}")
    wanted = {step.samples / a.world_size for a in run.attempts for step in a.steps}
    if missing := wanted - per_device:
        have = ", ".join(f"{n:g}" for n in sorted(per_device)) or "no steps"
        need = ", ".join(f"{n:g}" for n in sorted(missing))
        differ.append(f"sequences a device and step: {need} here, {have} there")
    if differ:
        raise RequestError(
            f"{reference.folder} is no one-node reference of {run.folder}; these differ:"
            + "".join(f"\n    {d}" for d in differ),
            code="reference-differs",
            fix="a run on one whole node with the same model, sequence length, precision, micro-batch and sequences "
            "a device, or no --reference: cluster efficiency is then modelled",
        )


def _fields(ours: Job, theirs: Job) -> list[tuple[str, Any, Any]]:
    """Name and both values of the fields of `SAME` in which two jobs differ."""
    found = []
    for section, key in SAME:
        a, b = getattr(ours, section), getattr(theirs, section)
        if key is not None:
            a, b = getattr(a, key), getattr(b, key)
        if a != b:
            found.append((f"{section}.{key}" if key else section, a, b))
    return found


def _nodes(job: Job, attempt: Attempt) -> int:
    """Nodes of an attempt: its ranks over the devices of a node, rounded up."""
    return -(-attempt.world_size // job.machine.gpus_per_node)
