"""What a goodput question rests on: every input with its source, from a fleet's published figures or the user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem, divisors_near, nearest
from bessemer.plan.faults import (
    LAYERS,
    Fleet,
    Sourced,
    cold_restart,
    communicator_start,
    detection,
    fault_row,
    fleet,
    mean_time_to_failure,
    parts,
    warm_restart,
)
from bessemer.plan.goodput import GoodputInputs

__all__ = ["Asked", "LayerRate", "ask"]

KEYS = tuple(f.name for f in fields(GoodputInputs) if f.name != "gpus")
WHOLE = ("gpus_per_node", "unit", "min_replicas", "micro_batches")
SHARES = ("drain_share", "fallback_share", "slow_share")
POSITIVE = ("mttf_s", "step_s", "interval_s", *WHOLE)


@dataclass(frozen=True)
class LayerRate:
    """One layer's failures: share of all, per day in this job, seconds until noticed, the most frequent causes."""

    layer: str
    share: float
    per_day: float
    detection_s: float
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A question made complete: the inputs, where each comes from, and the failures by layer."""

    fleet: Fleet
    inputs: GoodputInputs
    sources: dict[str, Sourced]
    layers: tuple[LayerRate, ...]


def ask(gpus: int, fleet_name: str, sets: Sequence[str] = (), *, inspection: bool = True) -> Asked:
    """Inputs for a job on `gpus` accelerators; `sets` are "key=value" with the names of `GoodputInputs`.

    ConfigError with all that is wrong: an unknown key, a value out of its range, sizes that don't divide.
    """
    given, problems = _given(sets)
    try:
        of = fleet(fleet_name)
    except ConfigError as error:
        problems += error.problems
    if gpus < 8 or gpus > 10_000_000:
        fix = "gpus from 8 to 10,000,000"
        problems.append(_wrong("gpus", f"{gpus:,} accelerators are outside of what is modelled", fix))
    if problems:
        raise ConfigError(problems, "the request")
    noticed = detection(of, inspected=inspection)
    sources = _defaults(gpus, of, noticed)
    sources.update(of.defaults)
    sources |= {k: Sourced(v, "given", f"--set {k}") for k, v in given.items()}
    if "snapshot_s" not in given:
        sources["snapshot_s"] = _snapshot(sources["step_s"].value)
    values: dict[str, Any] = {k: int(s.value) if k in WHOLE else s.value for k, s in sources.items()}
    if "unit" not in given:
        values["unit"] = _unit(gpus, values["gpus_per_node"])
        sources["unit"] = Sourced(values["unit"], "modelled", "assumption: about 16 replicas or more, of up to 512")
    inputs = GoodputInputs(gpus=gpus, **values)
    problems = _contradictions(inputs)
    if problems:
        raise ConfigError(problems, "the request")
    return Asked(of, inputs, sources, _layers(of, inputs.mttf_s, noticed))


def _defaults(gpus: int, of: Fleet, noticed: dict[str, Sourced]) -> dict[str, Sourced]:
    mean = sum(part.share * noticed[part.layer].value for part in parts(of.parts_of))
    start = communicator_start(gpus).value / communicator_start(98304).value
    drained, manual, all_ = fault_row("F125"), fault_row("F009"), fault_row("F003")
    warm = warm_restart(gpus)
    assumed = "assumption: no published figure; say your own with --set"
    return {
        "gpus_per_node": Sourced(8, "modelled", "assumption: hosts of 8"),
        "min_replicas": Sourced(1, "modelled", assumed),
        "mttf_s": mean_time_to_failure(of, gpus),
        "detection_s": Sourced(mean, "modelled", f"published times by layer, weighed with the parts of {of.parts_of}"),
        "restart_disk_s": cold_restart(gpus),
        "restart_memory_s": warm,
        "stall_s": Sourced(
            180.0 * start, "modelled", "3 min at 98,304 (arXiv 2602.00277), scaled as communicators take to set up"
        ),
        "join_s": Sourced(warm.value, "modelled", "no sooner than a warm restart of the whole job"),
        "step_s": Sourced(6.0, "modelled", "16 M tokens of Llama 3 405B at 400 TFLOP/s on 16,384 (arXiv 2407.21783)"),
        "checkpoint_s": Sourced(40.0, "published", "BLOOM 176B, 2.3 TB on 384 A100, 40 s to save (F108)"),
        "write_s": Sourced(40.0, "published", "as checkpoint_s of BLOOM (F108)"),
        "drain_share": drained,
        "repair_s": Sourced(86400.0, "modelled", assumed),
        "reboot_s": Sourced(600.0, "modelled", assumed),
        "fallback_share": Sourced(
            manual.value / all_.value, "modelled", "as many as needed a hand in Llama 3: 3 of 419 (F009, F003)"
        ),
        "jitter": Sourced(0.01, "modelled", "gives the 0.2 % a doubling of nodes that fits published training rows"),
        "slow_share": Sourced(0.0, "modelled", "slow nodes are sorted out; else 0.5 % (arXiv 2402.15627, F061)"),
        "slow_by": Sourced(0.10, "published", "arXiv 2402.15627 (F062)"),
    }  # fmt: skip


def _snapshot(step_s: float) -> Sourced:
    most = fault_row("F076").source
    return Sourced(0.009 * step_s, "modelled", f"0.9 % of step_s, the most for saving every step: {most}")


def _given(sets: Sequence[str]) -> tuple[dict[str, float], list[Problem]]:
    given: dict[str, float] = {}
    problems = []
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or key not in KEYS:
            near = nearest(key, KEYS) or KEYS
            problems.append(_wrong(key or text, f"there is no input {text!r}", "key=value with " + ", ".join(near)))
            continue
        try:
            given[key] = float(value)
        except ValueError:
            problems.append(_wrong(key, f"{value!r} is no number", f"--set {key}=600 (seconds, shares and counts)"))
            continue
        problem = _out_of_range(key, given[key])
        if problem is not None:
            problems.append(problem)
    return given, problems


def _out_of_range(key: str, value: float) -> Problem | None:
    if not math.isfinite(value) or value < 0 or (key in POSITIVE and value == 0):
        bound = "above zero" if key in POSITIVE else "zero or more"
        return _wrong(key, f"{key} = {value:g} is not possible", f"a finite number {bound}")
    if key in SHARES and value > 1:
        return _wrong(key, f"{key} = {value:g} is no share", f"{key} between 0 and 1, e.g. {value / 100:g}")
    if key in WHOLE and value != int(value):
        return _wrong(key, f"{key} = {value:g} is not a whole number", f"--set {key}={round(value) or 1}")
    return None


def _unit(gpus: int, per_node: int) -> int:
    """The largest whole number of nodes up to 512 accelerators and a sixteenth of the job that divides it."""
    most = max(min(512, gpus // 16), per_node)
    fits = [size for size in range(per_node, most + 1, per_node) if gpus % size == 0]
    return fits[-1] if fits else per_node


def _contradictions(inputs: GoodputInputs) -> list[Problem]:
    found, node = [], inputs.gpus_per_node
    if inputs.gpus % node:
        low = inputs.gpus // node * node
        fix = f"gpus = {low} or {low + node}"
        found.append(_wrong("gpus", f"{inputs.gpus:,} accelerators are not whole nodes of {node}", fix))
    elif inputs.unit % node or inputs.gpus % inputs.unit:
        fits = [node * d for d in divisors_near(inputs.gpus // node)]
        what = f"replicas of {inputs.unit} don't divide {inputs.gpus:,} accelerators in nodes of {node}"
        found.append(_wrong("unit", what, "unit = " + ", ".join(map(str, fits))))
    if inputs.min_replicas > inputs.replicas:
        what = f"min_replicas = {inputs.min_replicas} of {inputs.replicas}"
        found.append(_wrong("min_replicas", what, f"min_replicas up to {inputs.replicas}"))
    if inputs.mttf_s < inputs.step_s:
        what = f"a failure every {inputs.mttf_s:g} s, in steps of {inputs.step_s:g} s: no step would ever end"
        found.append(_wrong("mttf_s", what, "mttf_s in seconds (3.1 h is 11,136), or a shorter step_s"))
    if inputs.interval_s is not None and inputs.interval_s < inputs.step_s:
        what = f"saves every {inputs.interval_s:g} s, in steps of {inputs.step_s:g} s"
        found.append(_wrong("interval_s", what, f"interval_s = {inputs.step_s:g} or more"))
    return found


def _wrong(key: str, what: str, fix: str) -> Problem:
    return Problem(code="goodput-input", where=key, what=what, why="", fix=fix)


def _layers(of: Fleet, mttf_s: float, noticed: dict[str, Sourced]) -> tuple[LayerRate, ...]:
    rates = []
    for layer in LAYERS:
        own = [part for part in parts(of.parts_of) if part.layer == layer]
        share = sum(part.share for part in own)
        causes = tuple(part.name for part in own)
        rates.append(LayerRate(layer, share, share * 86400 / mttf_s, noticed[layer].value, causes))
    return tuple(sorted(rates, key=lambda rate: -rate.share))
