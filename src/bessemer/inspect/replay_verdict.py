"""What the runs of a fault say about its class. Confidences are judgements, not measurements, as those of landing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ReplayVerdict", "Run", "judge_replay"]


@dataclass(frozen=True)
class Run:
    """What was run again; whether the fault came again, None where it couldn't be run; why not, or what was raised."""

    what: str
    again: bool | None
    note: str = ""

    def __str__(self) -> str:
        said = {True: "bad again", False: "good", None: "not run"}[self.again]
        return f"{self.what}: {said}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class ReplayVerdict:
    kind: str  # data, code, "data or code", hardware or unknown
    confidence: float
    next: str


_NEXT = {
    "parameter": "an earlier update or memory made the parameter bad: look at it in the newest checkpoint; if it is "
    "good there, go on from that with another host in the place of this one",
    "nothing": "nothing of this dump can be run: a larger inspect.dump_mb keeps more",
    "redacted": "replaced token ids can't show it: inspect.redact = false keeps them",
    "transient": "take host {host} out of the run and let it be tested: the same inputs gave a good result",
    "that host": "it came again on {host} and not here: replay it on another host of the same kind; if it is good "
    "there too, let {host} be tested",
    "that device": "it came again on that {device} and not on a CPU: run the step on another device; if it is bad "
    "there too it is the device's kernel",
    "operator": "look at the operator and the element that caused it: the weights, train.lr, or the samples",
    "weight": "{parameter} makes it bad: look at how it grew (checkpoints, gradient norms), at train.lr and clip",
    "any tokens": "it comes with any tokens: look at the weights and the code of that part, and at train.lr",
    "these tokens": "it comes only with these tokens: look at the samples {samples} (a weight near overflow needs "
    "such a sample too)",
    "raised by tokens": "it is raised only with these tokens: look at the samples {samples}",
    "kernel": "the kernel failed on the device and the pass is good on a CPU: run the step on another device; if it"
    " fails there too it is the kernel",
    "outside": "the passes of the micro-batch raise nothing here: read the stack; what failed lies outside of them "
    "(reading data, communication, memory), or was of that process",
}


def judge_replay(record: Mapping[str, Any], runs: Sequence[Run], parameter: str = "") -> ReplayVerdict:
    """The verdict on a dump after `runs`, those on the rank itself among them. parameter: the element of the weights
    that made the result bad, where it is one."""
    there = [run.again for run in runs if "on the rank" in run.what and run.again is not None]
    here = [run for run in runs if run.what.endswith("here") and run.again is not None]
    kind, confidence, following = _judged(record, there, here, parameter)
    samples = ", ".join(str(sample) for told in record["micro_batches"] for sample in told.get("samples", []))
    text = _NEXT[following].format(host=record["host"], device=record["device"], samples=samples, parameter=parameter)
    return ReplayVerdict(kind, round(confidence, 2), text)


def _judged(
    record: Mapping[str, Any], there: Sequence[bool], here: Sequence[Run], parameter: str
) -> tuple[str, float, str]:
    if record["what"].startswith("parameter "):
        return "unknown", 0.4, "parameter"
    if not here:
        return "unknown", 0.2, "nothing"
    if any(run.again for run in here):
        sure = 0.9 if all(there) else 0.6
        blank = next((run for run in here if "every token 0" in run.what), None)
        if parameter:
            return "code", sure, "weight"
        if blank is None:
            return "data or code", sure, "operator"
        if blank.again:
            return "code", sure - 0.1, "any tokens"
        return "data", sure - 0.2, "these tokens" if record["kind"] == "non-finite" else "raised by tokens"
    if record["kind"] != "non-finite":
        return ("hardware", 0.5, "kernel") if record["kind"] == "kernel" else ("unknown", 0.3, "outside")
    if any(run.note for run in here):
        return "unknown", 0.3, "redacted"
    if not any(there):
        return "hardware", 0.9 if there else 0.7, "transient"
    return ("hardware", 0.6, "that host") if record["device"] == "cpu" else ("hardware", 0.45, "that device")
