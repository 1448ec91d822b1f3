"""Pipelines in closed form: how layers lie on stages, how long a step of m micro-batches takes, what is in flight.

tF, tI, tW: forward, input gradient (with recompute) and weight gradient of one micro-batch on a whole rank.
Time of a step = m x slowest rank + bubble. Bubbles of even stages (sources in `bessemer.core.schedules`):

    gpipe, 1f1b   (pp-1) (tF + tI + tW), over v virtual stages: / v
    zb-h1         (pp-1) (tF + tI - tW)
    zb-h2         (pp-1) (tF + tI - 2 tW)        zb-v  0
    dualpipe      (pp/2-1) (tF + 2 tI - tW)      from (pp/2-1) (F&B + B - 3W), with F&B = F + B
    dualpipev     (pp-1) (tF + 2 tI - tW) / 2    the same formula with 2 pp half stages

The zero-bubble forms are those of a run, where the optimizer step is checked after the fact and the ranks stay
staggered from step to step; a single step that starts and ends together takes (pp-1) tF more at least (`isolated`).
None is below zero. Uneven stages: a micro-batch fills the pipeline in the sum of its stages, the slowest sets the pace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.schedules import SCHEDULES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["bubble_s", "in_flight", "spelled_stages", "stage_layers"]

_ID = {name: i for i, name in enumerate(SCHEDULES)}


def stage_layers(
    layers: Any, pp: Any, virtual: Any, first: Any = 0, last: Any = 0, mtp: Any = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Layers of the first, of a middle (the fullest) and of the last stage.

    Where none is given: even, if pp x virtual divides the layers; else embedding and head count as a layer each, or the
    head alone, if that comes out even; else, and always with multi-token prediction, all chunks are as full as the
    fullest and the last stage takes what is left.
    """
    layers, pp, virtual, first, last, mtp = np.broadcast_arrays(
        *(np.asarray(x, float) for x in (layers, pp, virtual, first, last, mtp))
    )
    slots, plain = pp * virtual, mtp == 0
    even = (layers % slots == 0) & plain
    both = ~even & ((layers + 2) % slots == 0) & (pp > 1) & plain
    head = ~even & ~both & ((layers + 1) % slots == 0) & (pp > 1) & plain
    full = np.ceil(layers / slots) * virtual
    middle = np.where(both, (layers + 2) / pp, np.where(head, (layers + 1) / pp, full))
    own_first = np.where(both, middle - 1, middle)
    own_last = np.where(both | head, middle - 1, np.clip(layers - (pp - 1) * middle, 0, middle))
    given_first, given_last = np.where(first > 0, first, own_first), np.where(last > 0, last, own_last)
    rest = np.where(pp > 2, np.ceil((layers - given_first - given_last) / np.maximum(pp - 2, 1)), 0.0)
    given = (first > 0) | (last > 0)
    middle = np.where(given, rest, np.where(pp > 2, middle, 0.0))
    one = pp == 1
    return np.where(one, layers, given_first), np.where(one, 0.0, middle), np.where(one, layers, given_last)


def spelled_stages(layers: int, pp: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage in order; empty where they are as even as possible and nothing was asked."""
    if pp == 1 or (first == 0 and last == 0):
        return ()
    if pp == 2:
        start = first or layers - last
        return (start, layers - start)
    rest = layers - first - last
    base, more = divmod(rest, pp - 2)
    return (first, *[base + (i < more) for i in range(pp - 2)], last)


def bubble_s(
    schedule: Any, pp: Any, virtual: Any, forward: Any, inputs: Any, weights: Any, *, isolated: bool = False
) -> NDArray[np.float64]:
    """Seconds that a rank of even stages idles in a step. `schedule`: ids; times of one micro-batch on a whole rank."""
    pp, f, i, w = (np.asarray(x, float) for x in (pp, forward, inputs, weights))
    plain = (pp - 1) * (f + i + w)
    dual = f + 2 * i - w
    choices = {
        "1f1b": plain / virtual,
        "gpipe": plain,
        "zb-h1": (pp - 1) * (f + i - w),
        "zb-h2": (pp - 1) * (f + i - 2 * w),
        "zb-v": 0.0 * plain,
        "dualpipe": (pp / 2 - 1) * dual,
        "dualpipev": (pp - 1) * dual / 2,
    }
    start = {"zb-h1": 1.0, "zb-h2": 1.0, "zb-v": 0.5, "dualpipe": 0.5, "dualpipev": 0.5}
    out = np.zeros(np.broadcast(pp, f, np.asarray(schedule)).shape)
    for name, value in choices.items():
        floor = (pp - 1) * f * start.get(name, 0.0) if isolated else 0.0
        out = np.where(np.asarray(schedule) == _ID[name], np.maximum(value, floor), out)
    return np.where(pp > 1, out, 0.0)


def in_flight(schedule: Any, pp: Any, virtual: Any, num_micro: Any, stage: Any) -> NDArray[np.float64]:
    """Micro-batches whose activations pipeline rank `stage` (from 0) holds at the most, in whole-rank activations."""
    pp, v, m, rank = (np.asarray(x, float) for x in (pp, virtual, num_micro, stage))
    one = np.minimum(pp - rank, m)
    warm = np.minimum((pp - rank - 1) * 2 + (v - 1) * pp + 1, m * v) / v
    choices = {
        "1f1b": np.where(v > 1, warm, one),
        "gpipe": m,
        "zb-h1": np.minimum(pp, m),
        "zb-h2": np.minimum(2 * pp - 1, m),
        "zb-v": np.minimum(pp, m),
        "dualpipe": np.minimum(pp + 1, m),
        "dualpipev": np.minimum(pp + 0.5, m),
    }
    out = np.zeros(np.broadcast(pp, v, m, rank, np.asarray(schedule)).shape)
    for name, value in choices.items():
        out = np.where(np.asarray(schedule) == _ID[name], value, out)
    return np.where(pp > 1, out, 1.0)
