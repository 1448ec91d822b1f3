"""Kernels under sustained load, on any torch device: what a calibration of the planner is fitted to.

A kernel runs again and again for a while; the median of the later half counts, after clocks and caches have settled.
On a CPU it is one thread's own time, so that a busy computer doesn't look like a slow one.
(The declared peak of `runtime.peaks` is the best single call instead.)
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bessemer.runtime.device import Device

__all__ = [
    "ATTENTION_SHAPES",
    "GEMM_SHAPES",
    "GPU_ATTENTION_SHAPES",
    "GPU_GEMM_SHAPES",
    "AttentionSample",
    "GemmSample",
    "measure_attention",
    "measure_copy",
    "measure_gap",
    "measure_gemms",
    "measure_update",
    "neighbours",
    "paired_s",
    "sustained_s",
]

GEMM_SHAPES = (
    (2048, 512, 512),
    (1024, 1536, 512),
    (1024, 512, 1536),
    (1024, 2048, 256),
    (512, 1024, 1024),
    (2048, 384, 384),
)
"""Rows (tokens), outputs and depth of the products that are measured on a CPU."""
GPU_GEMM_SHAPES = (
    (8192, 8192, 8192),
    (8192, 28672, 8192),
    (8192, 8192, 28672),
    (8192, 4096, 4096),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (2048, 8192, 8192),
)
"""The same on a GPU."""
ATTENTION_SHAPES = ((4, 8, 256, 32), (2, 8, 512, 64))
"""Batch, heads, sequence and head size on a CPU."""
GPU_ATTENTION_SHAPES = ((4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 8192, 128))
"""The same on a GPU."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class GemmSample:
    """Seconds of one product [rows, depth] x [depth, outputs]."""

    dtype: str
    rows: int
    outputs: int
    depth: int
    seconds: float


@dataclass(frozen=True)
class AttentionSample:
    """Seconds of causal attention, forward and backward."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    forward_s: float
    backward_s: float


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keeps `count` other cores busy with matrix products, as the other ranks of a job would."""
    # it ends by itself when this process is gone, however that came
    work = (
        "import os, torch; torch.set_num_threads(1); a, parent = torch.ones(512, 512), os.getppid()\n"
        "while os.getppid() == parent: a @ a"
    )
    processes = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _clock(device: Device) -> Callable[[], float]:
    """On a CPU this thread's own time: what else the computer runs takes the core away, and isn't the kernel's."""
    return time.thread_time if device.kind == "cpu" else time.perf_counter


def sustained_s(call: Callable[[], object], device: Device, seconds: float) -> float:
    """Median seconds of one `call` over the later half of `seconds` of calls, at least three."""
    call()
    device.synchronize()
    times: list[float] = []
    now = _clock(device)
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = now()
        call()
        device.synchronize()
        times.append(now() - start)
    return statistics.median(times[len(times) // 2 :])


def paired_s(
    small: Callable[[], object], large: Callable[[], object], device: Device, seconds: float
) -> tuple[float, float]:
    """Median seconds of `small`, and median of what `large` takes beyond the call of `small` just before it: in turns,
    so that what else the computer does bears on both alike. At least five pairs; the first two don't count."""
    firsts: list[float] = []
    now = _clock(device)
    gains: list[float] = []
    end = time.perf_counter() + seconds
    while len(firsts) < 5 or time.perf_counter() < end:
        spent = []
        for call in (small, large):
            start = now()
            call()
            device.synchronize()
            spent.append(now() - start)
        firsts.append(spent[0])
        gains.append(spent[1] - spent[0])
    return statistics.median(firsts[2:]), statistics.median(gains[2:])


def measure_gemms(
    device: Device, dtypes: Sequence[str], seconds: float, shapes: Sequence[tuple[int, int, int]] = GEMM_SHAPES
) -> list[GemmSample]:
    """Every shape in every type ("bf16", "fp32"); `seconds` is shared among them."""
    share = seconds / (len(dtypes) * len(shapes))
    samples = []
    with torch.no_grad():
        for name in dtypes:
            for rows, outputs, depth in shapes:
                left = torch.randn(rows, depth, device=device.torch_device).to(DTYPES[name])
                right = torch.randn(outputs, depth, device=device.torch_device).to(DTYPES[name])
                spent = sustained_s(lambda a=left, b=right: F.linear(a, b), device, share)  # type: ignore[misc]
                samples.append(GemmSample(name, rows, outputs, depth, spent))
    return samples


def measure_copy(device: Device, seconds: float, size_bytes: int = 1 << 28) -> float:
    """Bytes/s that a large copy moves, read and written together."""
    source = torch.ones(size_bytes // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / sustained_s(lambda: target.copy_(source), device, seconds)


def measure_gap(device: Device, seconds: float, calls: int = 200) -> float:
    """Seconds from one tiny kernel to the next."""
    one = torch.ones(16, device=device.torch_device)

    def many() -> None:
        for _ in range(calls):
            one.add_(1.0)

    return sustained_s(many, device, seconds) / calls


def measure_attention(
    device: Device, dtype: str, seconds: float, shapes: Sequence[tuple[int, int, int, int]] = ATTENTION_SHAPES
) -> list[AttentionSample]:
    """torch's fused causal attention; `seconds` is shared among shapes and passes."""
    share = seconds / (2 * len(shapes))
    samples = []
    for batch, heads, seq, size in shapes:
        shape = (batch, heads, seq, size)
        q, k, v = (torch.randn(shape, device=device.torch_device).to(DTYPES[dtype]).requires_grad_() for _ in range(3))
        up = torch.randn(shape, device=device.torch_device).to(DTYPES[dtype])

        def forward(parts: tuple[torch.Tensor, ...] = (q, k, v)) -> torch.Tensor:
            return F.scaled_dot_product_attention(*parts, is_causal=True)

        def both(up: torch.Tensor = up, run: Callable[[], torch.Tensor] = forward) -> None:
            run().backward(up)

        one = sustained_s(forward, device, share)
        two = sustained_s(both, device, share)
        samples.append(AttentionSample(batch, heads, seq, size, one, max(two - one, 1e-9)))
    return samples


def measure_update(device: Device, seconds: float, parameters: int = 1 << 22) -> float:
    """Seconds of AdamW for one float32 parameter."""
    weight = torch.nn.Parameter(torch.ones(parameters, device=device.torch_device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], foreach=True)
    return sustained_s(optimizer.step, device, seconds) / parameters
