"""`Rates`: the figures of a machine that the cost model computes with, as floats or one entry a layout.

A figure that the machine's sources don't give is taken from its nearest relative and named in `assumed`; a machine
that has neither is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from bessemer.core.errors import ConfigError
from bessemer.core.machine import load_machine, machine_names
from bessemer.core.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bessemer.core.machine import Machine

__all__ = ["TABLES", "Rates", "rates_of", "stack_rates"]

TABLES = ("h100", "h200", "b200")
"""Machines with measured collectives inside a node (`data/nccl_node.csv`); `Rates.table` is an index, -1: none."""

_RELATIVES = {
    "gb300": "gb200",
    "b300": "b200",
    "h100-96gb": "h100",
    "h800": "h100",
    "h200": "h100",
    "a100-40gb": "a100-80gb",
}
_NIC = {"v100": 12.5e9, "a100": 25e9, "b200": 50e9, "gb200": 50e9, "b300": 100e9, "gb300": 100e9}
_DEFAULT_NIC = 25e9
_BUSBW = {
    "V100": 120e9,
    "A100": 230e9,
    "H100": 330e9,
    "H200": 335e9,
    "B200": 610e9,
    "B300": 610e9,
    "GB200": 610e9,
    "GB300": 610e9,
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates in operations/s and bytes/s of one device. `bus_bytes_per_s`: what gather and scatter reach inside a
    scale-up domain, per device. `engine`: share of an overlapped exchange's slow-down that remains (1: exchanges run
    on the compute units; 0: on an engine of their own). `mesh`: 1 where every pair in a domain has its own link."""

    fp32: float
    bf16: float
    fp8: float
    fp4: float
    hbm_bytes_per_s: float
    bus_bytes_per_s: float
    nic_bytes_per_s: float
    host_bytes_per_s: float  # one direction between device and host memory, for offload
    node: float  # devices of a host
    domain: float  # devices that reach each other over the scale-up link
    table: float
    latency_s: float  # of a collective inside a node, small messages
    engine: float
    mesh: float
    hop_s: float  # of a step of a collective in a full mesh
    reduce_saved: float  # of a reduction's bandwidth and
    reduce_start_saved: float  # latency, where it happens beside the memory
    hand_over_s: float  # between engines, a collective
    nic_efficiency: float  # 0: the calibration's
    pod: float  # devices under one full-bandwidth part of the fabric
    oversubscribed: float  # 1: full bandwidth everywhere
    memory_bytes: float
    assumed: tuple[str, ...] = field(default=(), compare=False)


def rates_of(machine: Machine, *, gpus_per_node: int | None = None, nic_bytes_per_s: float | None = None) -> Rates:
    """The rates of `machine`; the keyword arguments beat its own figures.

    ConfigError for a machine without a peak rate or memory bandwidth of its own or of a relative (`cpu-local` before
    it was measured).
    """
    relative = load_machine(_RELATIVES[machine.name]) if machine.name in _RELATIVES else None
    assumed: list[str] = []

    def figure(name: str, value: float | None, other: float | None, default: float | None = None) -> float:
        if value is not None:
            return float(value)
        if relative is not None and other is not None:
            assumed.append(f"{name} as {relative.name}")
            return float(other)
        if default is not None:
            assumed.append(f"{name} {default:g}")
            return float(default)
        raise ConfigError([_missing(machine, name)], f"machine {machine.name}")

    def peak(dtype: str, fallback: float | None) -> float:
        return figure(f"{dtype} peak", machine.peak(dtype), relative and relative.peak(dtype), fallback)

    wide = machine.peak("bf16") or machine.peak("fp16") or (machine.peak("fp8") or 0) / 2 or machine.peak("fp32")
    fp32 = machine.peak("tf32") or machine.peak("fp32") or (wide or 0) / 2
    link = machine.scaleup_bytes_per_s or (relative.scaleup_bytes_per_s if relative else None)
    family = machine.name.split("-")[0].upper()
    nic = nic_bytes_per_s or machine.nic_bytes_per_s or (relative.nic_bytes_per_s if relative else None)
    node = gpus_per_node or machine.gpus_per_node
    table = TABLES.index(family.lower()) if family.lower() in TABLES else -1
    return Rates(
        fp32=fp32 or peak("fp32", None),
        bf16=peak("bf16", wide),
        fp8=machine.peak("fp8") or 0.0,
        fp4=machine.peak("fp4") or 0.0,
        hbm_bytes_per_s=figure(
            "memory bandwidth", machine.memory_bytes_per_s, relative and relative.memory_bytes_per_s
        ),
        bus_bytes_per_s=_BUSBW.get(family) or (link * (machine.mesh_efficiency or 0.7) if link else 10e9),
        nic_bytes_per_s=nic or figure("network card", None, None, _NIC.get(family.lower(), _DEFAULT_NIC)),
        host_bytes_per_s=machine.host_bytes_per_s or 25e9,
        node=float(node),
        domain=float(max(machine.scaleup_domain or node, node)),
        table=float(table),
        latency_s=12e-6 * (machine.launch_latency_factor or 1.0),
        engine=machine.engine_interference if machine.engine_interference is not None else 1.0,
        mesh=1.0 if machine.scaleup_topology == "full-mesh" else 0.0,
        hop_s=machine.collective_start_s or 4e-6,
        reduce_saved=machine.reduction_bandwidth_saved or 0.0,
        reduce_start_saved=machine.reduction_latency_saved or 0.0,
        hand_over_s=machine.engine_dependency_s or 0.0,
        nic_efficiency=machine.nic_efficiency or 0.0,
        pod=float(machine.fabric_pod or 1e9),
        oversubscribed=machine.fabric_oversubscription or 1.0,
        memory_bytes=figure("memory", machine.limit_bytes, relative and relative.limit_bytes),
        assumed=tuple(assumed),
    )


def stack_rates(many: Sequence[Rates]) -> Rates:
    """One `Rates` of arrays with an entry for each of `many`."""
    names = [f.name for f in fields(Rates) if f.name != "assumed"]
    return Rates(**{n: np.array([getattr(r, n) for r in many], float) for n in names})


def _missing(machine: Machine, name: str) -> Problem:
    known = ", ".join(n for n in machine_names() if n != "cpu-local")
    return Problem(
        code="machine-uncalibrated",
        where="machine.name",
        what=f"{machine.name} has no {name}",
        why="a step can't be priced without it, and it is never guessed",
        fix=f"`bessemer plan calibrate` measures it; machines with figures: {known}",
    )
