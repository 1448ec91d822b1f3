"""What keeping a run alive costs while nothing fails: four ranks that run each step twice, once in plain replicated
data parallelism and once as four groups of a run that goes on through losses, with its coordinator beside them.

Both have the same model, batches and cores, one step of each after the other, so that noise meets both. CPU seconds
count, of whole processes, and of each rank the fastest step of either kind; the coordinator's are the mean over all
steps. Phase times are wall-clock: of the fastest steps, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _keep_runs import MEMBERS, SEQ, job_of, tell
from table import Row
from torch._C._distributed_c10d import FileStore

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.core.resolve import resolve_model
from bessemer.data import Batch
from bessemer.keep.cohort import Cohort, Epoch, Seat
from bessemer.keep.links import SECRET
from bessemer.keep.vault_client import VaultClient
from bessemer.parallel.across import Link, connect_gloo
from bessemer.parallel.mesh import build_mesh
from bessemer.train.assembly import assemble
from bessemer.train.elastic import Connector, ElasticLoop, group_job
from bessemer.train.loop import Loop
from bessemer.train.state import owned_slices
from bessemer.train.transfer import Landing

BAR = 3.0
BATCH = 32
"""With which a step takes about 0.3 s on two cores."""
WARM_UP = 2
COPY_EVERY = 10
SECRET_OF_BENCH = "bench"


@dataclass(frozen=True)
class Steps:
    """Of one rank, seconds of each step: CPU and wall-clock, of the plain way and of groups."""

    plain_cpu: list[float]
    plain_wall: list[float]
    groups_cpu: list[float]
    groups_wall: list[float]


def measure(folder: Path, sums: str, steps: int) -> tuple[list[Steps], float]:
    """What each rank took, and the coordinator's CPU seconds a step. `sums`: as keep.sums."""
    folder.mkdir()
    job = job_of(folder, "groups", BATCH, mode="zero-interruption", **({"sums": sums} if sums else {}))
    (folder / "job.toml").write_text(dump_job(job))
    environment = {**os.environ, SECRET: SECRET_OF_BENCH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bessemer.keep.coordinate", "--address", f"unix:{folder}/c"]
    command += ["--job", str(folder / "job.toml"), "--log", str(folder / "decisions.jsonl"), "--lease", "600"]
    processes = [subprocess.Popen(command, env=environment)]
    try:
        worker = [sys.executable, __file__, str(folder), str(processes[0].pid), str(steps)]
        ranks = [subprocess.Popen([*worker, str(rank)], env=environment) for rank in range(MEMBERS)]
        processes += ranks
        for process in ranks:
            if process.wait(300.0):
                raise SystemExit("a rank of the overhead's measurement failed")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    found = [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(MEMBERS)]
    return [Steps(**one["steps"]) for one in found], float(found[0]["coordinator"])


def rows(folder: Path, steps: int) -> list[Row]:
    """The added CPU time, in floating point, which is the default, and in exact sums; and the copies in memory."""
    listed = []
    for sums, name, bar in (("", "floating-point sums", BAR), ("exact", "exact sums", None)):
        tell(f"overhead without faults, {name}")
        ranks, coordinator = measure(folder / (sums or "fast"), sums, steps)
        plain = sum(min(rank.plain_cpu) for rank in ranks)
        groups = sum(min(rank.groups_cpu) for rank in ranks)
        walls = [min(map(max, zip(*times, strict=True))) for times in
                 ([r.plain_wall for r in ranks], [r.groups_wall for r in ranks])]  # fmt: skip
        note = f"CPU of 4 ranks {1e3 * plain:.0f} ms plain, {1e3 * groups:.0f} in groups, coordinator "
        note += f"{1e3 * coordinator:.1f}; fastest of {steps}; wall {1e3 * walls[0]:.0f} and {1e3 * walls[1]:.0f} ms"
        percent = 100 * ((groups + coordinator) / plain - 1)
        listed.append(Row(f"overhead without faults, {name}", percent, "% of CPU", "lower", bar, note))
    tell("copies in memory")
    return listed + _copies(folder, min(walls))


def _copies(folder: Path, step_s: float) -> list[Row]:
    """A copy of the state into a vault's memory, beside a plain copy of it. The state fits into a large cache."""
    job = job_of(folder, "copies")
    own = group_job(job)
    parts = assemble(own, spec := resolve_model(job.model), build_mesh(own, 0, torch.device("cpu"), spec))
    slices = owned_slices(parts.module, parts.optimizer, parts.mesh)
    meta = {"cursor": 0, "seed": 0}
    targets = [torch.zeros_like(s.tensor) for s in slices]
    held, copied = [], []
    with _vault(folder / "copies") as client:
        client.reserve(slices, meta)
        for step in range(1, 12):
            start = time.perf_counter()
            for target, s in zip(targets, slices, strict=True):
                target.copy_(s.tensor)
            between = time.perf_counter()
            client.hold(step, slices, meta)
            held.append(time.perf_counter() - between)
            copied.append(between - start)
            time.sleep(0.05)  # the checksums of this copy
    share = 100 * min(held) / COPY_EVERY / step_s
    note = f"stall {1e3 * min(held):.2f} ms, {min(held) / min(copied):.2f} x a memory copy of its {len(slices)} tensors"
    name = f"copies in memory every {COPY_EVERY} steps, of the leading rank"
    return [Row(name, share, "% of a step", "lower", None, note)]


@contextmanager
def _vault(run: Path) -> Iterator[VaultClient]:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", f"{place}/v", "--run", str(run)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            with VaultClient(Path(place) / "v") as client:
                yield client
            assert process.stdin is not None
            process.stdin.close()


# ---- a rank


class _Tokens:
    """Samples that follow from their ids alone."""

    fingerprint = "bench"

    def batch(self, ids: list[int]) -> Batch:
        rows = np.stack([np.random.default_rng(i).integers(0, 4096, SEQ + 1) for i in ids])
        ones, zeros = np.ones((len(ids), SEQ), np.float32), np.zeros((len(ids), SEQ), np.int32)
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), ones, zeros)


class _Silent:
    """Reports and saves nothing."""

    stop_requested = False

    def metric(self, record: dict[str, Any]) -> None: ...

    def event(self, name: str, /, **fields: Any) -> None: ...

    def phase(self, step: int, name: str) -> None: ...

    def reserve(self, slices: Any, meta: Any) -> None: ...


class _Files(Connector):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def link(self, epoch: Epoch, index: int) -> Link:
        store = FileStore(str(self._folder / f"epoch-{epoch.number}"), len(epoch.members))
        return connect_gloo(store, index, len(epoch.members), 60.0)


def _loops(folder: Path, job: Job, rank: int) -> tuple[Loop, ElasticLoop]:
    """The plain one and that of a group, each with a model of its own."""
    device, spec = torch.device("cpu"), resolve_model(job.model)
    tokens: Any = _Tokens()
    silent: Any = _Silent()
    plain = job_of(folder, "plain", BATCH)
    parts = assemble(plain, spec, build_mesh(plain, rank, device, spec))
    one = Loop(parts, tokens, None, silent, silent, folder / "plain")
    own = group_job(job)
    parts = assemble(own, spec, build_mesh(own, 0, device, spec))
    cohort = Cohort(f"unix:{folder}/c", SECRET_OF_BENCH, Seat(rank, 0, 0, "here"))
    landing = Landing(f"unix:{folder}/l{rank}", SECRET_OF_BENCH)
    exact = job.keep.sums == "exact"
    other = ElasticLoop(parts, tokens, None, silent, silent, folder / "groups", job, cohort, _Files(folder), landing,
                        SECRET_OF_BENCH, exact)  # fmt: skip
    return one, other


def rank_main(folder: Path, coordinator: int, steps: int, rank: int) -> None:
    """Leaves what it measured in `out-RANK.json`."""
    from bessemer.core.job_file import load_job

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=MEMBERS)
    plain, groups = _loops(folder, load_job(folder / "job.toml"), rank)
    batches = plain._batches(0)
    groups._start()
    found: dict[str, list[float]] = {name: [] for name in Steps.__annotations__}
    before = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before = _cpu_s(coordinator)
            found = {name: [] for name in found}
        for name, loop, its in (("plain", plain, batches), ("groups", groups, iter(()))):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loop._run_step(step, its)
            found[f"{name}_cpu"].append(time.process_time() - cpu)
            found[f"{name}_wall"].append(time.perf_counter() - wall)
    spent = (_cpu_s(coordinator) - before) / steps
    (folder / f"out-{rank}.json").write_text(json.dumps({"steps": found, "coordinator": spent}))
    dist.barrier()
    os._exit(0)  # nobody waits for threads that read ahead


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), *(int(given) for given in sys.argv[2:]))
