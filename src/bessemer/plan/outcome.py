"""The answer of a search or of one priced layout: everything that is said about it, as JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem
from bessemer.plan.axes import Request, layout_columns, request_problems
from bessemer.plan.enumerate import rules_of
from bessemer.plan.figures import Money, Priced, money, prices_of, yield_factors
from bessemer.plan.impossible import RULES, impossible
from bessemer.plan.neighbours import Limit, Neighbour, limits_of, neighbours_of, sensitivity_of
from bessemer.plan.replayed import with_replay
from bessemer.plan.search import Found
from bessemer.plan.space import Layouts

__all__ = ["Details", "Outcome", "Prices", "layout_problems", "one_layout", "outcome_of"]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a user pays and wants: a price of a device and hour in any currency, tokens of the whole run, and the
    factor from the devices' power to that of the building."""

    gpu_hour: float | None = None
    tokens: float | None = None
    pue: float = 1.0


class Details:
    """What is said about one layout beyond its row; each part is worked out when it is asked for."""

    def __init__(self, priced: Priced, index: int, wishes: Prices) -> None:
        self.priced, self.index, self.wishes = priced, index, wishes

    @cached_property
    def factors(self) -> dict[str, float]:
        return yield_factors(self.priced, self.index)

    @cached_property
    def neighbours(self) -> list[Neighbour]:
        return neighbours_of(self.priced, self.index)

    @cached_property
    def limits(self) -> list[Limit]:
        return limits_of(self.priced, self.index)

    @cached_property
    def sensitivity(self) -> dict[str, float]:
        return sensitivity_of(self.priced, self.index)

    @property
    def money(self) -> Money:
        """Of the tokens that were asked for, else of 10^12."""
        wishes = self.wishes
        return money(self.priced, self.index, tokens=wishes.tokens or 1e12, gpu_hour=wishes.gpu_hour, pue=wishes.pue)

    def as_json(self, *, around: bool = True) -> dict[str, Any]:
        """`around`: with its neighbourhood, which takes some ten times as long as all the rest."""
        priced, index = self.priced, self.index
        memory = priced.prices.memory
        own = {
            "breakdown_s": priced.breakdown(index),
            "memory_lines_bytes": priced.memory(index),
            "fullest_stage": int(memory.stage[index]),
            "peak_when": ("backward of the loss", "backward of a layer")[int(memory.when[index])],
            "factors": self.factors,
            "money": vars(self.money),
        }
        if not around:
            return own
        return {
            **own,
            "neighbours": [n.as_json() for n in self.neighbours],
            "breaks_first": [limit.as_json() for limit in self.limits],
            "sensitivity": self.sensitivity,
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer of `bessemer plan search`. `top`: layouts shown. Without a layout that fits, `problem` says why and
    what would; the exit code is then 2."""

    request: Request
    model: str
    ranked: Priced
    searched: int
    pruned: int
    feasible: int
    seconds: float
    alike: int = 1
    front: Priced | None = None
    trainable: Priced | None = None
    cut: dict[str, int] = field(default_factory=dict)
    problem: Problem | None = None
    top: int = 20
    wishes: Prices = Prices()
    written: str = ""

    @property
    def exit_code(self) -> int:
        return 0 if self.problem is None else ConfigError.exit_code

    @property
    def shown(self) -> int:
        return min(self.top, len(self.ranked))

    @cached_property
    def details(self) -> Details:
        """Of the best layout. There must be one."""
        return Details(self.ranked, 0, self.wishes)

    def alike_best(self, index: int) -> bool:
        """Whether a layout's band of uncertainty reaches into that of the best one."""
        return bool(self.ranked.prices.low_s[index] <= self.ranked.prices.high_s[0])

    def as_json(self) -> dict[str, Any]:
        rows = [{**self.ranked.row(i), "alike_best": self.alike_best(i)} for i in range(self.shown)]
        front = [] if self.front is None else [self.front.row(i) for i in range(len(self.front))]
        return {
            "searched": self.searched,
            "pruned": self.pruned,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "layouts": rows,
            "alike": self.alike,
            "pruned_by": self.cut,
            "notes": list(self.request.notes),
            "kind": "modelled",
            "pareto": front,
            "best": self.details.as_json() if rows else None,
            "impossible": None if self.problem is None else vars(self.problem),
            **({"written": self.written} if self.written else {}),
        }

    def __str__(self) -> str:
        from bessemer.plan.text import search_text

        return search_text(self)


def outcome_of(found: Found, model: str, *, top: int, wishes: Prices) -> Outcome:
    """The answer to a search; what would fit is looked for where nothing does."""
    return Outcome(
        request=found.request,
        model=model,
        ranked=found.best,
        searched=found.searched,
        pruned=found.pruned,
        feasible=found.feasible,
        seconds=found.seconds,
        alike=found.alike,
        front=found.front,
        trainable=found.trainable,
        cut=found.cut,
        problem=impossible(found) if not found.feasible else None,
        top=top,
        wishes=wishes,
    )


def layout_problems(request: Request, layouts: Layouts) -> list[Problem]:
    """The rules that one layout breaks, as problems."""
    found, world = [], int(layouts.world_size[0])
    for code in rules_of(request, layouts):
        what = (
            f"the layout has {world} ranks, not {request.num_gpus}" if code == "gpus" else f"the layout breaks {code}"
        )
        why = RULES.get(code, "degrees multiply to the number of devices" if code == "gpus" else "see docs/errors.md")
        found.append(Problem(code="plan-layout", where="layout", what=what, why=why, fix="another value, or a search"))
    return found


def one_layout(request: Request, given: dict[str, Any], model: str, wishes: Prices) -> Outcome:
    """The answer for one given layout; `dp` follows from the devices where it isn't given. ConfigError where it breaks
    a rule."""
    start = time.perf_counter()
    problems = request_problems(request)
    columns = layout_columns(given)
    if "dp" not in columns:
        rest = int(np.prod([columns.get(k, 1) for k in ("tp", "pp", "cp")]))
        columns["dp"] = max(request.num_gpus // rest, 1)
    layouts = Layouts.of(1, **columns)
    problems += layout_problems(request, layouts) if not problems else []
    if problems:
        raise ConfigError(problems, "the layout")
    priced = with_replay(prices_of(request, layouts))
    fits = bool(priced.headroom_bytes[0] >= 0)
    return Outcome(
        request=request, model=model, ranked=priced, searched=1, pruned=0, feasible=int(fits),
        seconds=time.perf_counter() - start, top=1, wishes=wishes,
    )  # fmt: skip
