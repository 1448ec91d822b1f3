"""`price`: the step time and the peak memory of many layouts at once, with where the time goes.

The cost of a layer is computed once per unique key and gathered; pipeline, data parallelism and memory are closed
forms over all layouts. One layout goes through the same code, so that scalar and vector can't differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.job import PrecisionSection
from bessemer.plan.calibration import Calibration, default_calibration, gpu_of
from bessemer.plan.data_parallel import data_parallel_s
from bessemer.plan.dims import dims_of
from bessemer.plan.layer import CATEGORIES, Work
from bessemer.plan.memory import MEMORY_LINES, Memory, memory_of
from bessemer.plan.own_memory import own_memory
from bessemer.plan.rates import rates_of
from bessemer.plan.step import Case, offload_s, optimizer_step_s, pipeline_s, slowest_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.core.machine import Machine
    from bessemer.core.model import ModelSpec
    from bessemer.plan.calibration import Constants
    from bessemer.plan.dims import Dims
    from bessemer.plan.rates import Rates
    from bessemer.plan.space import Layouts

__all__ = ["BANDS", "BREAKDOWN", "DEFAULT_ERA", "Prices", "price", "price_arrays", "price_case"]

DEFAULT_ERA = "megatron-2026"

_PLAIN = PrecisionSection()

BREAKDOWN = (*CATEGORIES, "ends", "p2p", "bubble", "dp", "offload", "optimizer", "scale", "fixed")
"""Seconds of a step on the slowest rank: the layers' parts (see `layer.CATEGORIES`), embedding, head and loss,
exposed transfers between stages, pipeline bubble, exposed data-parallel exchanges and activation offload, optimizer,
loss with the number of nodes, what comes once a step. They add up to `step_s`."""

BANDS = {"dense": 0.09, "moe": 0.28, "dense, uncalibrated": 0.20, "moe, uncalibrated": 0.35}
"""Relative half-widths of the step time's band. Calibrated: nine of ten measured steps whose configuration was not in
the fit fell inside (docs/validation.md). Uncalibrated: whole sources left out of a fit, and no measurement at all for
MoE."""


@dataclass
class Prices:
    """Arrays [S]. `low_s`/`high_s`: the step time's band of uncertainty; `stage_forward_s`, `stage_inputs_s` (recompute
    and input gradient), `stage_weights_s`: one micro-batch on the slowest rank, for a replay."""

    step_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    num_micro: NDArray[np.float64]
    breakdown: dict[str, NDArray[np.float64]]
    memory: Memory
    stage_forward_s: NDArray[np.float64]
    stage_inputs_s: NDArray[np.float64]
    stage_weights_s: NDArray[np.float64]


def price(  # noqa: PLR0913 - the request has that many parts
    spec: ModelSpec,
    machine: Machine,
    layouts: Layouts,
    *,
    global_batch: int,
    seq_len: int,
    num_gpus: int | None = None,
    calibration: Calibration | None = None,
    era: str = DEFAULT_ERA,
    work: Work | None = None,
    own: bool = False,
    precision: PrecisionSection = _PLAIN,
) -> Prices:
    """Prices `layouts` of one model on one machine.

    `work` says more about the step than `seq_len` (LoRA, packed sequences, expert imbalance). `own`: with the memory of
    Bessemer's own trainer instead of that of the era's software; `precision`: what a job says of that, its recipe
    apart. ValueError where a
    layout doesn't use `num_gpus` ranks or `global_batch` isn't micro_batch x dp x a whole number: such layouts are the
    enumeration's to leave out. ConfigError for a machine without figures, KeyError for an unknown era.
    """
    if num_gpus is not None and np.any(layouts.world_size != num_gpus):
        bad = int(np.argmax(layouts.world_size != num_gpus))
        raise ValueError(f"layout {bad} has {layouts.world_size[bad]} ranks, not {num_gpus}")
    each = layouts.micro_batch * layouts.dp
    if np.any(global_batch % each):
        bad = int(np.argmax(global_batch % each != 0))
        raise ValueError(f"layout {bad}: global batch {global_batch} is no multiple of micro_batch x dp = {each[bad]}")
    gpus = gpu_of(machine)
    constants = (calibration or default_calibration()).resolve(gpus, era)
    job = work or Work(seq=float(seq_len))
    case = Case(layouts, dims_of(spec), job, rates_of(machine), constants, global_batch / each)
    prices = price_case(case, calibrated=gpus[-1] != "generic", memory=not own)
    if own:
        prices.memory = own_memory(layouts, spec, job.seq, case.num_micro, constants.memory_base_bytes, precision)
        prices.memory_bytes = prices.memory.total
    return prices


def price_case(case: Case, *, calibrated: Any = True, memory: bool = True) -> Prices:
    """As `price`, for dims, rates and constants that may be arrays with one entry a layout. Without `memory` its lines
    are zero."""
    lay, c = case.layouts, case.constants
    rank = slowest_rank(case)
    bubble, p2p = pipeline_s(case, rank)
    offload = offload_s(case, rank)
    zero = np.zeros(len(lay))
    parts = {
        **dict(zip((*CATEGORIES, "ends"), rank.parts * case.num_micro, strict=True)),
        "p2p": p2p,
        "bubble": bubble,
        "dp": data_parallel_s(case, rank, offload),
        "offload": offload * case.num_micro,
        "optimizer": optimizer_step_s(case, rank.params),
        "fixed": c.step_s + zero,
    }
    step = case.num_micro * rank.total + sum(parts[k] for k in ("p2p", "bubble", "dp", "offload", "optimizer", "fixed"))
    parts["scale"] = step * c.scale * np.log2(np.maximum(lay.world_size / case.rates.node, 1.0))
    step = step + parts["scale"]
    empty = Memory(dict.fromkeys(MEMORY_LINES, zero), zero.astype(int), zero.astype(int))
    weighed = memory_of(lay, case.dims, case.work, c, case.num_micro) if memory else empty
    width = _half_width(case, calibrated)
    return Prices(
        step_s=step,
        low_s=step * (1 - width),
        high_s=step * (1 + width),
        memory_bytes=weighed.total,
        num_micro=case.num_micro,
        breakdown={k: parts[k] for k in BREAKDOWN},
        memory=weighed,
        stage_forward_s=rank.forward,
        stage_inputs_s=rank.inputs,
        stage_weights_s=rank.weights,
    )


def _half_width(case: Case, calibrated: Any) -> Any:
    moe = np.asarray(case.dims.moe_layers) > 0
    known = np.where(moe, BANDS["moe"], BANDS["dense"])
    return np.where(
        np.asarray(calibrated), known, np.where(moe, BANDS["moe, uncalibrated"], BANDS["dense, uncalibrated"])
    )


def price_arrays(
    lay: Layouts,
    d: Dims,
    w: Work,
    r: Rates,
    c: Constants,
    global_batch: Any,
    *,
    calibrated: Any = True,
    memory: bool = True,
) -> Prices:
    """`price_case` from its pieces."""
    case = Case(lay, d, w, r, c, global_batch / (lay.micro_batch * lay.dp))
    return price_case(case, calibrated=calibrated, memory=memory)
