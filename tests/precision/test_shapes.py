"""Which layers run in FP8, from sizes alone: closed forms, and the table against the modules of real models."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch
from torch import nn

from bessemer.core.layout import Layout
from bessemer.core.linear_layers import GAIN, Multiples, Shape, layer_table, multiples, plan, table_text
from bessemer.core.presets import PRESETS, preset
from bessemer.core.recipes import RECIPES
from bessemer.models.decoder import Decoder
from bessemer.models.moe import Stack
from bessemer.models.parts import Projection
from bessemer.models.router import Router
from bessemer.models.split import ExpertSplit, Split, TensorSplit
from bessemer.precision import numerics, quantise

FP8_16 = ["fp8-delayed", "fp8-current", "fp8-row"]


def test_multiples_of_each_recipe() -> None:
    """16 bytes of codes, whole blocks; a column of float32 scales begins at multiples of 16 bytes."""
    found = {name: multiples(recipe) for name, recipe in RECIPES.items() if recipe.quantised}
    assert found == {
        **dict.fromkeys(FP8_16, Multiples(1, 16, 16)),
        "fp8-block128": Multiples(4, 128, 128),
        "mxfp8": Multiples(1, 16, 32),
        "nvfp4": Multiples(1, 16, 32),
    }
    for name, of in found.items():  # what the planner's description says is what the trainer's formats and blocks need
        x, weight = numerics(name).x, numerics(name).weight
        columns = x.grain.cols > 1 and x.scale_format is None
        rows, depth = math.lcm(16, max(weight.grain.rows, 1)), math.lcm(128 // x.format.bits, max(x.grain.cols, 1))
        assert of == Multiples(4 if columns else 1, rows, depth)
    assert Multiples(4, 16, 128).filled(1, 16, 129) == (4, 16, 256)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.quantised])
def test_sizes_that_fit_run_as_they_are(name: str) -> None:
    made = plan(name, Shape(1024, 512, 768))
    assert made.quantised and made.text == RECIPES[name].gemm
    assert all(p.filled == p.size and p.work == 1 and p.changes == "" for p in made.products)
    sizes = {p.role: p.size for p in made.products}
    assert sizes == {"forward": (1024, 768, 512), "dgrad": (1024, 512, 768), "wgrad": (768, 512, 1024)}


@pytest.mark.parametrize(
    ("recipe", "shape", "text"),
    [
        ("fp8-current", (1000, 4096, 4096), "fp8 padded (tokens 1000 -> 1008)"),
        ("fp8-row", (4096, 4096, 1376), "fp8"),
        ("fp8-block128", (4096, 4096, 1376), "fp8 padded (outputs 1376 -> 1408)"),
        ("fp8-block128", (4096, 7168, 576), "fp8 padded (outputs 576 -> 640)"),
        ("fp8-block128", (4000, 576, 960), "fp8 padded (outputs 960 -> 1024, inputs 576 -> 640, tokens 4000 -> 4096)"),
        ("mxfp8", (48, 64, 64), "fp8 padded (tokens 48 -> 64)"),
        ("nvfp4", (48, 64, 64), "fp4 padded (tokens 48 -> 64)"),
        ("bf16", (1000, 10, 10), "bf16 because the recipe is bf16"),
        ("fp32", (1, 1, 1), "fp32 because the recipe is fp32"),
        (
            "fp8-current",
            (4096, 2048, 1),
            "bf16 because outputs 1 -> 16 in forward makes 16 times the work, more than the 1.5 FP8 gains",
        ),
        (
            "fp8-block128",
            (64, 256, 256),
            "bf16 because tokens 64 -> 128 in wgrad makes 2 times the work, more than the 1.5 FP8 gains",
        ),
    ],
)
def test_what_is_filled_up_and_what_stays(recipe: str, shape: tuple[int, int, int], text: str) -> None:
    made = plan(recipe, Shape(*shape))
    assert made.text == text and made.quantised == text.startswith(("fp8", "fp4"))


def test_filling_stops_where_it_costs_what_fp8_gains() -> None:
    """384 / 256 is 1.5 in each product of its own; a second dimension counts in the same product."""
    assert GAIN == 1.5
    assert plan("fp8-block128", Shape(4096, 257, 4096)).quantised  # 384 / 257 = 1.49
    assert not plan("fp8-block128", Shape(4096, 170, 4096)).quantised  # 256 / 170 = 1.51
    assert plan("fp8-block128", Shape(4096, 192, 4096)).quantised  # 1.33
    assert not plan("fp8-block128", Shape(4096, 192, 192)).quantised  # 1.33 squared
    assert plan("fp8-block128", Shape(4096, 127, 127)).quantised


def test_the_runs_of_experts_are_filled_up_one_by_one() -> None:
    made = plan("fp8-block128", Shape(1000, 512, 512), runs=True)
    assert {p.role: p.filled for p in made.products} == {
        "forward": (1127, 512, 512),
        "dgrad": (1127, 512, 512),
        "wgrad": (512, 512, 1127),
    }
    assert made.text == "fp8 padded (each expert's tokens to a multiple of 128)"
    few = plan("fp8-block128", Shape(200, 512, 512), runs=True)
    assert few.text == (
        "bf16 because each expert's tokens to a multiple of 128 in forward makes up to 1.64 times the work, "
        "more than the 1.5 FP8 gains"
    )
    assert plan("fp8-current", Shape(200, 512, 512), runs=True).quantised


@pytest.mark.parametrize("recipe", [*FP8_16, "fp8-block128", "mxfp8"])
def test_zeros_change_no_scale_and_no_code(recipe: str) -> None:
    n = numerics(recipe)
    of = multiples(RECIPES[recipe])
    x = torch.randn(100, 72, generator=torch.Generator().manual_seed(0))
    plain = quantise(x, n.x)
    wide = quantise(nn.functional.pad(x, (0, -72 % of.k, 0, -100 % of.k)), n.x)
    assert torch.equal(wide.codes[:100, :72].view(torch.uint8), plain.codes.view(torch.uint8))
    assert not wide.codes.float()[100:].any() and not wide.codes.float()[:, 72:].any()
    rows, cols = plain.scale.shape
    assert torch.equal(wide.scales()[:rows, :cols], plain.scales())


LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(dp=4, tp=2, ep=4, etp=2),
    Layout(dp=2, tp=4, cp=2, ep=8),
]


def _modules(layout: Layout, name: str) -> Counter[tuple[str, int, int, int]]:
    """(name inside its block, inputs, outputs, experts) of every linear layer of the model's modules."""
    tensor, experts = TensorSplit(), ExpertSplit()
    tensor.degree, tensor.sequence_parallel = layout.tp, layout.sequence_parallel
    experts.degree, experts.width_degree = layout.ep, layout.etp
    model = Decoder(preset(name), device="meta", split=Split(tensor=tensor, experts=experts))
    found: Counter[tuple[str, int, int, int]] = Counter()
    for path, module in model.named_modules():
        if isinstance(module, Projection | Stack | Router):
            shape = module.weight.shape
            short = re.sub(r"^(blocks\.\d+|mtp\.\d+\.block|mtp\.\d+)\.", "", path)
            found[short, shape[-1], shape[-2], shape[0] if len(shape) == 3 else 0] += 1
    if model.head is None:
        assert model.embed is not None
        found["head", model.embed.weight.shape[1], model.embed.weight.shape[0], 0] += 1
    return found


def _fits(name: str, layout: Layout) -> bool:
    spec = preset(name)
    return spec.num_heads % layout.tp == 0 and (spec.moe is None or spec.moe.num_experts % layout.ep == 0)


@pytest.mark.parametrize(("name", "place"), [(n, i) for n in PRESETS for i, at in enumerate(LAYOUTS) if _fits(n, at)])
def test_the_table_lists_the_modules_of_the_model(name: str, place: int) -> None:
    spec, layout = preset(name), LAYOUTS[place]
    rows = layer_table(spec, layout, "fp8-block128", micro_batch=1, seq_len=4096)
    listed = Counter()
    for row in rows:
        listed[row.name, row.shape.inputs, row.shape.outputs, row.experts] += len(row.layers)
    assert listed == _modules(layout, name)


def test_tokens_of_each_layer() -> None:
    """DeepSeek-V3, 2 sequences of 4096: context parallelism halves the tokens, sequence parallelism those that whole
    projections see, and the experts share what the ranks of their group send, 8 of 256 a token."""
    layout = Layout(dp=4, tp=2, cp=2, ep=8, sequence_parallel=True)
    rows = {r.name: r for r in layer_table(preset("deepseek-v3"), layout, "bf16", micro_batch=2, seq_len=4096)}
    tokens = {name: row.shape.tokens for name, row in rows.items()}
    assert tokens["attn.q_b"] == tokens["attn.o"] == tokens["mlp.gate_up"] == tokens["mlp.shared.down"] == 4096
    assert tokens["attn.q_a"] == tokens["attn.kv_a"] == tokens["join"] == 2048
    assert tokens["mlp.router"] == 2048 and tokens["head"] == 4096
    assert tokens["mlp.experts.gate"] == 2048 * 8 * 8 // 256 and rows["mlp.experts.gate"].experts == 32
    assert rows["mlp.gate_up"].layers == (0, 1, 2)
    assert rows["mlp.router"].layers == (*range(3, 61), 61) and rows["join"].layers == (61,)


def test_a_stage_lists_its_own_layers() -> None:
    spec = preset("deepseek-v3")
    first = layer_table(spec, Layout(pp=2), "fp8-block128", micro_batch=1, seq_len=4096, layers=range(3))
    assert {r.layers for r in first} == {(0, 1, 2)} and "head" not in {r.name for r in first}
    last = layer_table(spec, Layout(pp=2), "fp8-block128", micro_batch=1, seq_len=4096, layers=range(60, 61))
    assert {r.layers for r in last} == {(60, 61), (61,), (60,)}
    assert {r.name for r in last} >= {"head", "join"} and "mlp.gate_up" not in {r.name for r in last}


def test_what_no_recipe_quantises() -> None:
    for recipe in ("fp8-current", "bf16"):
        rows = {
            r.name: r.plan for r in layer_table(preset("qwen3-30b-a3b"), Layout(), recipe, micro_batch=1, seq_len=4096)
        }
        assert rows["mlp.router"].text.startswith("fp32 because a rounded score")
        assert not rows["head"].quantised and rows["head"].wide == "bf16"
    assert rows["head"].text == "bf16 because the recipe is bf16"


def test_the_table_for_people() -> None:
    rows = layer_table(preset("smollm2-135m"), Layout(), "fp8-block128", micro_batch=1, seq_len=2000)
    assert table_text(rows).splitlines() == [
        "layer        times  tokens  inputs x outputs  runs as",
        "attn.qkv        30    2000         576 x 960  fp8 padded "
        "(outputs 960 -> 1024, inputs 576 -> 640, tokens 2000 -> 2048)",
        "attn.o          30    2000         576 x 576  fp8 padded "
        "(outputs 576 -> 640, inputs 576 -> 640, tokens 2000 -> 2048)",
        "mlp.gate_up     30    2000        576 x 3072  fp8 padded (inputs 576 -> 640, tokens 2000 -> 2048)",
        "mlp.down        30    2000        1536 x 576  fp8 padded (outputs 576 -> 640, tokens 2000 -> 2048)",
        "head             1    2000       576 x 49152  bf16 because it is outside of the blocks",
    ]
