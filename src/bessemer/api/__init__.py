"""One public function for each verb: `bessemer.api.check("job.toml")`. The only place where rooms are wired together.

Each function lives in the module of `VERBS`, which is loaded when it is first used and loads torch only when it runs.
The command line is made from this table: a verb's flags are its function's signature, its help the docstring.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.api import lab, plan
    from bessemer.api._chaos import chaos
    from bessemer.api._check import CheckResult, check
    from bessemer.api._coordinator import Served, coordinator
    from bessemer.api._eval import EvalResult, eval
    from bessemer.api._export import export
    from bessemer.api._generate import generate
    from bessemer.api._landing import landing
    from bessemer.api._launch import Launched, launch
    from bessemer.api._ledger import ledger
    from bessemer.api._scale import Scaled, scale
    from bessemer.api._takeoff import takeoff
    from bessemer.api._train import Trained, train
    from bessemer.api._watch import Watched, watch

__all__ = [
    "GROUPS", "VERBS", "CheckResult", "EvalResult", "Launched", "Scaled", "Served", "Trained", "Watched", "chaos",
    "check", "coordinator", "eval", "export", "generate", "lab", "landing", "launch", "ledger", "plan", "scale",
    "takeoff", "train", "watch",
]  # fmt: skip

VERBS: dict[str, str] = {
    "check": "bessemer.api._check",
    "takeoff": "bessemer.api._takeoff",
    "train": "bessemer.api._train",
    "eval": "bessemer.api._eval",
    "generate": "bessemer.api._generate",
    "export": "bessemer.api._export",
    "ledger": "bessemer.api._ledger",
    "watch": "bessemer.api._watch",
    "landing": "bessemer.api._landing",
    "chaos": "bessemer.api._chaos",
    "scale": "bessemer.api._scale",
    "launch": "bessemer.api._launch",
    "coordinator": "bessemer.api._coordinator",
}
"""Verb -> the module that holds the function of that name, in the order in which help lists them."""

GROUPS: dict[str, str] = {"plan": "bessemer.api.plan", "lab": "bessemer.api.lab"}
"""Group of verbs -> the module that has them, with a table `VERBS` of its own: `bessemer.api.plan.search(...)`."""

_RESULTS = {
    "CheckResult": "check",
    "EvalResult": "eval",
    "Launched": "launch",
    "Scaled": "scale",
    "Served": "coordinator",
    "Trained": "train",
    "Watched": "watch",
}


def __getattr__(name: str) -> Any:
    if name in GROUPS:
        return importlib.import_module(GROUPS[name])
    module = VERBS.get(_RESULTS.get(name, name))
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
