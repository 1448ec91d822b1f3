"""How long a save stalls the training and how long a restore takes, beside a plain memory copy and torch's own ways.

    python bench/checkpoint.py [--json] [--quick] [--mib 1024] [--rounds 3] [--folder DIR]

The state is 24 fp32 tensors. Every round runs each way once, one after the other, so that they share the machine's
noise; the figure of each is its fastest round. Background writes end before the next measurement begins. The bars: a
copy in memory stalls for at most 1.1 times, and a save for 1.2 times, one warm copy of the same tensors into ordinary
memory; after a trainer's death its state is back within 1.3 times that copy and 1 ms; from another host's memory it
comes at 80 % of what a plain socket carries (both over loopback here, the former with its checksums compared; the
first round, which is not the fastest, has the memory still to be mapped).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
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
from bessemer.keep.links import SECRET
from bessemer.keep.memory import Memory
from bessemer.keep.memory_copies import MemoryCopies
from bessemer.keep.peers import CHUNK_BYTES, TcpTransport
from bessemer.keep.replicas import accept
from bessemer.keep.vault_client import VaultClient

TENSORS = 24
SAVE_BAR = 1.2
HOLD_BAR = 1.1
RESTORE_BAR = 1.3
RESTORE_MORE_S = 1e-3
PEER_BAR = 0.8
SECRET_OF_BENCH = "bench"
SENDER = """
import socket, sys
left, data = int(sys.argv[2]), memoryview(bytearray(16 << 20))
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link.recv(1)
while left:
    left -= link.send(data[: min(left, len(data))])
"""
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
def vault(run: Path, address: str) -> Iterator[VaultClient]:
    """A vault that keeps one checkpoint, and a client of it. Not niced: other work on the machine would stretch its
    writes, for which each round waits."""
    command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", str(run / "s"), "--run", str(run)]
    flags = ["--keep-last", "1", "--nice", "0", "--listen", address]
    environment = {**os.environ, SECRET: SECRET_OF_BENCH}
    with subprocess.Popen([*command, *flags], stdin=subprocess.PIPE, env=environment) as process:
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
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp:127.0.0.1:{probe.getsockname()[1]}"
    peer = Peer(address)
    with vault(folder, address) as client:
        with bench.time("reserve"):
            client.reserve(slices, META)
        for round_ in range(count):
            for repeat in range(3):  # the copy and the stall are short: three interleaved pairs a round
                step = round_ * 3 + repeat + 1
                with bench.time("memcpy"):
                    copy_into(targets, sources)
                with bench.time("hold, stall"):
                    client.hold(step, slices, META)
                checksums(folder)
                with bench.time("save until durable"):
                    with bench.time("save, stall"):
                        client.save(step, slices, META)
                    client.wait()
            for _ in range(3):
                memory_ways(folder, state, targets, bench)
            peer.measure(bench)
            restore_ways(folder, state, targets, bench)
            torch_ways(state, folder, bench)
            async_way(state, folder, bench, stager)
    stager.close()
    return bench


def checksums(folder: Path) -> None:
    """Wait until the vault has computed those of what was copied."""
    MemoryCopies(folder / "s").close()


def memory_ways(folder: Path, state: dict[str, torch.Tensor], targets: list[torch.Tensor], bench: Bench) -> None:
    """As a rank that was started again: attach the memory, copy out and compare with the checksums."""
    slices = [Slice.whole(name, target) for name, target in zip(state, targets, strict=True)]
    with bench.time("memcpy"):
        copy_into(targets, list(state.values()))
    with bench.time("attach, verify and restore"):
        with bench.time("attach"):
            copies = MemoryCopies(folder / "s")
        copies.read_into(max(copies.steps(slices)), slices, threads=torch.get_num_threads())
    copies.close()
    assert all(torch.equal(target, source) for target, source in zip(targets, state.values(), strict=True))


class Peer:
    """Another host's vault, as far as its memory goes: takes what the vault at `address` has, over loopback."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._transport = TcpTransport("tcp:127.0.0.1:0", SECRET_OF_BENCH)
        self._memory: Memory | None = None

    def measure(self, bench: Bench) -> None:
        about = max(self._transport.found(self._address), key=lambda found: found.step)
        if self._memory is None:
            self._memory = Memory.create(about.geometry)
        image = self._memory.image(0)
        with bench.time("peer, verified"):
            with bench.time("peer"):
                self._transport.get(self._address, about, image)
            accept(self._memory, 0, about)
        plain_socket(image, bench)


def plain_socket(image: memoryview, bench: Bench) -> None:
    """As many bytes from another process, which sends the same piece again and again, into the same memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", SENDER, str(server.getsockname()[1]), str(len(image))]
        with subprocess.Popen(command):
            link, _ = server.accept()
            with link, bench.time("plain socket"):
                link.sendall(b"!")
                at = 0
                while at < len(image):
                    at += link.recv_into(image[at : at + CHUNK_BYTES])


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
        ratio("hold, stall", HOLD_BAR),
        ratio("save, stall", SAVE_BAR),
        Row(
            "restore after a trainer's death / memcpy",
            (bench.best("attach, verify and restore") - RESTORE_MORE_S) / bench.best("memcpy"),
            "x",
            "lower",
            RESTORE_BAR,
            "less 1 ms; fastest of each",
        ),
        Row(
            "peer, verified / plain socket, rate",
            bench.best("plain socket") / bench.best("peer, verified"),
            "x",
            "higher",
            PEER_BAR,
            "fastest of each",
        ),
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
    parser.add_argument("--quick", action="store_true", help="one round of 128 MiB")
    parser.add_argument("--mib", type=int, help="size of the state; 1024")
    parser.add_argument("--rounds", type=int, help="3")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary directory")
    given = parser.parse_args()
    mib, count = given.mib or (128 if given.quick else 1024), given.rounds or (1 if given.quick else 3)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        bench = rounds(mib, count, Path(name))
        dist.destroy_process_group()
    show(rows(bench, mib), json=given.json)


if __name__ == "__main__":
    main()
