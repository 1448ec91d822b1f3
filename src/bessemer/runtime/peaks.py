"""The declared peak: this computer's best measured GEMM rate, or a GPU's published one.

    machine = ensure_peaks(load_machine("cpu-local"))      # measured at the first start, then read from the cache
    declared_peaks(machine, devices=4)                     # {"bf16": 4.2e11, "fp32": 2.0e11}, FLOP/s of the whole job

    python -m bessemer.runtime.peaks                       # measure again and print

The cached file is a machine file (`core.machine.cpu_local_file`). It is measured anew when the processor, the number
of usable cores or the torch version differ from those it names. Reading it imports no torch.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.core.errors import ConfigError
from bessemer.core.machine import DEFAULT_CACHE, Machine, Origin, Peaks, cpu_local_file, load_machine
from bessemer.core.units import format_rate
from bessemer.runtime.host import cpu_model, usable_cores

if TYPE_CHECKING:
    import torch

__all__ = ["GEMM_SIZES", "declared_peaks", "ensure_peaks", "measure_peaks"]

GEMM_SIZES = (512, 1024, 2048)
"""Square products tried. Up to 2048 rows the best rate of a many-core processor is reached within a few
milliseconds a product; larger ones only take longer."""


def measure_peaks(
    dtypes: Sequence[str] = ("bf16", "fp32"),
    seconds: float = 1.2,
    *,
    sizes: Sequence[int] = GEMM_SIZES,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The best rate of a square matrix product on all usable cores, in FLOP/s by data type ("bf16", "fp16", "fp32").

    `seconds` is shared among data types and sizes; each gets at least three single products, of which the fastest
    counts: other work on the computer only ever slows one down. What is measured is returned, also where bf16 is
    slower than fp32 because the processor has no bf16 instructions.
    """
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    share = seconds / (len(dtypes) * len(sizes))
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        best = dict.fromkeys(dtypes, 0.0)
        with torch.no_grad():
            for name in dtypes:
                for size in sizes:
                    best[name] = max(best[name], _gemm_rate(names[name], size, share, clock))
    finally:
        torch.set_num_threads(threads)
    return best


def ensure_peaks(machine: Machine, *, cache: str = DEFAULT_CACHE, seconds: float = 1.2) -> Machine:
    """`machine` with peaks: for `cpu-local` measured once and kept in `cpu_local_file(cache)`, else as it is."""
    if machine.name != "cpu-local":
        return machine
    file = cpu_local_file(cache)
    if file.is_file():
        try:
            kept = Machine.from_toml(file.read_text(encoding="utf-8"), str(file))
        except (ConfigError, UnicodeDecodeError):
            kept = None  # torn or of another version: measured again below
        if kept is not None and kept.origin.source.startswith(_conditions()) and kept.peak("fp32") is not None:
            return machine.model_copy(update={"peak_flops_per_s": kept.peak_flops_per_s, "origin": kept.origin})
    measured = _measured(machine, seconds)
    _write(file, measured.model_copy(update={"memory_bytes": None, "origins": {}}).to_toml())
    return measured


def declared_peaks(machine: Machine, *, devices: int, hosts: int = 1) -> dict[str, float]:
    """Peak of all devices of a job in FLOP/s by data type; a type without a known figure is absent.

    A GPU's peak counts once a device. The peak of `cpu-local` is that of the whole computer, however many ranks
    share it, so it counts once a host.
    """
    count = hosts if machine.device == "cpu" else devices
    return {name: peak * count for name, peak in machine.peak_flops_per_s.model_dump(exclude_none=True).items()}


def _gemm_rate(dtype: torch.dtype, size: int, seconds: float, clock: Callable[[], float]) -> float:
    import torch

    generator = torch.Generator().manual_seed(0)
    left = torch.randn(size, size, generator=generator).to(dtype)
    right = torch.randn(size, size, generator=generator).to(dtype)
    out = torch.mm(left, right)  # the first call also builds the kernel
    fastest = float("inf")
    end, rounds = clock() + seconds, 0
    while rounds < 3 or clock() < end:
        start = clock()
        torch.mm(left, right, out=out)
        fastest = min(fastest, clock() - start)
        rounds += 1
    return 2.0 * size**3 / fastest


def _measured(machine: Machine, seconds: float) -> Machine:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    sizes = ", ".join(map(str, GEMM_SIZES))
    source = f"{_conditions()}; best square GEMM of {sizes} on {today}: python -m bessemer.runtime.peaks"
    peaks = Peaks(**measure_peaks(seconds=seconds))
    origin = Origin(kind="measured", source=source)
    return machine.model_copy(update={"peak_flops_per_s": peaks, "origin": origin})


def _conditions() -> str:
    """What a stored measurement must agree in."""
    return f"{cpu_model()}, {usable_cores()} cores, torch {importlib.metadata.version('torch')}"


def _write(file: Path, text: str) -> None:
    """Written aside, then renamed: several jobs may start at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


def _main() -> None:
    cpu_local_file().unlink(missing_ok=True)
    machine = ensure_peaks(load_machine("cpu-local"))
    for name, peak in declared_peaks(machine, devices=1).items():
        print(f"{name}  {format_rate(peak, 'FLOP')}")
    print(machine.origin.source)


if __name__ == "__main__":
    _main()
