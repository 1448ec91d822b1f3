"""Which layers each pipeline stage holds. Plan and run read it here."""

from __future__ import annotations

import functools

from bessemer.core.counts import flops_per_token
from bessemer.core.layout import Layout
from bessemer.core.model import ModelSpec
from bessemer.core.schedules import SCHEDULES

__all__ = ["num_stages", "stage_ranges"]


def num_stages(layout: Layout) -> int:
    """Stages of the whole pipeline: pp, times those of a rank."""
    kind = SCHEDULES[layout.schedule]
    if layout.pp == 1 or kind.shape == "two-way":
        return layout.pp
    return layout.pp * (layout.virtual_stages if kind.chunks is None else kind.chunks)


def stage_ranges(spec: ModelSpec, layout: Layout, seq_len: int) -> list[range]:
    """The layers of each stage, in order: `layout.stage_layers`, or the cut whose slowest stage is fastest.

    A layer costs its forward FLOPs; the last stage also pays for head and multi-token prediction (looking up an
    embedding is free). Among equals the cut with the smallest sum of squares: as even as possible.
    ValueError where there are fewer layers than stages.
    """
    stages = num_stages(layout)
    sizes = list(layout.stage_layers) or _balanced(spec, stages, seq_len)
    if len(sizes) != stages or sum(sizes) != spec.num_layers:
        raise ValueError(f"{sizes} layers don't make {stages} stages of {spec.num_layers} layers")
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _balanced(spec: ModelSpec, stages: int, seq_len: int) -> list[int]:
    costs, last_extra = _costs(spec, seq_len)
    layers = len(costs)
    if layers < stages:
        raise ValueError(f"{layers} layers don't fill {stages} stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @functools.cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """(slowest stage, sum of squares, sizes) of the layers from `start` on, on the stages from `stage` on."""
        if stage == stages - 1:
            cost = before[layers] - before[start] + last_extra
            return cost, cost * cost, (layers - start,)
        found = None
        for end in range(start + 1, layers - (stages - stage - 1) + 1):
            cost = before[end] - before[start]
            if found is not None and cost > found[0]:
                break
            slowest, squares, sizes = best(stage + 1, end)
            candidate = max(cost, slowest), squares + cost * cost, (end - start, *sizes)
            # sums of floats differ in their last bits: a cut is only better if it is so by more than that
            if found is None or _less(candidate, found):
                found = candidate
        assert found is not None
        return found

    return list(best(0, 0)[2])


def _less(a: tuple[float, float, tuple[int, ...]], b: tuple[float, float, tuple[int, ...]]) -> bool:
    for x, y in zip(a[:2], b[:2], strict=True):
        if abs(x - y) > 1e-9 * max(x, y):
            return x < y
    return False


def _costs(spec: ModelSpec, seq_len: int) -> tuple[list[float], float]:
    """Forward FLOPs a token of each layer, and of what else the last stage does."""
    whole = flops_per_token(spec, seq_len)
    kinds = [spec.is_moe_layer(i) for i in range(spec.num_layers)]
    attention = (whole.attention_projections + whole.attention_scores) / spec.num_layers
    dense = whole.dense_ffn / max(1, kinds.count(False))
    experts = (whole.router + whole.experts) / max(1, kinds.count(True))
    return [attention + (experts if moe else dense) for moe in kinds], whole.head + whole.mtp
