"""Bytes that real steps exchange against the planner's closed form: equal to the byte, group by group.

All jobs of one world size run one after another in the same ranks. Their groups must not differ in number between
ranks: torch names a group by how many its members have made.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from parallel.parity import job_of
from ranks import run_ranks
from train.toy import run_steps, toy_parts

from bessemer.core.held import layers_by_stage
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.models.quantise import why_kept
from bessemer.plan.parameters import rank_parameters
from bessemer.plan.traffic import traffic
from bessemer.train.assembly import quantising

SP: dict[str, Any] = {"sequence_parallel": True}
FULL: dict[str, Any] = {"dp_shard": "full"}
Bytes = Counter[tuple[str, str]]
Counted = dict[str, tuple[Bytes, dict[str, Any]]]
"""By job, of a rank's step: bytes by names of a group and operation; and the shapes of its parameters."""


def bf16(job: Job, recipe: str = "bf16", **fields: Any) -> Job:
    """The job under another recipe, and other fields of precision."""
    return job.model_copy(update={"precision": job.precision.model_copy(update={"recipe": recipe} | fields)})


def of_batch(global_batch: int, job: Job) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"global_batch": global_batch})})


EVEN: dict[str, Job] = {
    "dp2 replicas": job_of(dp=2),
    "dp2 optimizer": job_of(dp=2, dp_shard="optimizer"),
    "dp2 gradient": job_of("deepseek_v3", dp=2, dp_shard="gradient"),
    "dp2 full": job_of(dp=2, **FULL),
    "mixtral dp2 full": job_of("mixtral", dp=2, **FULL),
    "tp2": job_of(tp=2),
    "tp2 sequence": job_of(tp=2, **SP),
    "tp2 sequence in chunks": job_of(tp=2, tp_chunks=2, **SP),
    "qwen3 tp2": job_of("qwen3", tp=2),
    "gpt2 tp2 sequence": job_of("gpt2", tp=2, **SP),
    "mixtral tp2": bf16(job_of("mixtral", tp=2)),
    "deepseek_v3 tp2": job_of("deepseek_v3", tp=2),
    "deepseek_v3 tp2 sequence": bf16(job_of("deepseek_v3", tp=2, **SP)),
    **{f"cp2 {kind}": job_of(cp=2, cp_kind=kind) for kind in ("ring", "allgather", "ulysses")},
    "cp2 bf16": bf16(job_of(cp=2)),
    "mixtral cp2 allgather": job_of("mixtral", cp=2, cp_kind="allgather"),
    "deepseek_v3 cp2 ring": job_of("deepseek_v3", cp=2),
    "deepseek_v3 cp2 ulysses": bf16(job_of("deepseek_v3", cp=2, cp_kind="ulysses")),
    "pp2 1f1b": job_of(pp=2),
    "pp2 interleaved": job_of(layers=4, pp=2, virtual_stages=2),
    "deepseek_v3 pp2 zb-v": job_of("deepseek_v3", layers=4, pp=2, schedule="zb-v"),
    "mixtral etp2": job_of("mixtral", dp=2, etp=2),
    "tp4 shares key/value heads": job_of(tp=4),
    "dp4 two replicas of full shards": job_of("deepseek_v3", dp=4, replicas=2, **FULL),
    "cp4 ulysses repeats key/value heads": job_of(cp=4, cp_kind="ulysses"),
    "dp2 full tp2 sequence": job_of(dp=2, tp=2, **FULL, **SP),
    "tp2 pp2": job_of(tp=2, pp=2),
    "dp2 tp2 with a unit more on one replica": of_batch(6, job_of(dp=2, tp=2)),
    "dp2 full gathers bf16": bf16(job_of("gpt2", dp=2, **FULL), gather="bf16"),
    "qwen3 dp2 full fp8-current gathers fp8": bf16(job_of("qwen3", dp=2, **FULL), "fp8-current", gather="fp8"),
    "dp2 optimizer fp8-delayed gathers fp8": bf16(job_of(dp=2, dp_shard="optimizer"), "fp8-delayed", gather="fp8"),
    "dp2 full fp8-delayed gathers fp8, second step": bf16(job_of(dp=2, **FULL), "fp8-delayed", gather="fp8"),
    "mixtral dp2 full fp8-delayed gathers fp8": bf16(job_of("mixtral", dp=2, **FULL), "fp8-delayed", gather="fp8"),
    "dp2 full mxfp8 gathers bf16": bf16(job_of(dp=2, **FULL), "mxfp8", gather="bf16"),
    "cp2 gradient fp8-current gathers fp8": bf16(job_of(cp=2, dp_shard="gradient"), "fp8-current", gather="fp8"),
    "tp2 fp8-current smooth": bf16(job_of(tp=2), "fp8-current", smooth=True),
    "dp4 two replicas of full shards, mxfp8 gathers fp8": bf16(
        job_of("deepseek_v3", dp=4, replicas=2, **FULL), "mxfp8", gather="fp8"
    ),
    "dp2 full tp2 sequence fp8-delayed gathers fp8": bf16(
        job_of(dp=2, tp=2, **FULL, **SP), "fp8-delayed", gather="fp8", smooth=True, high_last=1
    ),
}
"""Ranks of one place in the pipeline exchange alike: equal on every rank."""

UNEVEN: dict[str, Job] = {
    "mixtral ep2": job_of("mixtral", dp=2, ep=2),
    "deepseek_v3 ep2": bf16(job_of("deepseek_v3", dp=2, ep=2)),
    "mixtral tp2 sequence ep2": job_of("mixtral", tp=2, ep=2, **SP),
    "dp2 full pp2 interleaved": job_of(layers=4, dp=2, pp=2, virtual_stages=2, **FULL),
    "deepseek_v3 pp2 ep2 tp2 sequence": job_of("deepseek_v3", pp=2, ep=2, tp=2, **SP),
    "mixtral dp2 gradient cp2 ep4": job_of("mixtral", dp=2, cp=2, ep=4, dp_shard="gradient"),
    "mixtral ep2 dispatches fp8": bf16(job_of("mixtral", dp=2, ep=2), dispatch="fp8"),
    "deepseek_v3 dp2 full gathers bf16": bf16(job_of("deepseek_v3", dp=2, **FULL), gather="bf16"),
    "deepseek_v3 dp2 full tp2 sequence etp2 fp8-block128 gathers and dispatches fp8": bf16(
        job_of("deepseek_v3", dp=2, tp=2, etp=2, **FULL, **SP), "fp8-block128", gather="fp8", dispatch="fp8"
    ),
    "dp2 full pp2 interleaved fp8-row gathers fp8": bf16(
        job_of(layers=4, dp=2, pp=2, virtual_stages=2, **FULL), "fp8-row", gather="fp8"
    ),
}
"""Rows go where the router sends them, or FSDP cuts what doesn't come out even: equal in the sum over ranks."""


def step_of(name: str) -> int:
    """Which step of the job is counted."""
    return int(name.endswith("second step"))


def counted(rank: int, world: int, jobs: dict[str, Job]) -> Counted:
    from bessemer.comm import collectives as comm

    found: Counted = {}
    for name, job in jobs.items():
        parts = toy_parts(job, rank)
        shapes = {n: tuple(p.shape) for n, p in parts.module.named_parameters()}
        list(run_steps(parts, 0, step_of(name)))
        comm.reset_collected()
        list(run_steps(parts, step_of(name), step_of(name) + 1))
        found[name] = Counter({key: one.bytes for key, one in comm.collected().items()}), shapes
    return found


@functools.cache
def batch(world: int) -> list[Counted]:
    """Of each rank."""
    jobs = {name: job for name, job in (EVEN | UNEVEN).items() if job.layout.world_size == world}
    ranks: list[Counted] = run_ranks(world, counted, jobs, timeout_s=110)
    return ranks


def compared(name: str, job: Job) -> list[tuple[Bytes, Bytes]]:
    """(counted, closed form) of each rank; a group that serves several purposes is counted under all their names."""
    spec, how, pairs = resolve_model(job.model), quantising(job), []
    kept = [] if how is None else [layer for layer, why in why_kept(spec, how).items() if why]
    for rank, results in enumerate(batch(job.layout.world_size)):
        found, expected = results[name][0], Bytes()
        names = {single: joined for joined, _ in found for single in joined.split("+")}
        for group, operations in traffic(spec, job, rank, step_of(name), kept).items():
            for operation, size in operations.items():
                expected[names[group], operation] += size  # type: ignore[assignment]
        pairs.append((found, expected))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", EVEN)
def test_every_rank_exchanges_what_the_closed_form_says(name: str) -> None:
    for found, expected in compared(name, EVEN[name]):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN)
def test_all_ranks_together_exchange_what_the_closed_form_says(name: str) -> None:
    pairs = compared(name, UNEVEN[name])
    found, expected = (sum((pair[side] for pair in pairs), Bytes()) for side in (0, 1))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", EVEN | UNEVEN)
def test_parameters_are_those_of_the_model(name: str) -> None:
    job = (EVEN | UNEVEN)[name]
    spec, layout = resolve_model(job.model), job.layout
    stages = layers_by_stage(spec, layout, job.data.seq_len)
    for rank, results in enumerate(batch(layout.world_size)):
        own = stages[rank * layout.pp // layout.world_size]
        layers = [layer for stage in own.values() for layer in stage]
        expected = {p.name: p.shape for p in rank_parameters(spec, layout, layers)}
        assert results[name][1] == expected


def test_one_process_exchanges_nothing() -> None:
    job = job_of("deepseek_v3")
    assert traffic(resolve_model(job.model), job) == {}


@pytest.mark.parametrize("train", [{"recompute": "full"}, {"optimizer": "muon"}])
def test_what_the_formulas_leave_out_is_refused(train: dict[str, str]) -> None:
    job = job_of(tp=2)
    job = job.model_copy(update={"train": job.train.model_copy(update=train)})
    with pytest.raises(ValueError, match=next(iter(train))):
        traffic(resolve_model(job.model), job)


def test_amaxes_that_the_formulas_leave_out_are_refused() -> None:
    for job, what in ((job_of("mixtral", dp=2, ep=2), "share experts"), (job_of(tp=2, tp_chunks=2), "tp_chunks")):
        with pytest.raises(ValueError, match=what):
            traffic(resolve_model(job.model), bf16(job, "fp8-current"))


def test_a_large_job_sends_what_it_receives() -> None:
    """Over a pipeline of 2048 ranks with two stages each: every message has two ends."""
    layout = {"dp": 32, "tp": 4, "pp": 16, "ep": 64, "virtual_stages": 2, **FULL, **SP}
    job = Job.model_validate(
        {
            "model": {"preset": "deepseek-v3"},
            "data": {"seq_len": 4096},
            "layout": layout,
            "train": {"global_batch": 2048, "micro_batch": 1},
        }
    )
    spec = resolve_model(job.model)
    inner = 32 * 4
    stages = [traffic(spec, job, rank * inner)["pipeline"] for rank in range(16)]
    sent, received = (sum(stage[operation] for stage in stages) for operation in ("send", "recv"))
    messages = (16 * 2 - 1) * 2 * 2048 // 32
    assert sent == received == messages * 4096 * spec.hidden_size * 4 / 4
