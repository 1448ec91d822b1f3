"""What the checkpoint tests share: small states, ways to cut them, and a vault process that never outlives its test."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bessemer.keep.checkpoint import Slice

WAIT_S = 60.0
META = {"cursor": 640, "seed": 7, "job_hash": "abc", "job": {"train": {"lr": 0.003}}}


def make_state(seed: int) -> dict[str, torch.Tensor]:
    """A few tensors of every rank and several dtypes, all different for each seed."""
    g = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(12, 8, generator=g),
        "layers.0.attn.q.weight": torch.randn(8, 8, generator=g).bfloat16(),
        "experts": torch.randn(4, 6, 5, generator=g).half(),
        "steps": torch.randint(1 << 40, (5,), generator=g),
        "mask": torch.randint(2, (9,), generator=g).bool(),
        "scale": torch.tensor(float(seed)),
        "nothing": torch.empty(0, 3),
    }


def whole(state: dict[str, torch.Tensor]) -> list[Slice]:
    return [Slice.whole(name, tensor) for name, tensor in state.items()]


def rows(state: dict[str, torch.Tensor], rank: int, ranks: int) -> list[Slice]:
    """This rank's share when each tensor is cut along its first dimension; what can't be cut belongs to rank 0."""
    slices = []
    for name, tensor in state.items():
        if tensor.dim() == 0 or tensor.numel() == 0:
            if rank == 0:
                slices.append(Slice.whole(name, tensor))
            continue
        size = -(-tensor.shape[0] // ranks)
        start = min(rank * size, tensor.shape[0])
        part = tensor[start : start + size]
        offset = (start,) + (0,) * (tensor.dim() - 1)
        slices.append(Slice(name, tuple(tensor.shape), offset, part.contiguous()))
    return slices


def blank(slices: Sequence[Slice]) -> list[Slice]:
    """The same blocks, to be filled."""
    return [Slice(s.name, s.global_shape, s.global_offset, torch.zeros_like(s.tensor)) for s in slices]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_holds(checkpoint, state: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.names()) == sorted(state)
    for name, tensor in state.items():
        assert same(checkpoint.read_tensor(name), tensor), name


def leftovers(root: Path) -> list[str]:
    """Everything in a checkpoints folder that is not a checkpoint."""
    return sorted(p.name for p in root.iterdir() if not p.name.startswith("step-"))


@dataclass
class RunningVault:
    process: subprocess.Popen[bytes]
    socket: Path
    run: Path

    @property
    def root(self) -> Path:
        return self.run / "checkpoints"

    def fill_disk(self, limit: int) -> None:
        """From now on its disk seems full beyond files of `limit` bytes (so is its memory: reserve that before)."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (limit, limit))

    def finish(self, timeout_s: float = WAIT_S) -> int:
        """Tell it that nobody comes any more, and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def running_vault(run: Path, *flags: str, name: str = "vault", nice: int = 0) -> Iterator[RunningVault]:
    """A vault on the run folder `run`, its socket in a folder `name` there; killed at the end if it still runs.

    Not niced unless asked, so that tests don't crawl on a busy machine."""
    place = run / name
    place.mkdir(parents=True, mode=0o700)
    command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", str(place / "socket"), "--run", str(run)]
    process = subprocess.Popen([*command, "--nice", str(nice), *flags], stdin=subprocess.PIPE)
    vault = RunningVault(process, place / "socket", run)
    try:
        yield vault
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
