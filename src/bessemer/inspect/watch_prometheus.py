"""The figures of runs in Prometheus' text format (version 0.0.4): aggregates, and the worst ranks by place.

A series for each rank would be ten thousands of them. `bessemer_straggler_ratio{place="1"}` is the worst one's score
and `bessemer_straggler_rank{place="1"}` its number, so that a new straggler makes no new series.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from bessemer.inspect.ledger import FACTORS
from bessemer.inspect.watch_ranks import STATES
from bessemer.inspect.watch_run import RunWatch

__all__ = ["CONTENT_TYPE", "FIGURES", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PLACES = 8
RUN_STATES = ("waiting", "running", "quiet", "finished", "stopped", "failed")

FIGURES: dict[str, tuple[str, str]] = {
    "bessemer_run_state": ("gauge", "1 for the state that the run is in"),
    "bessemer_attempt": ("gauge", "Starts of the run so far"),
    "bessemer_step": ("gauge", "Last committed step"),
    "bessemer_steps": ("gauge", "Steps that the run will have"),
    "bessemer_quiet_seconds": ("gauge", "Since the last sign of life"),
    "bessemer_loss": ("gauge", "Training loss of the last step, nats a token"),
    "bessemer_val_loss": ("gauge", "Validation loss of the last evaluation, nats a token"),
    "bessemer_grad_norm": ("gauge", "Norm of the gradient of the last step"),
    "bessemer_learning_rate": ("gauge", "Learning rate of the last step"),
    "bessemer_step_seconds": ("gauge", "Duration of the last step"),
    "bessemer_tokens_per_second": ("gauge", "Tokens a second of the last step, all ranks"),
    "bessemer_waiting_seconds": ("gauge", "Of the last step, waiting for other ranks, mean"),
    "bessemer_predicted_step_seconds": ("gauge", "Duration of a step as the planner expects it (modelled)"),
    "bessemer_predicted_tokens_per_second": ("gauge", "Tokens a second as the planner expects them (modelled)"),
    "bessemer_yield_ratio": ("gauge", "Factory yield: useful model FLOPs over time x peak"),
    "bessemer_factor_ratio": ("gauge", "The five factors of the yield"),
    "bessemer_predicted_factor_ratio": ("gauge", "The factors as the planner expects them (modelled)"),
    "bessemer_saved_step": ("gauge", "Step of the newest checkpoint"),
    "bessemer_save_stall_seconds": ("gauge", "Seconds that saves held the ranks up, this reading of the events"),
    "bessemer_failed_saves": ("gauge", "Saves that failed"),
    "bessemer_rank_losses": ("gauge", "Ranks lost"),
    "bessemer_groups": ("gauge", "Groups of ranks by state"),
    "bessemer_ranks": ("gauge", "Ranks by state"),
    "bessemer_phase_seconds": ("gauge", "Seconds of the last step by phase, quantiles over ranks"),
    "bessemer_straggler_ratio": (
        "gauge",
        "Time to compute a token of the worst ranks over that of their stage's others",
    ),
    "bessemer_straggler_rank": ("gauge", "Number of that rank"),
    "bessemer_expert_imbalance_ratio": ("gauge", "Largest expert load over the mean one, worst layer"),
    "bessemer_dropped_choices": ("gauge", "Choices of experts that were dropped in the last step"),
    "bessemer_saturated_ratio": ("gauge", "Elements beyond what their scale holds, worst tensor"),
    "bessemer_flushed_ratio": ("gauge", "Elements lost to zero below their scale, worst tensor"),
    "bessemer_findings": ("gauge", "Findings of the flight inspection by kind"),
}
"""Name -> type and help of everything that is exposed; each has the label `run`."""

_COLUMNS = {
    "loss": "bessemer_loss", "val_loss": "bessemer_val_loss", "grad_norm": "bessemer_grad_norm",
    "lr": "bessemer_learning_rate", "step_s": "bessemer_step_seconds", "tokens_per_s": "bessemer_tokens_per_second",
    "waiting_s": "bessemer_waiting_seconds", "imbalance": "bessemer_expert_imbalance_ratio",
    "dropped": "bessemer_dropped_choices", "saturated": "bessemer_saturated_ratio",
    "flushed": "bessemer_flushed_ratio",
}  # fmt: skip

Sample = tuple[str, dict[str, str], float | None]


def exposition(runs: Sequence[RunWatch]) -> str:
    """All figures of `runs`, those of one name together."""
    lines: dict[str, list[str]] = {name: [] for name in FIGURES}
    for run in runs:
        for name, labels, value in _samples(run):
            if value is not None and math.isfinite(value):
                text = ",".join(f'{key}="{_escape(text)}"' for key, text in {"run": run.name, **labels}.items())
                lines[name].append(
                    f"{name}{{{text}}} {value:g}" if value != int(value) else f"{name}{{{text}}} {value:.0f}"
                )
    parts = []
    for name, (kind, about) in FIGURES.items():
        if lines[name]:
            parts += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines[name]]
    return "\n".join(parts) + "\n"


def _samples(run: RunWatch) -> Iterator[Sample]:
    with run.reading():
        yield from _of_course(run)
        yield from _of_ledger(run)
        yield from _of_keep(run)
        yield from _of_ranks(run)


def _of_course(run: RunWatch) -> Iterator[Sample]:
    head = run.headline()
    for state in RUN_STATES:
        yield "bessemer_run_state", {"state": state}, float(head["state"] == state)
    yield "bessemer_attempt", {}, head["attempt"]
    yield "bessemer_step", {}, head["step"]
    yield "bessemer_steps", {}, head["steps"]
    yield "bessemer_quiet_seconds", {}, head["quiet_s"]
    for column, name in _COLUMNS.items():
        yield name, {}, run.series.last(column)
    findings = Counter(event.kind for event in run.events if event.kind)
    for kind, count in findings.items():
        yield "bessemer_findings", {"kind": str(kind)}, count


def _of_ledger(run: RunWatch) -> Iterator[Sample]:
    predicted = run.predicted
    yield "bessemer_predicted_step_seconds", {}, predicted.step_s
    yield "bessemer_predicted_tokens_per_second", {}, predicted.tokens_per_s
    ledger = run.ledger.value
    for factor in FACTORS:
        yield "bessemer_predicted_factor_ratio", {"factor": factor}, predicted.factors.get(factor)
        if ledger is not None:
            yield "bessemer_factor_ratio", {"factor": factor}, ledger.factors[factor].value
    if ledger is not None:
        yield "bessemer_yield_ratio", {}, ledger.total.value


def _of_keep(run: RunWatch) -> Iterator[Sample]:
    kept = run.kept
    yield "bessemer_saved_step", {}, max(kept.saved, default=None)
    yield "bessemer_save_stall_seconds", {}, kept.stall_s
    yield "bessemer_failed_saves", {}, kept.failed_saves
    yield "bessemer_rank_losses", {}, kept.losses
    for state, count in Counter(str(group.get("state")) for group in kept.groups.values()).items():
        yield "bessemer_groups", {"state": state}, count


def _of_ranks(run: RunWatch) -> Iterator[Sample]:
    summary = run.ranks.summary()
    for state in STATES if summary["counts"] else ():
        yield "bessemer_ranks", {"state": state}, summary["counts"].get(state, 0)
    for phase in summary["phases"]:
        for quantile, key in (("0.01", "p1"), ("0.5", "p50"), ("0.99", "p99"), ("1", "max")):
            yield "bessemer_phase_seconds", {"phase": phase["name"], "quantile": quantile}, phase[key]
    for place, row in enumerate(run.ranks.worst(PLACES), 1):
        yield "bessemer_straggler_ratio", {"place": str(place)}, row["score"]
        yield "bessemer_straggler_rank", {"place": str(place)}, row["rank"]


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
