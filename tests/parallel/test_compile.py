"""Compiled blocks against plain ones: loss and gradients, sizes that change, what is kept, and where they are refused.

The backend is aot_eager: it traces forward and backward as inductor does, and runs torch's operators.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel.parity import job_of, one_process, record, whole
from ranks import run_ranks
from torch._dynamo.utils import counters
from train.toy import MODELS, SEQ, toy_batch, toy_job

from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.machine import load_machine
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.parallel.compile import compile_blocks
from bessemer.parallel.problems import problems
from bessemer.runtime.kernels import KernelSample

# torch asks tensors for `grad` while it traces, and hides the warning of it with a filter that "error" overrules
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Gradients = Mapping[str, np.ndarray]


def job_with(family: str = "llama", **train: Any) -> Job:
    return toy_job(model=MODELS[family], train={"compile": "aot_eager"} | train)


def pair(job: Job, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Decoder]:
    """The same model plain and compiled."""
    spec = resolve_model(job.model)
    plain, compiled = (build(spec, seed=job.train.seed, compute_dtype=dtype) for _ in range(2))
    names = [n for n, _ in compiled.named_parameters()]
    compile_blocks(compiled, job)
    assert [n for n, _ in compiled.named_parameters()] == names
    return plain, compiled


def step(module: Decoder, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    """Loss in nats per token, and gradients."""
    module.zero_grad()
    loss_sum, weight_sum = module(**batch)
    loss_sum.backward()
    gradients = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    return loss_sum.item() / weight_sum.item(), gradients


def excess(found: Gradients, expected: Gradients) -> float:
    """The largest deviation in units of the layout promise."""
    assert found.keys() == expected.keys()
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    return max(
        float(np.abs(found[n] - g).max() / (1e-5 * max(np.abs(g).max(), 1e-4 * norm / np.sqrt(g.size))))
        for n, g in expected.items()
    )


def plain_batch(ids: list[int], length: int = SEQ) -> dict[str, torch.Tensor]:
    """Without documents: attention is plain causal."""
    batch = {n: t[:, :length].contiguous() for n, t in toy_batch(ids).items()}
    del batch["segments_BS"]
    return batch


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("llama", 1),
        ("gpt2", 1),
        ("deepseek_v3", 5),  # the dense block; of those with experts two forms of a norm, attention, shared expert
    ],
)
def test_a_compiled_model_equals_the_plain_one(family: str, number: int) -> None:
    plain, compiled = pair(job_with(family))
    batch = toy_batch([1, 2])
    expected, found = step(plain, batch), step(compiled, batch)
    assert graphs() == number, "a graph for each kind of block, shared by its layers"
    assert abs(found[0] - expected[0]) <= 5e-6
    assert excess(found[1], expected[1]) <= 1


def test_a_new_length_is_compiled_once_and_evaluation_too() -> None:
    plain, compiled = pair(job_with())
    made = []
    for length in (SEQ, 24, 20, 28):
        batch = plain_batch([1, 2], length)
        expected, found = step(plain, batch), step(compiled, batch)
        assert abs(found[0] - expected[0]) <= 5e-6
        assert excess(found[1], expected[1]) <= 1
        made.append(graphs())
    assert made == [1, 2, 2, 2], "the second length is the last one that costs a graph"
    with torch.no_grad():
        for length in (28, 20, SEQ):
            batch = plain_batch([1, 2], length)
            torch.testing.assert_close(compiled(**batch), plain(**batch), rtol=1e-6, atol=0)
    assert graphs() == 3


def test_a_compiled_bf16_model_keeps_no_copy_of_a_weight_and_no_mask() -> None:
    plain, compiled = pair(job_with(), torch.bfloat16)
    batch = toy_batch([1, 2, 3])  # 96 tokens: no activation is shaped like a weight
    expected, found = step(plain, batch), step(compiled, batch)
    assert abs(found[0] - expected[0]) <= 5e-4
    for name, gradient in expected[1].items():
        assert np.abs(found[1][name] - gradient).max() <= 0.03 * np.abs(gradient).max(), name
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(**batch)
    shapes = {p.shape for p in compiled.blocks.parameters() if p.dim() == 2}
    masters = {p.data_ptr() for p in compiled.parameters()}
    weights = [t for t in saved if t.shape in shapes]
    assert weights and all(t.data_ptr() in masters for t in weights)
    heads = [t for t in saved if t.dim() == 4]
    assert heads and all(t.shape[-2:] != (SEQ, SEQ) for t in heads)


def test_a_kernel_sample_counts_compiled_products() -> None:
    plain, compiled = pair(job_with())
    batch = plain_batch([1, 2])
    samples = []
    for module in (plain, compiled, compiled):  # compiled under the sample, then run under it
        with KernelSample() as sample:
            step(module, batch)
        samples.append(sample.flops)
    assert graphs() == 1
    assert samples[0] == samples[1] == samples[2]


RANKS: dict[str, Job] = {
    "dp2": job_of(dp=2),
    "dp2 full": job_of(dp=2, dp_shard="full"),
    "pp2": job_of(pp=2),
    "cp2": job_of(cp=2),
    "mixtral dp2 full ep2": job_of("mixtral", dp=2, dp_shard="full", ep=2),
}


def records(rank: int, world: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Of each job what `record` tells, and the graphs it made; in one process, whose jobs share graphs."""
    found = []
    for job in jobs:
        before = graphs()
        found.append(record(rank, world, job) | {"graphs": graphs() - before})
    return found


def test_compiled_blocks_hold_under_data_pipeline_context_and_expert_parallelism() -> None:
    jobs = [
        job.model_copy(update={"train": job.train.model_copy(update={"compile": "aot_eager"})})
        for job in RANKS.values()
    ]
    ranks = run_ranks(2, records, jobs, timeout_s=110)
    made = dict(zip(RANKS, [r["graphs"] for r in ranks[0]], strict=True))
    # a block, once more where FSDP2 has it; two forms of a norm, and the feed-forward part or attention
    assert made == {"dp2": 1, "dp2 full": 1, "pp2": 0, "cp2": 3, "mixtral dp2 full ep2": 3}
    for at, (name, job) in enumerate(RANKS.items()):
        alone = job.model_copy(update={"layout": type(job.layout)(), "keep": type(job.keep)()})
        expected, found = one_process(alone.model_dump_json()), [r[at] for r in ranks]
        assert found[0]["losses"] == pytest.approx(expected["losses"], rel=0, abs=5e-6), name
        assert excess(whole([r["gradients"] for r in found]), whole([expected["gradients"]])) <= 1, name


def inductor_step(rank: int, world: int, cache: str) -> tuple[tuple[float, Gradients], tuple[float, Gradients], int]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    plain, compiled = pair(job_with(compile="inductor"))
    batch = toy_batch([1, 2])
    return step(plain, batch), step(compiled, batch), graphs()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_equals_the_plain_model(tmp_path: Path) -> None:
    (expected, found, made) = run_ranks(1, inductor_step, str(tmp_path), timeout_s=280)[0]
    assert made == 1
    assert abs(found[0] - expected[0]) <= 5e-6
    assert excess(found[1], expected[1]) <= 1


def refused(job: Job) -> dict[str, str]:
    """By code, what is wrong with `train.compile`."""
    found = problems(job, resolve_model(job.model), load_machine("cpu-local"))
    return {p.code: p.what for p in found if p.where == "train.compile"}


@pytest.mark.parametrize(
    ("code", "sections"),
    [
        ("compile-tensor", {"layout": {"tp": 2}}),
        ("compile-schedule", {"layout": {"pp": 2, "schedule": "zb-h1"}}),
        ("compile-schedule", {"layout": {"pp": 2, "schedule": "dualpipev"}}),
        ("compile-recompute", {"train": {"recompute": "full"}}),
        ("compile-recipe", {"precision": {"recipe": "fp8-row"}}),
    ],
)
def test_a_job_that_no_graph_holds_is_refused(code: str, sections: dict[str, dict[str, Any]]) -> None:
    train = sections.get("train", {})
    assert refused(toy_job(**sections | {"train": train | {"compile": "aot_eager"}})).keys() == {code}
    assert not refused(toy_job(**sections))


@pytest.mark.parametrize("layout", [job.layout for job in RANKS.values()])
def test_what_holds_is_not_refused(layout: Any) -> None:
    assert not refused(toy_job(layout=layout.model_dump(), train={"compile": "aot_eager"}))


def test_inductor_needs_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = problems(job_with(compile="inductor"), None, load_machine("cpu-local"))
    assert [p.code for p in found] == ["compile-tools", "compile-tools"]
    assert "no-such-compiler" in found[0].what and "Python.h" in found[1].what
    assert not problems(job_with(compile="inductor"), None, load_machine("h100"))
    assert not refused(job_with())
