"""What the loop adds to a step: data, records, checks, and an asynchronous checkpoint every 50 steps.

    python bench/loop.py [--json]

The demonstration's job runs for 101 steps in one process. The added work is everything outside forward, backward and
optimizer: its time in the loop's own thread, and the CPU time of what works beside it (the reading threads, the vault,
the agent's handling of the records). Wall-clock time would measure the neighbours of this machine instead.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from table import Row, main

from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.core.resolve import resolve_model
from bessemer.data import open_dataset, prepare
from bessemer.keep.journal import Journal
from bessemer.keep.progress import Printer
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.vault_client import VaultClient
from bessemer.parallel.mesh import build_mesh
from bessemer.train.assembly import assemble
from bessemer.train.loop import Loop

JOB = Path(__file__).parent.parent / "examples" / "first_heat.toml"
STEPS, SAVE_EVERY = 101, 50
TRAINING = ("forward_s", "backward_s", "optimizer_s")


class Recorder:
    """Keeps the records, for the agent's share to be measured apart, and the moment of each."""

    stop_requested = False

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.at: list[float] = []

    def metric(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        self.at.append(time.perf_counter())

    def event(self, name: str, **fields: Any) -> None:
        del name, fields

    def phase(self, step: int, name: str) -> None:
        del step, name


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        job = bench_job(folder)
        prepared = prepare(job)
        recorder = Recorder()
        spec = resolve_model(job.model)
        parts = assemble(job, spec, build_mesh(job, 0, torch.device("cpu"), spec))
        data = open_dataset(job, "train", prepared)
        vault, socket = start_vault(job)
        with VaultClient(socket) as saver:
            Loop(parts, data, None, recorder, saver, job.run.folder).run()
        vault_cpu_s = cpu_of(vault)
        readers_cpu_s = reading_cpu_s(job, data)
        agent_cpu_s = journal_cpu_s(job, recorder.metrics)
    return table(recorder, vault_cpu_s, readers_cpu_s, agent_cpu_s)


def bench_job(folder: str) -> Job:
    sets = ["layout.dp=1", "train.global_batch=8", f"train.steps={STEPS}", "train.eval_every=0"]
    return load_job(JOB, [*sets, f"keep.every={SAVE_EVERY}", f"run.dir={folder}"])


def start_vault(job: Job) -> tuple[subprocess.Popen[bytes], Path]:
    folder = job.run.folder
    folder.mkdir(parents=True)
    place = folder / "place"
    place.mkdir(mode=0o700)
    command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", str(place / "v"), "--run", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    while not (place / "v").exists():
        time.sleep(0.01)
    return process, place / "v"


def cpu_of(vault: subprocess.Popen[bytes]) -> float:
    """CPU seconds of the vault over its life, its start (0.2 s once) included."""
    assert vault.stdin is not None
    vault.stdin.close()
    _, _, usage = os.wait4(vault.pid, 0)
    vault.returncode = 0
    return usage.ru_utime + usage.ru_stime


def reading_cpu_s(job: Job, data: Any) -> float:
    """CPU seconds that the reading threads spend on all batches of the run."""
    start = time.thread_time()
    for step in range(STEPS):
        first = job.samples_before(step)
        data.batch(range(first, first + job.train.global_batch))
    return time.thread_time() - start


def journal_cpu_s(job: Job, metrics: list[dict[str, Any]]) -> float:
    """CPU seconds for writing and printing the run's records as the agent does."""
    with open(os.devnull, "w") as nowhere:
        journal = Journal(RunFolder(job), Printer(STEPS, stream=nowhere))
        start = time.process_time()
        for record in metrics:
            journal.metric(record)
        journal.close()
        return time.process_time() - start


def table(recorder: Recorder, vault_cpu_s: float, readers_cpu_s: float, agent_cpu_s: float) -> list[Row]:
    warm = range(5, STEPS)
    step_s = statistics.median(recorder.metrics[i]["step_s"] for i in warm)
    in_loop = [
        recorder.at[i] - recorder.at[i - 1] - sum(recorder.metrics[i]["phases"][p] for p in TRAINING) for i in warm
    ]
    beside_s = (vault_cpu_s + readers_cpu_s + agent_cpu_s) / STEPS
    share = (statistics.fmean(in_loop) + beside_s) / step_s
    return [
        Row("loop overhead", 100 * share, "% of the median step", "lower", bar=3.0, note=f"step {step_s:.3f} s"),
        Row("in the loop's thread", 1e3 * statistics.fmean(in_loop), "ms a step", "lower", note="checkpoints included"),
        Row("vault", 1e3 * vault_cpu_s / STEPS, "CPU ms a step", "lower", note=f"a save every {SAVE_EVERY} steps"),
        Row("reading threads", 1e3 * readers_cpu_s / STEPS, "CPU ms a step", "lower"),
        Row("agent", 1e3 * agent_cpu_s / STEPS, "CPU ms a step", "lower"),
    ]


if __name__ == "__main__":
    main(rows)
