"""The cost model: closed forms of kernels, conservation of FLOPs, monotonicity, one code path, memory."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from bessemer.core.counts import flops_per_token, parameter_counts
from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.layout import Layout
from bessemer.core.machine import load_machine
from bessemer.core.presets import preset
from bessemer.core.recipes import RECIPES, recipe
from bessemer.core.recompute import RECOMPUTE, recompute
from bessemer.plan.calibration import ERAS, default_calibration, gpu_of
from bessemer.plan.dims import dims_of
from bessemer.plan.kernels import FORWARD, attention_flops, gemm_s, grouped_share, mean_keys, precision_of
from bessemer.plan.layer import CATEGORIES, Keys, Work, layer_cost
from bessemer.plan.memory import MEMORY_LINES, stage_params
from bessemer.plan.pipeline import spelled_stages, stage_layers
from bessemer.plan.price import BREAKDOWN, price, price_case
from bessemer.plan.rates import rates_of
from bessemer.plan.space import Layouts
from bessemer.plan.step import Case, slowest_rank

MODELS = ["llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-3-175b"]


def context(name="h100", era="megatron-2026"):
    machine = load_machine(name)
    return rates_of(machine), default_calibration().resolve(gpu_of(machine), era)


def some(count=200, seed=1, **fixed):
    """Random layouts of 256 GPUs."""
    rng = np.random.default_rng(seed)
    tp, pp, cp = (2 ** rng.integers(0, k, count) for k in (4, 4, 2))
    columns = {
        "dp": 256 // (tp * pp * cp),
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "micro_batch": 2 ** rng.integers(0, 2, count),
        "virtual_stages": 1 + rng.integers(0, 3, count),
        "schedule": rng.integers(0, 7, count),
        "dp_shard": rng.integers(0, 4, count),
        "recompute": rng.integers(0, len(RECOMPUTE), count),
        "recompute_layers": rng.integers(0, 4, count),
        "recipe": list(RECIPES).index("bf16") + 2 * rng.integers(0, 2, count),
        "sequence_parallel": rng.integers(0, 2, count),
        "cp_kind": rng.integers(0, 3, count),
        "tp_overlap": rng.integers(0, 2, count),
        "graph": rng.integers(0, 2, count),
        "offload_optimizer": rng.integers(0, 2, count),
        "offload_activations": rng.integers(0, 2, count),
    }
    return Layouts.of(count, **{**columns, **fixed})


def test_a_large_product_takes_its_flops_over_the_sustained_rate():
    r, c = context()
    c = replace(c, gemm_half_k=0.0, gemm_half_n=0.0)
    p = precision_of(np.array([list(RECIPES).index("bf16")]), r, c)
    n = 65536.0
    seconds = gemm_s(n, n, n, p, r, c)[FORWARD, 0]
    flops = 2 * n**3 / (r.bf16 * c.clock * c.gemm_bf16)
    assert seconds == pytest.approx(flops + 6 * n * n / r.hbm_bytes_per_s)


def test_weight_gradients_also_read_and_write_the_float32_buffer():
    r, c = context()
    p = precision_of(np.array([1]), r, c)
    forward, inputs, weights = gemm_s(4096.0, 4096.0, 4096.0, p, r, c)[:, 0]
    assert inputs == pytest.approx(forward)
    assert weights - forward == pytest.approx(6 * 4096**2 / r.hbm_bytes_per_s)


def test_attention_flops_are_those_of_the_counts():
    for name in MODELS:
        spec = preset(name)
        per_token = flops_per_token(spec, 4096).attention_scores
        assert float(attention_flops(1.0, 4096.0, 1, dims_of(spec))) * spec.num_layers == pytest.approx(per_token)


def test_a_window_leaves_fewer_keys():
    dims = replace(dims_of(preset("llama-3-8b")), window=128, window_share=1.0)
    assert float(mean_keys(4096.0, dims)) == pytest.approx((128 * 129 / 2 + (4096 - 128) * 128) / 4096)
    assert float(mean_keys(64.0, dims)) == pytest.approx(65 / 2)


def test_grouped_products_saturate():
    _, c = context()
    share = [float(grouped_share(tokens, 2048.0, c)) for tokens in (64, 512, 4096, 1e9)]
    assert share == sorted(share)
    assert 0 < share[0] < 0.2 and share[-1] < 1


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_counts(name):
    """Dense and expert parameters of all ranks of one replica sum up to the model's."""
    spec = preset(name)
    lay = Layouts.of(1)
    params = stage_params(lay, dims_of(spec), np.array([float(spec.num_layers)]), first=1.0, last=1.0)
    total = float(params.dense[0] + params.experts[0])
    assert total == pytest.approx(parameter_counts(spec).total_with_mtp, rel=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_conserved(name):
    """With unit efficiency, no memory traffic and no gaps, a step's kernels take exactly its FLOPs over the peak."""
    spec = preset(name)
    r, c = context()
    free = {"gemm_bf16": 1.0, "attention": 1.0, "clock": 1.0, "attention_backward": 1.0, "moe": 1.0, "layer": 1.0}
    none = dict.fromkeys(
        ("gemm_half_k", "gemm_half_n", "gap_s", "attention_half", "attention_half_dim", "element", "cast"), 0.0
    )
    none |= dict.fromkeys(("grouped_half_tokens", "grouped_half_width", "permute", "moe_fixed_s", "cross_entropy"), 0.0)
    none |= dict.fromkeys(("host_dense_s", "host_moe_s", "stall_s"), 0.0)
    c = replace(c, **free, **none)
    r = replace(r, hbm_bytes_per_s=1e30)
    seq = 4096.0
    lay = Layouts.of(1, recipe="bf16")
    rank = slowest_rank(Case(lay, dims_of(spec), Work(seq=seq), r, c, np.array([1.0])))
    counted = flops_per_token(spec, int(seq))
    attention = counted.attention_scores + spec.mtp_layers * counted.attention_scores / spec.num_layers
    expected = 3 * (counted.forward - attention) + 3.5 * attention
    joining = spec.mtp_layers * 3 * 2.0 * 2 * spec.hidden_size**2  # the joining projection is priced with its layer
    found = float(rank.total[0]) * r.bf16 / seq
    assert found == pytest.approx(expected - joining, rel=0.01)


def test_the_parts_of_a_step_add_up():
    found = price(preset("llama-3-8b"), load_machine("h100"), some(), global_batch=2048, seq_len=4096)
    np.testing.assert_allclose(sum(found.breakdown[k] for k in BREAKDOWN), found.step_s, rtol=1e-9)
    np.testing.assert_allclose(sum(found.memory.lines[k] for k in MEMORY_LINES), found.memory_bytes, rtol=1e-12)
    assert all((found.breakdown[k] >= -1e-12).all() for k in BREAKDOWN)
    assert (found.low_s < found.step_s).all() and (found.high_s > found.step_s).all()


@pytest.mark.parametrize("name", ["llama-3-70b", "deepseek-v3"])
def test_one_layout_costs_what_it_costs_among_many(name):
    many = some(60)
    if name == "deepseek-v3":
        many = replace(many, ep=np.minimum(many.dp * many.cp * many.tp, 64))
    spec, machine = preset(name), load_machine("h100")
    together = price(spec, machine, many, global_batch=2048, seq_len=4096)
    for i in range(0, 60, 7):
        alone = price(spec, machine, many.take(np.array([i])), global_batch=2048, seq_len=4096)
        assert alone.step_s[0] == pytest.approx(together.step_s[i], rel=1e-12)
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[i], rel=1e-12)


@pytest.mark.parametrize("field", ["bus_bytes_per_s", "nic_bytes_per_s", "hbm_bytes_per_s", "bf16", "host_bytes_per_s"])
@pytest.mark.parametrize("name", ["a100-80gb", "h100"])
def test_more_bandwidth_is_never_slower(field, name):
    r, c = context(name)
    # where offload sets the pace, a faster rest only shifts what hides behind it
    offload = {} if field == "host_bytes_per_s" else {"offload_activations": 0}
    lay = some(300, recipe=list(RECIPES).index("bf16"), **offload)
    dims = dims_of(preset("qwen3-30b-a3b"))
    lay = replace(lay, ep=np.minimum(lay.dp * lay.cp * lay.tp, 16))

    def step(rates):
        return price_case(Case(lay, dims, Work(seq=4096.0), rates, c, 2048 / (lay.micro_batch * lay.dp)), memory=False)

    slow, fast = step(r).step_s, step(replace(r, **{field: getattr(r, field) * 1.5})).step_s
    assert (fast <= slow * (1 + 1e-12)).all()


def test_graphs_overlap_and_recompute_move_the_step_the_right_way():
    spec, machine = preset("llama-3-8b"), load_machine("b200")

    def step(**columns):
        lay = Layouts.of(1, dp=8, tp=8, micro_batch=1, sequence_parallel=1, dp_shard="optimizer", **columns)
        return price(spec, machine, lay, global_batch=64, seq_len=2048)

    assert step(graph=1).step_s < step().step_s  # small kernels: the host sets the pace
    assert step(tp_overlap=0, graph=1).step_s > step(graph=1).step_s
    times = [float(step(recompute=k, graph=1).step_s[0]) for k in ("none", "selective", "full")]
    memory = [float(step(recompute=k).memory_bytes[0]) for k in ("none", "selective", "full")]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


def test_sharding_saves_memory_step_by_step():
    spec, machine = preset("llama-3-8b"), load_machine("h100")
    memory = [
        float(price(spec, machine, Layouts.of(1, dp=64, dp_shard=k), global_batch=64, seq_len=2048).memory_bytes[0])
        for k in ("none", "optimizer", "gradient", "full")
    ]
    assert memory == sorted(memory, reverse=True)


def test_stage_layers():
    def of(*arguments):
        return tuple(int(x) for x in stage_layers(*arguments))

    assert of(32, 1, 1) == (32, 0, 32)
    assert of(32, 4, 1) == (8, 8, 8)
    assert of(126, 8, 4) == (15, 16, 15)  # embedding and head count as a layer
    assert of(61, 16, 1, 0, 0, 1) == (4, 4, 1)  # multi-token prediction and loss on the last stage
    assert of(31, 4, 1) == (8, 8, 7)
    assert of(32, 4, 1, 6, 6) == (6, 10, 6)
    assert spelled_stages(32, 4, 6, 6) == (6, 10, 10, 6)
    assert spelled_stages(32, 4, 0, 0) == ()


def test_layouts_from_a_job_and_back():
    layout = Layout(dp=4, tp=2, pp=2, dp_shard="optimizer", virtual_stages=2)
    lay = Layouts.from_layout(layout, micro_batch=2, recompute="full")
    assert lay.layout(0, 32) == layout
    assert lay.row(0)["recompute"] == "full"
    assert len(Layouts.from_job(Job())) == 1
    with pytest.raises(TypeError, match="no column"):
        Layouts.of(1, depth=3)


def test_what_does_not_fit_the_request_is_refused():
    spec, machine = preset("llama-3-8b"), load_machine("h100")
    with pytest.raises(ValueError, match="16 ranks, not 8"):
        price(spec, machine, Layouts.of(1, dp=16), global_batch=64, seq_len=2048, num_gpus=8)
    with pytest.raises(ValueError, match="no multiple"):
        price(spec, machine, Layouts.of(1, dp=16), global_batch=60, seq_len=2048)
    with pytest.raises(ConfigError) as error:
        price(spec, load_machine("cpu-local", cache="/nowhere"), Layouts.of(1), global_batch=1, seq_len=64)
    assert error.value.problems[0].code == "machine-uncalibrated"
    with pytest.raises(ConfigError):
        recipe("fp9")
    with pytest.raises(ConfigError):
        recompute("some")


def test_a_recipe_without_units_has_no_price():
    found = price(
        preset("llama-3-8b"),
        load_machine("a100-80gb"),
        Layouts.of(1, recipe="fp8-current"),
        global_batch=8,
        seq_len=2048,
    )
    assert np.isnan(found.step_s).all()


def test_every_gpu_and_era_resolves():
    calibration = default_calibration()
    for era in ERAS:
        for name in ("a100-80gb", "h100", "gb300", "full-mesh-8"):
            calibration.resolve(gpu_of(load_machine(name)), era)
    for key, constant in calibration.constants.items():
        assert constant.low <= constant.value <= constant.high, key
        assert constant.source, key


def test_layer_costs_are_the_sum_of_their_parts():
    r, c = context("b200")
    lay = some(80)
    columns = {name: getattr(lay, name) for name in Keys.__dataclass_fields__ if name != "two_way"}
    keys = Keys(**columns, two_way=lay.graph)
    for cost in layer_cost(keys, dims_of(preset("deepseek-v3")), Work(seq=4096.0), r, c):
        np.testing.assert_allclose(cost.parts.sum(axis=0), cost.forward + cost.inputs + cost.weights, rtol=1e-9)
        assert len(cost.parts) == len(CATEGORIES)


def test_one_explained_layout_is_quick():
    spec, machine, lay = preset("deepseek-v3"), load_machine("h100"), Layouts.of(1, dp=64, ep=64)
    price(spec, machine, lay, global_batch=64, seq_len=4096)
    start = time.process_time()
    for _ in range(5):
        price(spec, machine, lay, global_batch=64, seq_len=4096)
    assert (time.process_time() - start) / 5 < 0.05


def test_the_planner_imports_without_torch_and_quickly():
    code = (
        "import sys, time; start = time.process_time(); import bessemer.plan.price; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    seconds, torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert torch == "False"
    assert float(seconds) < 1.0
