"""A training step of compiled blocks beside the same step without, in one process on a CPU, and what the first costs.

The model is that of examples/first_heat.toml (5.8M parameters). Plain blocks run the CPU kernels of `ops`; compiled
ones can't, and run what inductor makes of the reference operators, which are measured too. All use one thread. Steady
steps are interleaved and timed as CPU seconds, the fastest of each counts; the first step is wall time, with an empty
cache of compiled code.
"""

from __future__ import annotations

import os
import tempfile
import time

import torch
from table import Row, main

from bessemer import ops
from bessemer.core.job import Job
from bessemer.core.resolve import resolve_model
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.parallel.compile import compile_blocks

STEPS = 6
BATCH, SEQ = 8, 256


def rows() -> list[Row]:
    """Of each type: seconds of the steps, their ratio, and the first step of the compiled model."""
    torch.set_num_threads(1)
    found: list[Row] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            found += _compare(name, dtype)
    return found


def _compare(name: str, dtype: torch.dtype) -> list[Row]:
    job = Job.model_validate({"train": {"compile": "inductor"}, "data": {"seq_len": SEQ}})
    spec = resolve_model(job.model)
    plain, compiled = (build(spec, seed=1, compute_dtype=dtype) for _ in range(2))
    compile_blocks(compiled, job)
    ids = torch.randint(0, spec.vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    loss = _step(compiled, ids)
    first_s = time.perf_counter() - start
    if abs(_step(plain, ids) - loss) > 1e-3 * abs(loss):
        raise SystemExit(f"{name}: the losses differ: not the same work")
    ways = {"plain": (plain, "auto"), "reference operators": (plain, "reference"), "compiled": (compiled, "auto")}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(STEPS):
        for way, (model, path) in ways.items():
            with ops.use(path):  # type: ignore[arg-type]
                start = time.process_time()
                _step(model, ids)
                seconds[way].append(time.process_time() - start)
    found = [
        Row(f"{name}, {way}", min(taken), "CPU s/step", "lower", note=_spread(taken)) for way, taken in seconds.items()
    ]
    gain = min(seconds["plain"]) / min(seconds["compiled"])
    kernels = "native kernels" if not ops.why_absent() else "without native kernels"
    return [
        *found,
        Row(f"{name}, plain over compiled", gain, "x", "higher", note=f"plain: {kernels}"),
        Row(f"{name}, first compiled step", first_s, "s", "lower", note="one graph for 6 layers, nothing cached"),
    ]


def _step(model: Decoder, ids: torch.Tensor) -> float:
    """Forward and backward; the loss."""
    model.zero_grad()
    loss, _ = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loss.backward()
    return float(loss.item())


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"min of {len(ordered)}: {ordered[0] * 1e3:.0f} ms, median {ordered[len(ordered) // 2] * 1e3:.0f} ms"


if __name__ == "__main__":
    main(rows)
