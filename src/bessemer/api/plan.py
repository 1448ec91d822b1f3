"""The verbs of `bessemer plan`: `bessemer.api.plan.search(...)`. Each is loaded when it is first used; none needs torch
but `calibrate`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.api._plan_calibrate import calibrate
    from bessemer.api._plan_explain import compare, explain
    from bessemer.api._plan_goodput import goodput
    from bessemer.api._plan_search import search
    from bessemer.api._plan_validate import validate

__all__ = ["VERBS", "calibrate", "compare", "explain", "goodput", "search", "validate"]

VERBS: dict[str, str] = {
    "search": "bessemer.api._plan_search",
    "explain": "bessemer.api._plan_explain",
    "compare": "bessemer.api._plan_explain",
    "goodput": "bessemer.api._plan_goodput",
    "calibrate": "bessemer.api._plan_calibrate",
    "validate": "bessemer.api._plan_validate",
}
"""Verb -> the module that holds the function of that name, in the order in which help lists them."""


def __getattr__(name: str) -> Any:
    if name not in VERBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(VERBS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
