"""Data parallelism against one process, in fp32: loss, every gradient, the norm and three updates.

The tolerance is the layout promise: loss within 5e-6; every gradient within 1e-5 of the larger of its own largest
element and 1e-4 of the global norm over the square root of its size.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from router_margin import smallest_margin
from train.toy import MODELS, run_steps, toy_job, toy_parts

from bessemer.core.job import Job
from bessemer.parallel import data as parallel_data
from bessemer.parallel.mesh import Mesh
from bessemer.train.state import slices_of, state_slices

STEPS = 3
Slices = list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]


SEEDS = {"llama": 1234, "mixtral": 15, "deepseek_v3": 3}
"""Of the models with experts a seed under which no token of the reference run is near a tie."""
MARGIN = 1e-4


def job_of(dp: int, family: str = "llama", **layout: Any) -> Job:
    keep = {"replicas": layout.pop("replicas")} if "replicas" in layout else {}
    train = {"global_batch": 16, "clip": 0.5, "seed": SEEDS[family]}
    return toy_job(model=MODELS[family], layout={"dp": dp, **layout}, train=train, keep=keep)


def record(rank: int, world: int, job: Job, sabotage: str = "") -> dict[str, Any]:
    """Three steps of a rank: its losses, norms, the first step's gradients and the last parameters, as slices."""
    _sabotage(sabotage)
    torch.manual_seed(rank)  # nothing may depend on the global generator
    parts = toy_parts(job, rank)
    first: list[Slices] = []
    update = parts.optimizer.step

    def keep_gradients(factor: float) -> None:
        if not first:
            grads = {n: p.grad for n, p in parts.optimizer.params.items() if p.grad is not None}
            first.append(_plain(slices_of(parts.module, grads)))
        update(factor)

    parts.optimizer.step = keep_gradients  # type: ignore[method-assign]
    with smallest_margin(parts.module) if world == 1 else contextlib.nullcontext([]) as margins:
        results = list(run_steps(parts, 0, STEPS))
    assert min(margins, default=MARGIN) >= MARGIN, "a tie: choose another seed"
    return {
        "experts": [r.experts for r in results],
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": [r.weight for r in results],
        "gradients": first[0],
        "state": _plain(state_slices(parts.module, None)),
    }


def _plain(slices: list[Any]) -> Slices:
    return [(s.name, s.global_shape, s.global_offset, s.tensor.clone().numpy()) for s in slices]


def _sabotage(what: str) -> None:
    """Leave out one reduction, as a mistake in the code would."""
    if what == "replica sum":
        parallel_data.ReplicaSum.start = lambda self, buffer: None  # type: ignore[method-assign]
    elif what == "load sum":
        whole_sum = Mesh.sum_over_world
        Mesh.sum_over_world = lambda self, values: (whole_sum(self, values[:3]), values)[1]  # type: ignore[method-assign]
    elif what == "weight sum":
        Mesh.sum_over_world = lambda self, values: values  # type: ignore[method-assign]
    elif what == "shard mean":
        parallel_data.FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    elif what == "partial sum":
        parallel_data.Sharded._across_replicas = (  # type: ignore[method-assign]
            lambda self, index, scattered: (self._sum.start(scattered) if self._last else None) and None
        )


def whole(parts: list[Slices]) -> dict[str, np.ndarray]:
    """The tensors that the slices of all ranks tile; replicas must agree bitwise where they overlap."""
    tensors: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for slices in parts:
        for name, shape, offset, block in slices:
            tensor = tensors.setdefault(name, np.zeros(shape, np.float32))
            mask = filled.setdefault(name, np.zeros(shape, bool))
            at = tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))
            assert (tensor[at][mask[at]] == block[mask[at]]).all(), f"replicas differ in {name}"
            tensor[at], mask[at] = block, True
    assert all(mask.all() for mask in filled.values()), "some elements belong to no rank"
    return tensors


@functools.cache
def one_process(family: str) -> dict[str, Any]:
    return record(0, 1, job_of(1, family))


def deviations(job: Job, sabotage: str = "") -> dict[str, float]:
    """Largest excess over the promise, 1.0 being exactly at it: of loss, gradients, norm; and of the parameters."""
    assert job.model.family is not None
    reference = one_process(job.model.family)
    ranks = run_ranks(job.layout.dp, record, job, sabotage)
    same = all(r["losses"] == ranks[0]["losses"] and r["norms"] == ranks[0]["norms"] for r in ranks)
    assert same, "ranks differ in the losses or norms they report"
    if not sabotage:
        assert all(r["experts"] == reference["experts"] for r in ranks), "the experts' load differs"
    expected, found = whole([reference["gradients"]]), whole([r["gradients"] for r in ranks])
    assert expected.keys() == found.keys()
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    params, now = whole([reference["state"]]), whole([r["state"] for r in ranks])
    return {
        "loss": max(abs(a - b) for a, b in zip(ranks[0]["losses"], reference["losses"], strict=True)) / 5e-6,
        "norm": max(abs(a / b - 1) for a, b in zip(ranks[0]["norms"], reference["norms"], strict=True)) / 1e-5,
        "gradient": max(
            np.abs(found[n] - g).max() / (1e-5 * max(np.abs(g).max(), 1e-4 * norm / np.sqrt(g.size)))
            for n, g in expected.items()
        ),
        "parameters": max(np.abs(now[n] - p).max() for n, p in params.items()),
    }


LAYOUTS = {
    "dp2 replicas": job_of(2),
    "dp4 replicas": job_of(4),
    "dp2 optimizer": job_of(2, dp_shard="optimizer"),
    "dp2 gradient": job_of(2, dp_shard="gradient"),
    "dp2 full": job_of(2, dp_shard="full"),
    "dp4 two replicas of optimizer shards": job_of(4, dp_shard="optimizer", replicas=2),
    "dp4 two replicas of gradient shards": job_of(4, dp_shard="gradient", replicas=2),
    "dp4 two replicas of full shards": job_of(4, dp_shard="full", replicas=2),
    "mixtral dp2 replicas": job_of(2, "mixtral"),
    "mixtral dp2 full": job_of(2, "mixtral", dp_shard="full"),
    "deepseek_v3 dp2 replicas": job_of(2, "deepseek_v3"),
    "deepseek_v3 dp2 optimizer": job_of(2, "deepseek_v3", dp_shard="optimizer"),
    "deepseek_v3 dp2 gradient": job_of(2, "deepseek_v3", dp_shard="gradient"),
    "deepseek_v3 dp4 two replicas of full shards": job_of(4, "deepseek_v3", dp_shard="full", replicas=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_data_parallel_layout_equals_one_process(name: str) -> None:
    found = deviations(LAYOUTS[name])
    assert found["loss"] <= 1, found
    assert found["gradient"] <= 1, found
    assert found["norm"] <= 1, found
    # Adam divides by the gradient's own size, so a tiny gradient's rounding shows whole: half a percent of lr
    assert found["parameters"] <= 5e-5, found


@pytest.mark.parametrize(
    ("name", "sabotage"),
    [
        ("dp2 replicas", "replica sum"),
        ("dp2 replicas", "weight sum"),
        ("dp2 full", "shard mean"),
        ("dp2 full", "weight sum"),
        ("dp4 two replicas of optimizer shards", "replica sum"),
        ("dp4 two replicas of full shards", "partial sum"),
    ],
)
def test_a_missing_or_wrongly_scaled_reduction_is_noticed(name: str, sabotage: str) -> None:
    """The test above must be able to fail: leave out one reduction and some bar breaks."""
    try:
        found = deviations(LAYOUTS[name], sabotage)
    except AssertionError as error:
        assert "differ in" in str(error), error
        return
    assert max(found["loss"], found["gradient"], found["norm"]) > 100, found


@pytest.mark.parametrize("name", ["deepseek_v3 dp2 replicas", "deepseek_v3 dp2 gradient"])
def test_an_unsummed_load_moves_the_selection_biases_apart(name: str) -> None:
    try:
        found = deviations(LAYOUTS[name], "load sum")
    except AssertionError as error:
        assert "replicas differ in layers.1.mlp.router.bias" in str(error), error
        return
    assert found["parameters"] > 1e-3, found
