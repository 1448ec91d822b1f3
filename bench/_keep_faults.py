"""What a fault costs a run that goes on through it: four members and spares, faults thrown one after the other.

    lost = from the last commit before the fault to the first one of the new epoch, less the usual time of those steps

The survivors do again what the lost member had to do of the step; the event `adapted` says how long that took. Where
members share cores, the survivors are faster without it, so that the time lost can be less than that, or negative. A
member that is alive without progress sleeps in its main thread, in the midst of a pass; its other threads go on.
"""

from __future__ import annotations

import bisect
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from _keep_runs import MEMBERS, Run, job_of, tell
from table import Row

from bessemer.inspect.chaos_target import Standing
from bessemer.keep.elastic_agent import LEASE_S
from bessemer.keep.records import read_records
from bessemer.keep.step_times import LEAST_HANG_S

MORE_S = 0.3
"""What detecting, agreeing and connecting may cost beside what is waited for by design."""
SETTLE_STEPS = 4
USUAL_STEPS = 9
WITHIN_S = 0.3
"""A fault comes so long after a commit, at most: anywhere in a step."""
SPARES = 2
HANG = signal.SIGRTMIN + 5
_HANGS = """
import signal, time

def hang(number, frame):
    at = frame
    while at is not None and not at.f_code.co_filename.endswith("passes.py"):
        at = at.f_back
    if at is None:  # not in a pass: look again in a moment
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        return
    time.sleep(3600)

signal.signal(signal.SIGRTMIN + 5, hang)
signal.signal(signal.SIGALRM, hang)
"""


@dataclass(frozen=True)
class Hit:
    """A fault that was thrown: when (unix seconds), and which group's rank."""

    kind: str
    t: float
    group: int


@dataclass(frozen=True)
class Cost:
    """Seconds. redone_s: of it, doing the lost share again; limit_s: after which one without progress is given up;
    join_s: from the fault until another group counted in its place; join_cost_s: lost as it came."""

    kind: str
    lost_s: float
    redone_s: float
    limit_s: float
    join_s: float
    join_cost_s: float


def measure(folder: Path, counts: dict[str, int]) -> list[Cost]:
    """One run; `counts` says how many faults of each kind ("kill", "stop", "hang"), in this order."""
    job = job_of(folder, "zero", mode="zero-interruption", spares=SPARES)
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": HANG}
    hits, chance = [], random.Random(1)
    with tempfile.TemporaryDirectory(dir=folder) as hooks:
        (Path(hooks) / "sitecustomize.py").write_text(_HANGS)
        with Run(job, {"PYTHONPATH": hooks}) as run:
            for kind, count in counts.items():
                for number in range(count):
                    run.until(_whole)
                    run.until_step(run.standing.step + SETTLE_STEPS + chance.randrange(3))
                    time.sleep(chance.uniform(0.0, WITHIN_S))
                    t, rank = run.signal_rank("active", numbers[kind], chance)
                    hits.append(Hit(kind, t, rank.group))
                    tell(f"{kind} {number + 1} of {count} at step {run.standing.step}")
                    run.until(partial(_without, rank.group))
            run.until(_whole)
            run.until_step(run.standing.step + SETTLE_STEPS)
    return costs(job.run.folder, hits)


def _whole(standing: Standing) -> bool:
    """All members are active, and a spare has come."""
    return len(standing.active) == MEMBERS and not standing.joining and bool(standing.candidates("spare"))


def _without(group: int, standing: Standing) -> bool:
    return group not in standing.active


def costs(folder: Path, hits: Sequence[Hit]) -> list[Cost]:
    """From the records of the run."""
    commits = sorted((int(r["step"]), float(r["t"])) for r in read_records(folder / "metrics.jsonl"))
    events = list(read_records(folder / "events.jsonl"))
    return [_cost(hit, commits, events) for hit in hits]


def _cost(hit: Hit, commits: list[tuple[int, float]], events: list[dict[str, Any]]) -> Cost:
    times = [t for _, t in commits]
    before = bisect.bisect_right(times, hit.t) - 1
    gaps = [end - begin for begin, end in pairwise(times[: before + 1])]
    usual = median(gaps[-USUAL_STEPS:])
    epochs = [e for e in events if e["event"] == "epoch" and e["t"] > hit.t]
    left = next(e for e in epochs if hit.group not in e["active"])
    after = next(i for i, (step, _) in enumerate(commits) if step > int(left["step"]))
    adapted = [e for e in events if e["event"] == "adapted" and e["epoch"] == left["epoch"]]
    whole = next(e for e in epochs if e["epoch"] > left["epoch"] and len(e["active"]) == MEMBERS)
    come = next((i for i, (step, _) in enumerate(commits) if step > int(whole["step"])), len(commits) - 1)
    longest = sorted(gaps[-200:])
    return Cost(
        kind=hit.kind,
        lost_s=times[after] - times[before] - (after - before) * usual,
        redone_s=max((float(e["redone_s"]) for e in adapted), default=0.0),
        limit_s=max(LEAST_HANG_S, 5 * longest[int(0.99 * (len(longest) - 1))]),
        join_s=float(whole["t"]) - hit.t,
        join_cost_s=times[come] - times[after] - (come - after) * usual,
    )


def rows(found: Sequence[Cost]) -> list[Row]:
    """One row for each kind, and what a join costs."""
    listed = []
    names = {
        "kill": "kill -9 of one of 4 members",
        "stop": "SIGSTOP of one of 4 members",
        "hang": "one of 4 members alive without progress",
    }
    for kind, name in names.items():
        of_kind = [cost for cost in found if cost.kind == kind]
        if not of_kind:
            continue
        lost, redone = [cost.lost_s for cost in of_kind], median(cost.redone_s for cost in of_kind)
        bar, why = {
            "kill": (redone + MORE_S, f"the share done again ({redone:.3f}) + {MORE_S:g} s"),
            "stop": (LEASE_S + MORE_S, f"a lease of {LEASE_S:g} s + {MORE_S:g} s"),
            "hang": (max(cost.limit_s for cost in of_kind), "10 s, or 5 x the p99 step"),
        }[kind]
        note = f"bar: {why}; median of {len(of_kind)}, {min(lost):.3f} to {max(lost):.3f}"
        listed.append(Row(f"{name}: time lost", median(lost), "s", "lower", bar, note))
    joins = [cost.join_s for cost in found if cost.kind != "hang"]
    arrivals = [cost.join_cost_s for cost in found]
    note = f"median of {len(arrivals)}, worst {max(arrivals):.3f}"
    listed.append(Row("a spare takes its place: time lost by all", median(arrivals), "s", "lower", None, note))
    note = f"median of {len(joins)}, without those alive without progress"
    listed.append(Row("from the fault until 4 members are active again", median(joins), "s", "lower", None, note))
    return listed
