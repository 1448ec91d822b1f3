"""Peak memory of a rank of Bessemer's own trainer for many layouts, by the closed form of `bessemer.core.rank_memory`.

`bessemer.plan.memory` has the habits of other engines, fitted to what they were measured to need; this is the profile
of the engine that runs the jobs that a search writes: fp32 masters and stream, stages as `core.stages` cuts them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.held import Elements, HeldLayers, block_elements, end_elements, layers_by_stage, prediction_elements
from bessemer.core.job import PrecisionSection
from bessemer.core.layout import Layout
from bessemer.core.memory import widest_matrix
from bessemer.core.model import ModelSpec
from bessemer.core.rank_memory import (
    Copies,
    Passing,
    Sharing,
    final_norm_elements,
    held_bytes,
    rotation_bytes,
    scattered_bytes,
    sharing_of,
    state_lines,
    working_bytes,
)
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import RECOMPUTE
from bessemer.core.saved import layer_bytes, waiting_bytes
from bessemer.core.schedules import SCHEDULES
from bessemer.core.sizes import Sizes
from bessemer.plan.memory import MEMORY_LINES, Memory
from bessemer.plan.moments import Moment, moments_of
from bessemer.plan.pipeline import spelled_stages
from bessemer.plan.space import CP_KINDS, DP_SHARDS, Layouts

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["own_memory", "own_rank_lines"]

_SCHEDULES = tuple(SCHEDULES)
_PLAIN = PrecisionSection()
_STAYS = 0.1
"""Of offloaded activations, on the device."""
_ROUNDS = 3
"""Times pp: with so many micro-batches a pipeline has been as full as it gets. None lets more wait in a stage."""
_PUT_OFF = (0.9, 2.0, 8.0, 30.0)
"""What a micro-batch keeps whose weight gradients are put off, against one before its backward pass: without
recompute, with some, with all. For each of these the fullest moment is looked for, and the fullest with a loss."""


def own_memory(
    lay: Layouts,
    spec: ModelSpec,
    seq: float,
    num_micro: Any,
    runtime_bytes: float = 0.0,
    precision: PrecisionSection = _PLAIN,
) -> Memory:
    """The heaviest rank. Of ranks that hold alike, only the first, where most micro-batches wait for their backward
    pass, and the last, where most put-off weight gradients do.

    runtime_bytes: what the device's libraries take for themselves. precision: of a job, for what it keeps narrow; the
    recipe is that of each layout."""
    if len(lay) == 0:
        return Memory(dict.fromkeys(MEMORY_LINES, np.zeros(0)), np.zeros(0, np.int64), np.zeros(0, np.int64))
    ranks = _Ranks(lay, spec, seq, num_micro, precision=precision)
    found, slot = ranks.lines(0), np.zeros(len(lay), np.int64)
    total = np.sum(list(found.values()), axis=0)
    runtime = np.full(len(lay), float(runtime_bytes))
    for other in range(1, ranks.slots):
        lines = ranks.lines(other)
        size = np.sum(list(lines.values()), axis=0)
        more = size > total
        found = {name: np.where(more, lines[name], found[name]) for name in found}
        total, slot = np.where(more, size, total), np.where(more, other, slot)
    return Memory({**found, "runtime": runtime}, ranks.rank_of(slot), np.ones(len(lay), np.int64))


def own_rank_lines(
    lay: Layouts,
    spec: ModelSpec,
    seq: float,
    num_micro: Any,
    runtime_bytes: float = 0.0,
    precision: PrecisionSection = _PLAIN,
) -> list[dict[str, float]]:
    """Bytes by line of each pipeline rank of one layout."""
    ranks = _Ranks(lay, spec, seq, num_micro, every=True, precision=precision)
    lines = [{name: float(size[0]) for name, size in ranks.lines(slot).items()} for slot in range(ranks.slots)]
    return [{**rank, "runtime": runtime_bytes} for rank in lines]


class _Ranks:
    """Layouts with their pipeline ranks in `slots`; where a layout has fewer, its last one is repeated."""

    def __init__(
        self,
        lay: Layouts,
        spec: ModelSpec,
        seq: float,
        num_micro: Any,
        *,
        precision: PrecisionSection,
        every: bool = False,
    ) -> None:
        self.lay, self.spec, self.num_micro, self._moments = lay, spec, num_micro, precision.moments
        columns = ("pp", "schedule", "virtual_stages", "first_layers", "last_layers")
        most = np.minimum(np.asarray(num_micro), _ROUNDS * lay.pp).astype(np.int64)
        kinds, which = _unique(lay, columns, functools.partial(_ranks, spec, int(seq), every), most)
        self.slots = max(map(len, kinds))
        filled = np.array([[*ranks, *[ranks[-1]] * (self.slots - len(ranks))] for ranks in kinds], float)
        self._held = filled[which]  # [S, slots, what `_ranks` gives]
        self._sizes = _columns(lay, ("tp", "ep", "etp"), functools.partial(_elements, spec))
        block = ("tp", "sequence_parallel", "cp", "cp_kind", "ep", "etp", "recompute", "recipe", "tp_overlap")
        several = np.minimum(lay.micro_batch, 2)  # sequences: more than one are put in another order here and there
        self._saved = _columns(lay, block, functools.partial(_saved, spec, precision.saved), several)
        wide = np.array([4.0 if r.compute == "fp32" else 2.0 for r in RECIPES.values()])[lay.recipe]
        stream = np.where(lay.sequence_parallel > 0, lay.tp, 1)
        tokens, table = lay.micro_batch * seq / lay.cp, self._sizes["table"]
        self._passing = Passing(tokens=tokens, stream=stream, wide=wide, hidden=spec.hidden_size, table=table)
        self._rotations = rotation_bytes(spec, lay.cp)
        self._sharing = _sharing(lay, spec.hidden_size, self._sizes, num_micro)

    def rank_of(self, slot: NDArray[np.int64]) -> NDArray[np.int64]:
        rank: NDArray[np.int64] = self._held[np.arange(len(slot)), slot, 0].astype(np.int64)
        return rank

    def lines(self, slot: int) -> dict[str, NDArray[np.float64]]:
        """By `MEMORY_LINES`; what the library takes for itself is not among them."""
        _, dense, moe, begins, ends, *moments = self._held[:, slot].T
        state, working = self._state(dense, moe, begins, ends)
        activations, most = self._pass(moments, moe, dense + moe, ends)
        found = {
            "weights": state["weights"],
            "gradients": state["gradients"] + state["gradient_sum"],
            "optimizer": state["optimizer"] * np.where(self.lay.offload_optimizer > 0, 0.0, 1.0),
            "activations": activations * np.where(self.lay.offload_activations > 0, _STAYS, 1.0),
            "transient": working + most,
            "gathered": state["gathered"],
        }
        zero = np.zeros(len(self.lay))
        return {name: found.get(name, zero) + zero for name in MEMORY_LINES}

    def _state(self, dense: Any, moe: Any, begins: Any, ends: Any) -> tuple[dict[str, Any], Any]:
        """Lines of the state, and the most of FSDP's whole gradients of a block."""
        e, s, mtp = self._sizes, self._sharing, self.spec.mtp_layers
        again = ends * (1 - begins) * float(self.spec.tied_embeddings or mtp > 0)  # the embedding's copy at the end
        around = (begins + again) * e["table"] + begins * e["positions"] + ends * e["last"]
        plain, routed, ahead = (Elements(*(e[f"{k}.{f}"] for f in Elements._fields)) for k in _BLOCKS)
        whole = Elements(around).plus(plain, dense).plus(routed, moe).plus(ahead, ends * mtp)
        first = _where(moe > 0, routed, plain)
        second = _where(moe > 1, routed, Elements(0).plus(plain, dense > (moe == 0)))
        if mtp:
            first, second = _where(ends > 0, ahead, first), _where(ends > 0, first, second)
        final_norm = ends * final_norm_elements(self.spec)
        lines = state_lines(
            whole, s, ends=around, blocks=first.plus(second), final_norm=final_norm, moments=self._moments
        )
        return lines, scattered_bytes(first, s)

    def _pass(self, moments: list[Any], moe: Any, layers: Any, ends: Any) -> tuple[Any, Any]:
        """Bytes that wait for backward passes, and those that a pass needs for a moment. moments: as in `_ranks`."""
        lay, spec, p, saved = self.lay, self.spec, self._passing, self._saved
        by_layer = np.array([r.by_layer for r in RECOMPUTE.values()])[lay.recompute] & (lay.recompute_layers > 0)
        share = np.where(by_layer, np.minimum(lay.recompute_layers / np.maximum(layers, 1), 1), 1.0)
        plain, routed = (share * saved[k] + (1 - share) * saved[f"{k}.all"] for k in ("plain", "routed"))
        last = routed if spec.is_moe_layer(spec.num_layers - 1) else plain
        held, _ = held_bytes(p, 0.0, ends=ends, predictions=spec.mtp_layers, prediction=last)
        last_off = saved["routed.off" if spec.is_moe_layer(spec.num_layers - 1) else "plain.off"]
        ahead_off = spec.mtp_layers * (last_off + 3 * p.wide * p.hidden / p.stream)
        waiting = np.zeros(len(lay))
        for moment in _apart(moments):
            dense, routes, dense_off, routes_off, loss, ends_off = moment
            micros = (dense + routes) / np.maximum(layers, 1)
            whole = dense * plain + routes * routed + micros * self._rotations
            off = dense_off * saved["plain.off"] + routes_off * saved["routed.off"] + ends_off * ahead_off
            waiting = np.maximum(waiting, p.tokens * (whole + off) + loss * held)
        gpipe = (lay.schedule == _SCHEDULES.index("gpipe")) & (lay.pp > 1)
        all_held = np.where(gpipe, self.num_micro, 1) * waiting
        rows = p.tokens / lay.tp * (spec.moe.top_k if spec.moe else 0) * (moe > 0)
        matrix = np.where(moe > 0, self._sizes["widest.routed"], self._sizes["widest.plain"])
        again = np.where(moe > 0, saved["routed.all"] - routed, saved["plain.all"] - plain)
        return all_held, working_bytes(p, matrix=matrix, rows=rows, again=again, ends=ends)


def _apart(moments: list[NDArray[np.float64]]) -> Iterator[NDArray[np.float64]]:
    """Six arrays a moment, as `_fullest` gives them; those that are alike once."""
    found: list[NDArray[np.float64]] = []
    for at in range(0, len(moments), 6):
        one = np.stack(moments[at : at + 6])
        if not any(np.array_equal(one, other) for other in found):
            found.append(one)
            yield one


_BLOCKS = ("plain", "routed", "ahead")


def _where(condition: Any, yes: Elements, no: Elements) -> Elements:
    return Elements(*(np.where(condition, a, b) for a, b in zip(yes, no, strict=True)))


def _sharing(lay: Layouts, hidden: int, sizes: dict[str, Any], num_micro: Any) -> Sharing:
    sharded, full = lay.dp_shard > 0, lay.dp_shard == DP_SHARDS.index("full")
    replicas = np.where(sharded, lay.replicas, 1)
    data = lay.dp * lay.cp // replicas
    experts = np.maximum(data * lay.tp // (lay.ep * lay.etp), 1)
    accumulates = (lay.pp > 1) | ((lay.dp_shard == DP_SHARDS.index("optimizer")) & (np.asarray(num_micro) > 1))
    copies = Copies(
        data=data,
        experts=experts,
        replicas=replicas,
        local_experts=sizes["local_experts"],
        width=sizes["expert_width"],
    )
    return sharing_of(copies, hidden, sharded=sharded * 1, full=full * 1, accumulates=accumulates * 1)


def _unique(
    lay: Layouts, columns: tuple[str, ...], build: Callable[..., Any], *more: NDArray[np.int64]
) -> tuple[list[Any], NDArray[np.int64]]:
    """(`build(*values)` of each combination of columns that occurs, which of them each layout has)."""
    values = [*(getattr(lay, name) for name in columns), *more]
    key = np.zeros(len(lay), np.int64)
    for column in values:
        key = key * (int(column.max()) + 1) + column
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return [build(*(int(column[i]) for column in values)) for i in first], which


def _columns(
    lay: Layouts, columns: tuple[str, ...], build: Callable[..., dict[str, float]], *more: NDArray[np.int64]
) -> dict[str, Any]:
    built, which = _unique(lay, columns, build, *more)
    return {name: np.array([one[name] for one in built], float)[which] for name in built[0]}


@functools.lru_cache(maxsize=4096)
def _ranks(spec: ModelSpec, seq: int, every: bool, *pipeline: int) -> tuple[tuple[float, ...], ...]:
    """Of a pipeline's ranks, or of the first and the last of each kind: rank, dense and MoE layers, whether the model
    begins and ends there. Then for each of `_PUT_OFF` the fullest moment, as `_fullest` gives it."""
    pp, schedule, virtual, first, last, num_micro = pipeline
    stages = spelled_stages(spec.num_layers, pp, first, last) if virtual == 1 else ()
    layout = Layout(pp=pp, schedule=_SCHEDULES[schedule], virtual_stages=virtual, stage_layers=stages)
    try:
        by_rank = [[HeldLayers.of(spec, c) for c in r.values()] for r in layers_by_stage(spec, layout, seq)]
    except ValueError:  # more stages than layers
        moe = sum(map(spec.is_moe_layer, range(spec.num_layers))) / pp
        by_rank = [[HeldLayers(spec.num_layers / pp - moe, moe, r == 0, r == pp - 1)] for r in range(pp)]
    rows: list[tuple[float, ...]] = []
    for rank, chunks in enumerate(by_rank):
        dense, moe = sum(c.dense for c in chunks), sum(c.moe for c in chunks)
        own = (dense, moe, any(c.begins for c in chunks), any(c.ends for c in chunks))
        moments = moments_of(_SCHEDULES[schedule], (pp, len(chunks), num_micro), rank)
        fullest = [_fullest(moments, chunks, *how) for how in itertools.product(_PUT_OFF, (0.0, _LOSS_FIRST))]
        rows.append((rank, *own, *itertools.chain(*fullest)))
    if every:
        return tuple(rows)
    first_of = {row[1:5]: row for row in reversed(rows)}
    last_of = {row[1:5]: row for row in rows} if SCHEDULES[_SCHEDULES[schedule]].split_backward else {}
    return tuple(sorted({*first_of.values(), *last_of.values()}))


_LOSS_FIRST = 1e6


def _fullest(moments: Sequence[Moment], chunks: Sequence[HeldLayers], put_off: float, loss: float) -> tuple[float, ...]:
    """Dense and MoE layers times the micro-batches that wait in them for their backward pass; the same for put-off
    gradients of weights; whether a loss is among the former, and how often the end of the model among the latter.
    put_off, loss: what they count as, in layers."""

    def size(moment: Moment) -> float:
        pairs = list(zip(moment, chunks, strict=True))
        return sum((n + put_off * w) * (c.dense + c.moe) + loss * (c.ends and n > 0) for (n, w), c in pairs)

    chosen: Moment = max(moments, key=size)
    fullest = list(zip(chosen, chunks, strict=True))
    waiting = (sum(n * c.dense for (n, _), c in fullest), sum(n * c.moe for (n, _), c in fullest))
    off = (sum(w * c.dense for (_, w), c in fullest), sum(w * c.moe for (_, w), c in fullest))
    return (
        *waiting,
        *off,
        float(any(c.ends and n > 0 for (n, _), c in fullest)),
        sum(w * c.ends for (_, w), c in fullest),
    )


def _elements(spec: ModelSpec, tp: int, ep: int, etp: int) -> dict[str, float]:
    layout = Layout(tp=tp, ep=ep, etp=etp)
    last = end_elements(spec, layout, begins=False, ends=True).dense
    table = -(-spec.vocab_size // tp) * spec.hidden_size
    blocks = {
        "plain": block_elements(spec, layout, moe=False),
        "routed": block_elements(spec, layout, moe=spec.moe is not None),
        "ahead": prediction_elements(spec, layout),
    }
    again = float(spec.tied_embeddings or spec.mtp_layers > 0) * table
    return {
        "table": table,
        "positions": spec.max_positions * spec.hidden_size if spec.positions == "learned" else 0,
        "last": last - again,
        "local_experts": max(spec.moe.num_experts // ep, 1) if spec.moe is not None else 1,
        "expert_width": spec.moe.expert_ffn_size // etp if spec.moe is not None else 1,
        "widest.plain": widest_matrix(spec, layout, moe=False),
        "widest.routed": widest_matrix(spec, layout, moe=True),
        **{f"{kind}.{field}": getattr(block, field) for kind, block in blocks.items() for field in Elements._fields},
    }


def _saved(spec: ModelSpec, saved: str, *columns: int) -> dict[str, float]:
    """Bytes a token that a layer without and one with experts save, under the columns' recompute and without any."""
    tp, sequence_parallel, cp, cp_kind, ep, etp, recompute, recipe, overlap, micro_batch = columns
    how = tuple(RECIPES.values())[recipe]
    axes = {"tp": tp, "sequence_parallel": bool(sequence_parallel), "cp": cp, "cp_kind": CP_KINDS[cp_kind]}
    layout = Layout.model_validate({**axes, "ep": ep, "etp": etp, "tp_chunks": 1 + overlap})
    narrow = how if saved == "fp8" and how.quantised else None
    wide = 4 if how.compute == "fp32" else 2
    sizes = Sizes.of(layout, wide, micro_batch, coded=how.keeps_codes, narrow=narrow)
    parts = tuple(RECOMPUTE.values())[recompute].parts
    kinds = {"plain": False, "routed": True}
    found = {}
    for name, moe in kinds.items():
        layer = next((i for i in range(spec.num_layers) if spec.is_moe_layer(i) == moe), None)
        for suffix, again in (("", parts), (".all", ())):
            found[name + suffix] = 0.0 if layer is None else layer_bytes(spec, layer, again, sizes)
        found[f"{name}.off"] = 0.0 if layer is None else waiting_bytes(spec, layer, sizes)
    return found
