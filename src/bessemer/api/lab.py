"""The verbs of `bessemer lab`: experiments on number formats, recipes and outliers. Each is loaded when it is used."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["VERBS"]

VERBS: dict[str, str] = {
    "formats": "bessemer.api._lab_formats",
    "parity": "bessemer.api._lab_parity",
    "precision": "bessemer.api._lab_precision",
    "outliers": "bessemer.api._lab_outliers",
    "scaling-law": "bessemer.api._lab_scaling",
}
"""Verb -> the module that holds the function of that name (with _ for -), in the order in which help lists them."""


def __getattr__(name: str) -> Any:
    module = VERBS.get(name.replace("_", "-"))
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name.replace("-", "_"))


def __dir__() -> list[str]:
    return sorted([*__all__, *(verb.replace("-", "_") for verb in VERBS)])
