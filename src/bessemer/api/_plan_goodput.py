"""The verb `plan goodput`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem
from bessemer.plan.goodput_advice import advise
from bessemer.plan.goodput_inputs import ask
from bessemer.plan.goodput_report import Goodput
from bessemer.plan.goodput_simulation import simulate

__all__ = ["goodput"]


def goodput(
    *,
    gpus: int = 16384,
    fleet: str = "llama-3",
    spares: int | None = None,
    target: float = 0.99,
    inspection: bool = True,
    sets: Sequence[str] = (),
) -> Goodput:
    """How much of a large job's time becomes training; how many spares, which interval and which mode it takes.

    Failures, their detection, saves, restarts from disk or memory, or survivors that go on while a spare joins: in
    closed form, with a Monte Carlo beside it. Every input is printed with its source.

    gpus: Accelerators that work; spares come on top.
    fleet: Whose failures: llama-3, rsc-1, rsc-2, ft-hsdp or b200-504.
    spares: Nodes in reserve. Without it, as many as the target takes.
    target: The effective time to reach, as a share.
    inspection: Hosts are inspected all the time, which tells most failures within a minute; without it the collectives'
        timeout does after ten.
    sets: Another value for an input: --set stall_s=10. May be repeated.
    """
    problems = []
    if not 0 < target < 1:
        what = f"target = {target:g} is no share of the time"
        problems.append(Problem(code="goodput-input", where="target", what=what, why="", fix="--target 0.99"))
    if spares is not None and spares < 0:
        what = f"spares = {spares} nodes"
        problems.append(Problem(code="goodput-input", where="spares", what=what, why="", fix="--spares 0 or more"))
    try:
        asked = ask(gpus, fleet, sets, inspection=inspection)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems], "the request") from None
    if problems:
        raise ConfigError(problems, "the request")
    advice = advise(asked.inputs, target, spares)
    played = {m.mode: simulate(asked.inputs, m.estimate) for m in advice.modes}
    return Goodput(asked=asked, advice=advice, simulated=played)
