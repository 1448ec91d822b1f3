"""Whole runs for tests: forked ranks, a real vault process, a real data set of a few files; no agent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from train.toy import MODEL

from bessemer.core.errors import BessemerError, Stopped
from bessemer.core.job import Job
from bessemer.data import open_dataset, prepare
from bessemer.keep.vault_client import VaultClient
from bessemer.keep.wire import short_temp_dir
from bessemer.train.loop import Loop

SEQ = 32


def small_job(folder: Path, **sections: dict[str, Any]) -> Job:
    """A job on this repository's own tests as corpus, with a byte tokenizer, in `folder`."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for source in sorted(Path(__file__).parent.glob("*.py")):
            (corpus / source.name).write_bytes(source.read_bytes())
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "small", "dir": str(folder / "runs")},
        "model": MODEL | {"vocab_size": 257},
        "data": {
            "paths": [str(corpus / "*.py")],
            "tokenizer": "bytes",
            "seq_len": SEQ,
            "val_fraction": 0.3,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": 12, "global_batch": 8, "micro_batch": 2, "warmup_steps": 2, "lr": 0.01, "eval_sequences": 8,
        },
        "keep": {"every": 4},
        "precision": {"recipe": "fp32"},
    }  # fmt: skip
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return Job.model_validate(base)


class Recorder:
    """A reporter that keeps what a rank says; `stop_at` asks to stop while that step runs."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._stop_at = stop_at
        self._step = 0

    @property
    def stop_requested(self) -> bool:
        return self._stop_at is not None and self._step >= self._stop_at

    def metric(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name} | fields)

    def phase(self, step: int, name: str) -> None:
        self._step = step


@contextlib.contextmanager
def vault(run_folder: Path, *flags: str) -> Iterator[Path]:
    """A vault process for `run_folder`; yields its socket. It finishes its writes when the block ends."""
    run_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=short_temp_dir()) as place:  # a socket's path must be short
        socket = Path(place) / "vault"
        command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", str(socket), "--run", str(run_folder)]
        with subprocess.Popen([*command, *flags], stdin=subprocess.PIPE) as process:
            try:
                deadline = time.monotonic() + 30
                while not socket.exists():
                    assert process.poll() is None, f"the vault ended with {process.returncode}"
                    assert time.monotonic() < deadline, "the vault opened no socket"
                    time.sleep(0.01)
                yield socket
                assert process.stdin is not None
                process.stdin.close()
                process.wait(30)
            finally:
                process.kill()


def train(job: Job, *, stop_at: int | None = None) -> list[dict[str, Any]]:
    """Run the job on its ranks, going on from what its run folder holds; per rank what it recorded and how it ended."""
    prepare(job)
    with vault(job.run.folder) as socket:
        return run_ranks(job.layout.world_size, rank_main, job, str(socket), stop_at)


def train_until_one_ends(job: Job, *vault_flags: str) -> dict[str, Any]:
    """As `train`, of the first rank that ends: the others may be in a sum with it."""
    prepare(job)
    with vault(job.run.folder, *vault_flags) as socket:
        return run_ranks(job.layout.world_size, rank_main, job, str(socket), None, until=1)[0]


def rank_main(rank: int, world: int, job: Job, socket: str, stop_at: int | None) -> dict[str, Any]:
    """One rank of `train`: its metrics, events, error, and a digest of its parameters and optimizer state."""
    from train.toy import toy_parts

    parts = toy_parts(job, rank)
    recorder = Recorder(stop_at)
    ended = ""
    with VaultClient(socket, rank=rank, world_size=world) as saver:
        loop = Loop(parts, open_dataset(job, "train"), open_dataset(job, "val"), recorder, saver, job.run.folder)
        try:
            loop.run()
        except Stopped:
            ended = "stopped"
        except BessemerError as error:
            ended = f"{error.code}: {error}"
    return {"metrics": recorder.metrics, "events": recorder.events, "ended": ended, "state": state_of(parts)}


def state_of(parts: Any) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]:
    """By (name, whole shape, offset) the slices that the rank holds."""
    from bessemer.train.state import state_slices

    slices = state_slices(parts.module, parts.optimizer)
    return {(s.name, s.global_shape, s.global_offset): s.tensor.clone() for s in slices}


def kill_at_bytes(count: int) -> tuple[str, ...]:
    """Flags that make the vault die by SIGKILL once it has written so many bytes."""
    return ("--fail-after-bytes", str(count))
