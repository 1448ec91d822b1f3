"""A job that runs as users run it, in processes of its own, so that faults can be thrown at it; and its job file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.inspect.chaos_target import Rank, Standing, child_running, is_child

MEMBERS = 4
SAVE_EVERY = 20
MODEL = {
    "family": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""That of examples/chaos.toml, 1.3 million parameters."""
SEQ, GLOBAL_BATCH = 128, 16
_LOOK_S = 0.02
_END_S = 30.0


def tell(text: str) -> None:
    """Progress, on standard error."""
    print(f"  {text}", file=sys.stderr, flush=True)


def job_of(folder: Path, name: str, batch: int = GLOBAL_BATCH, **keep: Any) -> Job:
    """The benches' job in `folder`/`name`, with these fields of [keep]; its number of steps is never reached."""
    return Job.model_validate(
        {
            "run": {"name": name, "dir": str(folder)},
            "model": MODEL,
            "data": {"corpus": "python-stdlib", "tokenizer": "bytes", "seq_len": SEQ, "val_fraction": 0.0},
            "layout": {"dp": MEMBERS},
            "train": {"steps": 100_000, "global_batch": batch, "micro_batch": batch // MEMBERS},
            "precision": {"recipe": "fp32"},
            "keep": {"every": SAVE_EVERY, **keep},
        }
    )


class _Plain(Standing):
    """Of a run without groups: how far it is."""

    def refresh(self) -> None:
        self.step = self._last_step()


class Run:
    """`bessemer train` of a job from `with` on; killed behind it, with all that it started."""

    def __init__(self, job: Job, environment: Mapping[str, str] | None = None) -> None:
        self.job = job
        self.standing = (Standing if job.keep.mode == "zero-interruption" else _Plain)(job.run.folder)
        self._environment = {**os.environ, **(environment or {})}
        self._file = Path(job.run.dir) / f"{job.run.name}.toml"
        self._log = self._file.with_suffix(".log")

    def __enter__(self) -> Self:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(dump_job(self.job))
        command = [sys.executable, "-m", "bessemer.cli", "train", str(self._file), "--quiet"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # it finishes the step, saves, and ends all its processes
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def kill_worker(self) -> None:
        """kill -9 of the oldest rank of a run without groups."""
        pid = child_running(self._process.pid, "bessemer.train.worker")
        if pid is None:
            raise SystemExit(f"the run {self.job.run.name} has no rank at step {self.standing.step}")
        os.kill(pid, signal.SIGKILL)

    def until_step(self, step: int) -> None:
        """Wait until so many are committed."""
        self.until(lambda standing: standing.step >= step)

    def until(self, what: Callable[[Standing], bool], timeout_s: float = 600.0) -> None:
        """Wait until `what` holds. SystemExit when the run has ended, or it takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.standing.refresh()
            if what(self.standing):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                how = f"ended with code {self._process.poll()}" if self._process.poll() is not None else "hangs"
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
                raise SystemExit(f"the run {self.job.run.name} {how} at step {self.standing.step}\n{tail}")
            time.sleep(_LOOK_S)

    def signal_rank(self, who: str, number: int, chance: random.Random) -> tuple[float, Rank]:
        """Send a signal to one of the groups' ranks that `who` means; when (unix seconds), and which."""
        found = [rank for rank in self.standing.candidates(who) if is_child(rank.pid, self._process.pid)]
        if not found:
            raise SystemExit(f"the run {self.job.run.name} has no {who} rank to hit at step {self.standing.step}")
        rank = chance.choice(found)
        t = time.time()
        os.kill(rank.pid, number)
        return t, rank
