"""All layouts of a request, a chunk of arrays at a time, and how many were cut and by which rule.

Degrees, experts and micro-batch make the *nodes*, pipeline schedules multiply them, and every node has the same table
of *flags* (recompute, sharding, precision ...) as all nodes of its class. Rules are tested on whole arrays, each at the
first level where what it reads is there; they are those of `bessemer check` (the same codes), and what the cost model
needs: a global batch that is micro_batch x dp x a whole number. A setting that has no effect in a layout is not
varied: one pipeline stage has one schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from bessemer.core.recompute import RECOMPUTE
from bessemer.core.schedules import SCHEDULES
from bessemer.plan.axes import AXES, NAMED, Request, axis_values
from bessemer.plan.pipeline import stage_layers
from bessemer.plan.space import CP_KINDS, DP_SHARDS, Layouts

__all__ = ["CHUNK", "Space", "enumerate_layouts", "rules_of"]

CHUNK = 1 << 16
"""Layouts a chunk: large enough that numpy's calls cost nothing, small enough to stay near the cache."""
_DEGREES = ("tp", "pp", "cp", "dp")
_NODE = (*_DEGREES, "ep", "etp", "micro_batch", "replicas", "schedule", "virtual_stages", "first_layers", "last_layers")
_FLAGS = (
    "recompute",
    "recompute_layers",
    "dp_shard",
    "sequence_parallel",
    "cp_kind",
    "tp_overlap",
    "recipe",
    "graph",
    "offload_optimizer",
    "offload_activations",
)
Columns = dict[str, NDArray[np.int64]]
_RING, _GATHER, _ULYSSES = (CP_KINDS.index(k) for k in ("ring", "allgather", "ulysses"))
_FULL, _BLOCK = (list(RECOMPUTE).index(k) for k in ("full", "block"))
_ID = {name: i for i, name in enumerate(SCHEDULES)}
_QUARTERS = 4
"""`block` recomputes one, two or three quarters of a stage's layers; all of them is `full`."""


@dataclass
class Space:
    """`size` layouts; `raw`: the product of all axes' values; `literal`: `recompute_layers` was given, and isn't a
    number of quarters; `cut`: rule -> nodes that it ruled out."""

    nodes: Columns
    classes: NDArray[np.int64]
    tables: list[Columns]
    counts: NDArray[np.int64]
    raw: int
    num_layers: int
    literal: bool = False
    cut: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return int(self.counts.sum())

    def chunks(self, size: int = CHUNK) -> Iterator[Layouts]:
        """The layouts in order, at most `size` at a time."""
        ends = np.cumsum(self.counts)
        for start in range(0, self.size, size):
            yield self.rows(np.arange(start, min(start + size, self.size)), ends)

    def rows(self, index: NDArray[np.int64], ends: NDArray[np.int64] | None = None) -> Layouts:
        """The layouts at these places of the order."""
        if not len(index):
            return Layouts.of(0)
        ends = np.cumsum(self.counts) if ends is None else ends
        node = np.searchsorted(ends, index, side="right")
        inner = index - (ends - self.counts)[node]
        columns = {name: column[node] for name, column in self.nodes.items()}
        offsets = np.cumsum([0, *(len(t["recompute"]) for t in self.tables)])
        place = offsets[self.classes[node]] + inner
        for name in _FLAGS:
            columns[name] = np.concatenate([t[name] for t in self.tables])[place]
        if not self.literal and (columns["recompute"] == _BLOCK).any():
            fullest = np.maximum(*stage_layers(self.num_layers, columns["pp"], columns["virtual_stages"])[:2])
            quarter = np.ceil(columns["recompute_layers"] * fullest / _QUARTERS).astype(np.int64)
            columns["recompute_layers"] = np.where(columns["recompute"] == _BLOCK, quarter, 0)
        return Layouts(**columns)


def enumerate_layouts(request: Request) -> Space:
    """Every layout of the request's space that no rule cuts."""
    cut: dict[str, int] = {}
    lists = {name: axis_values(request, name) for name in AXES}
    nodes = _degrees(request, lists)
    raw = len(nodes["tp"])
    for name in ("ep", "etp", "micro_batch", "replicas", *_FLAGS, "schedule", "virtual_stages"):
        raw *= len(lists[name])
    nodes = _keep(nodes, _degree_rules(request, nodes), cut)
    for name in ("ep", "etp", "micro_batch", "replicas"):
        nodes = _times(nodes, {name: np.array(lists[name], np.int64)})
        nodes = _keep(nodes, _inner_rules(request, nodes, name), cut)
    nodes = _times(nodes, _schedules(lists))
    nodes = _keep(nodes, _schedule_rules(request, nodes), cut)
    ends = itertools.product(lists["first_layers"], lists["last_layers"])
    first, last = (np.array(c, np.int64) for c in zip(*ends, strict=True))
    nodes = _keep(_times(nodes, {"first_layers": first, "last_layers": last}), {}, cut)
    nodes = _keep(nodes, _end_rules(request, nodes), cut)
    kinds, classes = np.unique(_class(request, nodes), return_inverse=True)
    tables = [_flag_table(request, lists, int(kind)) for kind in kinds]
    counts = np.array([len(t["recompute"]) for t in tables], np.int64)[classes] if tables else np.zeros(0, np.int64)
    if (counts == 0).any():
        cut["fixed"] = cut.get("fixed", 0) + int((counts == 0).sum())
    literal = "recompute_layers" in request.fixed
    return Space(nodes, classes, tables, counts, raw, request.spec.num_layers, literal, cut)


def _degrees(request: Request, lists: dict[str, list[int]]) -> Columns:
    """All tp x pp x cp x dp whose product is the number of devices."""
    tp, pp, cp = (
        a.ravel() for a in np.meshgrid(*(np.array(lists[k], np.int64) for k in ("tp", "pp", "cp")), indexing="ij")
    )
    fits = request.num_gpus % (tp * pp * cp) == 0
    tp, pp, cp = tp[fits], pp[fits], cp[fits]
    dp = request.num_gpus // (tp * pp * cp)
    allowed = np.isin(dp, lists["dp"])
    return {k: v[allowed] for k, v in zip(_DEGREES, (tp, pp, cp, dp), strict=True)}


def _times(nodes: Columns, more: Columns) -> Columns:
    """Every node with every row of `more`."""
    count, new = len(next(iter(nodes.values()))), len(next(iter(more.values())))
    grown = {k: np.repeat(v, new) for k, v in nodes.items()}
    return {**grown, **{k: np.tile(v, count) for k, v in more.items()}}


def _keep(nodes: Columns, rules: dict[str, NDArray[np.bool_]], cut: dict[str, int]) -> Columns:
    """The nodes that hold every rule; each that is cut counts once, for the first rule that it breaks."""
    keep = np.ones(len(next(iter(nodes.values()))), bool)
    for code, holds in rules.items():
        broken = int((keep & ~holds).sum())
        if broken:
            cut[code] = cut.get(code, 0) + broken
        keep &= holds
    return nodes if keep.all() else {k: v[keep] for k, v in nodes.items()}


def _degree_rules(request: Request, n: Columns) -> dict[str, NDArray[np.bool_]]:
    spec, tp, cp, seq = request.padded, n["tp"], n["cp"], request.seq_len
    kv = spec.num_kv_heads
    shared = spec.moe.shared_ffn_size if spec.moe else 0
    cuts = (seq % (2 * cp) == 0) | (seq % cp == 0) & _ulysses_heads(spec.num_heads, tp, cp)
    return {
        "tp-heads": spec.num_heads % tp == 0,
        "tp-kv-heads": (kv % tp == 0) | (tp % kv == 0) | (spec.mla is not None),
        "tp-vocab": spec.vocab_size % tp == 0,
        "tp-ffn": (spec.ffn_size % tp == 0) & (shared % tp == 0),
        "cp-sequence": (cp == 1) | cuts,
        "pp-layers": n["pp"] <= spec.num_layers,
        "batch-split": request.global_batch % n["dp"] == 0,
    }


def _ulysses_heads(heads: int, tp: NDArray[np.int64], cp: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (heads % tp == 0) & (heads // tp % cp == 0)


def _inner_rules(request: Request, n: Columns, axis: str) -> dict[str, NDArray[np.bool_]]:
    moe, ranks = request.spec.moe, n["dp"] * n["cp"] * n["tp"]
    if axis == "ep":
        experts = moe.num_experts if moe else 1
        code = "ep-experts" if moe else "ep-no-experts"
        return {code: (experts % n["ep"] == 0), "ep-ranks": ranks % n["ep"] == 0}
    if axis == "etp":
        wide = request.space == "wide" or "etp" in request.fixed
        usual = (n["etp"] == 1) | (n["etp"] == n["tp"])
        rules = {"etp-ffn" if moe else "etp-no-experts": (moe.expert_ffn_size if moe else 1) % n["etp"] == 0}
        return {**rules, "ep-ranks": ranks % (n["ep"] * n["etp"]) == 0, "usual": usual | wide}
    if axis == "micro_batch":
        return {"batch-split": request.global_batch % (n["micro_batch"] * n["dp"]) == 0}
    shard = n["dp"] // n["replicas"]
    return {"replicas": (n["dp"] % n["replicas"] == 0) & ((n["replicas"] == 1) | (shard > 1))}


def _schedules(lists: dict[str, list[int]]) -> Columns:
    pairs = list(itertools.product(lists["schedule"], lists["virtual_stages"]))
    schedule, virtual = (np.array(c, np.int64) for c in zip(*pairs, strict=True))
    return {"schedule": schedule, "virtual_stages": virtual}


def _schedule_rules(request: Request, n: Columns) -> dict[str, NDArray[np.bool_]]:
    pp, v, schedule, layers = n["pp"], n["virtual_stages"], n["schedule"], request.spec.num_layers
    micro = request.global_batch // (n["micro_batch"] * n["dp"])
    loop = schedule == _ID["1f1b"]
    slots = pp * v
    even = (layers % slots == 0) | ((layers + 1) % slots == 0) | ((layers + 2) % slots == 0)
    asked = "virtual_stages" in request.fixed
    chunks = np.array([s.chunks or 1 for s in SCHEDULES.values()])[schedule]
    two_way = (schedule == _ID["dualpipe"]) | (schedule == _ID["dualpipev"])
    halves = (pp % 2 == 0) & (micro % 2 == 0)
    return {
        "ignored-setting": (pp > 1) | (loop & (v == 1)),
        "schedule-shape": (loop | (v == 1)) & ((v == 1) | (micro % pp == 0) & (pp > 1)),
        "pp-layers": (slots <= layers) & (pp * chunks <= layers),
        "schedule-micro": ~two_way | ((micro >= 2 * pp) & (halves | (schedule == _ID["dualpipev"]))),
        "usual": (v == 1) | even | asked,
    }


def _end_rules(request: Request, n: Columns) -> dict[str, NDArray[np.bool_]]:
    """Outer stages of their own size: one virtual stage, both given, and the rest spread over the stages between."""
    first, last, pp, layers = n["first_layers"], n["last_layers"], n["pp"], request.spec.num_layers
    asked = (first > 0) | (last > 0)
    rest = layers - first - last
    fits = (first > 0) & (last > 0) & (n["virtual_stages"] == 1)
    spread = np.where(pp > 2, rest >= pp - 2, rest == 0)
    return {"stage-sum": ~asked | (fits & spread & (pp > 1))}


_BITS = ("tp", "cp", "shared", "replicas", "sp", "ring", "ulysses", "blocks")


def _class(request: Request, n: Columns) -> NDArray[np.int64]:
    """The class of a node: what decides which flags it may have, one bit each (see `_BITS`)."""
    seq, tp, cp = request.seq_len, n["tp"], n["cp"]
    bits = (
        tp > 1,
        cp > 1,
        n["dp"] * cp > 1,
        n["replicas"] > 1,
        seq % (cp * tp) == 0,
        seq % (2 * cp) == 0,
        (seq % cp == 0) & _ulysses_heads(request.spec.num_heads, tp, cp),
        _blocks(request, n),
    )
    return np.sum([b.astype(np.int64) << i for i, b in enumerate(bits)], axis=0, dtype=np.int64)


def _blocks(request: Request, n: Columns) -> NDArray[np.bool_]:
    """Whether the quarters of the fullest stage's layers differ from one another and from all of them; or whether it
    has the layers that were asked for."""
    fullest = np.maximum(*stage_layers(request.spec.num_layers, n["pp"], n["virtual_stages"])[:2])
    return fullest >= max(request.fixed.get("recompute_layers", (_QUARTERS,)))


def _flag_table(request: Request, lists: dict[str, list[int]], kind: int) -> Columns:
    """Every combination of flags that a node of this class may have. A fixed flag keeps its value or cuts the node."""
    has = {name: bool(kind >> i & 1) for i, name in enumerate(_BITS)}
    wide = request.space == "wide"
    cp_kinds = [k for k, ok in ((_RING, has["ring"]), (_GATHER, has["ring"]), (_ULYSSES, has["ulysses"])) if ok]
    cp_kinds = cp_kinds if has["cp"] else [_RING]
    shards = list(range(len(DP_SHARDS)))
    shards = [0] if not has["shared"] else shards[1:] if has["replicas"] else shards
    both = [(s, o) for s in ([0, 1] if has["sp"] else [0]) for o in ([0, 1] if s else [0])]
    usual = (1, 1) if has["sp"] else (0, 0)
    free = wide or {"sequence_parallel", "tp_overlap"} & set(request.fixed)
    sp = [(0, 1)] if not has["tp"] else both if free else [usual]
    blocks = request.fixed.get("recompute_layers") or range(1, _QUARTERS)
    zero = [0] if 0 in blocks or "recompute_layers" not in request.fixed else []
    recompute = [(r, b) for r in lists["recompute"] for b in (blocks if r == _BLOCK else zero)]
    recompute = [(r, b) for r, b in recompute if r != _BLOCK or (b and has["blocks"])]
    rows = [
        (r, b, shard, s, kind_, overlap, recipe, graph, optimizer, activations)
        for (r, b), shard, (s, overlap), kind_, recipe, graph, optimizer, activations in itertools.product(
            recompute, [s for s in shards if s in lists["dp_shard"]], sp,
            [k for k in cp_kinds if k in lists["cp_kind"]],
            lists["recipe"], lists["graph"], lists["offload_optimizer"], lists["offload_activations"],
        )
        if s in lists["sequence_parallel"] and overlap in lists["tp_overlap"]
    ]  # fmt: skip
    table = np.array(rows, np.int64).reshape(len(rows), len(_FLAGS))
    # innermost first in memory what doesn't change the cost of a layer, so that a chunk has few unique keys
    order = np.lexsort((table[:, 2], table[:, 8], table[:, 9], table[:, 1], table[:, 0]))
    return {name: table[order, i] for i, name in enumerate(_FLAGS)}


def rules_of(request: Request, layout: Layouts) -> list[str]:
    """The codes of the rules that one layout breaks, in the order in which the search tests them."""
    n = {f.name: getattr(layout, f.name) for f in fields(layout)}
    if (layout.world_size != request.num_gpus).any():
        return ["gpus"]
    rules = {**_degree_rules(request, n)}
    for axis in ("ep", "etp", "micro_batch", "replicas"):
        rules.update(_inner_rules(request, n, axis))
    rules.update(_schedule_rules(request, n))
    rules.update(_end_rules(request, n))
    broken = [code for code, holds in rules.items() if code != "usual" and not holds.all()]
    return broken or _broken_flags(request, n)


def _broken_flags(request: Request, n: Columns) -> list[str]:
    kind = int(_class(request, n)[0])
    has = {name: bool(kind >> i & 1) for i, name in enumerate(_BITS)}
    flag = {name: int(n[name][0]) for name in _FLAGS}
    ulysses = flag["cp_kind"] == _ULYSSES
    plain_cp = flag["cp_kind"] == _RING if not has["cp"] else has["ulysses"] if ulysses else has["ring"]
    rules = {
        "cp-heads" if ulysses and has["cp"] else "cp-sequence" if has["cp"] else "ignored-setting": plain_cp,
        "sp-sequence": not flag["sequence_parallel"] or not has["tp"] or has["sp"],
        "ignored-setting-sp": has["tp"] or not flag["sequence_parallel"],
        "ignored-setting-shard": has["shared"] or flag["dp_shard"] == 0,
        "replicas": not has["replicas"] or flag["dp_shard"] > 0,
    }
    return [code for code, holds in rules.items() if not holds]


assert set(_NODE) | set(_FLAGS) == set(AXES) and set(NAMED) <= set(AXES)
