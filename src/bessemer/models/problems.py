"""What can't be built from a model's description. No torch: `bessemer check` runs this before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.core.job import Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, divisors_near, one_of

__all__ = ["problems"]


def problems(job: Job, spec: ModelSpec | None, machine: Machine | None) -> list[Problem]:
    """Combinations that have no code, and sizes that contradict one another; nothing where there is no `spec`."""
    del job, machine
    if spec is None:
        return []
    return [*_not_runnable(spec), *_sizes(spec), *_heads(spec), *_experts(spec), *_rope(spec)]


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


def _experts(spec: ModelSpec) -> Iterator[Problem]:
    moe = spec.moe
    if moe is None or moe.num_groups < 1 or moe.num_experts % moe.num_groups:
        return
    size = moe.num_experts // moe.num_groups
    open_to_a_token = size * min(moe.top_groups, moe.num_groups)
    if moe.top_k > open_to_a_token:
        what = f"{moe.top_k} experts a token of the {open_to_a_token} in {moe.top_groups} groups"
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
        what = f"the {spec.rope.kind} rotary scaling lacks {', '.join(absent)}"
        yield _problem(
            "model-rope", "rope_scaling", what, why="the rule is not defined without", fix="give " + ", ".join(absent)
        )
    if spec.rope.interleaved and spec.mla is None:
        what = "interleaved rotary pairs are not built for dense models"
        why = "the dense families turn the two halves of a head"
        yield _problem("not-runnable", "rope_interleave", what, why=why, fix="model.rope_interleave = false")
