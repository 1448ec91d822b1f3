"""Collectives: closed forms, the measured tables, and the published figures of a full mesh."""

import numpy as np
import pytest

from bessemer.core.machine import load_machine
from bessemer.core.presets import preset
from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.collectives import (
    full_mesh_all_reduce_s,
    group_s,
    in_switch_all_reduce_s,
    nccl_table,
    node_s,
    p2p_s,
    ring_all_reduce_s,
)
from bessemer.plan.price import price
from bessemer.plan.rates import rates_of
from bessemer.plan.space import Layouts

OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")


def at(name):
    machine = load_machine(name)
    return rates_of(machine), default_calibration().resolve(gpu_of(machine), "megatron-2026")


def test_closed_forms():
    assert float(ring_all_reduce_s(8e6, 8, 1e11, 1e-6)) == pytest.approx(14 * (1e-6 + 1e-5))
    assert float(full_mesh_all_reduce_s(7e5, 8, 1e11, 2e-6)) == pytest.approx(9e-6)
    assert float(in_switch_all_reduce_s(1e8, 8, 4.5e11, 5e-6)) == pytest.approx(1e-5 + 1e8 / 4.5e11)
    assert float(full_mesh_all_reduce_s(7e5, 1, 1e11, 2e-6)) == 0


@pytest.mark.parametrize("name", ["h100", "a100-80gb", "gb200", "full-mesh-8"])
@pytest.mark.parametrize("op", OPS)
def test_one_rank_and_nothing_to_send_are_free(name, op):
    rates, constants = at(name)
    assert group_s(op, 1e8, 1, 1, rates, constants) == 0
    assert group_s(op, 0.0, 8, 8, rates, constants) == 0


@pytest.mark.parametrize("op", OPS)
def test_measured_tables_are_met_at_their_points(op):
    rates, constants = at("h100")
    sizes, seconds = nccl_table()["h100", op, 8]
    found = node_s(op, np.exp(sizes), np.full(len(sizes), 8.0), rates, constants) * constants.nvlink
    np.testing.assert_allclose(found, np.exp(seconds), rtol=1e-9)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["h100", "b200", "gb200", "a100-80gb"])
def test_more_bytes_and_more_hosts_are_never_faster(name, op):
    rates, constants = at(name)
    sizes = np.logspace(3, 10, 60)
    for local in (1, 4, 8):
        assert (np.diff(group_s(op, sizes, 16, local, rates, constants)) >= 0).all()
    hosts = group_s(op, 1e8, np.array([16.0, 32.0, 64.0, 128.0]), 8, rates, constants)
    assert (np.diff(hosts) >= 0).all()


def test_p2p_inside_a_domain_is_faster():
    rates, constants = at("h100")
    assert p2p_s(1e7, True, rates, constants) < p2p_s(1e7, False, rates, constants)


def test_an_oversubscribed_fabric_slows_all_to_all_beyond_a_pod():
    machine = load_machine("h100").model_copy(update={"fabric_pod": 64, "fabric_oversubscription": 7.0})
    thin, constants = rates_of(machine), at("h100")[1]
    full = rates_of(load_machine("h100"))
    for ranks in (32, 64):
        assert group_s("alltoall", 1e8, ranks, 8, thin, constants) == group_s(
            "alltoall", 1e8, ranks, 8, full, constants
        )
    wide = group_s("alltoall", 1e8, 128, 8, thin, constants) / group_s("alltoall", 1e8, 128, 8, full, constants)
    assert float(wide) == pytest.approx((1 - 8 / 128 + 0.5 * 6) / (1 - 8 / 128), rel=0.01)


def test_published_figures_of_a_full_mesh():
    """Eight accelerators: ring 53 us, one step 7.8 us for a small buffer (modelled from one hop latency)."""
    machine = load_machine("full-mesh-8")
    assert machine.origin.kind == "modelled"
    bus = machine.scaleup_bytes_per_s * machine.mesh_efficiency
    hop, size = machine.collective_start_s, 16384
    assert float(ring_all_reduce_s(size, 8, bus, hop)) == pytest.approx(53e-6, rel=0.02)
    assert float(full_mesh_all_reduce_s(size, 8, bus / 7, 2 * hop)) == pytest.approx(7.8e-6, rel=0.02)
    rates, constants = at("full-mesh-8")
    assert float(node_s("all_reduce", size, 8, rates, constants)) * constants.nvlink == pytest.approx(7.8e-6, rel=0.02)


def test_published_all_reduce_over_rdma():
    """194 GB/s of bus bandwidth between hosts, 97 % of 200 GB/s."""
    rates, constants = at("full-mesh-8")
    size, ranks = 8e9, 128
    seconds = float(group_s("all_reduce", size, ranks, 8, rates, constants))
    bus = 2 * size * (ranks / 8 - 1) / (ranks / 8) / seconds
    assert bus == pytest.approx(194e9, rel=0.01)


@pytest.mark.parametrize(
    ("model", "gpus", "degrees", "worth"),
    [
        ("llama-3-8b", 64, {"dp": 8, "tp": 8, "dp_shard": "optimizer"}, 0.132),
        ("llama-3-8b", 64, {"dp": 64, "tp": 1, "dp_shard": "full"}, 0.148),
        ("llama-3-70b", 512, {"dp": 64, "tp": 8, "dp_shard": "full"}, 0.082),
    ],
)
def test_an_engine_for_exchanges_is_worth_about_a_tenth(model, gpus, degrees, worth):
    """The vendor publishes about 10 % end to end on Llama and 15 % of compute saved; modelled here: 8 to 15 %."""
    machine = load_machine("full-mesh-8")
    layouts = Layouts.of(
        1, pp=1, micro_batch=1, sequence_parallel=int(degrees["tp"] > 1), recipe="bf16", recompute="none", **degrees
    )
    step_s, without_s = (
        float(price(preset(model), m, layouts, global_batch=8 * degrees["dp"], seq_len=8192, num_gpus=gpus).step_s[0])
        for m in (machine, machine.without_engine())
    )
    assert without_s / step_s - 1 == pytest.approx(worth, abs=0.02)


@pytest.mark.parametrize(
    ("model", "recipe", "worth"),
    [
        ("llama-3-8b", "fp8-current", 1.30),
        ("qwen3-8b", "fp8-current", 1.29),
        ("deepseek-v2", "fp8-delayed", 1.18),  # below the published range, and said so in docs/validation.md
        ("deepseek-v3", "fp8-delayed", 1.21),
    ],
)
def test_fp8_is_worth_a_fifth_to_a_third(model, recipe, worth):
    """FP8 is published at 20-30 % end to end on these models; modelled here, against bf16."""
    spec = preset(model)
    moe = spec.moe is not None
    layouts = [
        Layouts.of(
            1,
            dp=64 if moe else 16,
            tp=1,
            pp=1,
            ep=64 if moe and spec.moe.num_experts % 64 == 0 else 32 if moe else 1,
            micro_batch=1,
            dp_shard="optimizer",
            recipe=name,
        )
        for name in ("bf16", recipe)
    ]
    machine = load_machine("full-mesh-8")
    bf16, fp8 = (float(price(spec, machine, lay, global_batch=1024, seq_len=4096).step_s[0]) for lay in layouts)
    assert bf16 / fp8 == pytest.approx(worth, abs=0.02)
