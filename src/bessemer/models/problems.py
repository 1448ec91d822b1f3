"""What can't be built from a model's description. No torch: `bessemer check` runs this before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.core.job import Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, divisors_near, one_of
from bessemer.core.units import counted
from bessemer.models.weight_files import SIZE_KEYS, weights_problems

__all__ = ["problems"]

_ROPE_KEYS = {"original_max_positions": "original_max_position_embeddings"}


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """Combinations that have no code, and sizes that contradict one another; nothing where there is no `spec`."""
    del machine
    if spec is None:
        return []
    weights = [] if job.model.weights is None else weights_problems(job.model.weights, spec)
    return [*weights, *_not_runnable(spec), *_sizes(spec), *_heads(spec), *_experts(spec), *_rope(spec)]


def _problem(code: str, field: str, what: str, *, why: str, fix: str) -> Problem:
    return Problem(code=code, where=f"model.{field}", what=what, why=why, fix=fix)


def _not_runnable(spec: ModelSpec) -> Iterator[Problem]:
    """No published family asks for one of these; a job's own keys may."""
    experts, latent = spec.moe is not None, spec.mla is not None
    cases = (
        (experts and spec.activation != "swiglu", "hidden_act", f"experts with {spec.activation}", '"silu"'),
        (experts and spec.mlp_bias, "mlp_bias", "experts with biases", "false"),
        (latent and spec.positions != "rope", "family", "latent attention with learned positions", '"deepseek_v3"'),
        (latent and spec.norm != "rmsnorm", "family", "latent attention with LayerNorm", '"deepseek_v3"'),
        (latent and spec.qk_norm, "family", "latent attention with norms of queries and keys", '"deepseek_v3"'),
        (latent and spec.qkv_bias, "attention_bias", "latent attention with biases", "false"),
        (latent and spec.o_bias, "attention_bias", "latent attention with biases", "false"),
        (latent and spec.sliding_window is not None, "sliding_window", "latent attention with a window", "null"),
    )
    seen = set()
    for wrong, field, what, value in cases:
        if wrong and field not in seen:
            seen.add(field)
            why = "the trainer has no code for it, and would train another model than was asked for"
            yield _problem("not-runnable", field, f"{what} is not built", why=why, fix=f"model.{field} = {value}")


def _sizes(spec: ModelSpec) -> Iterator[Problem]:
    for field, key in SIZE_KEYS.items():
        value = getattr(spec, field)
        if value < 1:
            why, fix = "a size is at least 1", f"model.{key} = 1 or more"
            yield _problem("model-size", key, f"{key} = {value}", why=why, fix=fix)
    if spec.sliding_window is not None and spec.sliding_window < 1:
        what = f"sliding_window = {spec.sliding_window}"
        yield _problem(
            "model-window",
            "sliding_window",
            what,
            why="a query sees at least itself",
            fix="model.sliding_window = 1 or more",
        )
    if spec.norm_eps <= 0:
        key = "rms_norm_eps" if spec.norm == "rmsnorm" else "layer_norm_epsilon"
        why, fix = "a row of zeros would divide by zero", f"model.{key} = 1e-5"
        yield _problem("model-eps", key, f"{key} = {spec.norm_eps}", why=why, fix=fix)


def _heads(spec: ModelSpec) -> Iterator[Problem]:
    heads, kv = spec.num_heads, spec.num_kv_heads
    if min(heads, kv, spec.head_dim) < 1:
        return
    if spec.mla is None and heads % kv:
        what = f"num_attention_heads = {heads} can't share {counted(kv, 'key/value head')}"
        why = "each key/value head serves the same whole number of query heads"
        fix = one_of("model.num_key_value_heads", divisors_near(heads))
        yield _problem("model-kv-heads", "num_key_value_heads", what, why=why, fix=fix)
    if spec.positions == "rope" and spec.mla is None and spec.head_dim % 2:
        what = f"head_dim = {spec.head_dim} is odd"
        why = "rotary positions turn pairs of a head's dims"
        yield _problem("model-head-dim", "head_dim", what, why=why, fix=f"model.head_dim = {spec.head_dim + 1}")


def _experts(spec: ModelSpec) -> Iterator[Problem]:
    moe = spec.moe
    if moe is None or moe.num_groups < 1 or moe.num_experts % moe.num_groups:
        return
    size = moe.num_experts // moe.num_groups
    open_to_a_token = size * min(moe.top_groups, moe.num_groups)
    if moe.top_k > open_to_a_token:
        what = f"{counted(moe.top_k, 'expert')} a token of the {open_to_a_token} in {counted(moe.top_groups, 'group')}"
        why = f"a group holds {size} of the {moe.num_experts} experts"
        fix = f"model.num_experts_per_tok = {open_to_a_token} or less, or a larger model.topk_group"
        yield _problem("model-experts", "num_experts_per_tok", what, why=why, fix=fix)
    if moe.num_groups > 1 and moe.group_score == "top2" and size < 2:
        what = f"n_group = {moe.num_groups} leaves one expert a group"
        why = "a group is judged by its best two experts"
        yield _problem("model-experts", "n_group", what, why=why, fix=f"model.n_group = {moe.num_experts // 2} or less")


def _rope(spec: ModelSpec) -> Iterator[Problem]:
    needs = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
    }
    absent = [f for f in needs.get(spec.rope.kind, ()) if getattr(spec.rope, f) is None]
    if absent:
        keys = [_ROPE_KEYS.get(field, field) for field in absent]
        what = f"the {spec.rope.kind} rotary scaling lacks {', '.join(keys)}"
        fix = "model.rope_scaling.rope_type, and with it " + ", ".join(f"model.rope_scaling.{key}" for key in keys)
        yield _problem("model-rope", "rope_scaling", what, why="the rule is not defined without", fix=fix)
    if spec.rope.interleaved and spec.mla is None:
        what = "interleaved rotary pairs are not built for dense models"
        why = "the dense families turn the two halves of a head"
        yield _problem("not-runnable", "rope_interleave", what, why=why, fix="model.rope_interleave = false")
