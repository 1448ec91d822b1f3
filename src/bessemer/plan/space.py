"""`Layouts`: many layouts side by side, as arrays with one entry each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.layout import Layout
from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import RECOMPUTE
from bessemer.core.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bessemer.core.job import Job

__all__ = ["CP_KINDS", "DP_SHARDS", "Layouts"]

DP_SHARDS = ("none", "optimizer", "gradient", "full")
CP_KINDS = ("ring", "allgather", "ulysses")
TP_CHUNKS = 4
"""Pieces that a written job cuts a sequence into where tensor-parallel exchanges are to run under products."""
_NAMES = {
    "schedule": tuple(SCHEDULES),
    "dp_shard": DP_SHARDS,
    "recompute": tuple(RECOMPUTE),
    "recipe": tuple(RECIPES),
    "cp_kind": CP_KINDS,
}


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """S layouts as arrays [S] of int64; names as ids into SCHEDULES, DP_SHARDS, RECOMPUTE, RECIPES, CP_KINDS.

    Beyond `Layout`: micro_batch (sequences), recompute and recompute_layers (layers of each stage where a policy works
    by layer), recipe; first_layers and last_layers of the outer stages (0: even, with one layer less where embedding
    or head count as a layer, see `bessemer.plan.pipeline.stage_layers`); replicas of HSDP (1: sharded over all of dp);
    tp_overlap (tensor-parallel exchanges run under the products); graph (kernels are launched as one graph); offload of
    the optimizer state and of activations.
    """

    dp: NDArray[np.int64]
    tp: NDArray[np.int64]
    pp: NDArray[np.int64]
    cp: NDArray[np.int64]
    ep: NDArray[np.int64]
    etp: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    virtual_stages: NDArray[np.int64]
    schedule: NDArray[np.int64]
    dp_shard: NDArray[np.int64]
    recompute: NDArray[np.int64]
    recompute_layers: NDArray[np.int64]
    recipe: NDArray[np.int64]
    sequence_parallel: NDArray[np.int64]
    cp_kind: NDArray[np.int64]
    first_layers: NDArray[np.int64]
    last_layers: NDArray[np.int64]
    replicas: NDArray[np.int64]
    tp_overlap: NDArray[np.int64]
    graph: NDArray[np.int64]
    offload_optimizer: NDArray[np.int64]
    offload_activations: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def world_size(self) -> NDArray[np.int64]:
        return self.dp * self.cp * self.tp * self.pp

    @classmethod
    def of(cls, count: int | None = None, **columns: Any) -> Layouts:
        """Layouts from columns (scalars are repeated); what isn't named has the default of one plain layout.

        Names may stand for ids, e.g. schedule="1f1b". The length is `count` or that of the longest column.
        """
        defaults = dict.fromkeys((f.name for f in fields(cls)), 0)
        for name in ("dp", "tp", "pp", "cp", "ep", "etp", "micro_batch", "virtual_stages", "replicas", "tp_overlap"):
            defaults[name] = 1
        defaults["recipe"] = list(RECIPES).index("bf16")
        values = {**defaults, **{k: _ids(k, v) for k, v in columns.items()}}
        unknown = set(values) - set(defaults)
        if unknown:
            raise TypeError(f"Layouts has no column {sorted(unknown)}")
        size = count if count is not None else max((np.size(v) for v in values.values()), default=1)
        return cls(
            **{k: np.ascontiguousarray(np.broadcast_to(np.asarray(v, np.int64), (size,))) for k, v in values.items()}
        )

    @classmethod
    def from_layout(cls, layout: Layout, **columns: Any) -> Layouts:
        """One core layout; `columns` as in `of`, for micro_batch, recipe, recompute ..."""
        stages = layout.stage_layers
        own = {
            **{k: getattr(layout, k) for k in ("dp", "tp", "pp", "cp", "ep", "etp", "virtual_stages", "cp_kind")},
            "schedule": layout.schedule,
            "dp_shard": layout.dp_shard,
            "sequence_parallel": int(layout.sequence_parallel),
            "tp_overlap": int(layout.tp_chunks > 1),
            "first_layers": stages[0] if stages else 0,
            "last_layers": stages[-1] if stages else 0,
        }
        return cls.of(1, **{**own, **columns})

    @classmethod
    def from_job(cls, job: Job) -> Layouts:
        """The layout, micro-batch, precision and recompute of a job."""
        return cls.from_layout(
            job.layout,
            micro_batch=job.train.micro_batch,
            recipe=job.precision.recipe,
            recompute="fine" if job.train.recompute == "budget" else job.train.recompute,
            recompute_layers=job.train.recompute_layers or 0,
            replicas=job.replicas if job.layout.dp_shard != "none" else 1,
        )

    def take(self, index: NDArray[np.int64]) -> Layouts:
        """The layouts at `index`."""
        return Layouts(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def row(self, index: int) -> dict[str, int | str]:
        """One layout as a dict, names spelled out."""
        row: dict[str, int | str] = {}
        for f in fields(self):
            value = int(getattr(self, f.name)[index])
            row[f.name] = _NAMES[f.name][value] if f.name in _NAMES else value
        return row

    def layout(self, index: int, num_layers: int) -> Layout:
        """One layout as the core type; `stage_layers` is spelled out where the outer stages differ."""
        from bessemer.plan.pipeline import spelled_stages

        row = self.row(index)
        keys = ("dp", "tp", "pp", "cp", "ep", "etp", "virtual_stages", "schedule", "dp_shard", "cp_kind")
        stages = spelled_stages(num_layers, int(row["pp"]), int(row["first_layers"]), int(row["last_layers"]))
        picked: Mapping[str, Any] = {k: row[k] for k in keys}
        chunks = TP_CHUNKS if row["tp_overlap"] and int(row["tp"]) > 1 else 1
        sequence = bool(row["sequence_parallel"])
        return Layout(**picked, sequence_parallel=sequence, tp_chunks=chunks, stage_layers=stages)


def _ids(column: str, value: Any) -> Any:
    names = _NAMES.get(column)
    if names is None or isinstance(value, (int, np.integer)):
        return value
    if isinstance(value, str):
        return names.index(value)
    return _many_ids(names, value)


def _many_ids(names: Sequence[str], values: Any) -> Any:
    return (
        [names.index(v) if isinstance(v, str) else v for v in values] if isinstance(values, (list, tuple)) else values
    )
