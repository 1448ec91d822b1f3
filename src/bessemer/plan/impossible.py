"""When no layout fits: which limit, by how much, and the smallest changes after which one does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bessemer.core.problem import Problem
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import RECOMPUTE
from bessemer.core.units import format_bytes
from bessemer.plan.axes import NAMED, Request, axis_values, request_problems
from bessemer.plan.enumerate import enumerate_layouts
from bessemer.plan.search import Found, search
from bessemer.plan.space import DP_SHARDS

__all__ = ["RULES", "impossible"]

_MORE = (2, 4, 8, 16, 32, 64, 128)
_NEAR = 64
"""How far around a batch or a number of devices the nearest possible one is looked for."""


def impossible(found: Found) -> Problem:
    """The problem of a search in which nothing fits, with fixes that were tried and do."""
    request = found.request
    if found.smallest is None:
        return _no_layout(found)
    need, limit = float(found.smallest.prices.memory_bytes[0]), request.rank_machine.limit_bytes or 0
    row = found.smallest.layouts.row(0)
    degrees = " ".join(f"{k} {row[k]}" for k in ("dp", "tp", "pp", "cp", "ep") if row[k] != 1) or "one device"
    lines = list(found.smallest.memory(0).items())[:3]
    fixes = list(_fixes(request))
    return Problem(
        code="plan-memory",
        where="gpus",
        what=f"none of {found.searched} layouts fits: the smallest needs {format_bytes(need)} a device, "
        f"{request.machine.name} has {format_bytes(limit)}, {format_bytes(need - limit)} too little",
        why=f"the smallest: {degrees}, dp_shard {row['dp_shard']}, recompute {row['recompute']}; largest: "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in lines),
        fix=" or ".join(fixes) or "a machine with more memory, or a smaller model",
    )


def _lean(request: Request) -> Request:
    """The part of the space that needs the least memory: what isn't fixed is set to what saves most."""
    small = {
        "recompute": (list(RECOMPUTE).index("full"),),
        "dp_shard": (0, DP_SHARDS.index("full")),
        "micro_batch": (1,),
        "recipe": tuple(axis_values(request, "recipe")[:1]),
    }
    return replace(request, fixed={**small, **request.fixed})


def _fits(request: Request) -> bool:
    return not request_problems(request) and search(_lean(request), kept=1).feasible > 0


def _fixes(request: Request) -> Iterator[str]:
    """Single changes that make something fit, each the smallest of its kind."""
    for name in request.fixed:
        rest: Mapping[str, tuple[int, ...]] = {k: v for k, v in request.fixed.items() if k != name}
        if _fits(replace(request, fixed=rest)):
            named = NAMED.get(name)
            shown = ",".join(named[v] if named else str(v) for v in request.fixed[name])
            yield f"without --fix {name}={shown}"
    offload = {**request.fixed, "offload_optimizer": (1,)}
    if "offload_optimizer" not in request.fixed and _fits(replace(request, fixed=offload)):
        yield "--fix offload_optimizer=true"
    for factor in _MORE:
        more = replace(request, num_gpus=request.num_gpus * factor)
        if _fits(more):
            yield f"--gpus {more.num_gpus}"
            break
    seq = request.seq_len
    while seq > 128:
        seq //= 2
        if _fits(replace(request, seq_len=seq)):
            yield f"--seq {seq}"
            break


RULES = {
    "batch-split": "the global batch must be micro_batch x dp x a whole number",
    "tp-heads": "tp must divide the attention heads",
    "tp-kv-heads": "tp and the key/value heads must divide one another",
    "tp-ffn": "tp must divide the feed-forward width",
    "pp-layers": "a pipeline stage needs a layer",
    "cp-sequence": "cp must cut the sequence into equal pieces",
    "ep-experts": "ep must divide the experts",
    "ep-no-experts": "the model has no experts",
    "ep-ranks": "ep x etp must divide the ranks of a stage",
    "ignored-setting": "a fixed value has no effect there",
    "schedule-shape": "the schedule needs other micro-batches or virtual stages",
    "schedule-micro": "the schedule needs more micro-batches",
    "stage-sum": "the outer stages leave no even rest",
    "fixed": "the fixed values exclude one another",
}


def _no_layout(found: Found) -> Problem:
    request = found.request
    most = sorted(found.cut.items(), key=lambda item: -item[1])[:3]
    why = "; ".join(f"{code}: {RULES.get(code, 'see docs/errors.md')}" for code, _ in most)
    fixes = [
        f"--gpus {n}" for n in _near(request.num_gpus, request.machine.gpus_per_node) if _any(request, num_gpus=n)
    ][:1]
    fixes += [f"--global-batch {n}" for n in _near(request.global_batch, 1) if _any(request, global_batch=n)][:1]
    fixes += [
        f"without --fix {name}"
        for name in request.fixed
        if _any(request, fixed={k: v for k, v in request.fixed.items() if k != name})
    ]
    recipe = "".join(f" with {list(RECIPES)[r]}" for r in request.fixed.get("recipe", ()))
    return Problem(
        code="plan-no-layout",
        where="fix" if request.fixed else "gpus",
        what=f"no layout of {request.num_gpus} devices keeps every rule{recipe}: all were cut before they were priced",
        why=why or "no degrees multiply to that number of devices",
        fix=" or ".join(fixes) or "fewer fixed values, or another number of devices",
    )


def _near(number: int, unit: int) -> list[int]:
    """Numbers around `number`, nearest first."""
    steps = [number + sign * k * unit for k in range(1, _NEAR + 1) for sign in (1, -1)]
    return [n for n in steps if n > 0]


def _any(request: Request, **changed: object) -> bool:
    other = replace(request, **changed)  # type: ignore[arg-type]
    return not request_problems(other) and enumerate_layouts(_lean(other)).size > 0
