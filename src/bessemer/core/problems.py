"""Contradictions between model, data, precision and machine that no single room owns. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.core.job import Job
from bessemer.core.linear_layers import kept_layers
from bessemer.core.machine import Machine
from bessemer.core.memory import memory_problem
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, nearest, one_of
from bessemer.core.recipes import RECIPES, lacking
from bessemer.core.units import counted

__all__ = ["problems"]

_DELAYED = ("history", "amax", "margin")
_QUANTISED = ("high_first", "high_last", "stochastic", "smooth", "emulate", "watch_every", "fall_back")


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """The checks for which what they need could be read: `spec` and `machine` are None where it couldn't."""
    found = [*_recipe(job, machine), *_recipe_fields(job), *_switches(job), *_samples(job)]
    if spec is not None:
        found += [
            *_positions(job, spec),
            *_high_blocks(job, spec),
            *_quantised_layers(job, spec),
            *_model_switches(job, spec),
        ]
    if machine is not None:
        found += _devices(job, machine)
    # Stages without layers have no memory to speak of: the layout's own check says so.
    filled = spec is not None and job.layout.pp * job.layout.virtual_stages <= spec.num_layers
    if filled and spec is not None and machine is not None:
        over = memory_problem(job, spec, machine)
        found += [over] if over is not None else []
    return found


def _problem(code: str, where: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=where, what=what, why=why, fix=fix)


def _recipe(job: Job, machine: Machine | None) -> Iterator[Problem]:
    name = job.precision.recipe
    runs = one_of("precision.recipe", [f'"{r.name}"' for r in RECIPES.values() if r.runnable])
    known = RECIPES.get(name)
    if known is None:
        near = nearest(name.lower(), RECIPES, count=1)
        fix = f'precision.recipe = "{near[0]}"' if near else runs
        why = "recipes: " + ", ".join(RECIPES)
        yield _problem("recipe-unknown", "precision.recipe", f'recipe = "{name}" is not known', why=why, fix=fix)
        return
    if not known.runnable:
        what = f'recipe = "{name}" can be planned but not trained yet'
        why = "the trainer has no code for it, and would train something else than was asked for"
        yield _problem("not-runnable", "precision.recipe", what, why=why, fix=runs)
    lacks = "" if machine is None or job.precision.emulate else lacking(known, machine)
    if machine is not None and lacks:
        what = f'recipe = "{name}" needs {lacks}, and none are known of {machine.name}'
        fits = [f'"{r.name}"' for r in RECIPES.values() if r.runnable and not lacking(r, machine)]
        fix = f"{one_of('precision.recipe', fits)}; or precision.emulate = true, many times slower than bfloat16"
        why = "there is no silent fallback to another precision"
        yield _problem("recipe-machine", "precision.recipe", what, why=why, fix=fix)


def _recipe_fields(job: Job) -> Iterator[Problem]:
    """Fields that the recipe wouldn't read."""
    section, known = job.precision, RECIPES.get(job.precision.recipe)
    if known is None:
        return
    rules = [(name, known.name == "fp8-delayed", 'precision.recipe = "fp8-delayed"') for name in _DELAYED]
    rules += [(name, known.quantised, "a quantised recipe") for name in _QUANTISED]
    for name, used, instead in rules:
        value = getattr(section, name)
        if not used and value not in (None, 0):
            shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
            what = f'{name} = {shown} has no effect with recipe = "{known.name}"'
            why = "it belongs to another recipe, and would be silently ignored"
            yield _problem("ignored-setting", f"precision.{name}", what, why=why, fix=f"delete it, or {instead}")


def _switches(job: Job) -> Iterator[Problem]:
    """Fields that change what is kept, sent or remembered, where nothing is."""
    section, known = job.precision, RECIPES.get(job.precision.recipe)
    if known is None:
        return
    wide = f'recipe = "{known.name}"'
    low = known.compute == "bf16"
    rules = [
        ("saved", "compute", known.quantised, wide, "a quantised recipe"),
        ("gather", "fp32", job.layout.dp_shard != "none", 'dp_shard = "none"', 'layout.dp_shard = "full"'),
        ("gather", "fp32", low, wide, "a recipe that computes in bf16"),
        ("dispatch", "compute", low, wide, "a recipe that computes in bf16"),
        ("moments", "fp32", job.train.optimizer == "adamw", 'optimizer = "muon"', 'train.optimizer = "adamw"'),
        ("fall_back", False, section.watch_every > 0, "watch_every = 0", "precision.watch_every = 10"),
    ]
    if section.gather == "fp8":
        rules.append(("gather", "fp32", known.quantised, wide, 'precision.gather = "bf16", or a quantised recipe'))
    seen: set[str] = set()
    for name, default, used, mode, instead in rules:
        value = getattr(section, name)
        if used or value == default or name in seen:
            continue
        seen.add(name)
        shown = str(value).lower() if isinstance(value, bool) else f'"{value}"'
        what = f"{name} = {shown} has no effect with {mode}"
        why = "there is nothing that it could act on, and it would be silently ignored"
        yield _problem("ignored-setting", f"precision.{name}", what, why=why, fix=f"delete it, or {instead}")


def _samples(job: Job) -> Iterator[Problem]:
    """The watch, where the run is too short for what it is to see; whether the recipe has one is told elsewhere."""
    section, steps, known = job.precision, job.train.steps, RECIPES.get(job.precision.recipe)
    every = section.watch_every
    if known is None or not known.quantised or every == 0:
        return
    if every > steps:
        what = f"watch_every = {every} is longer than the run of {counted(steps, 'step')}"
        fix = f"precision.watch_every = {max(1, steps // 4)}"
        fix += "" if section.fall_back else ", or 0: no samples"
        yield _problem("watch-every", "precision.watch_every", what, why="it would never come to a sample", fix=fix)
    elif section.fall_back and steps // every < 2:
        what = f"fall_back = true, and watch_every = {every} takes one sample in {counted(steps, 'step')}"
        why = "a layer falls back once it was in trouble in two samples in a row"
        fix = f"train.steps = {2 * every} or more, or delete it"
        if steps > 1:
            fix = f"precision.watch_every = {max(1, steps // 4)}, or delete it"
        yield _problem("watch-every", "precision.fall_back", what, why=why, fix=fix)


def _quantised_layers(job: Job, spec: ModelSpec) -> Iterator[Problem]:
    """A recipe, or its smoothing, where every layer that it could act on is left as it is for its sizes."""
    section, known = job.precision, RECIPES.get(job.precision.recipe)
    if known is None or not known.quantised or section.high_first + section.high_last >= spec.num_layers:
        return
    kept = kept_layers(spec, known.name, high_first=section.high_first, high_last=section.high_last)
    first = section.high_first  # of the blocks that the job doesn't leave out
    if all(kept.values()):
        what = f'recipe = "{known.name}" quantises no layer of this model'
        why = f"e.g. {_reason(kept, first, '')}; the recipe and its settings would be silently ignored"
        fix = f'precision.recipe = "{known.compute}", or wider layers'
        yield _problem("ignored-setting", "precision.recipe", what, why=why, fix=fix)
    elif section.smooth and spec.gated and all(why for (_, name), why in kept.items() if name.endswith(".down")):
        what = f'smooth = true, and recipe = "{known.name}" quantises no down projection'
        why = f"e.g. {_reason(kept, first, '.down')}; there is nothing to smooth"
        yield _problem("ignored-setting", "precision.smooth", what, why=why, fix="delete it, or a wider feed-forward")


def _reason(kept: dict[tuple[int, str], str], layer: int, ending: str) -> str:
    """Of the first layer in that block whose name ends so."""
    return next(f"{name}: {why}" for (at, name), why in kept.items() if at == layer and name.endswith(ending))


def _model_switches(job: Job, spec: ModelSpec) -> Iterator[Problem]:
    """Fields for parts that the model hasn't got."""
    section = job.precision
    if section.dispatch != "compute" and (spec.moe is None or job.layout.ep * job.layout.etp == 1):
        what = f'dispatch = "{section.dispatch}", and no token travels to an expert'
        why = "the model has no experts" if spec.moe is None else "layout.ep = layout.etp = 1: every rank has them all"
        fix = "delete it" if spec.moe is None else "delete it, or layout.ep = 2 or more"
        yield _problem("ignored-setting", "precision.dispatch", what, why=why, fix=fix)
    if section.smooth and not spec.gated:
        what = "smooth = true, and the model's feed-forward has no gate"
        why = "only a product of two projections makes the outliers that Smooth-SwiGLU evens out"
        yield _problem("ignored-setting", "precision.smooth", what, why=why, fix="delete it")


def _high_blocks(job: Job, spec: ModelSpec) -> Iterator[Problem]:
    section, known = job.precision, RECIPES.get(job.precision.recipe)
    high, layers = section.high_first + section.high_last, spec.num_layers
    if known is not None and known.quantised and high >= layers:
        what = f"high_first + high_last = {high} leaves none of the {counted(layers, 'block')} to quantise"
        fix = f'precision.recipe = "{known.compute}", or fewer than {layers} together'
        why = f'recipe = "{known.name}" would then be another name of {known.compute}'
        yield _problem("precision-high", "precision.high_first", what, why=why, fix=fix)


def _positions(job: Job, spec: ModelSpec) -> Iterator[Problem]:
    if job.data.seq_len > spec.max_positions:
        what = f"seq_len = {job.data.seq_len} is longer than the {counted(spec.max_positions, 'position')} of the model"
        why = "positions beyond were never meant to be computed, and learned ones don't exist"
        fix = f"data.seq_len = {spec.max_positions} or less"
        if spec.positions == "rope":
            fix += f", or model.max_position_embeddings = {job.data.seq_len} (with a rope_scaling that suits it)"
        yield _problem("seq-positions", "data.seq_len", what, why=why, fix=fix)


def _devices(job: Job, machine: Machine) -> Iterator[Problem]:
    layout, world, per_node = job.layout, job.layout.world_size, job.machine.gpus_per_node
    degrees = f"dp {layout.dp} x cp {layout.cp} x tp {layout.tp} x pp {layout.pp}"
    if job.machine.gpus is not None and job.machine.gpus != world:
        what = f"gpus = {job.machine.gpus}, but the layout needs {world}"
        fix = f"machine.gpus = {world}"
        rest = layout.cp * layout.tp * layout.pp
        if job.machine.gpus % rest == 0:
            fix += f", or layout.dp = {job.machine.gpus // rest}"
        yield _problem("gpus", "machine.gpus", what, why=f"{degrees} = {counted(world, 'rank')}", fix=fix)
    if machine.device != "cpu" and world > per_node and world % per_node:
        what = f"{counted(world, 'rank')} don't fill hosts of gpus_per_node = {per_node}"
        why = f"{degrees} = {world}; a run takes whole hosts, or a part of one"
        fits = [d for d in range(per_node, 0, -1) if world % d == 0][:1]
        fix = f"machine.gpus_per_node = {fits[0]}, or a layout of {world // per_node * per_node} or "
        fix += f"{(world // per_node + 1) * per_node} ranks"
        yield _problem("gpus-per-node", "machine.gpus_per_node", what, why=why, fix=fix)
