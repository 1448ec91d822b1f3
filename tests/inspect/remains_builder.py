"""Writes what runs leave behind: events, logs, black boxes; each as the product writes it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.inspect.flight_records import Advice, Finding
from bessemer.inspect.landing import Landing, read_landing
from bessemer.inspect.landing_remains import KernelLine
from bessemer.runtime.recorder import Channel, Recorder
from bessemer.runtime.ring import NONE, OPERATIONS

FRAMES = (
    '  File "/opt/bessemer/train/loop.py", line 140, in _one_step\n    result = step.run(at)\n'
    '  File "/opt/bessemer/train/step.py", line 109, in run\n    return self._commit(step, mine)\n'
)
FLOAT32 = 0
"""Its number in a black box that has heard of no other element type."""
LOST = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321"


def traceback(error: str, frames: str = FRAMES) -> str:
    return f"Traceback (most recent call last):\n{frames}{error}\n"


@dataclass
class RemainsBuilder:
    """`now` is the time of the next event; it starts a minute ago, since black boxes carry the real clock."""

    folder: Path
    world: int = 4
    now: float = field(default_factory=lambda: time.time() - 60.0)
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "logs").mkdir(parents=True)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"t": self.now, "event": name, **fields})
        self.now += 0.01

    def start(self, **fields: Any) -> None:
        self.event("start", world_size=self.world, attempt=1, host="node-a", **fields)
        self.event("ready")
        self.now += 1.0

    def steps(self, norms: Sequence[float]) -> None:
        lines = [{"step": n + 1, "step_s": 0.5, "grad_norm": g, "t": self.now} for n, g in enumerate(norms)]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))

    def log(self, name: str, text: str) -> None:
        """Written at `now`."""
        path = self.folder / "logs" / f"{name}.log"
        path.write_text("some library says hello\n" + text)
        os.utime(path, (self.now, self.now))

    def victims(self, *ranks: int) -> None:
        self.now += 0.05
        for rank in ranks:
            self.log(f"rank-{rank}", traceback(LOST))

    def write(self) -> Path:
        (self.folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in self.events))
        return self.folder

    def box(self, rank: int) -> Recorder:
        made = Recorder(self.folder / "blackbox" / f"rank-{rank}", rank=rank, world=self.world, job_hash="x")
        assert made.dtype("float32", 4) == FLOAT32
        return made


def enqueue(
    channel: Channel, *, finish: bool, operation: str = "all_reduce", elements: int = 8, peer: int = NONE
) -> None:
    """An operation at which the host waits, to its end or for ever."""
    kind = OPERATIONS.index(operation)
    number = channel.enqueued(kind, FLOAT32, elements, elements, peer, True)
    if finish:
        channel.finished(number)


def land(builder: RemainsBuilder, *, kernel: list[KernelLine] | None = None, running: bool = False) -> Landing:
    """At a time when all that was built is past."""
    return read_landing(builder.write(), now=builder.now, kernel=kernel or [], running=running)


def lost(b: RemainsBuilder, rank: int, **how: object) -> None:
    b.event("rank_lost", rank=rank, **how, step=5, phase="training")


def ended(b: RemainsBuilder, rank: int | None, code: str = "rank-lost", message: str = "") -> None:
    b.now += 0.5
    b.event("failed", code=code, message=message, rank=rank, step=5)


def finding(
    b: RemainsBuilder, kind: str, ranks: Sequence[int], *, text: str = "", advice: Advice = "watch",
    evidence: Sequence[str] = (),
) -> None:  # fmt: skip
    """As the watch beside the run tells it, now."""
    told = Finding(
        kind=kind, t=b.now, step=5, ranks=tuple(ranks), text=text or kind, advice=advice, evidence=tuple(evidence)
    )
    fields = told.as_event()
    del fields["t"]
    b.event("finding", **fields)
