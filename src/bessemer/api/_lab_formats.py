"""The verb `lab formats`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bessemer.api._extras import need
from bessemer.core.errors import RequestError
from bessemer.core.units import format_rate, format_seconds

if TYPE_CHECKING:
    from bessemer.lab.formats import FormatRow

__all__ = ["Spectrum", "formats"]


@dataclass(frozen=True)
class Spectrum:
    """Every format on one device. `machine`: whose rates these are; `size`: M = N = K of the timed products."""

    machine: str
    device: str
    size: int
    rows: tuple[FormatRow, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "device": self.device,
            "size": self.size,
            "formats": [row.as_json() for row in self.rows],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        cells = [("format", "bits", "support", "rate", "error", "exact to", "product")]
        for row in self.rows:
            if row.support == "absent":
                cells.append((row.name, str(row.bits), row.support, "", "", "", row.why))
                continue
            rate, error = format_rate(row.operations_per_s or 0.0, "op"), f"{row.relative_error:.2g}"
            exact = str(row.exact_to) if row.sums_exact else "sums differ"
            text = row.how + (f"; {row.why}" if row.why else "")
            cells.append((row.name, str(row.bits), row.support, rate, error, exact, text))
        widths = [max(len(c[i]) for c in cells) for i in range(6)]
        lines = [f"{self.machine}: products of {self.size} x {self.size} x {self.size}"]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(c[:6], widths, strict=True)) + "  " + c[6] for c in cells]
        lines.append("error: against float64, of normal numbers (so FP64's is 0); exact to: integers that come back")
        lines.append(f"probed in {format_seconds(self.seconds)}")
        return "\n".join(lines)


def formats(*, device: str | None = None, size: int | None = None) -> Spectrum:
    """Which number formats the device at hand multiplies natively, by emulation, or not at all, how fast, how exactly.

    FP64, FP32, TF32, BF16, FP16, FP8 e4m3 and e5m2, MXFP8, FP4 and INT8 are tried, never told from the device's name:
    native means that torch has a product of it that gives known answers and is faster than the wider one that would
    stand in for it. Of a CPU it is one core's rate.

    device: What to probe: cpu, cuda or musa; default: the fastest that torch can use here.
    size: Rows, columns and depth of the products that are timed; default: 512 on a CPU, 8192 on a GPU.
    """
    need("lab formats", "train")
    if size is not None and (size < 128 or size % 128):
        raise RequestError(
            f"--size {size}: GPUs take narrow products in multiples of 128", code="lab-formats-size", fix="--size 512"
        )
    from bessemer.lab.formats import NAMES, SIZES, probe
    from bessemer.runtime.device import available_kinds, pick_device

    picked = pick_device(device or available_kinds()[0])
    start = time.perf_counter()
    rows = probe(picked, _progress(len(NAMES)), size)
    machine = f"one core of {picked.name}" if picked.kind == "cpu" else picked.name
    return Spectrum(machine, picked.kind, size or SIZES[picked.kind], tuple(rows), time.perf_counter() - start)


def _progress(whole: int) -> Callable[[int, str], None] | None:
    """A line on a terminal's standard error."""
    if not sys.stderr.isatty():
        return None

    def tell(done: int, name: str) -> None:
        last = done + 1 == whole
        text = f"\r{done + 1} of {whole}: {name}".ljust(40)
        print(text, end="\r" + " " * 40 + "\r" if last else "", file=sys.stderr, flush=True)

    return tell
