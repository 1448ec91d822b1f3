"""Which linear layers a recipe quantises, decided from sizes alone, so that a CPU decides what a GPU would.

A GPU takes the operands of a product a [M, K] b [N, K]^T only in certain multiples; a CPU takes any. So each of the
three products of a layer is filled up with zeros, which changes no scale and no result, or the layer stays as it is
without quantising: where zeros would be so much of the work that FP8 gains nothing. A layer is quantised whole or not
at all. `layer_table` says of every linear layer of a model how it runs, and why. `kept_layers` is the choice that the
trainer makes and the planner prices: it looks at the whole model's sizes, so that it is the same under every layout.

Legend: T tokens, I inputs, O outputs; M, N, K of a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bessemer.core.layout import Layout
from bessemer.core.model import ModelSpec
from bessemer.core.recipes import RECIPES, Recipe, recipe

__all__ = [
    "CHOICE_TOKENS",
    "GAIN",
    "Multiples",
    "Plan",
    "Product",
    "Row",
    "Shape",
    "kept_layers",
    "layer_table",
    "multiples",
    "plan",
    "table_text",
]

GAIN = 1.5
"""How many times the work may grow by filling up. An FP8 product of 8192 or more columns on either side runs 1.3 to 1.5
times (per tensor) and 1.5 times (blocks) as fast as a bfloat16 one, medians over the products of 1024 rows or more that
ai-dynamo/aiconfigurator 095f58a measured on H100 and H200 with vLLM 0.24; nothing is left of that beyond."""

Role = Literal["forward", "dgrad", "wgrad"]
_DIMS: dict[Role, tuple[str, str, str]] = {
    "forward": ("tokens", "outputs", "inputs"),
    "dgrad": ("tokens", "inputs", "outputs"),
    "wgrad": ("outputs", "inputs", "tokens"),
}
"""What M, N and K of each product are."""


CHOICE_TOKENS = 4096
"""Of a micro-batch, for what is decided from the whole model: so many that only the weights' sizes decide."""


@dataclass(frozen=True)
class Shape:
    """A product's sizes: tokens, inputs, outputs."""

    tokens: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Multiples:
    """Of M, N and K of a product."""

    m: int
    n: int
    k: int

    def filled(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """The sizes, rounded up to the multiples."""
        return _up(m, self.m), _up(n, self.n), _up(k, self.k)


@dataclass(frozen=True)
class Product:
    """One of the three; `size` and `filled` are (M, N, K). `runs`: the multiple to which each expert's tokens are
    filled up, `filled` then being the most that takes; 0 where the tokens are no expert's."""

    role: Role
    size: tuple[int, int, int]
    filled: tuple[int, int, int]
    runs: int = 0

    @property
    def work(self) -> float:
        """The work with zeros over that without."""
        return math.prod(self.filled) / math.prod(self.size)

    @property
    def changes(self) -> str:
        """ "tokens 1000 -> 1008", empty where nothing is filled up."""
        found = []
        for name, old, new in zip(_DIMS[self.role], self.size, self.filled, strict=True):
            if name == "tokens" and self.runs:
                found.append(f"each expert's tokens to a multiple of {self.runs}")
            elif old != new:
                found.append(f"{name} {old} -> {new}")
        return ", ".join(found)


@dataclass(frozen=True)
class Plan:
    """How a layer runs. `kept`: why it stays in `wide` (bf16 or fp32), empty where it is quantised to `narrow`."""

    products: tuple[Product, ...]
    narrow: str
    wide: str
    kept: str = ""

    @property
    def quantised(self) -> bool:
        """Whether all three products read quantised operands."""
        return not self.kept

    @property
    def text(self) -> str:
        """ "fp8", "fp8 padded (tokens 1000 -> 1008)" or "bf16 because ..."."""
        if self.kept:
            return f"{self.wide} because {self.kept}"
        changes = list(dict.fromkeys(c for p in self.products for c in p.changes.split(", ") if c))
        return f"{self.narrow} padded ({', '.join(changes)})" if changes else self.narrow


@dataclass(frozen=True)
class Row:
    """A linear layer as one rank has it, in `layers` of the model (blocks of multi-token prediction are numbered
    after the last). `shape.tokens` are those of a micro-batch; of `experts` (that many on a rank) those that each gets
    if the load is even."""

    name: str
    layers: tuple[int, ...]
    shape: Shape
    plan: Plan
    experts: int = 0


def multiples(recipe: Recipe) -> Multiples:
    """What `F.scaled_mm` of torch 2.13 wants on CUDA (aten/native/cuda/ScaledBlas.cpp): N and K of 16, and here K of
    whole 16 bytes of codes and of whole blocks, N of whole square blocks; with a column of float32 scales for each
    block of K, M of 4, so that it begins at multiples of 16 bytes."""
    bytes16 = 16 * 8 // (4 if recipe.gemm == "fp4" else 8)
    block = max(recipe.scale_block, 1)
    columns = block > 1 and recipe.scale_bytes == 4
    return Multiples(4 if columns else 1, math.lcm(16, block if recipe.square_blocks else 1), math.lcm(bytes16, block))


def plan(recipe_name: str, shape: Shape, *, runs: bool = False) -> Plan:
    """How a layer of that shape runs under a recipe. `runs`: the tokens are those of one of several experts, whose
    number changes with each step: each run is filled up to whole multiples, which costs one less than that at most."""
    spec = recipe(recipe_name)
    if not spec.quantised:
        return Plan(_products(shape, Multiples(1, 1, 1), False), spec.gemm, spec.gemm, f"the recipe is {spec.name}")
    products = _products(shape, multiples(spec), runs)
    worst = max(products, key=lambda p: p.work)
    why = ""
    if worst.work > GAIN:
        most = "up to " if runs else ""
        what = f"{worst.changes} in {worst.role} makes {most}{worst.work:.3g} times the work"
        why = f"{what}, more than the {GAIN} FP8 gains"
    return Plan(products, spec.gemm, spec.compute, why)


def layer_table(
    spec: ModelSpec, layout: Layout, recipe_name: str, *, micro_batch: int, seq_len: int,
    layers: Iterable[int] | None = None,
) -> list[Row]:  # fmt: skip
    """Every linear layer that a rank of the layout runs, in the order of the model; with `layers` those of the blocks
    given only (a pipeline stage's), and the head where the last of the model is among them. Names are those of the
    model's modules, with packed parameters (`attn.qkv`, `mlp.gate_up`). The layout is one that the model fits."""
    tokens = micro_batch * seq_len // layout.cp
    sizes = _Sizes(spec, layout, tokens, tokens // layout.tp if layout.sequence_parallel else tokens)
    last = spec.num_layers - 1
    held = list(range(spec.num_layers) if layers is None else layers)
    predictions = [spec.num_layers + i for i in range(spec.mtp_layers)] if last in held else []
    routed = [i for i in (*held, *predictions) if spec.is_moe_layer(min(i, last))]
    dense = [i for i in (*held, *predictions) if not spec.is_moe_layer(min(i, last))]
    parts = [
        (_attention(sizes), [*held, *predictions]),
        (_dense(sizes, "mlp", spec.ffn_size), dense),
        (_mixture(sizes), routed),
        ([_Part("join", sizes.stream, 2 * spec.hidden_size, spec.hidden_size, kept="it is outside of the blocks")],
         predictions),
        ([_Part("head", tokens, spec.hidden_size, math.ceil(spec.vocab_size / layout.tp),
                kept="it is outside of the blocks")], [last] if last in held else []),
    ]  # fmt: skip
    return [part.row(recipe_name, tuple(where)) for found, where in parts if where for part in found]


def kept_layers(
    spec: ModelSpec, recipe_name: str, *, high_first: int = 0, high_last: int = 0, slow: Iterable[tuple[str, str]] = ()
) -> dict[tuple[int, str], str]:
    """By (layer, name in its block) of each linear layer why it isn't quantised, "" where it is. The blocks of
    multi-token prediction are numbered after the last layer, and count as that. slow: (name, why) of what the recipe
    would slow down on the job's machine, as `bessemer.plan.gains.slow_layers` says."""
    found: dict[tuple[int, str], str] = {}
    last, loses = spec.num_layers - 1, dict(slow)
    shares = 1 if spec.moe is None else -(-spec.moe.num_experts // spec.moe.top_k)  # each expert then gets as many
    for row in layer_table(spec, Layout(), recipe_name, micro_batch=shares, seq_len=CHOICE_TOKENS):
        for layer in row.layers:
            asked = ""
            if min(layer, last) < high_first:
                asked = f"precision.high_first = {high_first}"
            elif min(layer, last) > last - high_last:
                asked = f"precision.high_last = {high_last}"
            found[layer, row.name] = row.plan.kept or asked or loses.get(row.name, "")
    return found


def table_text(rows: Iterable[Row]) -> str:
    """For people: a line a layer, with how often it occurs, its sizes on a rank, and how it runs and why."""
    cells = [("layer", "times", "tokens", "inputs x outputs", "runs as")]
    for row in rows:
        times = f"{len(row.layers)} x {row.experts}" if row.experts else str(len(row.layers))
        size = f"{row.shape.inputs} x {row.shape.outputs}"
        cells.append((row.name, times, str(row.shape.tokens), size, row.plan.text))
    widths = [max(len(c[i]) for c in cells) for i in range(4)]
    return "\n".join(
        f"{c[0]:<{widths[0]}}  {c[1]:>{widths[1]}}  {c[2]:>{widths[2]}}  {c[3]:>{widths[3]}}  {c[4]}" for c in cells
    )


@dataclass(frozen=True)
class _Sizes:
    """`tokens` of a micro-batch on a rank of context parallelism, `stream` those of a tensor-parallel rank's stream."""

    spec: ModelSpec
    layout: Layout
    tokens: int
    stream: int


@dataclass(frozen=True)
class _Part:
    """A linear layer; `kept`: why no recipe quantises it; `wide`: the type it then runs in, if not the recipe's."""

    name: str
    tokens: int
    inputs: int
    outputs: int
    kept: str = ""
    wide: str = ""
    experts: int = 0

    def row(self, recipe_name: str, layers: tuple[int, ...]) -> Row:
        shape = Shape(self.tokens, self.inputs, self.outputs)
        made = plan(recipe_name, shape, runs=self.experts > 0)
        spec = RECIPES[recipe_name]
        if self.kept and (spec.quantised or self.wide):
            made = Plan(made.products, made.narrow, self.wide or spec.compute, self.kept)
        return Row(self.name, layers, shape, made, self.experts)


def _attention(s: _Sizes) -> list[_Part]:
    spec, tp = s.spec, s.layout.tp
    heads, hidden, mla = spec.num_heads // tp, spec.hidden_size, spec.mla
    if mla is None:
        packed = (heads + 2 * max(1, spec.num_kv_heads // tp)) * spec.head_dim
        return [
            _Part("attn.qkv", s.tokens, hidden, packed),
            _Part("attn.o", s.tokens, heads * spec.head_dim, hidden),
        ]
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        query = [_Part("attn.q", s.tokens, hidden, queries)]
    else:
        query = [
            _Part("attn.q_a", s.stream, hidden, mla.q_lora_rank),
            _Part("attn.q_b", s.tokens, mla.q_lora_rank, queries),
        ]
    return [
        *query,
        _Part("attn.kv_a", s.stream, hidden, mla.kv_lora_rank + mla.qk_rope_head_dim),
        _Part("attn.kv_b", s.tokens, mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
        _Part("attn.o", s.tokens, heads * mla.v_head_dim, hidden),
    ]


def _dense(s: _Sizes, name: str, width: int) -> list[_Part]:
    hidden, width = s.spec.hidden_size, width // s.layout.tp
    up = _Part(f"{name}.gate_up", s.tokens, hidden, 2 * width)
    if not s.spec.gated:
        up = _Part(f"{name}.up", s.tokens, hidden, width)
    return [up, _Part(f"{name}.down", s.tokens, width, hidden)]


def _mixture(s: _Sizes) -> list[_Part]:
    moe, layout, hidden = s.spec.moe, s.layout, s.spec.hidden_size
    if moe is None:
        return []
    experts, width = moe.num_experts // layout.ep, moe.expert_ffn_size // layout.etp
    own = s.tokens // layout.tp  # that no other rank sends to experts
    each = math.ceil(own * layout.ep * layout.etp * moe.top_k / moe.num_experts)
    why = "a rounded score would change which experts are chosen"
    parts = [_Part("mlp.router", own, hidden, moe.num_experts, kept=why, wide="fp32")]
    parts += [_Part(f"mlp.experts.{n}", each, hidden, width, experts=experts) for n in ("gate", "up")]
    parts.append(_Part("mlp.experts.down", each, width, hidden, experts=experts))
    if moe.shared_ffn_size:
        parts += _dense(s, "mlp.shared", moe.shared_ffn_size)
    if moe.shared_gate:
        parts.append(_Part("mlp.shared_gate", s.stream, hidden, 1))
    return parts


def _products(shape: Shape, of: Multiples, runs: bool) -> tuple[Product, ...]:
    sizes = {"tokens": max(shape.tokens, 1), "inputs": shape.inputs, "outputs": shape.outputs}
    found = []
    for role, names in _DIMS.items():
        size = (sizes[names[0]], sizes[names[1]], sizes[names[2]])
        filled = list(of.filled(*size))
        if runs:
            filled[names.index("tokens")] = sizes["tokens"] + of.k - 1
        found.append(Product(role, size, (filled[0], filled[1], filled[2]), of.k if runs else 0))
    return tuple(found)


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
