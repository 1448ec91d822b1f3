"""The verb `plan search`. Imports no torch."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.api._check import check
from bessemer.api._plan_inputs import read_machine, read_model, software
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.problem import Problem, one_of
from bessemer.core.units import format_seconds
from bessemer.plan.axes import Request, parse_fixes
from bessemer.plan.jobfile import job_text
from bessemer.plan.local import LOCAL_ERA
from bessemer.plan.outcome import Outcome, Prices, one_layout, outcome_of
from bessemer.plan.search import search as search_all

__all__ = ["search"]

PATIENCE_S = 1.0
"""A shorter search shows no progress."""


# The flags of the command are this signature, so it has one parameter for each.
def search(  # noqa: PLR0913
    model: str,
    *,
    machine: str,
    gpus: int,
    global_batch: int,
    seq: int,
    fix: Sequence[str] = (),
    space: str = "usual",
    layout: str | None = None,
    top: int = 20,
    software_era: str | None = None,
    gpu_hour: float | None = None,
    tokens: float | None = None,
    pue: float = 1.0,
    report: str | None = None,
    write: str | None = None,
    modelled: bool = False,
) -> Outcome:
    """Rank the layouts of a training job by predicted step time.

    Prices every layout that the rules of `bessemer check` allow, and says of the best where each millisecond and byte
    goes, what its neighbours cost, what breaks first, and how sure all that is. Needs no GPU.

    model: A model by name (llama-3-70b), or the path of a Hugging Face folder or config.json.
    machine: The accelerator: h100, mtt-s5000 ..., cpu-local, or the path of a machine file.
    gpus: How many of them.
    global_batch: Sequences a step.
    seq: Tokens of a sequence.
    fix: Fix an axis: --fix tp=8, --fix recipe=bf16,fp8-current. May be repeated.
    space: "usual": what a person would try; "wide": everything that can be priced.
    layout: Price this one layout instead, as JSON: '{"tp": 8, "pp": 4, "micro_batch": 1}'.
    top: Layouts to list.
    software_era: Software that the efficiencies belong to; default: current Megatron, or Bessemer itself where
        it was calibrated.
    gpu_hour: Price of a device and hour, for the cost of the run.
    tokens: Tokens of the whole run, for its days, energy and cost.
    pue: Power of the building over power of the devices.
    report: Write a self-contained HTML page to this file.
    write: Write the best layout that `bessemer train` can run as a job file.
    modelled: With --write: the best layout, also where it is modelled only.
    """
    request = _request(model, machine, (gpus, global_batch, seq), fix, (space, software_era))
    wishes = _wishes(top, gpu_hour, tokens, pue)
    if layout is not None:
        outcome = one_layout(request, _parsed(layout), model, wishes)
    else:
        found = search_all(request, progress=_progress())
        outcome = outcome_of(found, model, top=top, wishes=wishes)
    if outcome.problem is not None:
        return outcome
    said = [_write(outcome, write, modelled)] if write is not None else []
    if report is not None:
        from bessemer.plan.report import write_report

        write_report(outcome, Path(report))
        said.append(f"report: {report}")
    return replace(outcome, written="\n".join(said))


def _wishes(top: int, gpu_hour: float | None, tokens: float | None, pue: float) -> Prices:
    for name, value, least in (("top", top, 1), ("gpu-hour", gpu_hour, 0), ("tokens", tokens, 1), ("pue", pue, 1)):
        if value is not None and not least <= value < float("inf"):
            raise _refused(
                "plan-request", name, f"{name} = {value:g}", f"it is a number from {least}", f"--{name} {least}"
            )
    return Prices(gpu_hour=gpu_hour, tokens=tokens, pue=pue)


def _request(
    model: str, machine: str, sizes: tuple[int, int, int], fix: Sequence[str], how: tuple[str, str | None]
) -> Request:
    """Every fault of the inputs at once, as far as they can be read apart."""
    problems: list[Problem] = []
    spec, (device, calibration), fixed = (
        _gather(lambda: read_model(model), problems),
        _gather(lambda: read_machine(machine), problems) or (None, None),
        _gather(lambda: parse_fixes(fix), problems),
    )
    if how[0] not in ("usual", "wide"):
        problems.append(Problem(code="plan-request", where="space", what=f"{how[0]!r} is no search space",
                                why="there are two", fix=one_of("--space", ["usual", "wide"])))  # fmt: skip
    if problems or spec is None or device is None or fixed is None:
        raise ConfigError(problems, "the request")
    path = machine if "/" in machine or machine.endswith(".toml") else None
    gpus, global_batch, seq = sizes
    return Request(
        spec=spec, machine=device, num_gpus=gpus, global_batch=global_batch, seq_len=seq, fixed=fixed,
        space="wide" if how[0] == "wide" else "usual", era=software(how[1], calibration), calibration=calibration,
        machine_path=path, own=how[1] is None or how[1] == LOCAL_ERA,
    )  # fmt: skip


def _gather(read: Callable[[], Any], problems: list[Problem]) -> Any:
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise _refused(
            "plan-layout", "layout", f"not JSON: {error}", "a layout is a JSON object", '{"tp": 8}'
        ) from error
    if not isinstance(given, dict):
        raise _refused("plan-layout", "layout", f"{text!r} is no JSON object", "it maps axes to values", '{"tp": 8}')
    return given


def _progress() -> Callable[[int, int], None] | None:
    """A line on a terminal's standard error, once a search takes longer than `PATIENCE_S`."""
    if not sys.stderr.isatty():
        return None
    start = time.perf_counter()

    def tell(done: int, whole: int) -> None:
        passed = time.perf_counter() - start
        if passed < PATIENCE_S:
            return
        left = format_seconds(passed / done * (whole - done)) if done < whole else ""
        text = f"\r{done:,} of {whole:,} layouts priced, {done / passed:,.0f} a second" + (
            f", {left} left" if left else ""
        )
        print(text.ljust(78), end="" if done < whole else "\r" + " " * 78 + "\r", file=sys.stderr, flush=True)

    return tell


def _write(outcome: Outcome, path: str, modelled: bool) -> str:
    """Writes the job file and says which layout it holds. RequestError where no layout may be written."""
    name, file = "planned", Path(path)
    if modelled:
        file.write_text(job_text(outcome.ranked, 0, outcome.model, name), encoding="utf-8")
        only = "" if outcome.ranked.row(0)["runnable"] else "; modelled only, train refuses it"
        return f"job file: {path} (the best layout{only})"
    pool = outcome.trainable if outcome.trainable is not None else outcome.ranked
    reasons: list[str] = []
    for index in range(len(pool)):
        if not pool.row(index)["runnable"]:
            continue
        text = job_text(pool, index, outcome.model, name)
        problems = _checked(text)
        if not problems:
            file.write_text(text, encoding="utf-8")
            slower = pool.prices.step_s[index] / outcome.ranked.prices.step_s[0] - 1
            best = (
                "the best layout"
                if slower <= 0
                else f"the best that runs, {slower:.1%} slower than the best modelled one"
            )
            return f"job file: {path} ({best}; `bessemer check {path}` accepts it)"
        reasons += [f"{p.code}: {p.what}" for p in problems[:1] if f"{p.code}: {p.what}" not in reasons]
    why = "; ".join(reasons[:2]) or "the trainer has no code for tensor, pipeline, context or expert parallelism yet"
    raise RequestError(
        f"no layout that fits can be trained today: {why}",
        code="plan-not-runnable",
        fix="--modelled writes the best modelled layout, or --fix tp=1 --fix pp=1 with a smaller model or more memory",
    )


def _checked(text: str) -> tuple[Problem, ...]:
    """What `bessemer check` says of a job file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(text, encoding="utf-8")
        return check(str(file)).problems


def _refused(code: str, where: str, what: str, why: str, fix: str) -> ConfigError:
    return ConfigError([Problem(code=code, where=where, what=what, why=why, fix=fix)], "the request")
