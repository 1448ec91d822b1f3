"""Two ranks on two cores against one process that does the same global batch, axis by axis.

    python bench/parallel.py [--json]

Each rank, and the one process, uses one thread. A step is the whole training step: passes, exchanges over gloo on this
machine, norm, update. The same two processes run all layouts in turn, the first of them the one-process step too while
the other waits; wall time counts, the fastest step of each. Twice as fast is the most that is possible; with m micro-
batches a pipeline of two stages stands still for 1 / (m + 1) of its time.

The bytes that a step exchanges, as `bessemer.comm` counts them, are held against the planner's closed form.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from table import Row, main

from bessemer.comm import collectives as comm
from bessemer.core.job import Job
from bessemer.core.resolve import resolve_model
from bessemer.core.units import format_bytes
from bessemer.parallel.mesh import build_mesh
from bessemer.plan.traffic import traffic
from bessemer.train.assembly import Assembly, assemble
from bessemer.train.passes import Batch
from bessemer.train.step import rank_micro_batches

ROUNDS = 7
SEQ, VOCAB, GLOBAL_BATCH, MICRO_BATCH = 512, 8192, 8, 1
DENSE: dict[str, Any] = {
    "family": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ,
    "tie_word_embeddings": True,
}  # 6.3 M parameters
EXPERTS = DENSE | {
    "family": "mixtral",
    "intermediate_size": 512,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # 15.5 M parameters
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "dp2": (DENSE, {"dp": 2}),
    "dp2 full": (DENSE, {"dp": 2, "dp_shard": "full"}),
    "tp2": (DENSE, {"tp": 2}),
    "tp2 sequence": (DENSE, {"tp": 2, "sequence_parallel": True}),
    "pp2": (DENSE, {"pp": 2}),
    "cp2 ring": (DENSE, {"cp": 2}),
    "experts": (EXPERTS, {}),
    "ep2": (EXPERTS, {"dp": 2, "ep": 2}),
}
"""Each after the one process that it is held against."""
Bytes = dict[tuple[str, str], float]
"""By names of a group and operation."""


class Seconds(NamedTuple):
    """Of a step; CPU time is that of all threads of the rank."""

    wall: float
    cpu: float


def job_of(name: str) -> Job:
    model, layout = LAYOUTS[name]
    return Job.model_validate(
        {
            "model": model,
            "data": {"seq_len": SEQ},
            "layout": layout,
            "train": {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "steps": ROUNDS + 1},
        }
    )


def rows() -> list[Row]:
    """Speed-up and exchanged bytes of dp, tp, pp, cp and ep on two ranks; takes about two minutes on 2 cores."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, context) as ranks:
        started = [ranks.submit(run_rank, rank, Path(folder) / "store") for rank in range(2)]
        (seconds, first), (_, second) = (rank.result() for rank in started)
    found: list[Row] = []
    alone = ""
    for name in LAYOUTS:
        if job_of(name).layout.world_size == 1:
            alone = name
        else:
            found.append(_speed_up(name, seconds[alone], seconds[name]))
            found.append(_exchanged(name, [first[name], second[name]]))
    return found


def run_rank(rank: int, store: Path) -> tuple[dict[str, list[Seconds]], dict[str, Bytes]]:
    """Of each layout: seconds of its steps, and the bytes that its first one exchanged."""
    torch.set_num_threads(1)
    wait = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait)
    parts = {name: _assembled(job_of(name), rank) for name in LAYOUTS}
    bytes_of: dict[str, Bytes] = {}
    for name in LAYOUTS:
        comm.reset_collected()
        _step(parts[name], 0)  # warms up
        bytes_of[name] = {key: one.bytes for key, one in comm.collected().items()}
    seconds: dict[str, list[Seconds]] = {name: [] for name in LAYOUTS}
    for step in range(1, ROUNDS + 1):
        for name in LAYOUTS:
            dist.barrier()
            start = Seconds(time.perf_counter(), time.process_time())
            _step(parts[name], step)
            seconds[name].append(Seconds(time.perf_counter() - start.wall, time.process_time() - start.cpu))
    dist.barrier()
    dist.destroy_process_group()
    return seconds, bytes_of


def _assembled(job: Job, rank: int) -> Assembly | None:
    """None for the rank that only waits."""
    if rank >= job.layout.world_size:
        return None
    spec = resolve_model(job.model)
    return assemble(job, spec, build_mesh(job, rank, torch.device("cpu"), spec))


def _step(parts: Assembly | None, step: int) -> None:
    if parts is not None:
        lists = rank_micro_batches(parts.job, step, parts.mesh.at("replica"), parts.mesh.at("shard"))
        parts.step.run(step, iter([_batch(ids) for ids in lists]), len(lists))


def _batch(ids: list[int]) -> Batch:
    streams = [torch.randint(0, VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(i)) for i in ids]
    tokens_BS = torch.stack(streams)
    return {"tokens_BS": tokens_BS[:, :-1].contiguous(), "labels_BS": tokens_BS[:, 1:].contiguous()}


def _speed_up(name: str, alone: list[Seconds], two: list[Seconds]) -> Row:
    one_s, two_s = ([step.wall for step in steps] for steps in (alone, two))
    medians = f"medians {statistics.median(two_s):.3f} and {statistics.median(one_s):.3f} s"
    cpu = f"CPU {min(step.cpu for step in two):.3f} and {min(step.cpu for step in alone):.3f} s"
    note = f"{min(two_s):.3f} s, one process {min(one_s):.3f} s; {medians}; {cpu}"
    return Row(f"{name}, over one process", min(one_s) / min(two_s), "x", "higher", note=note)


def _exchanged(name: str, counted: list[Bytes]) -> Row:
    """The largest deviation of any group and operation from the closed form, as a ratio: of a rank, or where experts'
    rows are shared unevenly of both together."""
    job = job_of(name)
    spec, by_group = resolve_model(job.model), Counter[str]()
    closed: list[Bytes] = []
    for rank, own in enumerate(counted):
        known = {single: joined for joined, _ in own for single in joined.split("+")}  # a group may serve several
        exchanged: Bytes = {}
        for group, operations in traffic(spec, job, rank).items():
            exchanged = _sum(exchanged, {(known.get(group, group), o): size for o, size in operations.items()})
            by_group[group] += round(sum(operations.values()) / len(counted))
        closed.append(exchanged)
    pairs = list(zip(counted, closed, strict=True))
    if job.layout.ep > 1:
        pairs = [(_sum(*counted), _sum(*closed))]
    ratio = max(_ratio(one.get(key, 0), other.get(key, 0)) for one, other in pairs for key in one | other)
    sizes = ", ".join(f"{group} {format_bytes(size)}" for group, size in by_group.most_common() if size > 1000)
    return Row(f"{name}, bytes counted over closed form", ratio, "x", "lower", bar=1.0, note=f"a rank: {sizes}")


def _sum(one: Bytes, other: Bytes) -> Bytes:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b) if min(a, b) > 0 else float("inf")


if __name__ == "__main__":
    main(rows)
