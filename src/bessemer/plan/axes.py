"""What a search goes through: a `Request`, the axes it may vary and the values that were fixed.

    request = Request(
        spec=preset("llama-3-8b"), machine=load_machine("h100"), num_gpus=64, global_batch=128, seq_len=8192
    )
    fixed = parse_fixes(["tp=8", "recipe=bf16,fp8-current"])

Two spaces: `usual` is what a person would try (tensor parallelism inside the scale-up domain, at least 1024 tokens a
rank, sequence parallelism wherever it fits ...), `wide` everything that the cost model knows. A fixed axis takes the
given values in either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bessemer.core.errors import ConfigError
from bessemer.core.job import PrecisionSection
from bessemer.core.layout import MAX_DEGREE
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, nearest, one_of
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import RECOMPUTE
from bessemer.core.schedules import SCHEDULES
from bessemer.plan.calibration import Calibration
from bessemer.plan.gains import choice_of
from bessemer.plan.layer import Work
from bessemer.plan.rates import rates_of
from bessemer.plan.space import CP_KINDS, DP_SHARDS, Layouts

__all__ = [
    "AXES",
    "NAMED",
    "Request",
    "axis_values",
    "divisors",
    "layout_columns",
    "parse_fixes",
    "recipe_problem",
    "request_problems",
    "shared_machine",
]

AXES = tuple(f.name for f in fields(Layouts))
"""What `--fix` and `--layout` may name: the columns of `Layouts`."""
NAMED: Mapping[str, tuple[str, ...]] = {
    "schedule": tuple(SCHEDULES),
    "dp_shard": DP_SHARDS,
    "recompute": tuple(RECOMPUTE),
    "recipe": tuple(RECIPES),
    "cp_kind": CP_KINDS,
}
SWITCHES = ("sequence_parallel", "tp_overlap", "graph", "offload_optimizer", "offload_activations")
_MAY_BE_ZERO = (*SWITCHES, "recompute_layers", "first_layers", "last_layers")
_PLAIN = PrecisionSection()
USUAL_TOKENS = 1024
"""Of a sequence on a context-parallel rank, in the usual space: below that attention has little to hide the ring."""
USUAL_MICRO_BATCH = 8
USUAL_RECOMPUTE = ("none", "fine", "mlp", "full")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model on `num_gpus` devices of a machine, `global_batch` sequences of `seq_len` tokens a step.

    `fixed`: axis -> the values it may take (ids where the axis has names). The model's vocabulary is padded where
    tensor parallelism asks for it, see `padded`.
    """

    spec: ModelSpec
    machine: Machine
    num_gpus: int
    global_batch: int
    seq_len: int
    fixed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    space: Literal["usual", "wide"] = "usual"
    era: str = "megatron-2026"
    calibration: Calibration | None = None
    machine_path: str | None = None  # where the machine was read from, if not by its name
    own: bool = False  # whether memory is that of Bessemer's own trainer; else of the software of `era`
    precision: PrecisionSection = _PLAIN  # a job's, whose recipe is the layout's

    @property
    def rank_machine(self) -> Machine:
        """The machine as one rank has it: the ranks on a CPU share its rates and its memory."""
        machine = self.machine
        sharing = min(self.num_gpus, machine.gpus_per_node) if machine.name != "cpu-local" else self.num_gpus
        return machine if machine.device != "cpu" else shared_machine(machine, sharing)

    @property
    def domain(self) -> int:
        """Devices that reach each other over the scale-up link."""
        return max(self.machine.scaleup_domain or 1, self.machine.gpus_per_node)

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees of the space that the heads allow."""
        spec = self.spec
        wanted = self.fixed.get("tp") or [
            d for d in divisors(self.num_gpus) if self.space == "wide" or d <= self.domain
        ]
        return tuple(d for d in wanted if spec.num_heads % d == 0)

    @property
    def padded(self) -> ModelSpec:
        """The model with the vocabulary that is priced: a multiple of 128 where a tensor-parallel degree of the space
        doesn't divide it (as Megatron-LM pads), else its own."""
        if all(self.spec.vocab_size % d == 0 for d in self.tp_degrees):
            return self.spec
        unit = math.lcm(128, *self.tp_degrees)
        return self.spec.model_copy(update={"vocab_size": math.ceil(self.spec.vocab_size / unit) * unit})

    @functools.cached_property
    def work(self) -> Work:
        """What a step has to do; for this trainer with the linear layers that it leaves high."""
        choice = choice_of(self.spec, self.machine, self.precision) if self.own else None
        return Work(seq=float(self.seq_len), choice=choice)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, for the reader."""
        found = []
        padded = self.padded.vocab_size
        if padded != self.spec.vocab_size:
            found.append(f"the vocabulary of {self.spec.vocab_size} is padded to {padded}, so that tp can share it")
        if self.seq_len > self.spec.max_positions:
            found.append(f"sequences of {self.seq_len} are longer than the model's {self.spec.max_positions} positions")
        assumed = rates_of(self.rank_machine).assumed
        if assumed:
            found.append(f"no source gives these figures of {self.machine.name}; assumed: " + ", ".join(assumed))
        return tuple(found)


def shared_machine(machine: Machine, ranks: int) -> Machine:
    """What each of `ranks` processes has of a computer's rates and memory."""
    peaks = machine.peak_flops_per_s
    rates = {name: value / ranks for name, value in peaks.model_dump(exclude_none=True).items()}
    shared = {
        "peak_flops_per_s": peaks.model_copy(update=rates),
        "memory_bytes": machine.limit_bytes and machine.limit_bytes // ranks,
        "memory_bytes_per_s": machine.memory_bytes_per_s and machine.memory_bytes_per_s / ranks,
        "gpus_per_node": max(machine.gpus_per_node, ranks),
    }
    return machine.model_copy(update=shared)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def request_problems(request: Request) -> list[Problem]:
    """What makes a request impossible whatever the layout."""
    found: list[Problem] = []
    spec, per_node = request.spec, request.machine.gpus_per_node
    for name, value in (("gpus", request.num_gpus), ("global_batch", request.global_batch), ("seq", request.seq_len)):
        if value < 1 or (name == "gpus" and value > MAX_DEGREE):
            fix = f"--{name.replace('_', '-')} with a whole number from 1" + (
                f" to {MAX_DEGREE}" if name == "gpus" else ""
            )
            found.append(_problem("plan-request", name, f"{name} = {value}", "it is a count", fix))
    if found:
        return found
    if request.machine.device != "cpu" and request.num_gpus > per_node and request.num_gpus % per_node:
        below = request.num_gpus // per_node * per_node
        what = f"{request.num_gpus} devices don't fill hosts of {per_node}"
        fix = f"--gpus {below} or --gpus {below + per_node}"
        found.append(_problem("gpus-per-node", "gpus", what, "a run takes whole hosts, or a part of one", fix))
    if spec.positions == "learned" and request.seq_len > spec.max_positions:
        what = f"seq = {request.seq_len} is longer than the {spec.max_positions} learned positions of the model"
        found.append(
            _problem("seq-positions", "seq", what, "there is no table row for the rest", f"--seq {spec.max_positions}")
        )
    for recipe in request.fixed.get("recipe", ()):
        problem = recipe_problem(request.machine, NAMED["recipe"][recipe])
        found += [problem] if problem else []
    return found


def recipe_problem(machine: Machine, name: str) -> Problem | None:
    """The problem of a quantised recipe on a device whose units can't do it."""
    known = RECIPES[name]
    if not known.quantised or machine.peak(known.gemm) is not None:
        return None
    fits = [f"recipe={r.name}" for r in RECIPES.values() if machine.peak(r.gemm) is not None]
    what = f"recipe {name} needs {known.gemm} matrix units, and none are known of {machine.name}"
    why = "there is no silent fallback to another precision"
    return _problem("recipe-machine", "recipe", what, why, "--fix " + " or ".join(fits or ["another machine"]))


def parse_fixes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`["tp=8", "recipe=bf16,mxfp8"]` -> axis -> ids. ConfigError with every fault at once."""
    fixed: dict[str, tuple[int, ...]] = {}
    problems: list[Problem] = []
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in AXES:
            near = nearest(name, AXES, count=1)
            fix = f"--fix {near[0]}={values or '...'}" if near else "axes: " + ", ".join(AXES)
            problems.append(_problem("plan-fix", "fix", f"{text!r} is no axis=value", "only axes can be fixed", fix))
            continue
        ids = [axis_id(name, word.strip()) for word in values.split(",")]
        problems += [i for i in ids if isinstance(i, Problem)]
        fixed[name] = tuple(i for i in ids if isinstance(i, int))
    if problems:
        raise ConfigError(problems, "the request")
    return fixed


def axis_id(name: str, word: str | int | bool) -> int | Problem:
    """A value of an axis as it stands in `Layouts`, or what is wrong with it."""
    names = NAMED.get(name)
    text = str(word)
    if names is not None:
        if text in names:
            return names.index(text)
        near = nearest(text.lower(), names) or names
        return _problem("plan-fix", name, f"{text!r} is no {name}", "known: " + ", ".join(names), one_of(name, near))
    if name in SWITCHES and text.lower() in ("true", "false", "on", "off", "1", "0"):
        return int(text.lower() in ("true", "on", "1"))
    least = 0 if name in _MAY_BE_ZERO else 1
    if text.isascii() and text.isdigit() and least <= int(text) <= (1 if name in SWITCHES else MAX_DEGREE):
        return int(text)
    kind = "true or false" if name in SWITCHES else f"a whole number from {least} to {MAX_DEGREE}"
    return _problem("plan-fix", name, f"{name} = {text!r}", f"it takes {kind}", f"{name}={max(least, 1)}")


def axis_values(request: Request, name: str) -> list[int]:
    """The values that an axis takes in the space of `request`, before rules between axes."""
    if name in request.fixed:
        return list(request.fixed[name])
    wide, spec, moe = request.space == "wide", request.spec, request.spec.moe
    if name in ("tp", "pp", "cp", "dp"):
        most = {"tp": request.domain, "pp": spec.num_layers, "cp": max(request.seq_len // USUAL_TOKENS, 1)}
        return [d for d in divisors(request.num_gpus) if wide or d <= most.get(name, d)]
    if name == "micro_batch":
        return [d for d in divisors(request.global_batch) if wide or d <= USUAL_MICRO_BATCH]
    if name == "ep":
        return divisors(moe.num_experts) if moe else [1]
    if name == "etp":
        return [d for d in divisors(request.num_gpus) if wide or d <= request.domain] if moe else [1]
    if name == "virtual_stages":
        return list(range(1, spec.num_layers + 1))
    return _flag_values(request, name, wide)


def _flag_values(request: Request, name: str, wide: bool) -> list[int]:
    machine = request.machine
    if name == "recipe":
        return [list(RECIPES).index(r) for r in _recipes(machine, wide)]
    if name == "recompute":
        return [i for i, r in enumerate(RECOMPUTE) if wide or r in USUAL_RECOMPUTE]
    if name in ("schedule", "dp_shard", "cp_kind"):
        return list(range(len(NAMED[name])))
    if name == "replicas":
        return [1, 2, 4, 8] if wide else [1]
    if name == "sequence_parallel":
        return [0, 1]
    if name == "tp_overlap":
        return [1, 0]
    return [0, 1] if wide and name in SWITCHES else [0]


def _recipes(machine: Machine, wide: bool) -> list[str]:
    """bf16, which every accelerator has, also where no source gives its rate; in the usual space beside it one fp8
    recipe: blocks with hardware scales where the device has fp4 units too (Blackwell), a scale per tensor elsewhere.
    fp16 costs what bf16 costs, so it is only searched where it is asked for."""
    quantised = [r.name for r in RECIPES.values() if r.quantised and machine.peak(r.gemm) is not None]
    if not wide:
        best = "mxfp8" if machine.peak("fp4") is not None else "fp8-current"
        quantised = [best] if best in quantised else []
    if machine.device == "cpu":
        return ["bf16", "fp32"]
    return ["bf16", *quantised]


def _problem(code: str, where: str, what: str, why: str, fix: str) -> Problem:
    return Problem(code=code, where=where, what=what, why=why, fix=fix)


def layout_columns(given: Mapping[str, Any]) -> dict[str, int]:
    """The columns of one layout written as JSON ({"tp": 8, "schedule": "1f1b"}). ConfigError with every fault."""
    problems: list[Problem] = []
    columns: dict[str, int] = {}
    for name, value in given.items():
        if name not in AXES:
            near = nearest(str(name), AXES, count=1)
            fix = f"the nearest is {near[0]}" if near else "axes: " + ", ".join(AXES)
            problems.append(
                _problem("plan-layout", "layout", f"{name!r} is no axis of a layout", "nothing reads it", fix)
            )
            continue
        found = axis_id(name, value)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            columns[name] = found
    if problems:
        raise ConfigError(problems, "the layout")
    return columns
