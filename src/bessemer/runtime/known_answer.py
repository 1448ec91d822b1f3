"""Matrix products whose answer is known, again and again for a while: is every bit right, how fast, does the rate hold?

    burn = Burner("bf16", device, size=512).burn(seconds=1.0)
    burn.fault                       # "" or what was wrong, where
    burn.checksum                    # the same on every device of a kind with the same libraries and threads

Two kinds of operands, both whole numbers drawn by the CPU's generator, so that they are equal on every host:

* -1, 0 and 1. Sums then are small whole numbers that each format here holds exactly, in any order of adding, so the
  answer is known without a second product: its row and column sums follow from those of the operands, and a wrong
  element stands where a wrong row meets a wrong column (Huang and Abraham, 1984, IEEE Trans. Computers C-33).
* numbers that fill the format's mantissa, whose products use the whole multiplier. The answer depends on the order of
  adding, so it is compared bit by bit with that of the first repetition, and by its checksum with other devices.

Legend: M, N, K of a product a [M, K] b [K, N].
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.core.units import counted
from bessemer.runtime.device import Device

__all__ = ["FORMATS", "Burn", "Burner", "WholeAnswer", "first_difference", "operands"]

Multiply = Callable[[Tensor, Tensor], Tensor]
FORMATS = ("fp64", "fp32", "bf16", "fp16", "int8", "fp8")
"""Names as in `core.machine.DTYPES`; fp8 is e4m3."""
_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
_MANTISSA_BITS = {"fp64": 53, "fp32": 24, "bf16": 8, "fp16": 11, "int8": 7, "fp8": 4}
_SEEDS = {"whole": 11, "full": 12}


@dataclass(frozen=True)
class Burn:
    """What repeated products of one format gave. `fault`: "" or the first wrong answer. Rates in operations/s: the
    median of all, of the first and of the last third. `checksum`: 16 hex digits over the bytes of the full answer."""

    format: str
    size: int
    repetitions: int
    rate: float
    rate_start: float
    rate_end: float
    checksum: str
    fault: str


def operands(kind: str, name: str, size: int) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N] on the CPU, M = N = K = `size`, in the format `name`; equal on every host.

    kind "whole": -1, 0 and 1. kind "full": multiples of 2^-p below 1, with p bits of mantissa (int8: whole numbers).
    """
    generator = torch.Generator().manual_seed(_SEEDS[kind])
    limit = 1 if kind == "whole" else 2 ** _MANTISSA_BITS[name] - 1
    made = []
    for _ in range(2):
        x = torch.randint(-limit, limit + 1, (size, size), generator=generator, dtype=torch.int64).double()
        if kind == "full" and name != "int8":
            x = x / (limit + 1)
        made.append(x.to(_DTYPES[name]))
    return made[0], made[1]


class Burner:
    """Products of format `name` on `device`, M = N = K = `size`. All answers must equal the first, which is kept.

    RuntimeError, NotImplementedError or the like, as torch raises it, where torch has no such product on the device.
    """

    def __init__(self, name: str, device: Device, size: int) -> None:
        self.name, self.size = name, size
        self._device, self._multiply = device, _multiply(name, device)
        self._known = WholeAnswer(*operands("whole", name, size), device.torch_device)
        self._a_MK, self._b_KN = (x.to(device.torch_device) for x in operands("full", name, size))
        self._reference_MN = self._product()  # it also builds the kernel
        self._checksum = _checksum(self._reference_MN)
        self._done = 1

    def burn(self, seconds: float) -> Burn:
        """For about `seconds`, at least one product of whole numbers and three of full mantissas.

        Times are of the product alone: on a CPU the thread's own, so that a busy computer doesn't look like a slow one.
        """
        start = time.perf_counter()
        fault, repetitions = "", 0
        while not fault and (repetitions < 1 or time.perf_counter() < start + seconds / 4):
            with torch.no_grad():
                fault = self._known.fault(self._multiply(self._known.a_MK, self._known.b_KN))
            repetitions += 1
        times, differs = self._repeat(start + seconds)
        third = max(1, len(times) // 3)
        medians = (statistics.median(part) for part in (times, times[:third], times[-third:]))
        rate, rate_start, rate_end = (2.0 * self.size**3 / each for each in medians)
        return Burn(self.name, self.size, repetitions + len(times), rate, rate_start, rate_end,
                    self._checksum, fault or differs)  # fmt: skip

    def _product(self) -> Tensor:
        with torch.no_grad():
            made_MN = self._multiply(self._a_MK, self._b_KN)
        self._device.synchronize()
        return made_MN

    def _repeat(self, end: float) -> tuple[list[float], str]:
        """(seconds of each product, the first difference from the first answer)."""
        clock = time.thread_time if self._device.kind == "cpu" else time.perf_counter
        times: list[float] = []
        fault = ""
        while len(times) < 3 or time.perf_counter() < end:
            begin = clock()
            made_MN = self._product()
            times.append(clock() - begin)
            self._done += 1
            if not fault and not torch.equal(_bits(made_MN), _bits(self._reference_MN)):
                where = first_difference(made_MN, self._reference_MN)
                fault = f"repetition {self._done} differs from the first at {where}"
        return times, fault


class WholeAnswer:
    """What the product of the whole numbers a [M, K] and b [K, N] must be: its row and column sums, computed on the CPU
    with whole numbers."""

    def __init__(self, a_MK: Tensor, b_KN: Tensor, device: torch.device) -> None:
        self._a_MK, self._b_KN = (x.double().long() for x in (a_MK, b_KN))
        sums = self._a_MK @ self._b_KN.sum(1, keepdim=True), self._a_MK.sum(0, keepdim=True) @ self._b_KN
        self._rows_M, self._columns_N = (x.flatten().double().to(device) for x in sums)
        self.a_MK, self.b_KN = a_MK.to(device), b_KN.to(device)

    def fault(self, c_MN: Tensor) -> str:
        """ "" where c is the product; else where the first wrong row meets the first wrong column, with both values."""
        wide_MN = c_MN.double()
        broken = (wide_MN != wide_MN.round()).nonzero()  # too little to show in a sum, or not a number
        if len(broken):
            return f"whole numbers: {self._instead(wide_MN, *broken[0].tolist())}"
        rows, columns = (
            (wide_MN.sum(dim) != known).nonzero().flatten().tolist()
            for dim, known in ((1, self._rows_M), (0, self._columns_N))
        )
        if not rows and not columns:
            return ""
        first = self._instead(wide_MN, *(found[0] if found else 0 for found in (rows, columns)))
        lines = f"{counted(len(rows), 'wrong row')} and {counted(len(columns), 'wrong column')}"
        return f"whole numbers: {lines}, first {first}"

    def _instead(self, wide_MN: Tensor, row: int, column: int) -> str:
        right = int((self._a_MK[row] * self._b_KN[:, column]).sum())
        return f"at [{row}, {column}]: {wide_MN[row, column].item():g} instead of {right}"


def first_difference(made: Tensor, reference: Tensor) -> str:
    """The first element whose bits differ: its index and both values in hexadecimal, first what was made."""
    one, other = _bits(made), _bits(reference)
    index = (one != other).nonzero()[0].tolist()
    mask = (1 << 8 * made.element_size()) - 1
    values = [int(x[tuple(index)].item()) & mask for x in (one, other)]
    return f"{index}: {values[0]:#x} instead of {values[1]:#x}"


def _bits(x: Tensor) -> Tensor:
    """The same bytes as whole numbers, since a NaN isn't equal to itself, nor -0 different from 0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _checksum(x: Tensor) -> str:
    data = x.cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def _multiply(name: str, device: Device) -> Multiply:
    if name == "int8":
        return torch._int_mm
    if name == "fp8":
        one = torch.ones((), device=device.torch_device)

        def scaled(a_MK: Tensor, b_KN: Tensor) -> Tensor:
            # the matrix units want b in columns
            return torch._scaled_mm(a_MK, b_KN.t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        return scaled
    return torch.mm
