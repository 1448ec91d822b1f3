"""What a price means: the figures of a priced layout that people compare, and the predicted factory yield.

MFU = useful model FLOPs / (step time x devices x peak of the recipe's data type). The five factors multiply to it:
generality x effective compute x node efficiency x cluster efficiency (stability belongs to a run, see
`bessemer plan goodput`). The one-node step that cluster efficiency is held against is the same step without what
comes with more than one node: exchanges and waiting that leave it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bessemer.core.counts import flops_per_token
from bessemer.core.layout import RUNNABLE
from bessemer.core.machine import Machine
from bessemer.core.recipes import RECIPES, lacking
from bessemer.core.recompute import RECOMPUTE
from bessemer.core.schedules import SCHEDULES
from bessemer.plan.axes import Request
from bessemer.plan.memory import Memory
from bessemer.plan.price import Prices, price
from bessemer.plan.rates import rates_of
from bessemer.plan.space import DP_SHARDS, Layouts

__all__ = ["Money", "Priced", "joined", "money", "prices_of", "runnable", "step_flops", "yield_factors"]

KERNELS = ("gemm", "attention", "grouped")
"""The parts of a step in which useful model FLOPs are done (with the head, which `ends` holds)."""
BETWEEN_NODES = ("p2p", "bubble", "imbalance", "dp", "scale")


@dataclass
class Priced:
    """Layouts of a request with their prices, and what follows from both; arrays [S]."""

    request: Request
    layouts: Layouts
    prices: Prices

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, index: NDArray[np.int64]) -> Priced:
        """The layouts at `index` with their prices."""
        old = self.prices
        memory = Memory(
            {k: v[index] for k, v in old.memory.lines.items()}, old.memory.stage[index], old.memory.when[index]
        )
        own = {f.name: getattr(old, f.name)[index] for f in fields(Prices) if f.name not in ("breakdown", "memory")}
        parts = {k: v[index] for k, v in old.breakdown.items()}
        return Priced(self.request, self.layouts.take(index), Prices(**own, breakdown=parts, memory=memory))

    @property
    def peak_flops(self) -> NDArray[np.float64]:
        """Peak of one device in FLOP/s at each layout's precision, as it is priced."""
        rates = rates_of(self.request.rank_machine)
        by_type = {"fp32": rates.fp32, "bf16": rates.bf16, "fp16": rates.bf16, "fp8": rates.fp8, "fp4": rates.fp4}
        return np.array([by_type[r.gemm] for r in RECIPES.values()], float)[self.layouts.recipe]

    @property
    def mfu(self) -> NDArray[np.float64]:
        flops = step_flops(self.request)
        return flops / (self.prices.step_s * self.request.num_gpus * self.peak_flops)

    @property
    def tokens_per_s_per_gpu(self) -> NDArray[np.float64]:
        request = self.request
        return request.global_batch * request.seq_len / self.prices.step_s / request.num_gpus

    @property
    def headroom_bytes(self) -> NDArray[np.float64]:
        """What the fullest device has left; negative where the layout doesn't fit."""
        limit = self.request.rank_machine.limit_bytes
        return (np.inf if limit is None else float(limit)) - self.prices.memory_bytes

    def row(self, index: int) -> dict[str, Any]:
        """One layout as `bessemer plan search --json` prints it."""
        prices = self.prices
        return {
            "layout": self.layouts.row(index),
            "step_s": float(prices.step_s[index]),
            "mfu": float(self.mfu[index]),
            "tokens_per_s_per_gpu": float(self.tokens_per_s_per_gpu[index]),
            "memory_bytes": float(prices.memory_bytes[index]),
            "headroom_bytes": float(self.headroom_bytes[index]),
            "band": [float(prices.low_s[index]), float(prices.high_s[index])],
            "runnable": bool(runnable(self.layouts, self.request.machine)[index]),
        }

    def breakdown(self, index: int) -> dict[str, float]:
        """Seconds of the step by part, largest first, zeros left out."""
        parts = {name: float(values[index]) for name, values in self.prices.breakdown.items()}
        return dict(sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda item: -item[1]))

    def memory(self, index: int) -> dict[str, float]:
        """Bytes of the heaviest stage by line, largest first, zeros left out."""
        lines = {name: float(values[index]) for name, values in self.prices.memory.lines.items()}
        return dict(sorted(((k, v) for k, v in lines.items() if v > 0), key=lambda item: -item[1]))


def prices_of(request: Request, layouts: Layouts) -> Priced:
    """The layouts priced as the request has it: its machine, software, calibration and padded vocabulary."""
    prices = price(
        request.padded,
        request.rank_machine,
        layouts,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
        calibration=request.calibration,
        era=request.era,
        work=request.work,
        own=request.own,
        precision=request.precision,
    )
    return Priced(request, layouts, prices)


def step_flops(request: Request) -> float:
    """Useful model FLOPs of a step, all devices together: causal attention, nothing recomputed, no padded rows."""
    return flops_per_token(request.spec, request.seq_len).training * request.global_batch * request.seq_len


def runnable(layouts: Layouts, machine: Machine) -> NDArray[np.bool_]:
    """Which layouts the trainer runs today on `machine`; the others are modelled only. Recipes run where
    `check` lets them."""
    ok = np.ones(len(layouts), bool)
    names = {"dp_shard": DP_SHARDS, "schedule": tuple(SCHEDULES)}
    for name, allowed in RUNNABLE.items():
        if not hasattr(layouts, name):
            continue
        ids = [names[name].index(str(v)) for v in allowed] if name in names else [int(str(v)) for v in allowed]
        ok &= np.isin(getattr(layouts, name), ids)
    ok &= np.array([r.runnable and not lacking(r, machine) for r in RECIPES.values()])[layouts.recipe]
    ok &= np.array([r.runnable for r in RECOMPUTE.values()])[layouts.recompute]
    idle = ("offload_optimizer", "offload_activations", "graph", "first_layers", "last_layers")
    for name in idle:
        ok &= getattr(layouts, name) == 0
    return ok


def yield_factors(priced: Priced, index: int) -> dict[str, float]:
    """Predicted factors of one layout; they multiply to `yield`. All modelled; stability is that of a run: 1 here.

    F_i / P_i: useful FLOPs of the block's products at the recipe's peak, those of attention core, router and head at
    the peak of the 16-bit type. Time in kernels: that of the fullest stage without recompute.
    """
    request, machine = priced.request, priced.request.rank_machine
    flops = flops_per_token(request.spec, request.seq_len)
    tokens = request.global_batch * request.seq_len / request.num_gpus
    peak = float(priced.peak_flops[index])
    wide = peak if RECIPES[str(priced.layouts.row(index)["recipe"])].gemm == "fp32" else rates_of(machine).bf16
    slow = 3 * tokens * (flops.attention_scores + flops.router + flops.head)
    fast = 3 * tokens * flops.forward - slow
    ideal = (fast + slow) / peak
    by_path = fast / peak + slow / wide
    parts = priced.breakdown(index)
    step = float(priced.prices.step_s[index])
    kernels = sum(parts.get(name, 0.0) for name in (*KERNELS, "ends"))
    leaving = sum(parts.get(name, 0.0) for name in _between(priced, index))
    one_node = step - leaving
    return {
        "generality": ideal / by_path,
        "effective_compute": by_path / kernels,
        "node_efficiency": kernels / one_node,
        "cluster_efficiency": one_node / step,
        "stability": 1.0,
        "yield": ideal / step,
    }


def _between(priced: Priced, index: int) -> tuple[str, ...]:
    """The parts of the step that a run on more than one node adds."""
    request, row = priced.request, priced.layouts.row(index)
    if request.num_gpus <= request.machine.gpus_per_node:
        return ()
    domain, tp = request.domain, int(row["tp"])
    wide = [
        name
        for name, ranks in (("tp", tp), ("cp", tp * int(row["cp"])), ("ep", int(row["ep"]) * int(row["etp"])))
        if ranks > domain
    ]
    return (*BETWEEN_NODES, *wide)


@dataclass(frozen=True)
class Money:
    """Of `tokens` tokens: hours on all devices, energy of the devices at their power limit, cost (None: no price)."""

    tokens: float
    hours: float
    gpu_hours: float
    energy_kwh: float | None
    cost: float | None


def money(priced: Priced, index: int, *, tokens: float, gpu_hour: float | None, pue: float = 1.0) -> Money:
    """`gpu_hour`: price of a device and hour, in any currency. Energy is an upper bound: every device at `tdp_w`."""
    request = priced.request
    per_s = float(priced.tokens_per_s_per_gpu[index]) * request.num_gpus
    hours = tokens / per_s / 3600
    gpu_hours = hours * request.num_gpus
    watts = request.machine.tdp_w
    energy = None if watts is None else gpu_hours * watts * pue / 1000
    return Money(tokens, hours, gpu_hours, energy, None if gpu_hour is None else gpu_hours * gpu_hour)


def joined(first: Priced, second: Priced) -> Priced:
    """The layouts of both, one after the other."""
    a, b = first.prices, second.prices

    def one(x: Any, y: Any) -> Any:
        return {k: np.concatenate([x[k], y[k]]) for k in x} if isinstance(x, dict) else np.concatenate([x, y])

    memory = Memory(*(one(getattr(a.memory, f.name), getattr(b.memory, f.name)) for f in fields(Memory)))
    own = {f.name: one(getattr(a, f.name), getattr(b, f.name)) for f in fields(Prices) if f.name != "memory"}
    names = [f.name for f in fields(Layouts)]
    layouts = Layouts(**{n: one(getattr(first.layouts, n), getattr(second.layouts, n)) for n in names})
    return Priced(first.request, layouts, Prices(**own, memory=memory))
