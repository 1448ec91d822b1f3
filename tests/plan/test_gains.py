"""What runs quantised: planner and trainer agree; what a recipe gains, and what stays high where it would lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer import api
from bessemer.core.job import DataSection, Job, MachineSection, ModelSection, PrecisionSection, TrainSection
from bessemer.core.layout import Layout
from bessemer.core.linear_layers import Shape, plan
from bessemer.core.machine import load_machine
from bessemer.core.presets import PRESETS, preset
from bessemer.core.recipes import RECIPES
from bessemer.models.quantise import choice, why_kept
from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.dims import dims_of
from bessemer.plan.gains import choice_of, filled_work, layer_gains, slow_layers
from bessemer.plan.kernels import precision_of
from bessemer.plan.layer import Keys, Work, layer_cost
from bessemer.plan.rates import rates_of
from bessemer.train.assembly import quantising

LAYOUTS = [Layout(), Layout(dp=2, tp=2, ep=4, sequence_parallel=True), Layout(tp=4, cp=2)]
NAMES = list(RECIPES)


def _job(name: str, layout: Layout, recipe: str, machine: str = "h100", **precision: Any) -> Job:
    return Job(
        model=ModelSection(preset=name),
        layout=layout,
        precision=PrecisionSection(recipe=recipe, **precision),
        machine=MachineSection(name=machine),
        data=DataSection(seq_len=4096),
        train=TrainSection(micro_batch=1, global_batch=8),
    )


def _keys(layout: Layout, recipe: str) -> Keys:
    given = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp, "micro_batch": 1}
    given |= {"sequence_parallel": int(layout.sequence_parallel), "recipe": NAMES.index(recipe)}
    return Keys(**{name: np.array([given.get(name, 0)]) for name in Keys.__dataclass_fields__})


def _planned(job: Job, name: str) -> dict[str, float]:
    """By layer the share that the planner prices high: asked of the very function that prices a product."""
    spec, machine = preset(name), load_machine(job.machine.name)
    found: dict[str, float] = {}
    chosen = choice_of(spec, machine, job.precision)

    class Spy:
        emulated = chosen.emulated

        def high(self, layer: str, *args: object) -> np.ndarray:
            share = chosen.high(layer, *args)  # type: ignore[arg-type]
            if layer in chosen.kept:
                found[layer] = float(share[0])
            return share

    c = default_calibration().resolve(gpu_of(machine), "megatron-2026")
    work = Work(seq=float(job.data.seq_len), choice=Spy())  # type: ignore[arg-type]
    layer_cost(_keys(job.layout, job.precision.recipe), dims_of(spec), work, rates_of(machine), c)
    return found


def _trained(job: Job, name: str) -> dict[str, float]:
    how = quantising(job)
    assert how is not None
    kept: dict[str, list[bool]] = {}
    for (_, layer), why in why_kept(preset(name), how).items():
        kept.setdefault(layer, []).append(bool(why))
    return {layer: float(np.mean(values)) for layer, values in kept.items()}


def _fits(name: str, layout: Layout) -> bool:
    spec = preset(name)
    return spec.num_heads % layout.tp == 0 and (spec.moe is None or spec.moe.num_experts % layout.ep == 0)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-row", "fp8-block128"])
@pytest.mark.parametrize("name", list(PRESETS))
def test_planner_and_trainer_run_the_same_layers_quantised(name: str, recipe: str) -> None:
    for layout in (at for at in LAYOUTS if _fits(name, at)):
        job = _job(name, layout, recipe, high_first=1)
        planned, trained = _planned(job, name), _trained(job, name)
        never = {"mlp.router", "head", "join", "mlp.shared_gate", "mlp.experts.gate"}
        assert set(planned) == set(trained) - never, layout
        assert planned == {layer: trained[layer] for layer in planned}, layout


def test_the_work_of_zeros_is_that_of_the_rule() -> None:
    for recipe in NAMES:
        for size in ((1000, 576, 960), (4096, 7168, 576), (48, 64, 64)):
            products = plan(recipe, Shape(*size)).products
            found = filled_work(np.array([NAMES.index(recipe)]), size[0], size[2], size[1])
            assert found[:, 0].tolist() == pytest.approx([p.work for p in products])


def test_what_would_be_slower_stays_high_and_says_why() -> None:
    """A scale per row costs 15 bytes an element: too much for the narrow shares of eight tensor-parallel ranks."""
    job = _job("llama-3-8b", Layout(tp=8), "fp8-row")
    slow = dict(slow_layers(job, preset("llama-3-8b"), load_machine("h100")))
    assert {"attn.qkv", "attn.o", "mlp.down"} <= set(slow) and "times as long as bf16 on h100" in slow["attn.o"]
    gains = {g.name: g for g in layer_gains(job, preset("llama-3-8b"), load_machine("h100"))}
    assert gains["attn.o"].speedup is not None and gains["attn.o"].speedup < 1 and gains["attn.o"].high
    for other in ({"layout": Layout()}, {"precision": PrecisionSection(recipe="fp8-row", emulate=True)}):
        assert slow_layers(job.model_copy(update=other), preset("llama-3-8b"), load_machine("h100")) == ()
    whole = job.model_copy(update={"precision": PrecisionSection(recipe="fp8-row", watch_every=1, fall_back=True)})
    assert slow_layers(whole, preset("llama-3-8b"), load_machine("h100")) == ()  # state hangs on it: any layout


def test_large_products_gain_what_the_rates_say() -> None:
    """Without casts a product of 8192 gains the ratio of the sustained rates, with them a little less."""
    machine = load_machine("h100")
    c, r = default_calibration().resolve(gpu_of(machine), "megatron-2026"), rates_of(machine)
    p = precision_of(np.array([NAMES.index("fp8-delayed")]), r, c)
    most = float(p.gemm_flops_per_s[0] / p.wide_flops_per_s[0])
    found = layer_gains(_job("llama-3-70b", Layout(), "fp8-delayed"), preset("llama-3-70b"), machine)
    assert found and all(g.speedup is not None and 1.2 < g.speedup < most and not g.high for g in found)


def test_a_cpu_emulates_and_predicts_nothing() -> None:
    job, spec = _job("deepseek-v3", Layout(), "fp8-delayed", "cpu-local"), preset("deepseek-v3")
    assert slow_layers(job, spec, load_machine("cpu-local")) == ()
    gains = layer_gains(job, spec, load_machine("cpu-local"))
    assert {(g.unknown, g.speedup, g.high) for g in gains if "experts" in g.name} == {("emulated", None, "")}


def test_routed_experts_stay_high_on_a_gpu_unless_emulation_is_asked_for() -> None:
    from dataclasses import replace

    name = "qwen3-30b-a3b"
    found = {g.name: g for g in layer_gains(_job(name, Layout(), "fp8-current"), preset(name), load_machine("h100"))}
    expert = found["mlp.experts.up"]
    assert "emulated" in expert.high and expert.speedup is not None and expert.speedup < 1
    how = quantising(_job(name, Layout(), "fp8-current", emulate=True))
    assert how is not None
    rows = {row["layer"]: row["runs"] for row in choice(preset(name), replace(how, path="scaled_mm"))}
    assert rows["mlp.experts.up"] == "fp8-current, emulated" and rows["attn.o"] == "fp8-current"


def test_explain_and_check_say_what_the_recipe_gains(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        '[model]\npreset = "llama-3-8b"\n[data]\nseq_len = 4096\n[train]\nglobal_batch = 16\nmicro_batch = 1\n'
        '[layout]\ndp = 2\ntp = 4\ndp_shard = "full"\n[precision]\nrecipe = "fp8-current"\n[machine]\nname = "h100"\n'
    )
    found = api.explain(str(file)) if hasattr(api, "explain") else api.plan.explain(str(file))
    rows = {row["layer"]: row for row in json.loads(json.dumps(found.as_json()))["linear_layers"]}
    assert rows["mlp.down"]["speedup"] == pytest.approx(rows["mlp.down"]["bf16_s"] / rows["mlp.down"]["recipe_s"])
    assert "linear layers in fp8-current" in str(found) and "speed-up (modelled)" in str(found)
    assert "times as fast as bf16, modelled" in api.check(str(file)).summary["linear layers"]
