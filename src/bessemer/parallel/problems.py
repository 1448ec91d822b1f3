"""Contradictions between the layout and the model. No torch: `bessemer check` runs them before anything starts."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.layout import RUNNABLE, Layout
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, nearest, one_of
from bessemer.core.recipes import RECIPES
from bessemer.core.schedules import SCHEDULES, check_shape
from bessemer.core.stages import num_stages

__all__ = ["problems"]

_LARGEST_DEGREE = 4096
"""No fix names a larger degree: no tensor, context or expert group is wider than that."""


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """All contradictions of the layout; those with the model only where `spec` could be read."""
    layout = job.layout
    found = [*_ignored(layout), *_sequence(job, spec), *_schedule(job), *_not_runnable(layout), *_compile(job, machine)]
    if spec is not None:
        found += [*_tensor(layout, spec), *_pipeline(layout, spec), *_ulysses(layout, spec), *_experts(job, spec)]
    return found


def _problem(code: str, where: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=f"layout.{where}", what=what, why=why, fix=fix)


def _degrees(fits: Callable[[int], bool], near: int, count: int = 5) -> list[int]:
    """The degrees that fit and lie nearest to `near`, ascending. 1 always fits."""
    candidates = [d for d in range(1, min(4 * near, _LARGEST_DEGREE) + 1) if fits(d)]
    return sorted(sorted(candidates, key=lambda d: (abs(d - near), d))[:count])


def _ignored(layout: Layout) -> Iterator[Problem]:
    """Settings that have no effect in this layout. A value that equals the default is no setting."""
    default = Layout()
    staged = (("schedule", "orders"), ("virtual_stages", "splits"), ("stage_layers", "fills"))
    cases = [
        *((name, layout.pp, "pp", 1, f"it {verb} the stages of a pipeline") for name, verb in staged),
        ("cp_kind", layout.cp, "cp", 1, "it says how the ranks of one sequence exchange keys and values"),
        ("tp_chunks", layout.tp, "tp", 1, "it sends pieces of what tensor-parallel ranks exchange"),
        ("sequence_parallel", layout.tp, "tp", 1, "it shares out the activations that tensor parallelism replicates"),
    ]
    for name, degree, axis, idle, why in cases:
        value = getattr(layout, name)
        if degree == idle and value != getattr(default, name):
            shown = _shown(value)
            what = f"{name} = {shown} has no effect with {axis} = 1"
            yield _problem("ignored-setting", name, what, why=why, fix=f"delete it, or layout.{axis} = 2 or more")


def _compile(job: Job, machine: Machine | None) -> Iterator[Problem]:
    """Where a block can't be a graph (`parallel.compile`), and where nothing could build one."""
    layout, train, recipe = job.layout, job.train, RECIPES.get(job.precision.recipe)
    if train.compile == "none":
        return
    if layout.tp > 1:
        why = "each product of a block exchanges with other ranks while the next one runs, which a graph can't hold"
        yield _note("compile-tensor", job, f"does not hold with tp = {layout.tp}", why, "layout.tp = 1")
    schedule = SCHEDULES.get(layout.schedule)
    if layout.pp > 1 and schedule is not None and schedule.split_backward:
        what = f'does not hold with schedule = "{schedule.name}"'
        why = "it puts weight gradients off, and the backward pass of a compiled block makes all gradients at once"
        yield _note("compile-schedule", job, what, why, 'layout.schedule = "1f1b"')
    if train.recompute != "none":
        what = f'does not hold with recompute = "{train.recompute}"'
        why = "a graph has no parts that could be dropped; the compiler chooses what its backward pass makes again"
        yield _note("compile-recompute", job, what, why, 'train.recompute = "none"')
    if recipe is not None and recipe.quantised:
        what = f'does not hold with recipe = "{recipe.name}"'
        why = "graphs are known to give the same results with bfloat16 and float32 products only"
        yield _note("compile-recipe", job, what, why, 'precision.recipe = "bf16"')
    if train.compile == "inductor" and machine is not None and machine.name == "cpu-local":
        yield from _missing_tools(job)


def _missing_tools(job: Job) -> Iterator[Problem]:
    """What inductor needs to build for this computer's CPU, and can't find."""
    why, compiler = "it writes C++ and builds that when a block is first called", os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        what = f"needs a C++ compiler, and there is no {compiler}"
        yield _note("compile-tools", job, what, why, "apt-get install g++, or set CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield _note("compile-tools", job, "needs Python.h, which is not there", why, "apt-get install python3-dev")


def _note(code: str, job: Job, what: str, why: str, fix: str) -> Problem:
    """A problem of train.compile."""
    what = f'compile = "{job.train.compile}" {what}'
    return Problem(code=code, where="train.compile", what=what, why=why, fix=f'{fix}, or train.compile = "none"')


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_runnable(layout: Layout) -> Iterator[Problem]:
    for name, allowed in RUNNABLE.items():
        value = getattr(layout, name)
        if value in allowed or (name == "schedule" and value not in SCHEDULES):
            continue
        what = f"{name} = {_shown(value)} can be planned but not trained yet"
        fix = one_of(f"layout.{name}", [_shown(v) for v in sorted(allowed, key=str)])
        why = "the trainer has no code for it, and would train something else than was asked for"
        yield _problem("not-runnable", name, what, why=why, fix=fix)


def _schedule(job: Job) -> Iterator[Problem]:
    layout = job.layout
    if layout.schedule in SCHEDULES:
        if layout.pp > 1 and layout.dp % job.replicas == 0 and job.micro_batches > 0:
            yield from _micro_batches(job)
        return
    near = nearest(layout.schedule, SCHEDULES, count=1)
    fix = f'layout.schedule = "{near[0]}"' if near else one_of("layout.schedule", [f'"{s}"' for s in SCHEDULES])
    why = "schedules: " + ", ".join(SCHEDULES)
    yield _problem("schedule-unknown", "schedule", f'schedule = "{layout.schedule}" is not known', why=why, fix=fix)


def _micro_batches(job: Job) -> Iterator[Problem]:
    """What the schedule makes of the micro-batches of a unit, with which it fills and empties the pipeline."""
    layout, given = job.layout, job.micro_batches
    wrong = _refusal(layout, given)
    if wrong is None:
        return
    fits = [n for n in range(1, 8 * layout.pp + 1) if _refusal(layout, n) is None]
    fix, replicas, each = wrong.fix, job.replicas, job.train.micro_batch * job.shard
    if fits and job.keep.unit is None:
        near = sorted(sorted(fits, key=lambda n: (abs(n - given), n))[:2])
        fix = one_of("train.global_batch", [n * each * replicas for n in near])
    why = f"a unit of {job.unit} samples is {given} micro-batches; {wrong.why}"
    yield _problem("schedule-shape", "schedule", wrong.what, why=why, fix=fix)


def _refusal(layout: Layout, num_micro: int) -> Problem | None:
    try:
        check_shape(layout.schedule, layout.pp, num_micro, layout.virtual_stages)
    except ConfigError as error:
        return error.problems[0]
    return None


def _sequence(job: Job, spec: ModelSpec | None) -> Iterator[Problem]:
    layout, seq_len = job.layout, job.data.seq_len
    chunks = 2 * layout.cp
    if layout.cp > 1 and seq_len % chunks:
        what = f"cp = {layout.cp} cannot cut a sequence of {seq_len} tokens into {chunks} equal pieces"
        why = f"pieces: cp = {layout.cp} x 2 (each rank takes an early and a late piece)"
        yield _problem("cp-sequence", "cp", what, why=why, fix=one_of("data.seq_len", _multiples_near(seq_len, chunks)))
    ranks = layout.cp * layout.tp
    divides = layout.sequence_parallel or (spec is not None and spec.moe is not None)
    if divides and layout.tp > 1 and seq_len % ranks:
        where = "sequence_parallel" if layout.sequence_parallel else "tp"
        what = f"{seq_len} tokens are not a multiple of cp {layout.cp} x tp {layout.tp} = {ranks}"
        why = "sequence parallelism gives each tensor-parallel rank an equal piece of the sequence"
        fix = one_of("data.seq_len", _multiples_near(seq_len, ranks))
        if where == "tp":
            why = "each tensor-parallel rank routes an equal piece of the sequence to the experts"
            fits = _degrees(lambda d: seq_len % (layout.cp * d) == 0, layout.tp)
            fix = f"{one_of('layout.tp', fits)}, or {fix}"
        elif spec is None or spec.moe is None:
            fix += ", or layout.sequence_parallel = false"
        yield _problem("sp-sequence", where, what, why=why, fix=fix)
    own = seq_len // (layout.cp * (layout.tp if layout.sequence_parallel else 1))
    if layout.tp > 1 and layout.tp_chunks > 1 and own % layout.tp_chunks:
        what = f"tp_chunks = {layout.tp_chunks} cannot cut the {own} tokens of a rank into equal pieces"
        fits = _degrees(lambda d: own % d == 0, layout.tp_chunks)
        why = "the exchange of one piece runs under the product of the next"
        yield _problem("tp-chunks", "tp_chunks", what, why=why, fix=one_of("layout.tp_chunks", fits))


def _multiples_near(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [m for m in (below, below + unit) if m > 0]


def _tensor(layout: Layout, spec: ModelSpec) -> Iterator[Problem]:
    tp, heads, kv = layout.tp, spec.num_heads, spec.num_kv_heads

    def heads_fit(degree: int) -> bool:
        return heads % degree == 0 and (kv % degree == 0 or degree % kv == 0)

    fix = one_of("layout.tp", _degrees(heads_fit, tp))
    if heads % tp:
        why = "attention is cut between heads, so each rank needs a whole number of them"
        yield _problem("tp-heads", "tp", f"tp = {tp} cannot share {heads} attention heads", why=why, fix=fix)
    if spec.mla is None and kv % tp and tp % kv:
        why = "a rank needs whole heads, or a head whole ranks"
        yield _problem("tp-kv-heads", "tp", f"tp = {tp} cannot share {kv} key/value heads", why=why, fix=fix)
    dense = any(not spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    widths = [("ffn_size", spec.ffn_size)] if dense else []
    if spec.moe is not None and spec.moe.shared_ffn_size:
        widths.append(("shared_ffn_size", spec.moe.shared_ffn_size))
    for name, width in widths:
        if width % tp:
            fits = _degrees(lambda d, w=width: w % d == 0 and heads_fit(d), tp)  # type: ignore[misc]
            what = f"tp = {tp} cannot share a feed-forward width of {width} ({name})"
            why = "each rank holds an equal share of the columns"
            yield _problem("tp-ffn", "tp", what, why=why, fix=one_of("layout.tp", fits))


def _pipeline(layout: Layout, spec: ModelSpec) -> Iterator[Problem]:
    if layout.pp == 1:
        return
    if layout.schedule not in SCHEDULES:
        return
    stages, layers = num_stages(layout), spec.num_layers
    each = stages // layout.pp
    product = f"pp {layout.pp}" + (f" x {each} stages a rank" if each > 1 else "")
    if layers < stages:
        what = f"{layers} layers cannot fill {stages} stages ({product})"
        why = "a stage holds at least one whole layer"
        most = layers // each
        fix = f"layout.pp = {most} or less" if most else f"layout.virtual_stages = {layers // layout.pp or 1} or less"
        yield _problem("pp-layers", "pp", what, why=why, fix=fix)
        return
    if not layout.stage_layers:
        return
    even = [layers // stages + (s < layers % stages) for s in range(stages)]
    given = list(layout.stage_layers)
    if len(given) != stages:
        what = f"stage_layers has {len(given)} entries for {stages} stages ({product})"
        why = "one entry for each stage, in order"
        yield _problem("stage-count", "stage_layers", what, why=why, fix=f"layout.stage_layers = {even}")
    if sum(given) != layers:
        what = f"stage_layers adds up to {sum(given)}, the model has {layers} layers"
        why = "no layer may be dropped or doubled"
        yield _problem("stage-sum", "stage_layers", what, why=why, fix=f"layout.stage_layers = {even}")


def _ulysses(layout: Layout, spec: ModelSpec) -> Iterator[Problem]:
    if layout.cp == 1 or layout.cp_kind != "ulysses" or spec.num_heads % layout.tp:
        return
    heads = spec.num_heads // layout.tp
    if heads % layout.cp:
        what = f"cp = {layout.cp} cannot share the {heads} attention heads that a rank has under tp = {layout.tp}"
        why = '"ulysses" swaps the sequence for heads inside attention'
        fix = one_of("layout.cp", _degrees(lambda d: heads % d == 0, layout.cp)) + ', or layout.cp_kind = "ring"'
        yield _problem("cp-heads", "cp", what, why=why, fix=fix)


def _experts(job: Job, spec: ModelSpec) -> Iterator[Problem]:
    layout = job.layout
    moe, ep, etp = spec.moe, layout.ep, layout.etp
    if moe is None:
        for name, code, degree in (("ep", "ep-no-experts", ep), ("etp", "etp-no-experts", etp)):
            if degree > 1:
                what = f"{name} = {degree} shares out experts, and this model ({spec.family}) has none"
                why = "only mixture-of-experts models have experts"
                yield _problem(code, name, what, why=why, fix=f"layout.{name} = 1")
        return
    if moe.num_experts % ep:
        what = f"ep = {ep} cannot share {moe.num_experts} experts"
        fix = one_of("layout.ep", _degrees(lambda d: moe.num_experts % d == 0, ep))
        yield _problem("ep-experts", "ep", what, why="each rank holds the same number of whole experts", fix=fix)
    if moe.expert_ffn_size % etp:
        what = f"etp = {etp} cannot share an expert's width of {moe.expert_ffn_size}"
        fix = one_of("layout.etp", _degrees(lambda d: moe.expert_ffn_size % d == 0, etp))
        yield _problem("etp-ffn", "etp", what, why="each rank holds an equal share of the columns", fix=fix)
    ranks = layout.dp * layout.cp * layout.tp
    if ranks % (ep * etp):
        what = f"ep {ep} x etp {etp} = {ep * etp} does not divide the {ranks} ranks of a stage"
        why = f"experts live on the ranks of dp {layout.dp} x cp {layout.cp} x tp {layout.tp}"
        fits = _degrees(lambda d: ranks % (d * etp) == 0 and moe.num_experts % d == 0, ep)
        fix = one_of("layout.ep", fits) if fits else one_of("layout.etp", _degrees(lambda d: ranks % d == 0, etp))
        yield _problem("ep-ranks", "ep", what, why=why, fix=fix)
    elif job.shard * layout.cp * layout.tp % (ep * etp):
        own = job.shard * layout.cp * layout.tp
        most = layout.dp // layout.expert_span
        what = f"ep {ep} x etp {etp} = {ep * etp} does not divide the {own} ranks that a stage of one replica has"
        why = f"each of the {job.replicas} replicas is a whole copy of the model, with all its experts"
        yield Problem(
            code="ep-replica",
            where="keep.replicas",
            what=what,
            why=why,
            fix=f"keep.replicas = {most} or a divisor of it",
        )
