"""Every axis alone, every pair, triples and all five at once, against one process."""

from __future__ import annotations

import pytest
from parallel.parity import deviations, holds, job_of

from bessemer.core.job import Job

SP = {"sequence_parallel": True}
SCHEDULES = ("gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipev")

ALONE: dict[str, Job] = {
    "dp2 replicas": job_of(dp=2),
    "dp4 replicas": job_of(dp=4),
    "dp2 optimizer": job_of(dp=2, dp_shard="optimizer"),
    "dp2 gradient": job_of(dp=2, dp_shard="gradient"),
    "dp2 full": job_of(dp=2, dp_shard="full"),
    "dp4 two replicas of optimizer shards": job_of(dp=4, dp_shard="optimizer", replicas=2),
    "dp4 two replicas of gradient shards": job_of(dp=4, dp_shard="gradient", replicas=2),
    "dp4 two replicas of full shards": job_of(dp=4, dp_shard="full", replicas=2),
    **{f"dp4 {kind}": job_of(dp=4, dp_shard=kind) for kind in ("optimizer", "gradient", "full")},
    "mixtral dp2 full": job_of("mixtral", dp=2, dp_shard="full"),
    "deepseek_v3 dp2 gradient": job_of("deepseek_v3", dp=2, dp_shard="gradient"),
    "deepseek_v3 dp4 two replicas of full shards": job_of("deepseek_v3", dp=4, dp_shard="full", replicas=2),
    "tp2": job_of(tp=2),
    "tp2 sequence": job_of(tp=2, **SP),
    "tp4 shares key/value heads": job_of(tp=4),
    "tp4 sequence": job_of(tp=4, **SP),
    "qwen3 tp4 sequence": job_of("qwen3", tp=4, **SP),
    "gpt2 tp2": job_of("gpt2", tp=2),
    "gpt2 tp4 sequence": job_of("gpt2", tp=4, **SP),
    "mixtral tp2": job_of("mixtral", tp=2),
    "mixtral tp4 sequence": job_of("mixtral", tp=4, **SP),
    "deepseek_v3 tp2": job_of("deepseek_v3", tp=2),
    "deepseek_v3 tp2 sequence": job_of("deepseek_v3", tp=2, **SP),
    "deepseek_v3 tp4 sequence": job_of("deepseek_v3", tp=4, **SP),
    "tp2 muon": job_of(tp=2, optimizer="muon"),
    "tp4 muon shares heads": job_of(tp=4, optimizer="muon"),
    **{f"cp2 {kind}": job_of(cp=2, cp_kind=kind) for kind in ("ring", "allgather", "ulysses")},
    **{f"cp4 {kind}": job_of(cp=4, cp_kind=kind) for kind in ("ring", "allgather", "ulysses")},
    "gpt2 cp2": job_of("gpt2", cp=2),
    "mixtral cp2": job_of("mixtral", cp=2),
    "deepseek_v3 cp2 ring": job_of("deepseek_v3", cp=2),
    "mixtral cp4": job_of("mixtral", cp=4, cp_kind="allgather"),
    "deepseek_v3 cp4 ring": job_of("deepseek_v3", cp=4),
    "deepseek_v3 cp2 ulysses": job_of("deepseek_v3", cp=2, cp_kind="ulysses"),
    "pp2": job_of(pp=2),
    "pp2 uneven": job_of(layers=4, pp=2, stage_layers=[3, 1]),
    **{
        f"pp2 {name}": job_of(layers=4, pp=2, schedule=name)
        for name in ("gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipev")
    },
    "pp2 interleaved": job_of(layers=4, pp=2, virtual_stages=2),
    "pp4": job_of(layers=4, pp=4),
    **{f"pp4 {name}": job_of(layers=4, pp=4, schedule=name) for name in ("gpipe", "zb-h1", "zb-h2")},
    **{f"pp4 {name}": job_of(layers=8, pp=4, schedule=name) for name in ("zb-v", "dualpipev")},
    "pp4 interleaved": job_of(layers=8, pp=4, virtual_stages=2),
    "mixtral pp2": job_of("mixtral", pp=2),
    "deepseek_v3 pp4": job_of("deepseek_v3", layers=4, pp=4),
    "deepseek_v3 pp2 zb-v": job_of("deepseek_v3", layers=4, pp=2, schedule="zb-v"),
    "mixtral ep2": job_of("mixtral", dp=2, ep=2),
    "mixtral ep4": job_of("mixtral", dp=4, ep=4),
    "mixtral etp2": job_of("mixtral", dp=2, etp=2),
    "mixtral etp4": job_of("mixtral", dp=4, etp=4),
    "deepseek_v3 ep2": job_of("deepseek_v3", dp=2, ep=2),
}

PAIRS: dict[str, Job] = {
    "dp2 tp2": job_of(dp=2, tp=2),
    "dp2 full tp2 sequence": job_of(dp=2, dp_shard="full", tp=2, **SP),
    "dp2 full tp4 shares heads": job_of(dp=2, dp_shard="full", tp=4),
    "dp2 cp2": job_of(dp=2, cp=2),
    "dp2 gradient cp2": job_of(dp=2, dp_shard="gradient", cp=2),
    "dp2 pp2": job_of(dp=2, pp=2),
    "dp2 pp2 several units a step": job_of(dp=2, dp_shard="full", pp=2, unit=8),
    "dp2 full pp2 interleaved": job_of(layers=4, dp=2, dp_shard="full", pp=2, virtual_stages=2),
    "dp2 optimizer pp2 zb-h1": job_of(layers=4, dp=2, dp_shard="optimizer", pp=2, schedule="zb-h1"),
    "dp4 ep2": job_of("mixtral", dp=4, ep=2),
    "deepseek_v3 dp4 full ep2": job_of("deepseek_v3", dp=4, dp_shard="full", ep=2),
    "mixtral dp4 full ep2, experts cut inside": job_of("mixtral", dp=4, dp_shard="full", ep=4, tp=2),
    "mixtral dp8 full, more ranks than experts": job_of("mixtral", dp=8, dp_shard="full"),
    "mixtral dp8 optimizer muon": job_of("mixtral", dp=8, dp_shard="optimizer", optimizer="muon", seed=1),
    "deepseek_v3 dp4 two replicas ep2": job_of("deepseek_v3", dp=4, dp_shard="full", replicas=2, ep=2),
    "mixtral dp2 full etp2 tp2": job_of("mixtral", dp=2, dp_shard="full", etp=2, tp=2, **SP),
    "tp2 cp2": job_of(tp=2, cp=2),
    "tp2 sequence cp2 ulysses": job_of(tp=2, cp=2, cp_kind="ulysses", **SP),
    "deepseek_v3 tp2 sequence cp2": job_of("deepseek_v3", tp=2, cp=2, **SP),
    "tp2 pp2": job_of(tp=2, pp=2),
    "tp2 sequence pp2 zb-v": job_of(layers=4, tp=2, pp=2, schedule="zb-v", **SP),
    "deepseek_v3 tp2 sequence pp2": job_of("deepseek_v3", tp=2, pp=2, **SP),
    "mixtral tp2 ep2": job_of("mixtral", tp=2, ep=2),
    "mixtral tp2 sequence ep2": job_of("mixtral", tp=2, ep=2, **SP),
    "deepseek_v3 tp2 ep2": job_of("deepseek_v3", tp=2, ep=2),
    "mixtral ep2 etp2": job_of("mixtral", dp=4, ep=2, etp=2),
    "mixtral cp2 etp2": job_of("mixtral", cp=2, etp=2),
    "mixtral pp2 tp2 etp2": job_of("mixtral", pp=2, tp=2, etp=2),
    "mixtral tp2 etp2": job_of("mixtral", tp=2, etp=2, **SP),
    "cp2 pp2": job_of(cp=2, pp=2),
    "deepseek_v3 cp2 pp2": job_of("deepseek_v3", cp=2, pp=2),
    "mixtral cp2 ep2": job_of("mixtral", cp=2, ep=2),
    "deepseek_v3 cp2 ep2 allgather": job_of("deepseek_v3", cp=2, ep=2, cp_kind="allgather"),
    "mixtral pp2 dp2 ep2": job_of("mixtral", pp=2, dp=2, ep=2),
    "deepseek_v3 pp2 dp2 ep2 dualpipev": job_of("deepseek_v3", layers=4, pp=2, dp=2, ep=2, schedule="dualpipev"),
}

MORE: dict[str, Job] = {
    "dp2 tp2 pp2": job_of(dp=2, tp=2, pp=2),
    "deepseek_v3 dp2 tp2 pp2": job_of("deepseek_v3", dp=2, tp=2, pp=2, **SP),
    "dp2 cp2 tp2": job_of(dp=2, dp_shard="full", cp=2, tp=2, **SP),
    "deepseek_v3 dp2 cp2 tp2": job_of("deepseek_v3", dp=2, cp=2, tp=2, **SP),
    "mixtral pp2 ep2 tp2": job_of("mixtral", pp=2, ep=2, tp=2, **SP),
    "deepseek_v3 pp2 ep2 tp2": job_of("deepseek_v3", pp=2, ep=2, tp=2, **SP),
    "llama all axes but experts": job_of(dp=2, dp_shard="full", tp=2, pp=2, cp=2, **SP),
    "mixtral five axes": job_of("mixtral", dp=2, dp_shard="full", tp=2, pp=2, cp=2, ep=4, etp=2, **SP),
    "deepseek_v3 five axes": job_of("deepseek_v3", dp=2, dp_shard="optimizer", tp=2, pp=2, cp=2, ep=2, **SP),
}

RECOMPUTED: dict[str, Job] = {
    "full tp2 sequence": job_of(tp=2, recompute="full", **SP),
    "fine tp2 sequence": job_of(tp=2, recompute="fine", **SP),
    "full cp2": job_of(cp=2, recompute="full"),
    "full dp2 full": job_of(dp=2, dp_shard="full", recompute="full"),
    "fine dp2 full": job_of(dp=2, dp_shard="full", recompute="fine"),
    "full pp2 zb-v": job_of(layers=4, pp=2, schedule="zb-v", recompute="full"),
    "fine pp2 zb-h1": job_of(layers=4, pp=2, schedule="zb-h1", recompute="fine"),
    "mixtral full ep2": job_of("mixtral", dp=2, ep=2, recompute="full"),
    "deepseek_v3 fine tp2 ep2 pp2": job_of("deepseek_v3", tp=2, ep=2, pp=2, recompute="fine", **SP),
    "deepseek_v3 full five axes": job_of(
        "deepseek_v3", dp=2, dp_shard="full", tp=2, pp=2, cp=2, ep=2, recompute="full", **SP
    ),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_made_again_equals_one_process_that_keeps_all(name: str) -> None:
    holds(deviations(RECOMPUTED[name]))


@pytest.mark.parametrize("name", ALONE)
def test_an_axis_alone_equals_one_process(name: str) -> None:
    holds(deviations(ALONE[name]))


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_axes_equals_one_process(name: str) -> None:
    holds(deviations(PAIRS[name]))


@pytest.mark.parametrize("name", MORE)
def test_three_axes_and_more_equal_one_process(name: str) -> None:
    holds(deviations(MORE[name]))
