"""Contradictions in batches, schedule, optimiser and recompute. No torch: `bessemer check` runs them before anything
starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bessemer.core.errors import ConfigError
from bessemer.core.job import Job, TrainSection
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, divisors_near, one_of
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import PARTS, parts_of_layer
from bessemer.core.schedules import SCHEDULES
from bessemer.core.sizes import Sizes
from bessemer.core.units import format_bytes
from bessemer.parallel.recompute_budget import applied_recompute, layers_of_rank, least_bytes

__all__ = ["problems"]


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """All contradictions of the [train] table with itself, with the layout and, in recompute, with the model."""
    train = job.train
    found = [*_batches(job), *_ramp(train), *_schedule(train), *_optimizer(train), *_evaluation(job)]
    found += [*_recompute_settings(train), *_recompute_modules(job, spec)]
    if spec is not None and job.layout.schedule in SCHEDULES and job.precision.recipe in RECIPES:
        found += _recompute_sizes(job, spec, machine)
    return found


def _problem(code: str, where: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=f"train.{where}", what=what, why=why, fix=fix)


def _batches(job: Job) -> Iterator[Problem]:
    """Each step's batch is a whole number of units, at least one for each replica.

    Silent where keep's own checks already found the unit or the replicas impossible: what follows is noise.
    """
    if job.layout.dp % job.replicas or job.unit % (job.train.micro_batch * job.shard):
        return
    unit, replicas = job.unit, job.replicas
    if job.keep.unit is not None:
        formula = f"keep.unit {unit}"
    else:
        formula = f"micro_batch {job.train.micro_batch}" + (f" x dp {job.shard}" if job.shard > 1 else "")
    sizes = [("global_batch", job.train.global_batch)]
    sizes += [(f"batch_ramp[{i}][1]", size) for i, (_, size) in enumerate(job.train.batch_ramp)]
    for where, size in sizes:
        if size <= 0:
            continue  # reported by the ramp's own check
        least = unit * replicas
        near = sorted({max(least, size // unit * unit), max(least, -(-size // unit) * unit)})
        fix = one_of(f"train.{where}", near)
        if size % unit:
            what = f"{where} = {size} is not {formula} x a whole number"
            why = "a step takes whole units, and no sample may be dropped or repeated"
            yield _problem("batch-split", where, what, why=why, fix=fix)
        elif size < least:
            what = f"{where} = {size} is {size // unit} unit{'s' if size > unit else ''} of {unit}, fewer than the"
            why = "each replica needs at least one unit a step, else it stands idle"
            smaller = size // replicas
            if job.keep.unit is None and smaller and smaller % job.shard == 0:
                fix += f", or train.micro_batch = {smaller // job.shard}"
            yield _problem("batch-units", where, f"{what} {replicas} replicas", why=why, fix=fix)


def _ramp(train: TrainSection) -> Iterator[Problem]:
    before = 0
    for i, (until, size) in enumerate(train.batch_ramp):
        where = f"batch_ramp[{i}]"
        if until <= before:
            what = f"{where} ends at step {until}, not after step {before} where it begins"
            yield _problem("batch-ramp", where, what, why="entries are [until step, sequences a step], ascending",
                           fix=f"an end above {before}, or delete the entry")  # fmt: skip
        if until >= train.steps:
            what = f"{where} ends at step {until}, the run at step {train.steps}"
            why = f"global_batch = {train.global_batch} would never be reached"
            fix = f"an end below {train.steps}, or train.steps = {until + 1} or more"
            yield _problem("batch-ramp", where, what, why=why, fix=fix)
        if size <= 0:
            what = f"{where} asks for {size} sequences a step"
            yield _problem("batch-ramp", where, what, why="a step takes at least one sequence", fix="1 or more")
        before = max(before, until)


def _schedule(train: TrainSection) -> Iterator[Problem]:
    default = TrainSection()
    if train.warmup > train.steps:
        what = f"warmup_steps = {train.warmup} is longer than the run of {train.steps} steps"
        fix = f"train.warmup_steps = {train.steps // 10}, or train.steps = {train.warmup * 10}"
        yield _problem("warmup-steps", "warmup_steps", what, why="lr would never be reached", fix=fix)
    if train.lr_schedule == "constant" and train.min_lr_ratio != default.min_lr_ratio:
        yield _ignored(train, "min_lr_ratio", 'lr_schedule = "constant"', 'train.lr_schedule = "cosine"')
    if train.decay_fraction is not None and train.lr_schedule != "wsd":
        yield _ignored(train, "decay_fraction", f'lr_schedule = "{train.lr_schedule}"', 'train.lr_schedule = "wsd"')
    elif train.decay_fraction is not None and train.warmup <= train.steps:
        decay = round(train.decay_fraction * train.steps)
        if train.warmup + decay > train.steps:
            what = f"warm-up ({train.warmup} steps) and decay ({decay}) overlap in a run of {train.steps} steps"
            most = (train.steps - train.warmup) / train.steps
            fix = f"train.decay_fraction = {int(most * 100) / 100} or less" if most >= 0.01 else "a shorter warm-up"
            yield _problem("decay-overlap", "decay_fraction", what, why="wsd warms up, holds, then decays", fix=fix)


def _ignored(train: TrainSection, name: str, mode: str, other: str) -> Problem:
    what = f"{name} = {getattr(train, name)} has no effect with {mode}"
    return _problem("ignored-setting", name, what, why=f"{mode} does not read it", fix=f"delete it, or {other}")


def _optimizer(train: TrainSection) -> Iterator[Problem]:
    if train.optimizer != "muon":
        for name in ("muon_lr", "muon_momentum"):
            if getattr(train, name) is not None:
                yield _ignored(train, name, f'optimizer = "{train.optimizer}"', 'train.optimizer = "muon"')
    for i, beta in enumerate(train.betas):
        if not 0 < beta < 1:
            what = f"betas[{i}] = {beta} is not between 0 and 1"
            why = "it is the share of the running average that a step keeps"
            yield _problem("betas", f"betas[{i}]", what, why=why, fix="train.betas = [0.9, 0.95] is the default")


def _evaluation(job: Job) -> Iterator[Problem]:
    train, default = job.train, TrainSection()
    if train.eval_every > train.steps:
        what = f"eval_every = {train.eval_every} is longer than the run of {train.steps} steps"
        fix = f"train.eval_every = {max(1, train.steps // 4)}, or 0: only at the end"
        yield _problem("eval-every", "eval_every", what, why="it would never come to an evaluation", fix=fix)
    # That eval_every needs a validation split is one of the data room's checks.
    if job.data.val_fraction == 0 and train.eval_sequences != default.eval_sequences:
        yield _ignored(train, "eval_sequences", "data.val_fraction = 0", "data.val_fraction = 0.02")


def _recompute_settings(train: TrainSection) -> Iterator[Problem]:
    readers = {"recompute_layers": "block", "recompute_modules": "fine", "recompute_gb": "budget"}
    for name, policy in readers.items():
        if getattr(train, name) is not None and train.recompute != policy:
            yield _ignored(train, name, f'recompute = "{train.recompute}"', f'train.recompute = "{policy}"')
    if train.recompute == "block" and train.recompute_layers is None:
        yield _problem(
            "recompute-layers",
            "recompute_layers",
            'recompute = "block" without recompute_layers',
            why="it says in how many layers of each pipeline rank all is made again",
            fix='train.recompute_layers = 1 or more, or train.recompute = "full"',
        )
    if train.recompute == "budget" and train.recompute_gb is None:
        yield _problem(
            "recompute-budget",
            "recompute_gb",
            'recompute = "budget" without recompute_gb',
            why="it says how many 10^9 bytes the blocks of a rank may keep for the backward pass",
            fix='train.recompute_gb = 10, or train.recompute = "fine"',
        )


def _recompute_modules(job: Job, spec: ModelSpec | None) -> Iterator[Problem]:
    """Names of parts that would do nothing."""
    names = job.train.recompute_modules
    if names is None or job.train.recompute != "fine":
        return
    has = set(PARTS)
    if spec is not None:
        has = {p for layer in range(spec.num_layers) for p in parts_of_layer(spec, layer)}
    idle = {n: "the model has no such part" for n in names if n not in has}
    if "gather" in names and not Sizes.of(job.layout, 4).divided:
        idle["gather"] = "nothing is gathered without sequence parallelism"
    if "out" in names and "norm" not in names:
        idle["out"] = 'only "norm" would have to keep its output'
    left = [n for n in names if n not in idle]
    if idle or not names:
        shown = ", ".join(f'"{n}"' for n in idle)
        what = f"recompute_modules names {shown}, which makes nothing again" if idle else "recompute_modules = []"
        why = "; ".join(f"{n}: {why}" for n, why in idle.items()) or "nothing would be made again"
        listed = ", ".join(f'"{n}"' for n in left)
        fix = f"train.recompute_modules = [{listed}]" if left else 'train.recompute = "none"'
        yield _problem("recompute-modules", "recompute_modules", what, why=why, fix=fix)


def _recompute_sizes(job: Job, spec: ModelSpec, machine: Machine | None) -> list[Problem]:
    """Too many layers for "block", or too few bytes for a budget."""
    train = job.train
    try:
        ranks = [layers_of_rank(job, spec, rank) for rank in range(job.layout.pp)]
    except ValueError:  # layers don't fill the stages: the layout's own check says so
        return []
    most = max(map(len, ranks))
    if train.recompute == "block" and (train.recompute_layers or 0) > most:
        what = f"recompute_layers = {train.recompute_layers}, and no pipeline rank holds more than {most} layers"
        fix = f'train.recompute_layers = {most} or less, or train.recompute = "full"'
        return [_problem("recompute-layers", "recompute_layers", what, why="they are counted on each rank", fix=fix)]
    if train.recompute != "budget" or train.recompute_gb is None or machine is None:
        return []
    try:
        fits = all(applied_recompute(job, spec, rank, machine) is not None for rank in range(job.layout.pp))
    except ConfigError as error:  # a machine whose rates nobody knows: nothing can be priced
        return list(error.problems)
    return [] if fits else [_budget_problem(job, spec, train.recompute_gb)]


def _budget_problem(job: Job, spec: ModelSpec, given: float) -> Problem:
    least = least_bytes(job, spec)
    step = 10.0 ** (math.floor(math.log10(least)) - 1)  # two digits, rounded up
    fix = f"train.recompute_gb = {math.ceil(least / step) * step / 1e9:.4g} or more"
    for micro in reversed(divisors_near(job.train.micro_batch, job.train.micro_batch // 2, 64)):
        smaller = job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": micro})})
        if least_bytes(smaller, spec) <= given * 1e9:
            fix += f", or train.micro_batch = {micro}"
            break
    what = f"recompute_gb = {given:g} is less than the {format_bytes(least)} that the inputs of a rank's blocks take"
    why = "modelled; they are kept even if everything else is made again, for each micro-batch that is under way"
    return _problem("recompute-budget", "recompute_gb", what, why=why, fix=fix)
