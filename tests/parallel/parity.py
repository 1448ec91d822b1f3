"""Any layout against one process, in fp32: loss, every gradient, the norm and three updates.

The tolerance is the layout promise: loss within 5e-6; every gradient within 1e-5 of the larger of its own largest
element and 1e-4 of the global norm over the square root of its size. Deviations are given in units of it.

The batches have packed documents and unequal numbers of counted tokens, gradients accumulate over several
micro-batches, the embedding is tied, and 97 tokens of vocabulary are not divisible by anything.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ranks import run_ranks
from router_margin import smallest_margin
from train.toy import MODELS, run_steps, toy_job, toy_parts

from bessemer.core.job import Job
from bessemer.train.assembly import Assembly
from bessemer.train.state import slices_of, state_slices

STEPS = 3
Slices = list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]
Sabotage = Callable[[], None]

SEEDS = {
    ("mixtral", 2): 5,
    ("mixtral", 4): 47,
    ("deepseek_v3", 2): 2,
    ("deepseek_v3", 4): 157,
}
"""Of the models with experts, by layers, a seed under which no token of the reference run is near a tie."""
MARGIN = 1e-4


class Disagreement(AssertionError):
    """Ranks that must hold or report the same don't."""


def disagreed(same: bool, what: str) -> None:
    if not same:
        raise Disagreement(what)


def job_of(family: str = "llama", *, layers: int = 2, model: dict[str, Any] | None = None, **layout: Any) -> Job:
    """The parity job of a toy family under a layout; `replicas`, `unit`, `optimizer`, `recompute`,
    `compile` and `seed` may be named beside the degrees."""
    keep = {name: layout.pop(name) for name in ("replicas", "unit") if name in layout}
    train: dict[str, Any] = {"global_batch": 16, "clip": 0.5, "seed": SEEDS.get((family, layers), 1234)}
    train["eps"] = 1e-3  # at Adam's usual 1e-8 a gradient of almost nothing would show its rounding as a whole update
    for name in ("optimizer", "recompute", "compile", "seed"):
        if name in layout:
            train[name] = layout.pop(name)
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    fields = MODELS[family] | {depth: layers} | (model or {})
    return toy_job(model=fields, layout=layout, train=train, keep=keep)


def first_gradients(parts: Assembly) -> list[Slices]:
    """A list that the next update, and none after it, puts the step's summed gradients into."""
    first: list[Slices] = []
    update = parts.optimizer.step

    def keep_gradients(factor: float) -> None:
        if not first:
            first.append(plain(slices_of(parts.module, parts.optimizer.gradients())))
        update(factor)

    parts.optimizer.step = keep_gradients  # type: ignore[method-assign]
    return first


def record(rank: int, world: int, job: Job, sabotage: Sabotage | None = None) -> dict[str, Any]:
    """Three steps of a rank: its losses, norms, the first step's gradients and the last parameters, as slices."""
    if sabotage is not None:
        sabotage()
    torch.manual_seed(rank)  # nothing may depend on the global generator
    parts = toy_parts(job, rank)
    first = first_gradients(parts)
    with smallest_margin(parts.module) if world == 1 else contextlib.nullcontext([]) as margins:
        results = list(run_steps(parts, 0, STEPS))
    assert min(margins, default=MARGIN) >= MARGIN, f"a tie ({min(margins)}): choose another seed"
    return {
        "experts": [r.experts for r in results],
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": [r.weight for r in results],
        "gradients": first[0],
        "state": plain(state_slices(parts.module, None)),
    }


def plain(slices: list[Any]) -> Slices:
    """As numpy, which a rank can send."""
    return [(s.name, s.global_shape, s.global_offset, s.tensor.clone().numpy()) for s in slices]


def whole(parts: list[Slices]) -> dict[str, np.ndarray]:
    """The tensors that the slices of all ranks tile; copies must agree bitwise where they overlap."""
    tensors: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for slices in parts:
        for name, shape, offset, block in slices:
            tensor = tensors.setdefault(name, np.zeros(shape, np.float32))
            mask = filled.setdefault(name, np.zeros(shape, bool))
            at = tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))
            disagreed(bool((tensor[at][mask[at]] == block[mask[at]]).all()), f"copies differ in {name}")
            tensor[at], mask[at] = block, True
    assert all(mask.all() for mask in filled.values()), "some elements belong to no rank"
    return tensors


@functools.lru_cache
def one_process(job_json: str) -> dict[str, Any]:
    return record(0, 1, Job.model_validate_json(job_json))


def deviations(job: Job, sabotage: Sabotage | None = None) -> dict[str, float]:
    """Largest excess over the promise, 1.0 being exactly at it: of loss, gradients, norm; and of the parameters."""
    plain = job.train.model_copy(update={"recompute": "none", "compile": "none"})
    alone = job.model_copy(update={"layout": type(job.layout)(), "keep": type(job.keep)(), "train": plain})
    reference = one_process(alone.model_dump_json())
    world = job.layout.world_size
    ranks = run_ranks(world, record, job, sabotage, timeout_s=100)
    same = all(r["losses"] == ranks[0]["losses"] and r["norms"] == ranks[0]["norms"] for r in ranks)
    disagreed(same, "ranks differ in the losses or norms they report")
    if sabotage is None:
        disagreed(all(r["experts"] == reference["experts"] for r in ranks), "the experts' load differs")
        disagreed(all(r["weights"] == reference["weights"] for r in ranks), "the number of counted tokens differs")
    expected, found = whole([reference["gradients"]]), whole([r["gradients"] for r in ranks])
    assert expected.keys() == found.keys()
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    params, now = whole([reference["state"]]), whole([r["state"] for r in ranks])
    excess = {
        n: np.abs(found[n] - g).max() / (1e-5 * max(np.abs(g).max(), 1e-4 * norm / np.sqrt(g.size)))
        for n, g in expected.items()
    }
    worst = max(excess, key=lambda n: excess[n])
    return {
        "loss": max(abs(a - b) for a, b in zip(ranks[0]["losses"], reference["losses"], strict=True)) / 5e-6,
        "norm": max(abs(a / b - 1) for a, b in zip(ranks[0]["norms"], reference["norms"], strict=True)) / 1e-5,
        "gradient": float(excess[worst]),
        "parameters": float(max(np.abs(now[n] - p).max() for n, p in params.items())),
        worst: float(excess[worst]),
    }


def holds(found: dict[str, float]) -> None:
    """Within the promise."""
    assert found["loss"] <= 1, found
    assert found["gradient"] <= 1, found
    assert found["norm"] <= 1, found
    assert found["parameters"] <= 2e-6, found  # after three updates with lr 0.01


def breaks(job: Job, sabotage: Sabotage) -> None:
    """With one reduction left out or wrongly scaled, the check above must fail, and not by a little."""
    try:
        found = deviations(job, sabotage)
    except Disagreement:
        return
    assert max(found["loss"], found["gradient"], found["norm"], found["parameters"] / 2e-6) > 10, found
