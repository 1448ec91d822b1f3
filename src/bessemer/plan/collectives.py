"""Seconds of collectives, vectorised: inside a node from measured tables, between nodes in closed form.

`size_bytes` is the full buffer: what an all-gather ends with, a reduce-scatter or all-reduce starts with, and what
one rank sends in all in an all-to-all (its own part included). All functions are zero for one rank.
Bandwidth figures are per device; a *bus* bandwidth is what an all-gather or reduce-scatter reaches of a link.
"""

from __future__ import annotations

import csv
import functools
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bessemer.plan.rates import TABLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.calibration import Constants
    from bessemer.plan.rates import Rates

__all__ = [
    "full_mesh_all_reduce_s",
    "group_s",
    "in_switch_all_reduce_s",
    "nccl_table",
    "node_s",
    "p2p_s",
    "ring_all_reduce_s",
    "two_step_mesh_all_reduce_s",
]

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
_TURNS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "alltoall": 1.0}


def ring_all_reduce_s(size_bytes: Any, ranks: Any, link_bytes_per_s: Any, hop_s: Any) -> Any:
    """2 (n-1) hops, each moving size/n over one link of `link_bytes_per_s`."""
    return 2 * (np.asarray(ranks) - 1) * (hop_s + np.asarray(size_bytes) / ranks / link_bytes_per_s)


def full_mesh_all_reduce_s(size_bytes: Any, ranks: Any, pair_bytes_per_s: Any, start_s: Any) -> Any:
    """One step in a full mesh: every rank reads the other n-1 inputs over its n-1 links at once and reduces by itself.

    Each link of `pair_bytes_per_s` carries the whole buffer once, so it pays while the buffer is small.
    """
    return np.where(np.asarray(ranks) > 1, start_s + np.asarray(size_bytes) / pair_bytes_per_s, 0.0)


def two_step_mesh_all_reduce_s(size_bytes: Any, ranks: Any, pair_bytes_per_s: Any, start_s: Any) -> Any:
    """Reduce-scatter and all-gather, each in one step of a full mesh: every link carries size/n twice."""
    each = start_s + np.asarray(size_bytes) / ranks / pair_bytes_per_s
    return np.where(np.asarray(ranks) > 1, 2 * each, 0.0)


def in_switch_all_reduce_s(size_bytes: Any, ranks: Any, link_bytes_per_s: Any, start_s: Any) -> Any:
    """A reducing switch: each rank sends its buffer once and gets the result once, both ways at the same time."""
    return np.where(np.asarray(ranks) > 1, 2 * start_s + np.asarray(size_bytes) / link_bytes_per_s, 0.0)


@functools.cache
def nccl_table() -> dict[tuple[str, str, int], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """(machine, op, ranks) -> natural logarithms of bytes and of seconds. Source in the file's head.

    A larger buffer is never faster: where the measurement says so, it was noise and the longer time stands.
    """
    text = (resources.files("bessemer.plan") / "data" / "nccl_node.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))
    sizes = np.log(np.array(rows[0][3:], float))
    seconds = {(r[0], r[1], int(r[2])): np.array(r[3:], float) * 1e-6 for r in rows[1:]}
    return {key: (sizes, np.log(np.maximum.accumulate(times))) for key, times in seconds.items()}


def node_s(op: Op, size_bytes: Any, ranks: Any, rates: Rates, constants: Constants) -> NDArray[np.float64]:
    """Inside a scale-up domain: log-log interpolation of the measured table where there is one (beyond 8 ranks and
    between the table's 2, 4, 8 by the bus bandwidth of the nearest), else latency + size (n-1)/n / bus bandwidth.
    """
    shape = np.broadcast(size_bytes, ranks, rates.table, constants.nvlink).shape
    size, count, table = (
        np.broadcast_to(x, shape or (1,)) for x in (size_bytes, np.asarray(ranks, float), rates.table)
    )
    share = (count - 1) / np.maximum(count, 1)
    bus = np.asarray(rates.bus_bytes_per_s) * np.where(op == "alltoall", 0.9, 1.0)
    reduces = op in ("all_reduce", "reduce_scatter")
    start = rates.latency_s * _TURNS[op] * (1 - rates.reduce_start_saved * reduces) + rates.hand_over_s
    out = start + _TURNS[op] * size * share / bus * (1 - rates.reduce_saved * reduces / 2)
    if np.any(rates.mesh):
        out = np.where(np.asarray(rates.mesh) > 0, _mesh_s(op, size, count, bus, rates), out)
    column = np.where(count >= 8, 8, np.where(count >= 4, 4, 2))
    for index in np.unique(table[table >= 0]).astype(int):
        for n in (2, 4, 8):
            here = (table == index) & (column == n)
            if not here.any():
                continue
            sizes, times = nccl_table()[TABLES[index], op, n]
            measured = np.exp(_extended(np.log(np.maximum(size[here], 1.0)), sizes, times))
            out[here] = measured * share[here] / ((n - 1) / n)
    wide = np.where((op == "alltoall") & (count > rates.node), constants.wide_alltoall, 1.0)
    return np.where((count > 1) & (size > 0), out / constants.nvlink / wide, 0.0).reshape(shape)


def _mesh_s(op: Op, size: Any, count: Any, bus: Any, rates: Rates) -> Any:
    """In a full mesh of n, each link has bus/(n-1): the best of ring, one step and two steps; others take one step."""
    pair = bus / np.maximum(count - 1, 1)
    hop = rates.hop_s
    if op != "all_reduce":
        return hop * 2 + size / np.maximum(count, 1) / pair
    best = np.minimum(ring_all_reduce_s(size, count, bus, hop), full_mesh_all_reduce_s(size, count, pair, 2 * hop))
    return np.minimum(best, two_step_mesh_all_reduce_s(size, count, pair, 2 * hop))


def _extended(at: NDArray[np.float64], xs: NDArray[np.float64], ys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear interpolation that goes on with slope 1 (bandwidth-bound) above the last point."""
    return np.interp(at, xs, ys) + np.maximum(at - xs[-1], 0.0)


def group_s(op: Op, size_bytes: Any, ranks: Any, local: Any, rates: Rates, constants: Constants) -> NDArray[np.float64]:
    """A group of `ranks` of which `local` share a scale-up domain: the inner exchange and the outer one, pipelined, so
    the slower counts. Each local rank brings its own network card, so the outer exchange moves size/local per card.

    An oversubscribed fabric slows the part of an all-to-all that leaves the pod. Rings cross from pod to pod once each
    while every host has one, so they stay within even a thin uplink.
    """
    size, count = np.asarray(size_bytes, float), np.asarray(ranks, float)
    inside = np.minimum(np.maximum(np.asarray(local, float), 1.0), count)
    outside = count / inside
    inner = node_s(op, size, inside, rates, constants)
    if op == "alltoall":  # every byte for another node crosses this rank's own card
        reached = np.where(np.asarray(rates.nic_efficiency) > 0, rates.nic_efficiency, constants.nic_alltoall)
        beyond = np.maximum(1 - rates.pod / np.maximum(count, 1), 0.0)
        wire = size * (1 - inside / count + beyond * (rates.oversubscribed - 1)) / (rates.nic_bytes_per_s * reached)
        inner = inner * inside / count * np.where(inside > 1, 1.0, 0.0)
        outer = np.where(outside > 1, wire + constants.hop_s, 0.0)
    else:
        reached = np.where(np.asarray(rates.nic_efficiency) > 0, rates.nic_efficiency, constants.nic)
        wire = size / inside * (outside - 1) / outside / (rates.nic_bytes_per_s * reached)
        # all-reduce over many hosts goes by trees, gather and scatter by rings
        steps = np.minimum(outside - 1, 2 * np.log2(np.maximum(outside, 1)) + 8) if op == "all_reduce" else outside - 1
        outer = np.where(outside > 1, _TURNS[op] * (wire + steps * constants.hop_s), 0.0)
    return np.maximum(inner, outer)


def p2p_s(size_bytes: Any, inside: Any, rates: Rates, constants: Constants) -> NDArray[np.float64]:
    """One message between two ranks, over the scale-up link where `inside`, else over the network card."""
    bandwidth = np.where(inside, rates.bus_bytes_per_s * constants.nvlink, rates.nic_bytes_per_s * constants.nic)
    return constants.hop_s + np.asarray(size_bytes, float) / bandwidth
