"""Which parts of which layers are made again: what a policy says, or the cheapest that fits into a budget. No torch.

    applied = applied_recompute(job, spec, rank)     # None: it doesn't fit even if everything is made again
    print(applied)                                   # what it saves and costs

What a part saves is counted in closed form (`core.saved`). What it costs is priced as the planner prices a step: its
products, the attention core, the bytes that small operators move, and its exchanges, each by the rates of the machine.
Of a CPU these are nominal: they are measured on each host by itself, and ranks that exchange something inside of a
part must all choose alike. The choice depends on the job, the model and the machine's description alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bessemer.core.job import Job
from bessemer.core.machine import Machine, Peaks, load_machine
from bessemer.core.model import ModelSpec
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import PARTS, parts_of_layer, recompute
from bessemer.core.saved import Product, again, layer_bytes
from bessemer.core.schedules import SCHEDULES, stages_of_rank
from bessemer.core.sizes import Sizes
from bessemer.core.stages import num_stages, stage_ranges
from bessemer.core.units import counted, format_bytes, format_seconds
from bessemer.plan.calibration import Constants, default_calibration, gpu_of
from bessemer.plan.collectives import Op, group_s
from bessemer.plan.dims import dims_of
from bessemer.plan.kernels import attention_core, gemm_s, precision_of
from bessemer.plan.pipeline import in_flight
from bessemer.plan.price import DEFAULT_ERA
from bessemer.plan.rates import Rates, rates_of

__all__ = ["Applied", "applied_recompute", "layers_of_rank", "least_bytes", "rank_sizes"]

_CPU_CORE = {"peak_flops_per_s": Peaks(fp32=1e11, bf16=1e11), "memory_bytes_per_s": 1e10, "memory_bytes": 1 << 40}
"""One core: 100 GFLOP/s in products (docs/log.md), and a tenth as many bytes in 1 s. Only the ratio counts here."""
_STEPS = 2000
"""Bytes are counted in this part of the budget, each layer's rounded up: so the choice is the cheapest to within
layers / 2000 of the budget."""


@dataclass(frozen=True)
class Applied:
    """What a pipeline rank makes again, by layer, and what that comes to. All figures are modelled.

    kept_bytes: what its blocks keep between forward and backward, of all micro-batches that are under way at once;
    plain_bytes: the same if nothing were made again.  again_flops, forward_flops: of its blocks for one micro-batch,
    what runs again and the forward pass.  again_s: priced seconds of the former; None where nothing had to be priced.
    """

    policy: str
    parts: Mapping[int, frozenset[str]]
    kept_bytes: int
    plain_bytes: int
    again_flops: float
    forward_flops: float
    again_s: float | None = None

    def __str__(self) -> str:
        counts = Counter(tuple(p for p in PARTS if p in parts) for parts in self.parts.values())
        sets = [f"{counted(n, 'layer')}: {', '.join(parts) or 'nothing'}" for parts, n in counts.items()]
        again = self.again_flops / self.forward_flops
        seconds = "" if self.again_s is None else f", about {format_seconds(self.again_s)} a micro-batch"
        kept, plain = format_bytes(self.kept_bytes), format_bytes(self.plain_bytes)
        return (
            f"recompute {self.policy} ({'; '.join(sets)}): blocks keep {kept} of {plain}, "
            f"{again:.1%} of their forward FLOPs run again{seconds} (modelled)"
        )


class _Option(NamedTuple):
    bytes: float
    seconds: float
    parts: frozenset[str]


def rank_sizes(job: Job) -> Sizes:
    """What a rank of the job holds of a block."""
    how = RECIPES[job.precision.recipe]
    compute = 4 if how.compute == "fp32" else 2
    narrow = how if job.precision.saved == "fp8" else None
    return Sizes.of(job.layout, compute, job.train.micro_batch, coded=how.keeps_codes, narrow=narrow)


def layers_of_rank(job: Job, spec: ModelSpec, rank: int) -> tuple[int, ...]:
    """The layers of all stages of a pipeline rank, ascending."""
    layout = job.layout
    if layout.pp == 1:
        return tuple(range(spec.num_layers))
    chunks = num_stages(layout) // layout.pp
    ranges = stage_ranges(spec, layout, job.data.seq_len)
    stages = stages_of_rank(SCHEDULES[layout.schedule], layout.pp, chunks, rank)
    return tuple(sorted(layer for stage in stages for layer in ranges[stage]))


class _Pricing:
    """Bytes and seconds of a layer under any set of parts, for one micro-batch of a rank."""

    def __init__(self, job: Job, spec: ModelSpec, machine: Machine) -> None:
        machine = machine.model_copy(update=_CPU_CORE) if machine.device == "cpu" else machine
        self.job, self.spec, self.sizes = job, spec, rank_sizes(job)
        self.tokens = job.train.micro_batch * job.data.seq_len / job.layout.cp
        self.rates: Rates = rates_of(machine)
        self.constants: Constants = default_calibration().resolve(gpu_of(machine), DEFAULT_ERA)
        recipe = np.array([list(RECIPES).index(job.precision.recipe)])
        self.precision = precision_of(recipe, self.rates, self.constants)
        self._options: dict[tuple[bool, int | None], list[_Option]] = {}
        self._product_s: dict[Product, float] = {}
        seq, tp = job.data.seq_len, job.layout.tp
        core = attention_core(self.tokens, seq, tp, dims_of(spec), self.precision, self.rates, self.constants)
        self._core_s = float(core[0, 0])

    def bytes(self, layer: int, parts: Collection[str]) -> float:
        return self.tokens * layer_bytes(self.spec, layer, parts, self.sizes)

    def seconds(self, layer: int, parts: frozenset[str]) -> float:
        rates, constants = self.rates, self.constants
        work = again(self.spec, layer, parts, self.sizes, self.job.data.seq_len)
        total = self.tokens * work.moved_bytes * constants.element / (rates.hbm_bytes_per_s * constants.hbm)
        total += sum(map(self._of_product, work.products)) + (self._core_s if work.attention_flops else 0.0)
        return total + self._exchange_s(layer, parts)

    def _of_product(self, p: Product) -> float:
        if p not in self._product_s:
            rows, wide = self.tokens * p.rows, p.part == "router"
            seconds = gemm_s(rows, p.out, p.depth, self.precision, self.rates, self.constants, wide=wide)
            self._product_s[p] = float(seconds[0, 0])
        return self._product_s[p]

    def _exchange_s(self, layer: int, parts: frozenset[str]) -> float:
        """Of tensor, context and expert parallelism inside of the parts, none of it hidden."""
        layout, spec, c = self.job.layout, self.spec, self.sizes.compute_bytes
        stream = self.tokens * spec.hidden_size * c
        moe = spec.moe if spec.is_moe_layer(layer) else None
        dense = moe is None or moe.shared_ffn_size > 0

        def over(op: Op, size: float, ranks: int, inside: float) -> float:
            local = max(self.rates.domain // inside, 1)
            return float(group_s(op, size, ranks, local, self.rates, self.constants)) if ranks > 1 else 0.0

        gathers = 2 if "gather" in parts else ("qkv" in parts) + ("up" in parts and dense)
        total = gathers * over("all_gather", stream, layout.tp, 1) if layout.sequence_parallel else 0.0
        if "out" in parts:
            total += over("reduce_scatter" if layout.sequence_parallel else "all_reduce", stream, layout.tp, 1)
        if "attention" in parts:
            kv = spec.num_kv_heads * 2 * spec.head_dim * c * self.tokens / layout.tp
            total += over("all_gather", kv * layout.cp, layout.cp, layout.tp)
        if "experts" in parts and moe is not None:
            rows = stream / layout.tp * moe.top_k * layout.etp
            total += 2 * over("alltoall", rows, layout.ep * layout.etp, 1)
        return total

    def options(self, layer: int) -> list[_Option]:
        """The sets of parts of which none is both smaller and cheaper, the largest and cheapest first."""
        kind = (self.spec.is_moe_layer(layer), self.spec.window(layer))
        if kind not in self._options:
            found = [
                _Option(self.bytes(layer, s), self.seconds(layer, s), s) for s in _sets(self.spec, layer, self.sizes)
            ]
            found.sort(key=lambda o: (o.seconds, o.bytes, sorted(o.parts)))
            least = itertools.accumulate((o.bytes for o in found), min, initial=math.inf)
            self._options[kind] = [o for o, before in zip(found, least, strict=False) if o.bytes < before]
        return self._options[kind]


def _sets(spec: ModelSpec, layer: int, sizes: Sizes) -> list[frozenset[str]]:
    """The sets worth looking at: a projection is made again only where norms are, whose outputs it reads or makes
    readable; `experts` holds what lies behind the router."""
    parts = sorted(parts_of_layer(spec, layer) - (frozenset() if sizes.divided else {"gather"}))
    every = (frozenset(c) for n in range(len(parts) + 1) for c in itertools.combinations(parts, n))
    inside, behind = {"up", "activation", "dispatch"}, {"qkv", "out", "up", "experts", "mla_up", "router"}
    return [s for s in every if not (s & behind and "norm" not in s) and not ("experts" in s and s & inside)]


def applied_recompute(job: Job, spec: ModelSpec, rank: int = 0, machine: Machine | None = None) -> Applied | None:
    """What pipeline rank `rank` makes again by `train.recompute`; None where a budget can't be met.

    machine: whose rates price a budget; by default that of the job, which may be unknown (ConfigError).
    """
    layers, train = layers_of_rank(job, spec, rank), job.train
    if train.recompute == "budget":
        machine = load_machine(job.machine.name) if machine is None else machine
        return _cheapest(job, spec, rank, _Pricing(job, spec, machine))
    policy = recompute(train.recompute)
    wanted = policy.parts if train.recompute_modules is None else train.recompute_modules
    count = (train.recompute_layers or 0) if policy.by_layer else len(layers)
    useful = set(wanted) - (set() if rank_sizes(job).divided else {"gather"})
    parts = {layer: parts_of_layer(spec, layer, useful if i < count else ()) for i, layer in enumerate(layers)}
    return _applied(job, spec, rank, parts)


def least_bytes(job: Job, spec: ModelSpec) -> float:
    """What the blocks of the fullest pipeline rank keep if everything is made again."""
    return max(
        _applied(job, spec, rank, {i: parts_of_layer(spec, i) for i in layers_of_rank(job, spec, rank)}).kept_bytes
        for rank in range(job.layout.pp)
    )


def _cheapest(job: Job, spec: ModelSpec, rank: int, pricing: _Pricing) -> Applied | None:
    assert job.train.recompute_gb is not None
    layers = layers_of_rank(job, spec, rank)
    budget = job.train.recompute_gb * 1e9 / _under_way(job, rank)
    weights = [_blocks(spec, layer) for layer in layers]
    options = [pricing.options(layer) for layer in layers]
    nothing, everything = [o[0] for o in options], [o[-1] for o in options]

    def fits(picked: Sequence[_Option]) -> bool:
        return sum(w * o.bytes for w, o in zip(weights, picked, strict=True)) <= budget

    if not fits(everything):
        return None
    picked = nothing if fits(nothing) else _pick(options, weights, budget) or everything
    parts = _in_order(spec, layers, picked)
    seconds = sum(_blocks(spec, i) * pricing.seconds(i, s) for i, s in parts.items())
    return replace(_applied(job, spec, rank, parts), again_s=seconds)


def _blocks(spec: ModelSpec, layer: int) -> int:
    """Blocks that go by the number of a layer: those of multi-token prediction are made as the last one is."""
    return 1 + (spec.mtp_layers if layer == spec.num_layers - 1 else 0)


def _pick(options: Sequence[Sequence[_Option]], weights: Sequence[int], budget: float) -> list[_Option] | None:
    """One option a layer, of the least seconds in all; None where rounded bytes don't fit.

    cost[u]: the least seconds of the layers so far within u steps of the budget.
    """
    cost = np.zeros(_STEPS + 1)
    choices = []
    for own, weight in zip(options, weights, strict=True):
        sums = np.full((len(own), _STEPS + 1), np.inf)
        for row, option in zip(sums, own, strict=True):
            steps = math.ceil(weight * option.bytes / budget * _STEPS)
            if steps <= _STEPS:
                row[steps:] = cost[: _STEPS + 1 - steps] + weight * option.seconds
        choices.append(sums.argmin(axis=0))
        cost = sums.min(axis=0)
    if not np.isfinite(cost[-1]):
        return None
    left, picked = _STEPS, []
    for own, weight, choice in zip(reversed(options), reversed(weights), reversed(choices), strict=True):
        option = own[int(choice[left])]
        picked.append(option)
        left -= math.ceil(weight * option.bytes / budget * _STEPS)
    return picked[::-1]


def _in_order(spec: ModelSpec, layers: Sequence[int], picked: Sequence[_Option]) -> dict[int, frozenset[str]]:
    """Layers of one kind may exchange what was picked for them: those that keep least come first."""
    kinds: dict[tuple[bool, int | None, int], list[int]] = {}
    for at, layer in enumerate(layers):
        kinds.setdefault((spec.is_moe_layer(layer), spec.window(layer), _blocks(spec, layer)), []).append(at)
    parts = {}
    for places in kinds.values():
        sets = sorted((picked[at] for at in places), key=lambda o: o.bytes)
        parts.update({layers[at]: o.parts for at, o in zip(places, sets, strict=True)})
    return dict(sorted(parts.items()))


def _under_way(job: Job, rank: int) -> float:
    """Micro-batches whose activations pipeline rank `rank` holds at once, at the most."""
    layout = job.layout
    schedule = list(SCHEDULES).index(layout.schedule)
    return float(in_flight(schedule, layout.pp, layout.virtual_stages, job.micro_batches, rank))


def _applied(job: Job, spec: ModelSpec, rank: int, parts: Mapping[int, frozenset[str]]) -> Applied:
    sizes, seq = rank_sizes(job), job.data.seq_len
    tokens = job.train.micro_batch * seq / job.layout.cp
    kept = plain = flops = forward = 0.0
    for layer, own in parts.items():
        blocks, everything = _blocks(spec, layer), parts_of_layer(spec, layer)
        kept += blocks * layer_bytes(spec, layer, own, sizes)
        plain += blocks * layer_bytes(spec, layer, (), sizes)
        flops += blocks * again(spec, layer, own, sizes, seq).flops
        forward += blocks * (again(spec, layer, everything, sizes, seq).flops + _last_product(spec, layer, sizes))
    held = tokens * _under_way(job, rank)
    return Applied(
        policy=job.train.recompute,
        parts=parts,
        kept_bytes=math.ceil(held * kept),
        plain_bytes=math.ceil(held * plain),
        again_flops=tokens * flops,
        forward_flops=tokens * forward,
    )


def _last_product(spec: ModelSpec, layer: int, sizes: Sizes) -> float:
    """FLOPs a token of the projection that leaves a dense feed-forward part, which is never made again."""
    return 0.0 if spec.is_moe_layer(layer) else 2.0 * spec.hidden_size * spec.ffn_size / sizes.tp
