"""The declared peak: this computer's best measured GEMM rate, or a GPU's published one.

    machine = ensure_peaks(load_machine("cpu-local"))      # measured at the first start, then read from the cache
    declared_peaks(machine, devices=4)                     # {"bf16": 4.2e11, "fp32": 2.0e11}, FLOP/s of the whole job

    python -m bessemer.runtime.peaks                       # measure again and print

The cached file is a machine file (`core.machine.cpu_local_file`). It is measured anew when the processor, the number
of usable cores or the torch version differ from those it names, or where it was taken on a busy computer. Reading it
imports no torch.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
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
    """`machine` with peaks: for `cpu-local` measured once and kept in `cpu_local_file(cache)`, else as it is.

    A measurement taken while other work kept the processor busy is too low. It is repeated at each start until one
    met a quiet computer, and the best rate of each data type is kept.
    """
    if machine.name != "cpu-local":
        return machine
    file = cpu_local_file(cache)
    kept = _kept(file)
    if kept is not None and not _was_busy(kept):
        return machine.model_copy(update={"peak_flops_per_s": kept.peak_flops_per_s, "origin": kept.origin})
    measured = _measured(machine, seconds, kept)
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


def _kept(file: Path) -> Machine | None:
    """The stored measurement; None where there is none, or one of other conditions, or a torn one."""
    if not file.is_file():
        return None
    try:
        kept = Machine.from_toml(file.read_text(encoding="utf-8"), str(file))
    except (ConfigError, UnicodeDecodeError):
        return None  # torn, or of another version: measured again
    fits = kept.origin.source.startswith(_conditions()) and kept.peak("fp32") is not None
    return kept if fits else None


def _measured(machine: Machine, seconds: float, kept: Machine | None) -> Machine:
    load = os.getloadavg()[0]  # before: the measurement is load itself
    found = measure_peaks(seconds=seconds)
    if kept is not None:
        found = {name: max(rate, kept.peak(name) or 0.0) for name, rate in found.items()}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    how = f"best square GEMM of {', '.join(map(str, GEMM_SIZES))} on {today}, load average {load:.1f} before"
    source = f"{_conditions()}; {how}: python -m bessemer.runtime.peaks"
    origin = Origin(kind="measured", source=source)
    return machine.model_copy(update={"peak_flops_per_s": Peaks(**found), "origin": origin})


def _was_busy(kept: Machine) -> bool:
    """Whether more than half of the cores had other work when it was measured."""
    found = re.search(r"load average ([0-9.]+) before", kept.origin.source)
    return found is None or float(found[1]) > usable_cores() / 2


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
