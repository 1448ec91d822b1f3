"""Units: numbers for people, and numbers and tables written as TOML. Bytes are shown in powers of 1024."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["counted", "format_bytes", "format_count", "format_rate", "format_seconds", "toml_text", "toml_value"]

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def counted(number: int, noun: str) -> str:
    """ "1 rank", "4,096 tokens", "2 processes": a number with its noun, whose plural ends in s or, after s, in es."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def format_bytes(size_bytes: float) -> str:
    """ "1.50 GiB": three significant figures, powers of 1024."""
    value, unit = float(size_bytes), "B"
    for name in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, name
    return f"{int(value)} B" if unit == "B" else f"{_three(value)} {unit}"


def format_count(count: float) -> str:
    """ "8.03 B" for parameters and tokens: k, M, B (10^9), T (10^12)."""
    for step, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= step:
            return f"{_three(count / step)} {name}"
    return f"{count:g}"


def format_rate(per_s: float, unit: str) -> str:
    """ "1.20 TFLOP/s" from (1.2e12, "FLOP"): powers of 1000."""
    for step, prefix in _STEPS:
        if abs(per_s) >= step:
            return f"{_three(per_s / step)} {prefix}{unit}/s"
    return f"{per_s:.3g} {unit}/s"


def format_seconds(seconds: float) -> str:
    """ "340 ms", "12.5 s", "3 min 05 s", "2 h 03 min": for progress and reports."""
    if seconds < 1e-3:
        return f"{_three(seconds * 1e6)} us"
    if seconds < 1:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def toml_text(table: Mapping[str, Any]) -> str:
    """TOML of nested mappings: plain values first, then each nested mapping as a [table]; None values are refused."""
    return "\n".join(_toml_lines(table, ())) + "\n"


def toml_value(value: object) -> str:
    """One TOML value: bool, int, float, str, or a list, tuple or mapping (inline) of them; else TypeError."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # Python's inf and nan are TOML's too
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"TOML has no value for {type(value).__name__}")


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(k)} = {toml_value(v)}" for k, v in table.items() if not isinstance(v, Mapping)]
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = (*path, key)
            lines += ["", "[" + ".".join(map(_key, inner)) + "]", *_toml_lines(value, inner)]
    return lines


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else toml_value(key)


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"
