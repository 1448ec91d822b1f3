"""A planned layout as a job file."""

from __future__ import annotations

from typing import Any

from bessemer.core.presets import PRESETS
from bessemer.core.units import toml_text
from bessemer.plan.figures import Priced

__all__ = ["job_text"]

_BESIDE = ("graph", "offload_optimizer", "offload_activations")
"""Choices that no field of a job has: they are named in a comment."""


def job_text(priced: Priced, index: int, model: str, name: str) -> str:
    """TOML of the layout with its model, batch, precision and machine; what the plan doesn't decide is left at its
    default. `model`: a preset, or the path of a folder or config.json."""
    request, row = priced.request, priced.layouts.row(index)
    layout = priced.layouts.layout(index, request.spec.num_layers).model_dump(exclude_defaults=True)
    source: dict[str, Any] = {"preset" if model in PRESETS else "hf": model}
    if request.seq_len > request.spec.max_positions:
        source["max_position_embeddings"] = request.seq_len
    train = {"global_batch": request.global_batch, "micro_batch": row["micro_batch"]}
    if row["recompute"] != "none":
        train["recompute"] = row["recompute"]
    if row["recompute"] == "block":
        train["recompute_layers"] = row["recompute_layers"]
    job: dict[str, Any] = {
        "run": {"name": name},
        "model": source,
        "data": {"seq_len": request.seq_len},
        "layout": layout,
        "train": train,
        "precision": {"recipe": row["recipe"]},
        "machine": {
            "name": request.machine.name if request.machine_path is None else request.machine_path,
            "gpus": request.num_gpus,
            "gpus_per_node": request.machine.gpus_per_node,
        },
    }
    if int(row["replicas"]) > 1:
        job["keep"] = {"replicas": row["replicas"]}
    seconds, low, high = (float(a[index]) for a in (priced.prices.step_s, priced.prices.low_s, priced.prices.high_s))
    memory = float(priced.prices.memory_bytes[index]) / 2**30
    head = [
        f"# Planned (modelled): {seconds:.4g} s a step, {low:.4g} to {high:.4g}; {memory:.4g} GiB a device.",
        *(f"# Beside the layout: {k} = {row[k]}" for k in _BESIDE if row[k]),
    ]
    return "\n".join([*head, toml_text(job)])
