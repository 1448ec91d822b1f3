"""How long a save stalls the training and how long a restore takes, beside a plain memory copy and torch's own ways.

    python bench/checkpoint.py [--json] [--mib 1024] [--rounds 3] [--folder DIR]

The state is 24 fp32 tensors. Every round runs each way once, one after the other, so that they share the machine's
noise; the figure of each is its fastest round. Background writes end before the next measurement begins. The bar: a
save stalls for at most 1.2 times one warm copy of the same tensors into ordinary memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from table import Row, show
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bessemer.keep.checkpoint import CheckpointFolder, Slice
from bessemer.keep.vault_client import VaultClient

TENSORS = 24
BAR = 1.2
META = {"cursor": 0, "seed": 0}


class Bench:
    """Seconds of each way in each round, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def best(self, name: str) -> float:
        return min(self.seconds[name])

    def spread(self, name: str) -> str:
        return "rounds " + " ".join(f"{s:.3f}" for s in self.seconds[name])


def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@contextlib.contextmanager
def vault(run: Path) -> Iterator[VaultClient]:
    """A vault that keeps one checkpoint, and a client of it. Not niced: other work on the machine would stretch its
    writes, for which each round waits."""
    command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", str(run / "s"), "--run", str(run)]
    with subprocess.Popen([*command, "--keep-last", "1", "--nice", "0"], stdin=subprocess.PIPE) as process:
        with VaultClient(run / "s") as client:
            yield client
        assert process.stdin is not None
        process.stdin.close()


def torch_ways(state: dict[str, torch.Tensor], folder: Path, bench: Bench) -> None:
    """torch.save, dcp.save and dcp.async_save (staging into shared memory, its fastest way on a CPU)."""
    with bench.time("torch.save"):
        torch.save(state, folder / "torch.pt")
    with bench.time("torch.save and fsync"), (folder / "torch.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    with bench.time("dcp.save"):
        dcp.save(state, checkpoint_id=folder / "dcp")
    shutil.rmtree(folder / "dcp")


def async_way(state: dict[str, torch.Tensor], folder: Path, bench: Bench, stager: DefaultStager) -> None:
    with bench.time("dcp.async_save, done"):
        with bench.time("dcp.async_save, stall"):
            future = dcp.async_save(state, checkpoint_id=folder / "async", async_stager=stager)
        future.result()
    shutil.rmtree(folder / "async")


def rounds(mib: int, count: int, folder: Path) -> Bench:
    elements = mib * (1 << 20) // 4 // TENSORS
    names = [f"layers.{i}.weight" for i in range(TENSORS)]
    state = {name: torch.full((elements,), float(i)) for i, name in enumerate(names)}
    sources = list(state.values())
    targets = [torch.zeros(elements) for _ in sources]
    slices = [Slice.whole(name, tensor) for name, tensor in state.items()]
    bench = Bench()
    staging = StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                             use_non_blocking_copy=False)  # fmt: skip
    stager = DefaultStager(staging)
    with vault(folder) as client:
        with bench.time("reserve"):
            client.reserve(slices, META)
        for round_ in range(count):
            for repeat in range(3):  # the copy and the stall are short: three interleaved pairs a round
                step = round_ * 3 + repeat + 1
                with bench.time("memcpy"):
                    copy_into(targets, sources)
                with bench.time("save until durable"):
                    with bench.time("save, stall"):
                        client.save(step, slices, META)
                    client.wait()
            restore_ways(folder, state, targets, bench)
            torch_ways(state, folder, bench)
            async_way(state, folder, bench, stager)
    stager.close()
    return bench


def restore_ways(folder: Path, state: dict[str, torch.Tensor], targets: list[torch.Tensor], bench: Bench) -> None:
    """Read back what was saved last, with and without comparing checksums first."""
    slices = [Slice.whole(name, target) for name, target in zip(state, targets, strict=True)]
    with bench.time("find, verify and restore"):
        found = CheckpointFolder(folder / "checkpoints").newest_verified().checkpoint
        assert found is not None
        found.read_into(slices)
    with bench.time("restore what was verified"):
        found.read_into(slices)
    assert all(torch.equal(target, source) for target, source in zip(targets, state.values(), strict=True))
    found.close()


def rows(bench: Bench, mib: int) -> list[Row]:
    size = mib * (1 << 20)

    def seconds(name: str) -> Row:
        rate = size / bench.best(name) / 1e9
        return Row(f"{name}", bench.best(name), "s", "lower", None, f"{rate:.2f} GB/s; {bench.spread(name)}")

    def ratio(name: str, bar: float | None) -> Row:
        value = bench.best(name) / bench.best("memcpy")
        return Row(f"{name} / memcpy", value, "x", "lower", bar, "fastest of each")

    return [
        ratio("save, stall", BAR),
        ratio("dcp.async_save, stall", None),
        ratio("dcp.save", None),
        ratio("torch.save", None),
        ratio("find, verify and restore", None),
        ratio("restore what was verified", None),
        *(seconds(name) for name in bench.seconds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary directory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        bench = rounds(given.mib, given.rounds, Path(name))
        dist.destroy_process_group()
    show(rows(bench, given.mib), json=given.json)


if __name__ == "__main__":
    main()
