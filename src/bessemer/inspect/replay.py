"""A fault run again from its dump, in one process on the CPU: does the same bad result come again, and from what?

    replayed = replay(Path("runs/a/dumps/dump-1"))
    replayed.element       # the first bad element of the result: out.0[0, 3] = inf
    replayed.cause         # the element of an input without which it would be good
    replayed.verdict       # repeats: data or code; doesn't: hardware; and how sure that is

What comes again from the same inputs was not the machine's doing. What doesn't come again, there or here, was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer import ops
from bessemer.core.job import Job
from bessemer.core.layout import Layout
from bessemer.core.resolve import resolve_model
from bessemer.inspect.replay_verdict import ReplayVerdict, Run, judge_replay
from bessemer.models.quantise import histories, refresh_amax
from bessemer.parallel.mesh import build_mesh
from bessemer.runtime.bad_element import Element, cause_of, first_bad_element
from bessemer.runtime.dump import Operator, read_dump
from bessemer.runtime.first_bad import Call, FirstBad
from bessemer.train.assembly import Assembly, assemble
from bessemer.train.passes import Batch

__all__ = ["Replayed", "replay"]


@dataclass
class Replayed:
    """What a dump shows when it is run again. operator, module: what made the bad value, from the dump or from the pass
    that was run again; parameter: the cause, where it is an element of a parameter."""

    dump: str
    record: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    operator: str = ""
    module: str = ""
    element: Element | None = None
    cause: Element | None = None
    parameter: str = ""
    verdict: ReplayVerdict = field(default_factory=lambda: ReplayVerdict("unknown", 0.0, ""))

    def as_json(self) -> dict[str, Any]:
        """The form of `bessemer landing --replay DUMP --json`."""
        record = self.record
        return {
            "verdict": {"class": self.verdict.kind, "confidence": self.verdict.confidence, "next": self.verdict.next},
            "dump": self.dump,
            **{name: record[name] for name in ("kind", "what", "rank", "step", "host", "micro_batches", "core_file")},
            "operator": self.operator,
            "module": self.module,
            "element": None if self.element is None else vars(self.element) | {"value": str(self.element.value)},
            "cause": None if self.cause is None else vars(self.cause) | {"value": str(self.cause.value)},
            "parameter": self.parameter,
            "runs": [vars(run) for run in self.runs],
        }

    def __str__(self) -> str:
        record = self.record
        where = f" of {self.module}" if self.module else ""
        told = [b for b in record["micro_batches"] if "unit" in b]
        lines = [
            f"replay of {self.dump}",
            f"{record['kind']} of rank {record['rank']} on {record['host']}, step {record['step']}: {record['what']}",
            *(f"  samples: {', '.join(map(str, b['samples']))} (unit {b['unit']})" for b in told),
            f"  operator: {self.operator}{where}" if self.operator else f"  part of the model: {self.module}",
            f"  first bad element: {self.element}" if self.element is not None else "",
            f"  caused by: {self.cause}{self.parameter and f', which is {self.parameter}'}" if self.cause else "",
            *(f"  {run}" for run in self.runs),
        ]
        core = record["core_file"]
        if core is not None:
            lines.append(f"  core dump of CUDA: {core['path']}, {core['bytes']:,} bytes; `cuda-gdb` opens it")
        verdict = self.verdict
        lines.append(f"verdict: {verdict.kind}, confidence {verdict.confidence:.2f}")
        lines.append(f"  -> {verdict.next}")
        return "\n".join(line for line in lines if line and not line.endswith("model: "))


def replay(path: Path) -> Replayed:
    """Run again what a dump holds: its operator, and the micro-batch where the weights are in it.

    RequestError `dump-unreadable` where `path` is no dump.
    """
    record, tensors = read_dump(path)
    found = Replayed(str(path), record, module=record["module"])
    _from_record(found, tensors)
    if record["operator"] is not None:
        _run_operator(found, Operator(record["operator"], tensors))
    if record["weights"]:
        _run_micro_batches(found, tensors)
    found.verdict = judge_replay(record, found.runs, found.parameter)
    return found


def _from_record(found: Replayed, tensors: Mapping[str, Tensor]) -> None:
    """The runs that the rank itself made, and the tensor that it found bad."""
    operator, again = found.record["operator"], found.record["again"]
    if operator is not None and operator["repeats"] is not None:
        found.runs.append(Run("the operator, at once on the rank", operator["repeats"]))
    for kind, bad in again.items():
        found.runs.append(Run(f"the passes, at once on the rank with {kind} operators", bad))
    found.element = first_bad_element({n: t for n, t in tensors.items() if n.startswith(("gradient.", "weight."))})


def _run_operator(found: Replayed, operator: Operator) -> None:
    """Call it again; name the bad element and what caused it."""
    found.operator = operator.name
    found.element = first_bad_element(operator.outputs) or found.element
    if operator.record["arrives"]:
        return  # its input was bad already
    if not operator.can_run:
        found.runs.append(Run("the operator, here", None, "its inputs did not fit into the dump"))
        return
    with torch.random.fork_rng(devices=[]):
        outputs = {f"out.{i}": t for i, t in enumerate(operator.run())}
        element = first_bad_element(outputs)
        why = "" if operator.record["whole"] else "whole numbers in its inputs were replaced"
        found.runs.append(Run("the operator, here", element is not None, why))
        if element is None:
            return
        found.element = element
        number = int(element.name.partition(".")[2])
        found.cause = cause_of(operator.run, operator.inputs, number, element.index) or operator.bad_argument()
    if found.cause is not None and (view := operator.parameter(found.cause.name)) is not None:
        found.parameter = f"{view.name}{list(view.index(found.cause.index))}"


def _run_micro_batches(found: Replayed, tensors: Mapping[str, Tensor]) -> None:
    """Forward and backward of each from the saved weights; of the first that is bad also with every token 0."""
    record = found.record
    parts, step = _rebuilt(record, tensors), record["step"] - 1
    for told in record["micro_batches"]:
        names = {name: f"batch.{told['place']}.{name}" for name in told["inputs"]}
        if not all(name in tensors for name in names.values()):
            continue
        batch = {name: tensors[held] for name, held in names.items()}
        redacted = any(record["tensors"][held].get("redacted") for held in names.values())
        raised, call = _pass(parts, step, batch)
        bad = bool(raised or call)
        found.runs.append(Run("the micro-batch, here", bad, raised or ("with token ids replaced" if redacted else "")))
        if call is not None and not found.operator:
            found.operator, found.module = call.operator, call.module
            found.element = first_bad_element({f"out.{i}": t for i, t in enumerate(call.outputs)})
        if bad and not redacted:
            blank = batch | {n: torch.zeros_like(batch[n]) for n in ("tokens_BS", "labels_BS")}
            raised, call = _pass(parts, step, blank)
            found.runs.append(Run("the micro-batch with every token 0, here", bool(raised or call), raised))
        if bad:
            return


def _pass(parts: Assembly, step: int, batch: Batch) -> tuple[str, Call | None]:
    """(what was raised, "" for nothing; what made a bad value). With a run's own operators where the reference shows
    nothing."""
    passes = parts.step.passes
    passes.run(iter(()), 0, step)
    for reference in (True, False):
        with ops.use("reference" if reference else "auto"), FirstBad(parts.module) as watch:
            try:
                passes.again([batch])
            except Exception as error:
                text = next(iter(str(error).splitlines()), "")
                where = f"{watch.current} of {watch.place or 'the model'}"
                return f"{type(error).__name__}: {text} in {where}", None
        if watch.culprit is not None:
            return "", watch.culprit
    return "", None


def _rebuilt(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Assembly:
    """The whole model on this process, with the weights and the states of the dump."""
    job = Job.model_validate(record["job"])
    job = job.model_copy(
        update={
            "layout": Layout(),
            "keep": job.keep.model_copy(update={"replicas": None, "unit": None, "mode": "restart"}),
            "model": job.model.model_copy(update={"weights": None}),
            "train": job.train.model_copy(update={"compile": "none"}),
        }
    )
    spec = resolve_model(job.model)
    parts = assemble(job, spec, build_mesh(job, 0, torch.device("cpu"), spec))
    targets = {f"weight.{n}": p.detach() for n, p in parts.module.named_parameters()}
    targets |= {f"buffer.{n}": b for n, b in parts.module.named_buffers()}
    targets |= {f"history.{n}": h for n, h in histories(parts.module)}
    for name, target in targets.items():
        target.copy_(tensors[name])
    refresh_amax(parts.module)
    return parts
