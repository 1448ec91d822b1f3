"""The cheapest recompute that fits: against trying all, and what `check` says where none does."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from train.toy import MODELS, SEQ, toy_job

from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.machine import load_machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem
from bessemer.core.recompute import parts_of_layer
from bessemer.core.saved import layer_bytes
from bessemer.parallel.recompute_budget import _Pricing, applied_recompute, least_bytes, rank_sizes
from bessemer.train.problems import problems

H100 = load_machine("h100")


def with_train(job: Job, **train: Any) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update=train)})


def case(family: str = "llama", layers: int = 2, **layout: Any) -> tuple[Job, ModelSpec]:
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    job = toy_job(model=MODELS[family] | {depth: layers}, layout=layout, train={"recompute": "budget"})
    return job, resolve_model(job.model)


def budget(job: Job, share: float, spec: ModelSpec, rank: int = 0) -> Job:
    """A budget of a share of what is kept without recompute."""
    plain = applied_recompute(with_train(job, recompute="none"), spec, rank)
    assert plain is not None
    return with_train(job, recompute_gb=share * plain.kept_bytes / 1e9)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_nothing_cheaper_fits(family: str) -> None:
    """All pairs of sets of parts for two layers, tried one by one."""
    job, spec = case(family)
    pricing = _Pricing(job, spec, H100)
    parts = sorted(parts_of_layer(spec, 0) - {"gather"})
    every = [frozenset(c) for n in range(len(parts) + 1) for c in itertools.combinations(parts, n)]
    sizes = [(pricing.bytes(0, s), pricing.seconds(0, s)) for s in every]
    # bytes are modelled for the sets that are worth it: a projection with norms, the experts without what they hold
    sizes = [
        size
        for size, s in zip(sizes, every, strict=True)
        if "norm" in s or not s & {"qkv", "out", "up", "experts", "router"}
        if "experts" not in s or not s & {"up", "activation", "dispatch"}
    ]
    for share in (0.95, 0.8, 0.6, 0.45, 0.3):
        limited = budget(job, share, spec)
        found = applied_recompute(limited, spec, machine=H100)
        assert found is not None and limited.train.recompute_gb is not None
        limit = limited.train.recompute_gb * 1e9
        assert found.kept_bytes <= limit + 1
        least = min(s1 + s2 for b1, s1 in sizes for b2, s2 in sizes if b1 + b2 <= limit * (1 - 2 / 2000))
        assert found.again_s is not None and found.again_s <= least * (1 + 1e-9)


def test_more_bytes_never_cost_more_and_the_choice_is_the_same_each_time() -> None:
    job, spec = case("deepseek_v3", layers=3)
    found = [applied_recompute(budget(job, share, spec), spec, machine=H100) for share in (0.2, 0.35, 0.5, 0.7, 1.0)]
    seconds = [f.again_s for f in found if f is not None]
    assert len(seconds) == 5 and seconds == sorted(seconds, reverse=True) and seconds[-1] == 0
    assert applied_recompute(budget(job, 0.5, spec), spec, machine=H100) == found[2]


def test_a_cpu_is_priced_alike_on_every_host() -> None:
    job, spec = case("mixtral")
    local = load_machine("cpu-local")
    faster = local.model_copy(update={"memory_bytes_per_s": 1e12})
    limited = budget(job, 0.5, spec)
    assert applied_recompute(limited, spec, machine=local) == applied_recompute(limited, spec, machine=faster)


def test_the_blocks_of_several_predictions_count_as_the_last_layer() -> None:
    job, spec = case("deepseek_v3")
    everything = applied_recompute(with_train(job, recompute="full"), spec)
    assert everything is not None
    assert everything.kept_bytes == 3 * job.train.micro_batch * SEQ * spec.hidden_size * 4 == least_bytes(job, spec)


def test_a_pipeline_rank_pays_for_each_micro_batch_under_way() -> None:
    job, spec = case(layers=4, pp=2)
    first, last = (applied_recompute(with_train(job, recompute="full"), spec, rank) for rank in (0, 1))
    assert first is not None and last is not None
    assert tuple(first.parts) == (0, 1) and tuple(last.parts) == (2, 3)
    assert first.kept_bytes == 2 * last.kept_bytes
    block = applied_recompute(with_train(job, recompute="block", recompute_layers=1), spec, 1)
    assert block is not None and block.parts[2] and not block.parts[3]


def test_layers_that_keep_least_come_first_and_it_is_said() -> None:
    job, spec = case(layers=4)
    found = applied_recompute(budget(job, 0.6, spec), spec, machine=H100)
    assert found is not None
    kept = [layer_bytes(spec, layer, parts, rank_sizes(job)) for layer, parts in found.parts.items()]
    assert kept == sorted(kept) and kept[0] < kept[-1]
    assert re.fullmatch(
        r"recompute budget \(.*layers?: .*\): blocks keep .* of .*, .*% of their forward FLOPs run again, about .* a "
        r"micro-batch \(modelled\)",
        str(found),
    )


def found_problems(job: Job, spec: ModelSpec | None = None) -> list[Problem]:
    return problems(job, resolve_model(job.model) if spec is None else spec, H100)


@pytest.mark.parametrize(
    ("family", "layout", "train", "code", "where", "fixed"),
    [
        ("llama", {}, {"recompute": "block"}, "recompute-layers", "recompute_layers", {"recompute_layers": 1}),
        (
            "llama",
            {},
            {"recompute": "block", "recompute_layers": 3},
            "recompute-layers",
            "recompute_layers",
            {"recompute_layers": 2},
        ),
        ("llama", {}, {"recompute_layers": 1}, "ignored-setting", "recompute_layers", {"recompute": "block"}),
        ("llama", {}, {"recompute_gb": 1.0}, "ignored-setting", "recompute_gb", {"recompute": "budget"}),
        ("llama", {}, {"recompute_modules": ("norm",)}, "ignored-setting", "recompute_modules", {"recompute": "fine"}),
        (
            "llama",
            {},
            {"recompute": "fine", "recompute_modules": ("norm", "router")},
            "recompute-modules",
            "recompute_modules",
            {"recompute_modules": ("norm",)},
        ),
        (
            "mixtral",
            {},
            {"recompute": "fine", "recompute_modules": ("out", "experts", "gather")},
            "recompute-modules",
            "recompute_modules",
            {"recompute_modules": ("experts",)},
        ),
        (
            "llama",
            {},
            {"recompute": "fine", "recompute_modules": ()},
            "recompute-modules",
            "recompute_modules",
            {"recompute": "none", "recompute_modules": None},
        ),
        ("llama", {}, {"recompute": "budget"}, "recompute-budget", "recompute_gb", {"recompute_gb": 10.0}),
        (
            "llama",
            {"pp": 2},
            {"recompute": "budget", "recompute_gb": 1e-5},
            "recompute-budget",
            "recompute_gb",
            {"recompute_gb": 0.01},
        ),
    ],
)
def test_contradictions_are_found_and_the_fix_mends_them(
    family: str, layout: dict[str, Any], train: dict[str, Any], code: str, where: str, fixed: dict[str, Any]
) -> None:
    job = with_train(case(family, **layout)[0], recompute="none")
    broken = with_train(job, **train)
    (problem,) = found_problems(broken)
    assert (problem.code, problem.where) == (code, f"train.{where}")
    assert found_problems(with_train(broken, **fixed)) == []
    shown = {k: f'"{v}"' if isinstance(v, str) else str(v) for k, v in fixed.items() if k in problem.fix}
    assert shown, problem.fix


def test_a_budget_that_a_smaller_micro_batch_would_meet_says_so() -> None:
    job, spec = case()
    job = with_train(job, micro_batch=8, recompute_gb=least_bytes(with_train(job, micro_batch=2), spec) / 1e9)
    (problem,) = found_problems(job)
    assert "train.micro_batch = 2" in problem.fix and "KiB that the inputs" in problem.what
    assert found_problems(with_train(job, micro_batch=2)) == []


def test_only_listed_parts_can_be_named() -> None:
    with pytest.raises(ValueError, match="norm"):
        Job.model_validate({"train": {"recompute": "fine", "recompute_modules": ["norms"]}})


def test_recompute_is_no_part_of_a_runs_identity() -> None:
    plain = Job()
    other = with_train(plain, recompute="budget", recompute_gb=1.0)
    assert other.identity == plain.identity and other.hash != plain.hash
