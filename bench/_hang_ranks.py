"""The processes of `bench/hangs.py`: ranks that train a tiny model until they are killed, and the watch of their run.
They are forked from a process that has imported what they need."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bessemer.core.job import Job

PRELOAD = ["torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.fsdp", "torch.distributed.tensor",
           "bessemer.train.assembly", "bessemer.core.hf_config", "bessemer.inspect.flight_watch"]  # fmt: skip
PHASES = ("data_s", "forward_s", "backward_s", "comm_s", "optimizer_s", "")
"""Where a rank may stop making progress; "": between two steps."""
LAYOUTS: tuple[dict[str, int], ...] = ({"dp": 3}, {"dp": 2}, {"tp": 2}, {"pp": 2})
ARMED, STRUCK = "armed", "struck"
VOCAB, SEQ = 97, 32


def context() -> Any:
    """Where processes are forked from."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def job_of(layout: dict[str, int]) -> Job:
    """A run of a tiny model that doesn't end by itself."""
    model = {"family": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    train = {"steps": 1_000_000, "global_batch": 12, "micro_batch": 2, "warmup_steps": 2, "lr": 1e-3}
    return Job.model_validate(
        {"model": model, "data": {"seq_len": SEQ}, "layout": layout, "train": train, "precision": {"recipe": "fp32"}}
    )


def watch(folder: str, least_hang_s: float | None) -> None:
    """The watch of the product. least_hang_s: in place of the product's 10 s."""
    from bessemer.inspect import flight_watch
    from bessemer.keep import step_times

    _die_with_the_bench()
    if least_hang_s is not None:
        step_times.LEAST_HANG_S = least_hang_s
    sys.argv = ["flight_watch", "--run", folder, "--agent", f"{folder}/agent"]
    raise SystemExit(flight_watch.main())


def rank(number: int, world: int, folder: str, hangs_in: str | None) -> None:
    """Train. Where `hangs_in` is a phase, the rank that finds the file `armed` sleeps for ever when it enters that."""
    import torch
    import torch.distributed as dist

    from bessemer.comm import collectives as comm
    from bessemer.core.hf_config import resolve_model
    from bessemer.core.job_file import load_job
    from bessemer.parallel.mesh import build_mesh
    from bessemer.runtime.recorder import Recorder
    from bessemer.train.assembly import assemble
    from bessemer.train.step import rank_micro_batches

    _die_with_the_bench()
    base = Path(folder)
    log = os.open(base / "logs" / f"rank-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # as `keep.member` does
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    job = load_job(base / "job.toml")
    recorder = Recorder(base / "blackbox" / f"rank-{number}", rank=number, world=world, job_hash=job.hash)
    comm.record_to(recorder)
    spec = resolve_model(job.model)
    mesh = build_mesh(job, number, torch.device("cpu"), spec)
    parts = assemble(job, spec, mesh)
    parts.step.passes.phases.attach(recorder)
    if hangs_in:
        _hang_in(hangs_in, base)
    tokens = torch.randint(0, VOCAB, (job.train.micro_batch, SEQ + 1))
    batch = {"tokens_BS": tokens[:, :-1].contiguous(), "labels_BS": tokens[:, 1:].contiguous(),
             "weights_BS": torch.ones(job.train.micro_batch, SEQ),
             "segments_BS": torch.zeros(job.train.micro_batch, SEQ, dtype=torch.int32)}  # fmt: skip
    for step in range(job.train.steps):
        if hangs_in == "":
            hang_if_armed(base)
        count = len(rank_micro_batches(job, step, mesh.at("replica"), mesh.at("shard")))
        parts.step.run(step, iter([batch] * count), count)


def _hang_in(phase: str, base: Path) -> None:
    from bessemer.runtime import phases

    enter = phases._Phase.__enter__

    def entered(self: Any) -> None:
        enter(self)
        if self.name == phase:
            hang_if_armed(base)

    phases._Phase.__enter__ = entered  # type: ignore[method-assign]


def hang_if_armed(base: Path) -> None:
    """Sleep for ever, once the bench says so, and leave since when (of the monotonic clock)."""
    if not (base / ARMED).exists():
        return
    aside = base / f"{STRUCK}.part"
    aside.write_text(json.dumps(time.monotonic()))
    aside.rename(base / STRUCK)
    while True:
        time.sleep(random.random() / 100)


def _die_with_the_bench() -> None:
    """The fork server ends with the bench."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
