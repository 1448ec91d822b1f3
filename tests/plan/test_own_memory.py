"""The planner's profile of this project's own trainer: the closed form that `check` uses, for many layouts at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from bessemer.core.job import Job
from bessemer.core.memory import rank_lines
from bessemer.core.resolve import resolve_model
from bessemer.core.schedules import schedule_actions
from bessemer.plan.moments import moments_of
from bessemer.plan.own_memory import own_memory, own_rank_lines
from bessemer.plan.space import Layouts

DENSE: dict[str, Any] = {"tp": 2, "pp": 4, "dp": 4}
SPARSE: dict[str, Any] = {"dp": 32, "pp": 8, "ep": 32, "dp_shard": "optimizer"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama-3-8b", DENSE, {}),
    ("llama-3-8b", DENSE | {"sequence_parallel": True, "tp_chunks": 2}, {"recompute": "mlp"}),
    ("llama-3-8b", DENSE | {"virtual_stages": 2}, {}),
    ("llama-3-8b", DENSE | {"schedule": "gpipe"}, {"recompute": "selective"}),
    ("llama-3-8b", {"dp": 8, "cp": 2, "cp_kind": "ulysses", "dp_shard": "full"}, {"micro_batch": 2}),
    ("llama-3-8b", {"dp": 2, "pp": 4, "dp_shard": "gradient", "stage_layers": [7, 9, 9, 7]}, {}),
    ("qwen3-30b-a3b", {"dp": 64, "ep": 16, "dp_shard": "full"}, {}),
    ("mixtral-8x7b", {"dp": 32, "tp": 2, "ep": 8, "dp_shard": "full"}, {"recompute": "ops"}),
    *[
        ("deepseek-v3", SPARSE | {"schedule": schedule}, {"recompute": recompute})
        for schedule, recompute in itertools.product(("1f1b", "zb-h1", "zb-v", "dualpipev"), ("none", "full"))
    ],
]


def own_job(
    preset: str, layout: dict[str, Any], train: dict[str, Any], recipe: str = "bf16", moments: str = "fp32"
) -> Job:
    sections = {
        "model": {"preset": preset},
        "data": {"seq_len": 4096},
        "layout": layout,
        "train": {"micro_batch": 1, "global_batch": 1024} | train,
        "precision": {"recipe": recipe, "moments": moments},
    }
    return Job.model_validate(sections)


def num_micro(job: Job) -> np.ndarray:
    return np.array([job.train.global_batch / (job.train.micro_batch * job.layout.dp)])


@pytest.mark.parametrize(("preset", "layout", "train"), CASES)
@pytest.mark.parametrize(("recipe", "moments"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp8-current", "fp8")])
def test_it_is_the_closed_form_of_the_check(
    preset: str, layout: dict[str, Any], train: dict[str, Any], recipe: str, moments: str
) -> None:
    job = own_job(preset, layout, train, recipe, moments)
    spec, lay = resolve_model(job.model), Layouts.from_job(job)
    found = own_rank_lines(lay, spec, job.data.seq_len, num_micro(job), precision=job.precision)
    for own, lines in zip(found, rank_lines(job, spec), strict=True):
        for line in ("weights", "optimizer", "gathered"):
            assert own[line] == pytest.approx(lines[line], rel=1e-6)
        assert own["gradients"] == pytest.approx(lines["gradients"] + lines["gradient_sum"], rel=1e-6)
        assert own["activations"] == pytest.approx(lines["activations"], rel=5e-3)
        assert own["transient"] == pytest.approx(lines["working"], rel=0.05)
    heaviest = own_memory(lay, spec, job.data.seq_len, num_micro(job), precision=job.precision)
    assert heaviest.total[0] == pytest.approx(max(sum(own.values()) for own in found), rel=1e-6)


def test_a_layout_weighs_what_it_weighs_among_many() -> None:
    jobs = [own_job(*case) for case in CASES if case[0] == "llama-3-8b"]
    spec = resolve_model(jobs[0].model)
    rows = [Layouts.from_job(job).row(0) for job in jobs]
    many = Layouts.of(len(rows), **{name: [row[name] for row in rows] for name in rows[0]})
    micro = np.concatenate([num_micro(job) for job in jobs])
    together = own_memory(many, spec, 4096, micro, runtime_bytes=1e9)
    for i in range(len(rows)):
        alone = own_memory(many.take(np.array([i])), spec, 4096, micro[[i]], runtime_bytes=1e9)
        assert alone.total[0] == pytest.approx(together.total[i], rel=1e-12)
        assert alone.stage[0] == together.stage[i]
        assert alone.lines["runtime"][0] == 1e9


def test_no_layouts_weigh_nothing() -> None:
    spec = resolve_model(own_job(*CASES[0]).model)
    assert own_memory(Layouts.of(1).take(np.zeros(0, np.int64)), spec, 4096, np.zeros(0)).total.shape == (0,)


SIZES = [(2, 4), (4, 6), (4, 10), (8, 16), (8, 40)]
LISTS = [(name, *size) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v") for size in SIZES]
LISTS += [("dualpipev", pp, micros) for pp, micros in SIZES if micros >= 2 * pp]  # it needs as many


@pytest.mark.parametrize(("schedule", "pp", "micros"), LISTS)
def test_the_fullest_moment_is_that_of_the_schedules_own_lists(schedule: str, pp: int, micros: int) -> None:
    """Whatever a micro-batch weighs whose weight gradients are put off, against one before its backward pass."""
    virtual = 2 if schedule == "1f1b" and micros % pp == 0 else 1
    chunks = 2 if schedule in ("zb-v", "dualpipev") else virtual
    for rank, actions in enumerate(schedule_actions(schedule, pp, micros, virtual)):
        found = moments_of(schedule, (pp, chunks, min(micros, 3 * pp)), rank)
        for put_off in (0.5, 0.9, 2.0, 10.0):
            changes = {"F": 1.0, "B": -1.0, "I": put_off - 1.0, "W": -put_off}
            running = itertools.accumulate(changes.get(action.kind, 0.0) for action in actions)
            assert max(sum(n + put_off * w for n, w in moment) for moment in found) == pytest.approx(max(running))
