"""Calibration: the physical constants of the cost model, by GPU and by framework era, with provenance and band.

A constant is looked up from the most special table to the most general one: era on that GPU, era, GPU, the GPU's
generation, all. The files in `calibrations/` hold the tables; `bessemer.plan.fit` wrote the fitted values. There are
few constants and each has a physical meaning; none belongs to a single row or a single model.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bessemer.core.machine import Machine

__all__ = ["ERAS", "Calibration", "Constant", "Constants", "default_calibration", "gpu_of", "stack_constants"]


@dataclass(frozen=True)
class Constant:
    """A value with the range in which it may lie and where it comes from. `spread`: standard deviation of the natural
    logarithm that was allowed around `prior` in the fit; 0: not fitted."""

    value: float
    low: float
    high: float
    prior: float
    spread: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the cost model reads; each a float, or an array with an entry a layout. Efficiencies are fractions of a
    peak; `x_*` the share of an exchange that stays exposed where it is overlapped."""

    gemm_fp32: float
    gemm_bf16: float  # of the bf16 peak, sustained, asymptotic in size (fp16 alike)
    gemm_fp8: float  # of the fp8 peak, per-tensor scales
    gemm_mxfp8: float  # of the fp8 peak, block scales
    gemm_fp4: float  # of the fp4 peak
    clock: float  # sustained clock of this product against its generation
    gemm_half_k: float  # depth K at which a product reaches half of its efficiency
    gemm_half_n: float  # the same for the smallest of rows, columns and depth, summed
    hbm: float  # of the memory bandwidth
    gap_s: float  # between two kernels
    attention: float  # forward, on causal FLOPs, at long sequences
    attention_backward: float  # backward efficiency / forward efficiency, for 2.5 times the FLOPs
    attention_half: float  # sequence length at half efficiency
    attention_half_dim: float  # head_dim at half efficiency
    unfused: float  # bytes moved by unfused attention, x counted
    unfused_attention: float  # 1 where scores go through memory, 0 for flash attention
    head_dim_penalty: float  # x where head_dim is no multiple of 8 in unfused attention
    element: float  # bytes moved by norms, rotary, activation, residuals, x counted
    cast: float  # bytes moved by quantisation, x counted
    cross_entropy: float  # x 24 bytes a logit
    optimizer: float  # x 30 bytes a local parameter
    host_dense_s: float  # the host's time for a dense layer, forward and backward of one micro-batch
    host_moe_s: float  # the same of an MoE layer
    stall_s: float  # of the device in a layer and micro-batch, where the runtime synchronises (0 elsewhere)
    moe: float  # x on everything in the MoE part but its exchanges
    moe_fixed_s: float  # a layer and pass
    grouped_half_tokens: float  # tokens of an expert at half efficiency
    grouped_half_width: float  # expert width at half efficiency
    unfused_experts: float  # x the bytes of the activation in experts with biases
    permute: float  # bytes moved by permutation, x counted
    layer: float  # x on the layer's kernels
    recompute_full: float  # share of a layer that `full` makes again
    x_tp: float
    x_cp: float
    x_pp: float
    x_dp: float
    x_fsdp: float
    x_ep: float  # of dispatch and combine inside a scale-up domain
    x_ep_wire: float  # between hosts
    slow: float  # compute slowed by overlapped exchanges, x their time
    bubble: float
    nvlink: float  # x on the measured or nominal bus bandwidth inside a node
    nic: float  # of the network card's rate, gather and scatter
    nic_alltoall: float  # the same, all-to-all
    wide_alltoall: float  # x on all-to-all in a scale-up domain wider than a node
    hop_s: float  # latency of a step between nodes
    scale: float  # lost share of the step per doubling of nodes
    step_s: float  # once a step: data, logging, synchronisation
    memory_base_bytes: float  # context, libraries, communication buffers: what an allocator doesn't count
    memory_activation: float  # x on saved activations (compilers save less, eager frameworks more)
    logit_bytes: float  # of a logit at the peak of the loss
    grad_bytes: float  # of a gradient of a bf16 model at rest
    dummy_grads: (
        float  # 1 where a weight-shaped buffer a distinct shape is kept (TransformerEngine, fused accumulation)
    )
    gathered_layers: float  # layers whose gathered parameters are alive at once under FSDP
    stage_stash: float  # stage inputs and outputs that a pipeline runtime keeps beside the layers' own
    resharded: float  # FSDP: times that parameters are gathered in a step and micro-batch (2: again for the backward)
    reduce_bytes: float  # of a gradient on the wire
    gather_fp8: float  # bytes of a parameter on the wire where products are quantised


ERAS = (
    "megatron-2020",
    "megatron-2021",
    "megatron-2022",
    "megatron-deepspeed-2022",
    "composer-2023",
    "megatron-2024",
    "megatron-2025",
    "megatron-2026",
    "megatron-2026.06",
    "megatron-plain",
    "torchtitan-2024",
    "torchtitan-eager-2024",
    "torchtitan-2025",
    "jax-2024",
    "paxml-2024",
)
"""Software of a time. `megatron-plain` is current Megatron-LM with all overlap switched off."""

_PARENTS = {"torchtitan-2025": "torchtitan-2024", "torchtitan-eager-2024": "torchtitan-2024"}
"""What an era doesn't say, its parent does."""

_GPUS = {
    "V100": ("v100", "volta"),
    "A100": ("a100", "ampere"),
    "H100-96": ("h100-96gb", "h100", "hopper"),
    "H100": ("h100", "hopper"),
    "H200": ("h200", "h100", "hopper"),
    "H800": ("h800", "h100", "hopper"),
    "GB300": ("gb300", "gb200", "blackwell"),
    "GB200": ("gb200", "blackwell"),
    "B300": ("b300", "b200", "blackwell"),
    "B200": ("b200", "blackwell"),
}


def gpu_of(machine: Machine) -> tuple[str, ...]:
    """The tables of a machine, the most special first; the last is "generic" where none was calibrated."""
    name = machine.name.upper()
    for key, chain in _GPUS.items():
        if name.startswith(key):
            return chain
    return ("cpu", "generic") if machine.device == "cpu" else ("generic",)


@dataclass(frozen=True)
class Calibration:
    """Constants by dotted key: "common.gap_s", "gpu.h100.clock", "era.megatron-2025.x_tp",
    "era.composer-2023.h100.attention"."""

    constants: Mapping[str, Constant]

    def key(self, field: str, gpus: Sequence[str], era: str) -> str:
        """The key from which `field` is read; KeyError where no table has it."""
        candidates: list[str] = []
        for name in (era, _PARENTS.get(era)):
            candidates += [f"era.{name}.{gpu}.{field}" for gpu in gpus] + [f"era.{name}.{field}"]
        candidates += [f"gpu.{gpu}.{field}" for gpu in gpus] + [f"common.{field}"]
        for candidate in candidates:
            if candidate in self.constants:
                return candidate
        raise KeyError(f"no calibration has {field} for {gpus[0]}, {era}")

    def resolve(self, gpus: Sequence[str], era: str) -> Constants:
        """The constants of one GPU under the software of `era`."""
        values = {f.name: self.constants[self.key(f.name, gpus, era)].value for f in fields(Constants)}
        return Constants(**values)


def stack_constants(many: Sequence[Constants]) -> Constants:
    """One `Constants` of arrays with an entry for each of `many`."""
    return Constants(**{f.name: np.array([getattr(c, f.name) for c in many], float) for f in fields(Constants)})


@functools.cache
def default_calibration() -> Calibration:
    """The constants that come with the package."""
    constants: dict[str, Constant] = {}
    folder = resources.files("bessemer.plan") / "calibrations"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            _flatten(tomllib.loads(file.read_text(encoding="utf-8")), (), constants)
    return Calibration(constants)


def _flatten(table: Mapping[str, object], path: tuple[str, ...], into: dict[str, Constant]) -> None:
    for key, value in table.items():
        here = (*path, key)
        if not isinstance(value, dict):
            raise ValueError(f"calibration entry {'.'.join(here)} is no table")
        if "value" in value:
            into[".".join(here)] = Constant(**value)
        else:
            _flatten(value, here, into)
