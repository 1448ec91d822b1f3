"""Writes run folders as a trainer would, with losses put in by hand, and keeps the books beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.counts import flops_per_token
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.core.resolve import resolve_model

MODEL = {
    "family": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PEAKS = {"bf16": 4.0e12, "fp32": 1.0e12}


def make_job(*, gpus_per_node: int = 8, dp: int = 2, batch: int = 16, **sections: Mapping[str, Any]) -> Job:
    fields: dict[str, Any] = {
        "model": MODEL,
        "data": {"seq_len": 64},
        "layout": {"dp": dp},
        "train": {"global_batch": batch, "micro_batch": 4},
        "machine": {"gpus_per_node": gpus_per_node},
    }
    for name, changes in sections.items():
        fields[name] = {**fields.get(name, {}), **changes}
    return Job.model_validate(fields)


def flops_a_step(job: Job) -> float:
    """Useful FLOPs of one step."""
    spec = resolve_model(job.model)
    return flops_per_token(spec, job.data.seq_len).training * job.data.seq_len * job.train.global_batch


@dataclass
class Pace:
    """What one step does. Seconds of a device; the defaults are a healthy run at an efficiency of 0.5 in kernels and
    of 0.8 on the node."""

    fp32_share: float = 0.0  # of the FLOPs, run on the slower path at the same efficiency in its kernels
    kernel_slowdown: float = 1.0
    beside_kernels: float = 0.25  # of the healthy kernel time: launches, memory-bound work
    waiting_s: float = 0.0  # for a late rank
    recompute: float = 0.0  # of the FLOPs, run again


@dataclass
class RunBuilder:
    """`step`, `event` and `wait` move the clock; `write` leaves the folder."""

    job: Job
    pace: Pace = field(default_factory=Pace)
    peaks: Mapping[str, float] | None = field(default_factory=lambda: dict(PEAKS))
    sample_every: int = 4
    now: float = 1_000_000.0
    world_size: int = 2
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def healthy_kernel_s(self) -> float:
        return flops_a_step(self.job) / PEAKS["bf16"] / 0.5

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"t": self.now, "event": name, **fields})

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def start(self, *, set_up_s: float = 0.0, step: int = 0) -> None:
        self.event("start", world_size=self.world_size, attempt=1, job_hash="x", identity="x", host="a")
        self.event("ready")
        if self.peaks is not None:
            self.event("machine", peak_flops=dict(self.peaks), kind="measured")
        self.event("loaded", step=step, path=None, why="nothing saved")
        self.wait(set_up_s)

    def kernel_s(self) -> tuple[float, dict[str, float]]:
        """Seconds in kernels of a device and the FLOPs by path."""
        pace, flops = self.pace, flops_a_step(self.job) * (1 + self.pace.recompute)
        parts = {"bf16": flops * (1 - pace.fp32_share), "fp32": flops * pace.fp32_share}
        parts = {path: part for path, part in parts.items() if part}
        return sum(part / PEAKS[path] / 0.5 for path, part in parts.items()) * pace.kernel_slowdown, parts

    def step(self, number: int) -> None:
        kernel_s, flops = self.kernel_s()
        step_s = kernel_s + self.pace.beside_kernels * self.healthy_kernel_s + self.pace.waiting_s
        self.wait(step_s)
        batch = self.job.train.global_batch
        phases = {"forward_s": kernel_s / 3, "backward_s": kernel_s * 2 / 3, "comm_s": self.pace.waiting_s}
        self.metrics.append(
            {
                "step": number,
                "samples": [(number - 1) * batch, number * batch],
                "step_s": step_s,
                "phases": phases,
                "t": self.now,
            }
        )
        if (number - 1) % self.sample_every == 0 and self.sample_every < 1000:
            self.event("kernels", step=number, flops=flops, kernel_s=kernel_s, step_s=step_s)

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.step(number)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(dump_job(self.job))
        for name, records in (("metrics", self.metrics), ("events", self.events)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return folder
