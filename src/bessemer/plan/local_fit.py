"""From measurements of one device to constants of the cost model.

Each constant is fitted to the measurement that depends on it most, in an order in which the earlier ones stand: rates
of products, then attention, then a whole layer against what these and its small operators come to, then what is left of
the ends (loss), and the update. (What is left of a layer is a small difference: fitted to the small operators' traffic
it came out between 0.04 and 18 on a busy computer.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.recipes import RECIPES
from bessemer.plan.calibration import Constant, Constants, default_calibration
from bessemer.plan.dims import dims_of
from bessemer.plan.kernels import Precision, attention_core, cross_entropy_s, gemm_s, optimizer_s, precision_of
from bessemer.plan.layer import CATEGORIES, Work
from bessemer.plan.price import price_arrays
from bessemer.plan.rates import Rates, rates_of
from bessemer.plan.space import Layouts

__all__ = ["AttentionTime", "LayerTime", "Measured", "ProductTime", "fit_constants"]

_MOST = 1e4
_PRODUCTS = ("gemm_bf16", "gemm_fp32")


@dataclass(frozen=True)
class ProductTime:
    """Seconds of one linear layer's forward: rows x depth by depth x outputs."""

    dtype: str
    rows: int
    outputs: int
    depth: int
    seconds: float


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of causal attention of `batch` sequences."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class LayerTime:
    """One micro-batch through a small model: seconds of a decoder layer, and of embedding, head and loss together,
    forward and backward."""

    spec: ModelSpec
    recipe: str
    batch: int
    seq: int
    layer_s: float
    ends_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on `machine`, which has its peaks and memory bandwidth."""

    machine: Machine
    products: Sequence[ProductTime]
    attention: Sequence[AttentionTime]
    layers: Sequence[LayerTime]
    gap_s: float
    update_s: float  # of one parameter
    exchange_bytes_per_s: float | None = None  # bus bandwidth of an all-reduce between processes of the machine


def fit_constants(measured: Measured, source: str) -> dict[str, Constant]:
    """Every constant that the measurements say something about; `low` and `high` are the range of single samples."""
    base = default_calibration().resolve(("generic",), "megatron-2026")
    rates = rates_of(measured.machine)
    plain = {
        "clock": 1.0, "hbm": 1.0, "gap_s": measured.gap_s, "layer": 1.0, "element": 1.0, "host_dense_s": 0.0,
        "host_moe_s": 0.0, "unfused_attention": 0.0, "attention_half_dim": 0.0, "attention_half": 0.0,
        "gemm_half_n": 0.0, "scale": 0.0, "x_dp": 1.0, "step_s": 0.0, "dummy_grads": 0.0, "reduce_bytes": 4.0,
    }  # fmt: skip
    known = {k: v for k, v in plain.items() if k in {f.name for f in fields(Constants)}}
    c = replace(base, **known)
    found = {name: _constant((value,), source) for name, value in known.items()}

    def take(name: str, values: Sequence[float]) -> None:
        nonlocal c
        found[name] = _constant(values, source)
        c = replace(c, **{name: found[name].value})

    for dtype, name in (("bf16", "gemm_bf16"), ("fp32", "gemm_fp32")):
        own = [p for p in measured.products if p.dtype == dtype]
        if own:
            take(name, [_solved(_product(p, rates, c, name), p.seconds, falling=True) for p in own])
    take("attention", [_solved(_attention(a, rates, c, 0), a.forward_s, falling=True) for a in measured.attention])
    take(
        "attention_backward",
        [_solved(_attention(a, rates, c, 1), a.backward_s, falling=True) for a in measured.attention],
    )
    take("layer", [x.layer_s / _layer_s(x, rates, c) for x in measured.layers])
    take("cross_entropy", [_solved(_ends(x, rates, c), x.ends_s, falling=False) for x in measured.layers])
    take("optimizer", [measured.update_s / float(optimizer_s(1.0, rates, replace(c, optimizer=1.0)))])
    if measured.exchange_bytes_per_s is not None:
        take("nvlink", [measured.exchange_bytes_per_s / rates.bus_bytes_per_s])
    return found


def _constant(values: Sequence[float], source: str) -> Constant:
    value = float(np.median(values))
    return Constant(value, float(min(values)), float(max(values)), value, 0.0, source)


def _solved(predicted: Callable[[float], float], seconds: float, *, falling: bool) -> float:
    """The constant at which the prediction is `seconds`, by bisection of its logarithm; the nearest end if none is."""
    low, high = np.log(1e-4), np.log(_MOST)
    for _ in range(60):
        middle = (low + high) / 2
        above = predicted(float(np.exp(middle))) > seconds
        low, high = (middle, high) if above == falling else (low, middle)
    return float(np.exp((low + high) / 2))


def _product(p: ProductTime, r: Rates, c: Constants, name: str) -> Callable[[float], float]:
    def predicted(value: float) -> float:
        own = replace(c, **{name: value})
        one = gemm_s(p.rows, p.outputs, p.depth, _precision(p.dtype, r, own), r, own)
        return float(one[0, 0]) + c.gap_s

    return predicted


def _attention(a: AttentionTime, r: Rates, c: Constants, backward: int) -> Callable[[float], float]:
    spec = _heads_of(a)
    precision = _precision("bf16", r, c)
    name = "attention_backward" if backward else "attention"

    def predicted(value: float) -> float:
        one = attention_core(
            float(a.batch * a.seq), float(a.seq), 1.0, dims_of(spec), precision, r, replace(c, **{name: value})
        )
        return float(one[backward].max())

    return predicted


def _precision(recipe: str, r: Rates, c: Constants) -> Precision:
    return precision_of(np.array([list(RECIPES).index(recipe)]), r, c)


def _heads_of(a: AttentionTime) -> ModelSpec:
    return ModelSpec(
        family="llama", vocab_size=128, hidden_size=a.heads * a.head_dim, num_layers=1, num_heads=a.heads,
        num_kv_heads=a.heads, head_dim=a.head_dim, ffn_size=128, max_positions=a.seq,
    )  # fmt: skip


def _layer_s(x: LayerTime, r: Rates, c: Constants) -> float:
    layouts = Layouts.of(1, micro_batch=x.batch, recipe=x.recipe)
    dims, work, batch = dims_of(x.spec), Work(seq=float(x.seq)), np.array([float(x.batch)])
    found = price_arrays(layouts, dims, work, r, c, batch, memory=False)
    return sum(float(found.breakdown[k][0]) for k in CATEGORIES) / x.spec.num_layers


def _ends(x: LayerTime, r: Rates, c: Constants) -> Callable[[float], float]:
    """Head and loss; the embedding's copies are small and left out."""
    precision = _precision(x.recipe, r, c)
    tokens = float(x.batch * x.seq)
    head = float(gemm_s(tokens, x.spec.vocab_size, x.spec.hidden_size, precision, r, c, wide=True).sum())

    def predicted(value: float) -> float:
        return head + float(cross_entropy_s(tokens, x.spec.vocab_size, r, replace(c, cross_entropy=value)))

    return predicted


def summary(constants: Mapping[str, Constant]) -> list[tuple[str, float]]:
    """The fitted ones, by name, for printing."""
    shown = (*_PRODUCTS, "attention", "attention_backward", "layer", "cross_entropy", "optimizer", "gap_s", "nvlink")
    return [(name, constants[name].value) for name in shown if name in constants]
