"""What can't be built from a model's description. No torch: `bessemer check` runs this before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.core.job import Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, divisors_near, one_of

__all__ = ["problems"]

_DENSE = "dense models: llama, mistral, qwen2, qwen3 and gpt2"


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """Families that have no code yet, and sizes that contradict one another; nothing where there is no `spec`."""
    del job, machine
    if spec is None:
        return []
    return [*_not_runnable(spec), *_sizes(spec), *_heads(spec), *_rope(spec)]


def _problem(code: str, field: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=f"model.{field}", what=what, why=why, fix=fix)


def _not_runnable(spec: ModelSpec) -> Iterator[Problem]:
    parts = (
        (spec.moe is not None, "experts (MoE)"),
        (spec.mla is not None, "latent attention (MLA)"),
        (spec.mtp_layers > 0, "multi-token prediction (MTP)"),
    )
    missing = [text for present, text in parts if present]
    if missing:
        what = f"{spec.family} needs {', '.join(missing)}, which can be planned but not trained yet"
        why = "the trainer builds dense decoders only, and would train another model than was asked for"
        yield _problem("not-runnable", "family", what, why=why, fix=_DENSE)


def _sizes(spec: ModelSpec) -> Iterator[Problem]:
    fields = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
    for field in (*fields, "max_positions"):
        value = getattr(spec, field)
        if value < 1:
            yield _problem(
                "model-size", field, f"{field} = {value}", why="a size is at least 1", fix=f"{field} = 1 or more"
            )
    if spec.sliding_window is not None and spec.sliding_window < 1:
        what = f"sliding_window = {spec.sliding_window}"
        yield _problem("model-window", "sliding_window", what, why="a query sees at least itself", fix="1 or more")
    if spec.norm_eps <= 0:
        what = f"norm_eps = {spec.norm_eps}"
        yield _problem("model-eps", "norm_eps", what, why="a row of zeros would divide by zero", fix="norm_eps = 1e-5")


def _heads(spec: ModelSpec) -> Iterator[Problem]:
    heads, kv = spec.num_heads, spec.num_kv_heads
    if min(heads, kv, spec.head_dim) < 1:
        return
    if spec.mla is None and heads % kv:
        what = f"num_heads = {heads} can't share {kv} key/value heads"
        why = "each key/value head serves the same whole number of query heads"
        fix = one_of("model.num_key_value_heads", divisors_near(heads))
        yield _problem("model-kv-heads", "num_key_value_heads", what, why=why, fix=fix)
    if spec.positions == "rope" and spec.mla is None and spec.head_dim % 2:
        what = f"head_dim = {spec.head_dim} is odd"
        why = "rotary positions turn pairs of a head's dims"
        yield _problem("model-head-dim", "head_dim", what, why=why, fix=f"model.head_dim = {spec.head_dim + 1}")


def _rope(spec: ModelSpec) -> Iterator[Problem]:
    needs = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
    }
    absent = [f for f in needs.get(spec.rope.kind, ()) if getattr(spec.rope, f) is None]
    if absent:
        what = f"the {spec.rope.kind} rotary scaling lacks {', '.join(absent)}"
        yield _problem(
            "model-rope", "rope_scaling", what, why="the rule is not defined without", fix="give " + ", ".join(absent)
        )
    if spec.rope.interleaved and spec.mla is None:
        what = "interleaved rotary pairs are not built for dense models"
        why = "the dense families turn the two halves of a head"
        yield _problem("not-runnable", "rope_interleave", what, why=why, fix="model.rope_interleave = false")
