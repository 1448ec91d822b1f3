"""Run folders for the live page: finished ones, running ones that go on when told, and those with losses."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run_builder import RunBuilder, make_job

from bessemer.core.job import Job
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder

SECONDS = {"data_s": 0.001, "forward_s": 0.1, "backward_s": 0.2, "comm_s": 0.02, "optimizer_s": 0.01}


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RankWriter:
    """Writes the black box of one rank as its step loop would."""

    folder: Path
    rank: int
    world: int = 2
    num_marks: int = 4096
    says_step: bool = True
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        path = self.folder / "blackbox" / f"rank-{self.rank}"
        self.recorder = Recorder(path, rank=self.rank, world=self.world, job_hash="x", num_marks=self.num_marks)
        self.phases = Phases(clock=self.clock)
        self.phases.attach(self.recorder)

    def step(self, number: int, *, until: str | None = None, **seconds: float) -> None:
        """One step, each phase for so many seconds; `until`: a phase that is entered and not left any more."""
        if self.says_step:
            self.phases.at(step=number)
        for name, usual in SECONDS.items():
            phase = self.phases(name)
            phase.__enter__()
            if name == until:
                return
            self.clock.now += seconds.get(name, usual)
            phase.__exit__(None, None, None)

    def between(self, name: str, seconds: float) -> None:
        with self.phases(name):
            self.clock.now += seconds


@dataclass
class LiveRun:
    """A run folder that grows: its records are appended as they come. `now` is the time of the next record."""

    folder: Path
    job: Job = field(default_factory=lambda: make_job(dp=2, run={"name": "live"}))
    now: float = field(default_factory=lambda: time.time() - 100.0)

    def __post_init__(self) -> None:
        from bessemer.core.job_file import dump_job

        self.folder.mkdir(parents=True)
        (self.folder / "job.toml").write_text(dump_job(self.job))

    def event(self, name: str, **fields: Any) -> None:
        self._append("events.jsonl", {"t": self.now, "event": name, **fields})

    def step(self, number: int, **fields: Any) -> None:
        self.now += 0.5
        batch = self.job.train.global_batch
        samples = [(number - 1) * batch, number * batch]
        record = {"step": number, "samples": samples, "loss": 8.0 / number, "lr": 1e-3, "grad_norm": 1.0,
                  "step_s": 0.5, "tokens_per_s": 2048.0, "phases": {"comm_s": 0.02}, "t": self.now}  # fmt: skip
        self._append("metrics.jsonl", record | fields)

    def start(self, world: int = 2, attempt: int = 1) -> None:
        self.event("start", world_size=world, attempt=attempt, host="node-a", job_hash="x", identity="x")
        self.event("ready")
        self.event("loaded", step=0, path=None, why="there is no checkpoint yet")

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


def finished_run(folder: Path, name: str = "done", steps: int = 40, ranks: int = 4) -> Path:
    """A finished run with a ledger, checkpoints, a lost rank that was replaced, and black boxes."""
    builder = RunBuilder(make_job(dp=2, run={"name": name}, train={"steps": steps}), now=time.time() - 1000.0)
    builder.start(set_up_s=2.0)
    for rank in range(ranks):
        builder.event("rank_started", rank=rank, group=rank, pid=1000 + rank, forked=False)
    builder.event("epoch", epoch=1, step=0, active=[0, 1], joining=[], term=1)
    builder.steps(1, steps // 2)
    builder.event("rank_lost", rank=1, group=1, why="rank 1 was killed by SIGKILL", step=steps // 2, exit_code=-9,
                  phase="training", silent_s=0.0)  # fmt: skip
    builder.event("epoch", epoch=2, step=steps // 2, active=[0, 2], joining=[], term=1)
    builder.event("joined", group=2, step=steps // 2 + 1, seconds=1.5)
    builder.steps(steps // 2 + 1, steps)
    builder.event("save", step=steps, stall_s=0.25)
    builder.event("saved", step=steps, path="checkpoints/step", seconds=1.5, bytes=3 << 20)
    builder.event("finished", step=steps)
    for metric in builder.metrics:
        metric |= {"loss": 8.0 / metric["step"] ** 0.3, "grad_norm": 1.0, "lr": 1e-3,
                   "tokens_per_s": 1024.0 / metric["step_s"]}  # fmt: skip
    builder.write(folder)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text("first line\n<b>not markup</b>\n")
    for rank in range(ranks - 1):
        writer = RankWriter(folder, rank, world=ranks)
        for step in range(1, 26):
            writer.step(step, forward_s=0.3 if rank == 2 else 0.1)
    return folder
