"""Number formats on the device at hand: which of them its matrix units take, how fast, how exact.

Nothing is told from names. A format is "native" where torch has a product of it on the device, the product gives known
answers, and is at least `GAIN` times as fast as the product that would stand in for it (float32 for TF32, 16 bits and
INT8, the faster of 16 bits for narrower ones): units that widen their operands first gain nothing. It is "emulated"
where a product of it can be had, but not from such units; "absent" where it can't. Rates are of the product alone, of
operands that are quantised already; decoding belongs to emulation. On a CPU one thread's own time counts, so that a
busy computer doesn't look like a slow one.

Legend: M, N, K of a product a [M, K] b [N, K]^T.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.precision import INT8_WEIGHT, Grain, Scaled, Scheme, keyed_generator, multiply, quantise
from bessemer.precision.formats import E2M1, E4M3, E5M2, E8M0
from bessemer.precision.gpu import multiply_on
from bessemer.precision.outliers import relative_error
from bessemer.precision.scaled import TENSOR
from bessemer.runtime.device import Device

__all__ = ["GAIN", "NAMES", "FormatRow", "probe"]

GAIN = 1.2
"""How many times as fast as its stand-in a native product must be: narrower operands promise 2, small sizes and a busy
computer take some of it."""
SIZES = {"cpu": 512, "cuda": 8192, "musa": 8192}
"""M = N = K of the products that are timed, by kind of device."""
_ERROR_SIZE, _ROUNDS, _WRONG = 512, 5, 1e-2


@dataclass(frozen=True)
class FormatRow:
    """What was found of a format. `largest`: its largest finite number. `how`: what computes the product in `support`
    "native" or "emulated"; `why`: what speaks against native units, or against the format being there at all.

    `operations_per_s` (2 M N K over seconds) and `relative_error` (Frobenius, against float64 products of what was
    quantised: standard normal numbers) are of `how`; None where absent. `exact_to`: the largest n for which 1, n - 1
    and n come back from a product at scale 1. `sums_exact`: whether sums of 112 products of -1, 0, 1 do.
    """

    name: str
    bits: int
    largest: float
    support: str
    how: str
    why: str
    operations_per_s: float | None
    relative_error: float | None
    exact_to: int | None
    sums_exact: bool | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Way:
    """Of computing products: `make(a, b)` prepares operands (float64) and returns the product to call."""

    how: str
    make: Callable[[Tensor, Tensor], Callable[[], Tensor]]
    operator: bool  # torch's own, in the format itself


@dataclass(frozen=True)
class _Kind:
    """`largest` of a's and b's format sets their scales to 1 where they stand in a tensor or block."""

    name: str
    bits: int
    largest: tuple[float, float]
    ways: tuple[_Way, ...]
    beats: tuple[str, ...] = ()  # names of the products that would stand in for its own; none: it needn't


def _plain(dtype: torch.dtype) -> tuple[_Way, ...]:
    def make(a_MK: Tensor, b_NK: Tensor) -> Callable[[], Tensor]:
        left, right = a_MK.to(dtype), b_NK.to(dtype).t()
        return lambda: torch.mm(left, right)

    return (_Way(f"torch.mm of {str(dtype).removeprefix('torch.')}", make, operator=True),)


def _tf32() -> tuple[_Way, ...]:
    def make(a_MK: Tensor, b_NK: Tensor) -> Callable[[], Tensor]:
        left, right = a_MK.float(), b_NK.float().t()

        def product() -> Tensor:
            with _high_precision():
                return torch.mm(left, right)

        return product

    return (_Way('torch.mm of float32 at matmul precision "high"', make, operator=True),)


@contextlib.contextmanager
def _high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _narrow(
    left: Scheme, right: Scheme, operator: str, product: Callable[[Scaled, Scaled], Tensor]
) -> tuple[_Way, ...]:
    def made(run: Callable[[Scaled, Scaled], Tensor]) -> Callable[[Tensor, Tensor], Callable[[], Tensor]]:
        def make(a_MK: Tensor, b_NK: Tensor) -> Callable[[], Tensor]:
            a, b = quantise(a_MK.float(), left), quantise(b_NK.float(), right)
            return lambda: run(a, b)

        return make

    return (
        _Way(operator, made(product), operator=True),
        _Way("decoded to bfloat16, then torch.mm", made(multiply), operator=False),
    )


def _scaled_mm(a_MK: Scaled, b_NK: Scaled) -> Tensor:
    return multiply_on("scaled_mm", a_MK, b_NK)


def _int_mm(a_MK: Scaled, b_NK: Scaled) -> Tensor:
    return torch._int_mm(a_MK.codes, b_NK.codes.t()) * (a_MK.scale * b_NK.scale.t())


_FP8, _BF8 = Scheme(E4M3, TENSOR), Scheme(E5M2, TENSOR)
_MX, _NV = Scheme(E4M3, Grain(1, 32), E8M0), Scheme(E2M1, Grain(1, 16), E4M3)
_NO_SCALE = (1.0, 1.0)
_KINDS = (
    _Kind("FP64", 64, _NO_SCALE, _plain(torch.float64)),
    _Kind("FP32", 32, _NO_SCALE, _plain(torch.float32)),
    _Kind("TF32", 19, _NO_SCALE, _tf32(), ("FP32",)),
    _Kind("BF16", 16, _NO_SCALE, _plain(torch.bfloat16), ("FP32",)),
    _Kind("FP16", 16, _NO_SCALE, _plain(torch.float16), ("FP32",)),
    _Kind("FP8 e4m3", 8, (448.0, 448.0), _narrow(_FP8, _FP8, "F.scaled_mm", _scaled_mm), ("BF16", "FP16")),
    _Kind("FP8 e5m2", 8, (57344.0, 448.0), _narrow(_BF8, _FP8, "F.scaled_mm", _scaled_mm), ("BF16", "FP16")),
    _Kind("MXFP8", 8, (448.0, 448.0), _narrow(_MX, _MX, "F.scaled_mm", _scaled_mm), ("BF16", "FP16")),
    _Kind("FP4", 4, (6.0, 6.0), _narrow(_NV, _NV, "F.scaled_mm", _scaled_mm), ("BF16", "FP16")),
    _Kind("INT8", 8, (127.0, 127.0), _narrow(INT8_WEIGHT, INT8_WEIGHT, "torch._int_mm", _int_mm), ("FP32",)),
)
"""e5m2 (gradients) is multiplied with e4m3 (weights), as in training. FP4 is NVFP4. INT8 has a scale per row."""
NAMES = tuple(k.name for k in _KINDS)
_LARGEST = {
    "FP64": torch.finfo(torch.float64).max, "FP32": torch.finfo(torch.float32).max, "TF32": (2 - 2**-10) * 2.0**127,
    "BF16": torch.finfo(torch.bfloat16).max, "FP16": torch.finfo(torch.float16).max,
}  # fmt: skip


def probe(device: Device, tell: Callable[[int, str], None] | None = None, size: int | None = None) -> list[FormatRow]:
    """A row for each of NAMES. `tell(done, name)` before each; `size`: M = N = K of what is timed."""
    threads = torch.get_num_threads()
    if device.kind == "cpu":
        device.set_threads(1)
    rates: dict[str, float] = {}
    rows = []
    try:
        with torch.no_grad():
            for done, kind in enumerate(_KINDS):
                if tell is not None:
                    tell(done, kind.name)
                rows.append(_row(kind, device, size or SIZES[device.kind], rates))
    finally:
        torch.set_num_threads(threads)
    return rows


def _row(kind: _Kind, device: Device, size: int, rates: dict[str, float]) -> FormatRow:
    largest = _LARGEST.get(kind.name, kind.largest[0])
    refused, usable = _usable(kind, device)
    if not usable:
        return FormatRow(kind.name, kind.bits, largest, "absent", "", refused, None, None, None, None)
    timed = {way.how: _rate(way, device, size) for way in usable}
    best = max(usable, key=lambda way: timed[way.how])
    own = next((way for way in usable if way.operator), None)
    rival = max((name for name in kind.beats if name in rates), key=lambda name: rates[name], default=None)
    why = refused
    if own is not None and rival is not None and timed[own.how] < GAIN * rates[rival]:
        why = f"{own.how} runs at {timed[own.how] / rates[rival]:.2f} of the rate of {rival}"
    if kind.name == "TF32" and _exact_to(kind, usable[0], device) > 2**11:
        why = "the setting changes no product: float32 keeps its 24 bits"
        return FormatRow(kind.name, kind.bits, largest, "absent", "", why, None, None, None, None)
    rates[kind.name] = timed[best.how]
    chosen, support = (best, "emulated") if why else (own or best, "native")
    return FormatRow(
        kind.name, kind.bits, largest, support, chosen.how, why, timed[chosen.how], _error(chosen, device),
        _exact_to(kind, chosen, device), _sums_exact(kind, chosen, device),
    )  # fmt: skip


def _usable(kind: _Kind, device: Device) -> tuple[str, list[_Way]]:
    """(why torch's own product isn't among them, the ways that run and agree on a small product)."""
    a_MK, b_NK = _normal(device, 128, 1), _normal(device, 128, 2)
    why, found = "", []
    other = [way for way in kind.ways if not way.operator]
    for way in kind.ways:
        try:
            made = way.make(a_MK, b_NK)()
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:  # torch has no such product here
            why = f"{way.how}: {' '.join(str(error).split())[:120]}"
            continue
        if way.operator and other and relative_error(made, other[0].make(a_MK, b_NK)()) > _WRONG:
            why = f"{way.how} gives another product than its operands"
            continue
        found.append(way)
    return why, found


def _normal(device: Device, size: int, seed: int) -> Tensor:
    made = torch.randn(size, size, dtype=torch.float64, generator=keyed_generator(seed))
    return made.to(device.torch_device)


def _rate(way: _Way, device: Device, size: int) -> float:
    """Of the fastest of a few calls: other work only ever slows one down."""
    clock = time.thread_time if device.kind == "cpu" else time.perf_counter
    call = way.make(_normal(device, size, 3), _normal(device, size, 4))
    call()
    fastest = float("inf")
    for _ in range(_ROUNDS):
        device.synchronize()
        start = clock()
        call()
        device.synchronize()
        fastest = min(fastest, clock() - start)
    return 2.0 * size**3 / fastest


def _error(way: _Way, device: Device) -> float:
    a_MK, b_NK = _normal(device, _ERROR_SIZE, 5), _normal(device, _ERROR_SIZE, 6)
    return relative_error(way.make(a_MK, b_NK)(), a_MK @ b_NK.t())


def _at_scale_one(kind: _Kind, device: Device, a_MK: Tensor, b_NK: Tensor) -> list[Tensor]:
    """Both with the largest number of their format in each 16 columns, where the other has 0: their scales become 1.
    Of a and b 14 columns remain in each, 112 together."""
    made = []
    for column, (largest, x) in enumerate(zip(kind.largest, (a_MK, b_NK), strict=True)):
        blocks = torch.zeros(len(x), 8, 16, dtype=torch.float64)
        blocks[:, :, column] = largest
        blocks[:, :, 2:] = F.pad(x, (0, 112 - x.shape[1])).view(len(x), 8, 14)
        made.append(blocks.flatten(1).to(device.torch_device))
    return made


def _exact_to(kind: _Kind, way: _Way, device: Device) -> int:
    """Looked for among the powers of two and their successors."""
    picks = torch.eye(32, dtype=torch.float64)
    for n in (m for power in range(1, 64) for m in (1 << power, (1 << power) + 1)):
        values = torch.tensor([[1.0, float(n - 1), float(n)]], dtype=torch.float64).repeat(32, 1)
        y_MN = way.make(*_at_scale_one(kind, device, values, picks))().double().cpu()
        if not bool(y_MN.isfinite().all()) or [int(v) for v in y_MN[0, :3].tolist()] != [1, n - 1, n]:
            return n - 1
    raise AssertionError("no format here has more than 53 bits")


def _sums_exact(kind: _Kind, way: _Way, device: Device) -> bool:
    a_MK, b_NK = (
        torch.randint(-1, 2, (32, 112), generator=keyed_generator(seed), dtype=torch.float64) for seed in (7, 8)
    )
    y_MN = way.make(*_at_scale_one(kind, device, a_MK, b_NK))()
    return torch.equal(y_MN.double().cpu(), a_MK @ b_NK.t())
