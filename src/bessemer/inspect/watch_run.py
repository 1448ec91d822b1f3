"""One run as the page shows it: read a little at a time, from nothing but its folder, which stays as it is.

    run = RunWatch(folder, predicted)
    run.look()                                   # once a second; reads what is new
    run.told(Seen(rows=120, events=40))          # what a page that has seen that much lacks

`metrics.jsonl`, `events.jsonl` and the black boxes are followed; the ledger and the landing verdict, which need the
whole run, are asked for in a thread now and then (`watch_slow`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.inspect.landing import Landing, read_landing
from bessemer.inspect.ledger import Ledger, read_ledger
from bessemer.inspect.watch_boxes import Boxes
from bessemer.inspect.watch_detail import box_words, last_lines
from bessemer.inspect.watch_events import Event, Kept, event_of
from bessemer.inspect.watch_ranks import ENDED, LOST, SPARE, BoxFeed, RankFeed, Ranks
from bessemer.inspect.watch_series import Series
from bessemer.inspect.watch_slow import Answer
from bessemer.keep.record_tail import Tail

__all__ = ["Prediction", "RunWatch", "Seen"]

HANG_S, HANG_STEPS = 30.0, 5.0
"""Without a sign of life for longer than both a run stands still (as in docs/landing.md)."""
WORST = 20
HISTORY = 40
MOST_EVENTS = 2000
_ROLES = ("x", "weight", "grad")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the planner expects of a run; modelled. factors as in `plan.figures`. why: there is none, and the reason."""

    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: float | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How far a page has come: rows of a generation of the curves, events of an attempt at the file, the generation of
    the ranks' places; whether it wants ranks at all."""

    generation: int = -1
    rows: int = 0
    events: int = 0
    reading: int = -1
    place: int = -1
    ranks: bool = True


class RunWatch:
    """Raises RequestError `no-run` where the folder holds no run."""

    def __init__(self, folder: Path, predicted: Prediction | None = None, feed: RankFeed | None = None) -> None:
        if not (folder / "job.toml").is_file():
            raise RequestError(f"{folder} is no run folder: it has no job.toml", code="no-run", fix=_known_runs(folder))
        self.folder = folder
        self.job: Job = load_job(folder / "job.toml")
        self.name = self.job.run.name
        self.predicted = predicted if predicted is not None else Prediction(why="the planner was not asked")
        self.series, self.kept = Series(), Kept()
        self.events: list[Event] = []
        self._boxes = Boxes(folder / "blackbox")
        self.ranks = Ranks(feed if feed is not None else BoxFeed(self._boxes, self.job))
        self.ledger = Answer(lambda: read_ledger(folder))
        self.landing = Answer(lambda: read_landing(folder))
        self.now = 0.0
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
        self._newest: dict[str, Any] = {}  # parts of the last records that had them
        self._reading = 0  # how often events.jsonl was read from its begin
        self._lock = threading.Lock()
        self._looked_s = -math.inf

    def look(self, *, least_s: float = 0.9, now: float | None = None, wait: bool = False) -> None:
        """Reads what is new, unless that was done less than `least_s` ago. now: unix seconds. wait: for the ledger and
        the verdict too."""
        with self._lock:
            if time.monotonic() - self._looked_s < least_s:
                return
            self.now = time.time() if now is None else now
            self._take_metrics()
            self._take_events()
            self._boxes.begin(self.kept.attempt_t)
            self._boxes.step = int(self.series.last("step") or 0)
            self.ranks.read(self._known_states(), hung=self.hung, ended=self.kept.end is not None)
            self._looked_s = time.monotonic()
        state = (len(self.series), self.series.generation, self.kept.attempt, self.kept.end is not None)
        self.ledger.wanted(state, wait=wait)
        if self.kept.end is not None or self.hung or self.kept.losses or wait:
            told = (self.kept.attempt, self.kept.end is not None, self.kept.losses)
            self.landing.wanted((*told, self.now // 60 if self.hung else 0), wait=wait)

    @property
    def quiet_s(self) -> float:
        """Since the last sign of life."""
        times = [self.series.last("t") or 0.0, self.events[-1].t if self.events else 0.0]
        return max(0.0, self.now - max(times))

    @property
    def hung(self) -> bool:
        """Whether an attempt that didn't end has been quiet for longer than a step may take."""
        limit_s = max(HANG_S, HANG_STEPS * (self.series.usual("step_s") or 0.0))
        return self.kept.attempt > 0 and self.kept.end is None and self.quiet_s > limit_s

    @property
    def state(self) -> str:
        """waiting, running, quiet, finished, stopped or failed."""
        if self.kept.attempt == 0:
            return "waiting"
        if self.kept.end is not None:
            return str(self.kept.end["event"])
        return "quiet" if self.hung else "running"

    def told(self, seen: Seen) -> tuple[dict[str, Any], bytes]:
        """(what a page that has `seen` so much lacks, for JSON; the frame of all ranks or nothing)."""
        with self._lock:
            first = seen.events if seen.reading == self._reading and seen.events <= len(self.events) else 0
            first = max(first, len(self.events) - MOST_EVENTS)
            told: dict[str, Any] = {
                "now": self.now,
                "run": self.headline(),
                "series": self.series.handed(seen.generation, seen.rows),
                "events": {"reading": self._reading, "from": first, "count": len(self.events),
                           "rows": [event.as_json() for event in self.events[first:]]},
                "predicted": asdict(self.predicted),
                "ledger": _ledger_json(self.ledger),
                "verdict": _verdict_json(self.landing),
                "keep": {**self.kept.as_json(), "every": self.job.keep.every, "spares": self.job.keep.spares,
                         "mode": self.job.keep.mode},
                "experts": self._newest.get("experts"),
                "precision": self._precision(),
            }  # fmt: skip
            if not seen.ranks or self.ranks.reading is None:
                return told, b""
            unit_s, frame = self.ranks.frame()
            told["ranks"] = {**self.ranks.summary(), "unit_s": unit_s, "worst": self.ranks.worst(WORST)}
            if seen.place != self.ranks.reading.generation:
                told["place"] = self.ranks.place()
            return told, frame

    def reading(self) -> threading.Lock:
        """To be held while its parts are read one by one."""
        return self._lock

    def detail(self, rank: int) -> dict[str, Any] | None:
        """One rank: where it stands, its last steps, what is open in its black box, the end of its log, and the events
        that name it. None where there is no such rank."""
        with self._lock:
            index = self.ranks.index(rank)
            if index is None:
                return None
            found = {
                **self.ranks.one(index),
                "phases": list(self.ranks.feed.phases),
                "history": self.ranks.feed.history(index)[-HISTORY:],
                "events": [event.as_json() for event in self.events if rank in event.ranks][-12:],
            }
        return {**found, **box_words(self.folder / "blackbox" / f"rank-{rank}", self.now),
                "log": last_lines(self.folder / "logs" / f"rank-{rank}.log")}  # fmt: skip

    def headline(self) -> dict[str, Any]:
        """Where the run stands, and what it is."""
        job, layout = self.job, self.job.layout
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": self.state,
            "quiet_s": self.quiet_s,
            "step": int(self.series.last("step") or 0),
            "steps": job.train.steps,
            "tokens_a_step": job.train.global_batch * job.data.seq_len,
            "started_t": self.kept.started_t,
            "attempt": self.kept.attempt,
            "world": self.kept.world or layout.world_size,
            "host": self.kept.host,
            "model": job.model.preset or job.model.hf or job.model.family,
            "recipe": job.precision.recipe,
            "machine": job.machine.name,
            "sizes": {"replicas": job.replicas, "pp": layout.pp, "shard": job.shard, "cp": layout.cp, "tp": layout.tp},
            "damaged": self._metrics.damaged + self._events.damaged,
        }

    def _take_metrics(self) -> None:
        anew, records = self._metrics.read()
        if anew:
            self.series.clear()
        for record in records:
            self.series.add(record)
            for part in ("experts", "precision"):
                if isinstance(record.get(part), Mapping):
                    self._newest[part] = {**record[part], "step": record.get("step")}

    def _take_events(self) -> None:
        anew, records = self._events.read()
        if anew:
            self._reading += 1
            self.events, self.kept = [], Kept()
        for record in records:
            if (event := event_of(record)) is not None:
                self.events.append(event)
                self.kept.take(record)

    def _known_states(self) -> dict[int, int]:
        """Of the ranks whose state the events tell."""
        found: dict[int, int] = {}
        for group in self.kept.groups.values():
            state = {"spare": SPARE, "lost": LOST, "left": ENDED}.get(str(group.get("state")))
            if state is not None:
                found |= dict.fromkeys(group.get("ranks") or (), state)
        return found | dict.fromkeys(self.kept.lost_ranks, LOST)

    def _precision(self) -> dict[str, Any] | None:
        """Of the newest sample the tensors that lose most: beyond what their scale holds, and below it."""
        sample, names = self._newest.get("precision"), self.kept.watch.get("names")
        if sample is None or not names:
            return None
        rows = []
        for role in _ROLES:
            of_role = sample.get(role) or {}
            columns = [of_role.get(key) or [None] * len(names) for key in ("saturated", "flushed", "error", "amax")]
            for name, saturated, flushed, error, amax in zip(names, *columns, strict=False):
                if saturated is not None:
                    rows.append({"name": name, "role": role, "saturated": saturated, "flushed": flushed,
                                 "error": error, "amax": amax})  # fmt: skip
        rows.sort(key=lambda row: (-row["saturated"], -(row["flushed"] or 0.0)))
        return {"step": sample.get("step"), "recipe": self.job.precision.recipe, "tensors": len(names),
                "worst": rows[:12], "fallen": self.kept.fallen}  # fmt: skip


def _ledger_json(answer: Answer) -> dict[str, Any]:
    ledger: Ledger | None = answer.value
    return {"why": answer.why} if ledger is None else ledger.as_json()


def _verdict_json(answer: Answer) -> dict[str, Any] | None:
    """The landing verdict, with a sentence for people."""
    landing: Landing | None = answer.value
    if landing is None:
        return None
    verdict = landing.verdict
    if verdict.kind == "no fault":
        words = "No fault"
    elif verdict.rank is None:
        words = f"No single rank is guilty: {verdict.kind}"
    else:
        words = f"Rank {verdict.rank}" + (f" on {verdict.host}" if verdict.host else "") + f": {verdict.kind}"
    return {**verdict.as_json(), "words": words, "victims": list(verdict.victims),
            "losses": [loss.as_json() for loss in landing.losses[-8:]]}  # fmt: skip


def _known_runs(folder: Path) -> str:
    """What to type instead: the run folders below or beside the path."""
    for place in (folder, folder.parent):
        found = sorted(str(p.parent) for p in place.glob("*/job.toml")) if place.is_dir() else []
        if found:
            return "bessemer watch " + found[0] + (f" (there are {len(found)} runs)" if len(found) > 1 else "")
    return "bessemer watch runs/NAME, the folder of a run that `bessemer train` has started"
