"""The jobs of a comparison of recipes: the same job under every recipe with every seed, each in a run folder below
one folder. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import ConfigError, NonFinite, RequestError, RunFolderError
from bessemer.core.job import Job, PrecisionSection
from bessemer.core.job_file import load_job
from bessemer.core.problem import Problem
from bessemer.core.recipes import RECIPES, recipe
from bessemer.keep.records import read_records

__all__ = ["REFERENCE", "LabRun", "check_folders", "lab_jobs", "recipe_names", "tail_mean"]

REFERENCE = "bf16"
"""The recipe that the others are compared with."""

ENDS = ("start", "finished", "stopped", "failed")
"""Events that begin or end an attempt."""

TAIL = 0.1
"""Share of the steps, the last ones, over which the training loss is averaged."""


@dataclass(frozen=True)
class LabRun:
    """One run of a comparison. `dropped`: settings of [precision] that the recipe doesn't read."""

    job: Job
    dropped: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        return self.job.precision.recipe

    @property
    def seed(self) -> int:
        return self.job.train.seed

    @property
    def title(self) -> str:
        return f"{self.recipe} seed {self.seed}"

    @property
    def kind(self) -> str:
        return self.recipe

    @property
    def steps(self) -> int:
        return self.job.train.steps

    @property
    def folder(self) -> Path:
        return self.job.run.folder

    def seconds(self) -> float:
        """What its steps took."""
        return sum(float(r["step_s"]) for r in self.records())

    def records(self) -> list[dict[str, Any]]:
        """One record a committed step, in order; of a step that was done twice the later one."""
        by_step = {int(r["step"]): r for r in read_records(self.folder / "metrics.jsonl")}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def finished(self) -> bool:
        """Whether the last step is committed and evaluated, and its checkpoint written."""
        if not any(event["event"] == "finished" for event in read_records(self.folder / "events.jsonl")):
            return False
        records = self.records()
        return bool(records) and records[-1]["step"] == self.job.train.steps and records[-1].get("val_loss") is not None

    @property
    def diverged(self) -> bool:
        """Whether its newest attempt ended because a loss, gradient or amax was no number, or finished with no number
        as its validation loss, which is null in the records: another attempt would too."""
        events = [e for e in read_records(self.folder / "events.jsonl") if e["event"] in ENDS]
        if not events or events[-1]["event"] != "finished":
            return bool(events) and str(events[-1].get("code", "")).startswith(NonFinite.code)
        records = self.records()
        return bool(records) and records[-1].get("val_loss", 0.0) is None


def recipe_names(text: str) -> list[str]:
    """Names from "bf16,current,fp8-block128": the reference first, then as given. ConfigError for an unknown or
    unrunnable one, RequestError `lab-recipes` where one stands twice or there is none but the reference."""
    names = [_full_name(word.strip()) for word in text.split(",") if word.strip()]
    for name in names:
        recipe(name)
    twice = sorted({name for name in names if names.count(name) > 1})
    others = [name for name in names if name != REFERENCE]
    if twice or not others:
        what = f"{twice[0]} stands twice" if twice else f"there is nothing to compare with {REFERENCE}"
        raise RequestError(
            f"--recipes {text}: {what}", code="lab-recipes", fix=f"--recipes {REFERENCE},fp8-delayed,fp8-current"
        )
    return [REFERENCE, *others]


def _full_name(word: str) -> str:
    """ "current" and "block128" stand for the recipes of FP8 of that name."""
    return f"fp8-{word}" if word not in RECIPES and f"fp8-{word}" in RECIPES else word


def lab_jobs(
    job: Job, names: Sequence[str], seeds: int, folder: Path, check: Callable[[Job], list[Problem]]
) -> list[LabRun]:
    """The runs of a comparison, seed by seed, so that a first answer for all recipes comes early.

    Seeds count from the job's own. A setting of [precision] that a recipe doesn't read goes back to its default for
    that recipe; one that no recipe reads is a problem, as is whatever else `check` finds in one of the jobs: all are
    raised together as one ConfigError. RequestError where a comparison can't be made of the request.
    """
    if seeds < 2:
        raise RequestError(
            f"--seeds {seeds}: the spread between seeds can't be seen with fewer than two",
            code="lab-seeds",
            fix="--seeds 3, or more to tell smaller differences",
        )
    if job.run.resume != "auto":
        raise RequestError(
            f'run.resume = "{job.run.resume}" would start all runs in the same way, and a comparison goes on by itself',
            code="lab-resume",
            fix="--set run.resume=auto, and another folder by --runs for runs from the start",
        )
    problems: dict[Problem, None] = {}
    by_recipe: dict[str, tuple[Job, tuple[str, ...]]] = {}
    ignored: dict[str, list[Problem]] = {}
    for name in names:
        ours = _with(job, "precision", recipe=name)
        found = check(ours)
        unread = {p.where.partition(".")[2]: p for p in found if _unread(p)}
        for field, problem in unread.items():
            ignored.setdefault(field, []).append(problem)
        defaults = {field: PrecisionSection.model_fields[field].default for field in unread}
        ours = _with(ours, "precision", **defaults)
        problems |= dict.fromkeys(check(ours) if unread else found)
        by_recipe[name] = (ours, tuple(f"precision.{field}" for field in unread))
    problems |= dict.fromkeys(found[-1] for found in ignored.values() if len(found) == len(names))
    if problems:
        raise ConfigError(list(problems), "the jobs of the comparison")
    runs = []
    for seed in range(job.train.seed, job.train.seed + seeds):
        for name, (ours, dropped) in by_recipe.items():
            seeded = _with(ours, "train", seed=seed)
            placed = _with(seeded, "run", name=f"{name}-seed-{seed}", dir=str(folder))
            runs.append(LabRun(_with(placed, "keep", keep_last=1), dropped))
    return runs


def _unread(problem: Problem) -> bool:
    return problem.code == "ignored-setting" and problem.where.startswith("precision.")


def _with(job: Job, section: str, **fields: Any) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=fields)})


def check_folders(runs: Sequence[LabRun]) -> None:
    """RunFolderError `lab-other-runs` where a run folder holds steps, or the divergence, of a job that gives other
    numbers: of another identity, or under another layout, micro-batch or evaluation."""
    for run in runs:
        file = run.folder / "job.toml"
        if not file.is_file() or not (run.records() or run.diverged):
            continue
        then, now = _numbers(load_job(file)), _numbers(run.job)
        differ = [f"{key}: {then[key]} -> {now[key]}" for key in now if then[key] != now[key]]
        if differ:
            raise RunFolderError(
                f"{run.folder} holds a run of another job; these fields differ:\n    " + "\n    ".join(differ[:12]),
                code="lab-other-runs",
                fix="--runs with another folder, or put the old values back",
            )


def _numbers(job: Job) -> dict[str, str]:
    """Every field that may move a loss, by its dotted name."""
    fields = job.identity_fields() | {"layout": job.layout.model_dump(mode="json")}
    fields["train"] |= {"micro_batch": job.train.micro_batch, "eval_sequences": job.train.eval_sequences}
    return {f"{table}.{key}": json.dumps(value) for table, keys in fields.items() for key, value in keys.items()}


def tail_mean(losses: Sequence[float]) -> float:
    """Mean of the last tenth of a run's losses, of one at least."""
    count = max(1, round(TAIL * len(losses)))
    return sum(losses[-count:]) / count
