"""What pydantic finds in a table of the job file, in plain words: a `Problem` for each of its errors."""

from __future__ import annotations

import datetime
import math
import types
import typing
from typing import Any

from bessemer.core.model import Frozen
from bessemer.core.problem import Problem, nearest
from bessemer.core.units import toml_value

__all__ = ["explain", "found"]

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text in double quotes",
    "bool_type": "true or false",
    "tuple_type": "a list in square brackets",
    "model_type": "a table in braces",
}
_RELATIONS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_FORMS = {
    "paths": '["texts/*.txt"]',
    "mixture": '[{corpus = "python-stdlib", weight = 1.0}]',
    "stage_layers": "[6, 6]",
    "batch_ramp": "[[1000, 8], [2000, 16]]",
}
"""The shape of fields whose default is an empty list."""
_PATTERN_WORDS = "letters, digits, dots, hyphens and underscores, the first a letter or digit"


def found(value: Any) -> str:
    """The kind of a TOML value in plain words, with the value where it is short."""
    if isinstance(value, bool | int | float):
        return toml_value(value)
    if isinstance(value, str):
        return f"the text {toml_value(value if len(value) <= 40 else value[:37] + '...')}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, datetime.date | datetime.time):
        return f"the date or time {value.isoformat()}"
    return f"a {type(value).__name__}"


def explain(section: str, kind: type[Frozen], error: dict[str, Any]) -> Problem:
    """One entry of `ValidationError.errors()` of the table [section] as a problem."""
    loc, value, context = error["loc"], error["input"], error.get("ctx", {})
    where = section + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    key = where.partition(".")[2]
    top = str(loc[0])
    name = error["type"]
    default = _default_fix(section, kind, top)
    if name in _KINDS:
        what = f"{key} must be {_KINDS[name]}, not {found(value)}"
        repaired = _repair(name, value)
        fix = f"{where} = {repaired}" if repaired is not None else default
        return Problem(code="wrong-type", where=where, what=what, why="", fix=fix)
    if name == "literal_error":
        choices = _choices(kind.model_fields[top].annotation)
        near = nearest(value, choices, count=1) if isinstance(value, str) else []
        fix = f'{where} = "{near[0]}"' if near else default
        why = "choices: " + ", ".join(f'"{c}"' for c in choices)
        return Problem(code="unknown-choice", where=where, what=f"{key} can't be {found(value)}", why=why, fix=fix)
    if name == "extra_forbidden":
        inner = tuple(_item_fields(kind.model_fields[top].annotation))
        near = nearest(str(loc[-1]), inner, count=1)
        fix = near[0] if near else "one of " + ", ".join(inner)
        what = f"there is no key {str(loc[-1])!r} in an entry of {top}"
        return Problem(code="unknown-key", where=where, what=what, why="keys: " + ", ".join(inner), fix=fix)
    what = _range_text(key, error)
    return Problem(code="out-of-range", where=where, what=what, why=_shape(name, context), fix=default)


def _range_text(key: str, error: dict[str, Any]) -> str:
    name, value, context = error["type"], error["input"], error.get("ctx", {})
    if name in _RELATIONS:
        entry, words = _RELATIONS[name]
        return f"{key} = {toml_value(value)} must be {words} {context[entry]:,.12g}"
    if name == "string_pattern_mismatch":
        return f"{key} = {toml_value(value)} must be made of {_PATTERN_WORDS}"
    if name in ("too_long", "too_short"):
        return f"{key} has {context['actual_length']} entries"
    if name == "missing":
        return f"{key} is missing"
    return f"{key}: {error['msg']}"


def _shape(name: str, context: dict[str, Any]) -> str:
    if name == "too_long":
        return f"it holds at most {context['max_length']}"
    if name == "too_short":
        return f"it holds at least {context['min_length']}"
    return ""


def _repair(name: str, value: Any) -> str | None:
    """The value that was most likely meant, as TOML, where the wrong one shows it."""
    if name in ("int_type", "int_from_float") and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        if not abs(number) < 1e15:
            return None
        return str(int(number)) if number == int(number) else f"{math.floor(number)} or {math.ceil(number)}"
    if name == "float_type" and isinstance(value, str):
        try:
            return repr(float(value))
        except ValueError:
            return None
    if name == "bool_type" and (str(value).lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")):
        return "true" if str(value).lower() in ("true", "yes", "on", "1") else "false"
    if name == "string_type" and isinstance(value, bool | int | float):
        return toml_value(toml_value(value))
    if name == "tuple_type" and isinstance(value, str | int | float):
        return toml_value([value])
    return None


def _default_fix(section: str, kind: type[Frozen], key: str) -> str:
    info = kind.model_fields[key]
    default = info.get_default(call_default_factory=True)
    if key in _FORMS:
        return f"a list such as {section}.{key} = {_FORMS[key]}"
    if default is None:
        return f"delete {section}.{key} to have it chosen"
    return f"{section}.{key} = {toml_value(default)} is the default"


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(map(str, typing.get_args(annotation)))
    return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))


def _item_fields(annotation: Any) -> tuple[str, ...]:
    """The keys of the tables that a list field holds (`Corpus` in data.mixture)."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return tuple(annotation.model_fields) if issubclass(annotation, Frozen) else ()
    return tuple(name for part in typing.get_args(annotation) for name in _item_fields(part))
