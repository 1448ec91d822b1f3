"""Rotary position settings of a config.json: `rope_theta` with `rope_scaling`, or `rope_parameters` holding both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bessemer.core.hf_keys import REQUIRED, KeyReader
from bessemer.core.model import RopeSpec

__all__ = ["read_rope", "rope_config"]

_KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
_YARN_OPTIONAL = ("mscale", "mscale_all_dim", "attention_factor")


def read_rope(keys: KeyReader, theta: float, max_positions: int, interleaved: bool) -> RopeSpec:
    """The `RopeSpec` of a config. theta: the family's default base. Problems go to `keys`."""
    outer = keys.number("rope_theta", None, least=1.0) if keys.given("rope_theta") else None
    keys.only("partial_rotary_factor", 1, 1.0)
    keys.ignore("rope_theta")
    old, new = keys.table("rope_scaling"), keys.table("rope_parameters")
    if old and new:
        what, why = "rope_scaling and rope_parameters are both given", "they are two forms of one setting"
        keys.report("model-value", "rope_scaling", what, why, "keep one of them")
    name, values = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    inner = keys.part(name, values)
    inner.only("partial_rotary_factor", 1, 1.0)
    own = inner.number("rope_theta", None, least=1.0) if inner.given("rope_theta") else None
    if own is not None and outer is not None and own != outer:
        what = f"rope_theta = {outer:g} differs from {name}.rope_theta = {own:g}"
        keys.report("model-value", "rope_theta", what, "transformers would silently take the inner one", "keep one")
    base = own if own is not None else outer if outer is not None else theta
    kind_key = "rope_type" if inner.given("rope_type") else "type"
    inner.ignore("rope_theta", "rope_type", "type")
    kind = inner.choice(kind_key, "default", _KINDS)
    fields = _scaling(inner, kind, max_positions)
    inner.finish((), ())
    return RopeSpec(theta=base, kind=kind, interleaved=interleaved, **fields)  # type: ignore[arg-type]


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """The keys `rope_theta` and, where scaled, `rope_scaling`: the form that transformers 4 and 5 both read."""
    if rope.kind == "none":
        return {"rope_theta": rope.theta}
    pairs = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "attention_factor": rope.attention_factor,
    }
    scaling = {key: value for key, value in pairs.items() if value is not None}
    if not rope.truncate:
        scaling["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _scaling(inner: KeyReader, kind: str, max_positions: int) -> Mapping[str, Any]:
    if kind == "none":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": inner.number("factor", REQUIRED, least=1.0)}
    original = inner.integer_or_none("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor", REQUIRED), inner.number("high_freq_factor", REQUIRED)
        if low >= high and not inner.problems:
            what, why = f"low_freq_factor {low:g} isn't below high_freq_factor {high:g}", "the bands would overlap"
            inner.report("model-value", "low_freq_factor", what, why, "low_freq_factor = 1.0, high_freq_factor = 4.0")
        factor = inner.number("factor", REQUIRED, least=1.0)
        return {"factor": factor, "original_max_positions": original, "low_freq_factor": low, "high_freq_factor": high}
    # Without a factor, yarn stretches the original length to max_position_embeddings.
    implied = max(max_positions / (original or max_positions), 1.0)
    optional = {key: inner.number(key) for key in _YARN_OPTIONAL if inner.given(key)}
    inner.ignore(*_YARN_OPTIONAL)
    return {
        "factor": inner.number("factor", implied, least=1.0),
        "original_max_positions": original,
        "beta_fast": inner.number("beta_fast", 32.0),
        "beta_slow": inner.number("beta_slow", 1.0),
        "truncate": inner.flag("truncate", True),
        **optional,
    }
