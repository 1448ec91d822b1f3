"""FLOPs by path and seconds inside the matrix kernels of a sampled step.

    with KernelSample(device) as sample:
        loss.backward()                    # forward, backward, custom autograd functions: all are seen
    sample.flops                           # {"bf16": 1.2e12, "fp32": 3.0e9}
    sample.kernel_s                        # 2.1

A path is the data type of the operands as they are multiplied, named as in `core.machine.DTYPES`. Counted are matrix
products and attention; everything else is memory-bound and belongs to node efficiency. A kernel that doesn't go through
torch's dispatcher (called through ctypes) is counted where its caller says so with `native_kernel`. Of a compiled graph
the calls of torch's operators are seen, products and attention among them; what the compiler wrote itself isn't.

What is counted, so that the sum agrees with three times the forward FLOPs of `core.counts`:
* a product [m, k] @ [k, n] has 2 m k n FLOPs;
* attention has two products over the visible (query, key) pairs. A causal or masked call over S = S_q = S_k
  positions counts as causal, S(S+1)/2 pairs, whatever the mask hides besides; otherwise S_q S_k pairs. A native
  kernel that skips what packed documents or a window hide says how many pairs are seen;
* its backward pass counts as twice the forward: the scores that the kernel computes again are not counted.
  Attention that torch splits into plain products (no fused kernel) counts as those: all S_q S_k pairs.

Products inside an optimizer (Muon) are no model FLOPs; put the sample around forward and backward only where that
matters. Nothing is seen under `torch.inference_mode`, where torch doesn't split `linear` into products.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.runtime.tracing import LAUNCHES, launched

__all__ = ["KernelSample", "KernelTotal", "attention_flops", "native_kernel", "path_of"]

_aten = torch.ops.aten

_PRODUCTS: dict[Any, tuple[str, str]] = {
    _aten.mm: ("self", "mat2"),
    _aten.addmm: ("mat1", "mat2"),
    _aten.addmm_: ("mat1", "mat2"),
    _aten.bmm: ("self", "mat2"),
    _aten.baddbmm: ("batch1", "batch2"),
    _aten.baddbmm_: ("batch1", "batch2"),
    _aten._scaled_mm: ("self", "mat2"),
    _aten._scaled_mm_v2: ("self", "mat2"),
    _aten._grouped_mm: ("self", "mat2"),  # each row meets one expert's matrix
}
"""Matrix products, and the names of their two factors in the operator's schema."""

_ATTENTION: dict[Any, int] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 2,
    _aten._scaled_dot_product_flash_attention: 1,
    _aten._scaled_dot_product_flash_attention_backward: 2,
    _aten._scaled_dot_product_efficient_attention: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 2,
    _aten._scaled_dot_product_cudnn_attention: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 2,
    _aten._scaled_dot_product_fused_attention_overrideable: 1,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: 2,
}
"""Fused attention, and its FLOPs in multiples of the forward pass."""

_PATHS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


@dataclass
class KernelTotal:
    """All calls of one operator on one path within a sample."""

    calls: int = 0
    flops: float = 0.0
    seconds: float = 0.0


class KernelSample(TorchDispatchMode):
    """Counts and times the matrix kernels of this process between enter and exit; may be entered again to add up.

    `clock` (seconds, monotonic) is for tests; it times kernels on the CPU, where a call returns when its work is
    done. On a GPU events of the device are used, read once at exit.
    """

    def __init__(self, device: torch.device | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._timer: _Timer = _HostTimer(clock) if device is None or device.type == "cpu" else _EventTimer(device)
        self.totals: dict[tuple[str, str], KernelTotal] = {}  # by (operator, path)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled graph runs as it does without a sample, and the products and attention that it calls are seen."""
        return True

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs by path."""
        found: dict[str, float] = {}
        for (_, path), total in self.totals.items():
            found[path] = found.get(path, 0.0) + total.flops
        return found

    @property
    def kernel_s(self) -> float:
        """Seconds inside the counted kernels. On a GPU known after exit."""
        return sum(total.seconds for total in self.totals.values())

    def __enter__(self) -> Self:
        super().__enter__()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.remove(self)
        super().__exit__(kind, error, trace)
        self._timer.finish()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a DTensor: it calls the local operators next, which are counted then
        packet = func.overloadpacket
        if packet in _PRODUCTS:
            path, flops = _product(func, args, kwargs or {})
        elif packet in _ATTENTION:
            path, flops = _attention(func, args, kwargs or {})
        else:
            return func(*args, **(kwargs or {}))
        with self.kernel(packet.__name__, path, flops):
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def kernel(self, name: str, path: str, flops: float) -> Iterator[None]:
        """Counts `flops` on `path` for the operator `name`, and times the body as a kernel."""
        total = self.totals.setdefault((name, path), KernelTotal())
        total.calls += 1
        total.flops += flops
        self._timer.start()
        try:
            yield
        finally:
            self._timer.stop(total)


_active: list[KernelSample] = []
"""The samples that are running in this process, innermost last; autograd's threads see them too."""


def native_kernel(name: str, dtype: torch.dtype, flops: Callable[[], float]) -> AbstractContextManager[None]:
    """For a kernel that torch doesn't dispatch: counts and times the body when a step is being sampled.

    dtype: in which it multiplies, whatever its inputs are stored in.
    `flops` is only called then; without a sample this costs well under a microsecond.
    """
    counted = _active[-1].kernel(name, path_of(dtype, "cpu"), flops()) if _active else _nothing
    return launched(name, counted) if LAUNCHES else counted


_nothing = contextlib.nullcontext()


class _Timer(Protocol):
    def start(self) -> None: ...

    def stop(self, total: KernelTotal) -> None: ...

    def finish(self) -> None: ...


class _HostTimer:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def stop(self, total: KernelTotal) -> None:
        total.seconds += self._clock() - self._since

    def finish(self) -> None:
        """Nothing is pending on a CPU."""


class _EventTimer:
    """Pairs of device events around each kernel, read after one wait at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: torch.Event | None = None
        self._pairs: list[tuple[KernelTotal, torch.Event, torch.Event]] = []

    def start(self) -> None:
        self._begin = self._mark()

    def stop(self, total: KernelTotal) -> None:
        assert self._begin is not None
        self._pairs.append((total, self._begin, self._mark()))

    def finish(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)
        for total, begin, end in self._pairs:
            total.seconds += begin.elapsed_time(end) / 1e3
        self._pairs.clear()

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def path_of(dtype: torch.dtype, device_type: str) -> str:
    """The path of a product with operands of `dtype`, named as in `core.machine.DTYPES`; KeyError for others.

    On a GPU, float32 products are "tf32" where torch may use it (`torch.set_float32_matmul_precision`).
    """
    if dtype == torch.float32 and device_type != "cpu" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return _PATHS[dtype]


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, causal: bool) -> float:
    """FLOPs of one forward pass of attention over q_BHSD, k_BHSD, v_BHSD; grouped keys are read once a query head.

    2 FLOPs times visible pairs times (head size of q and k + head size of v), for each query head.
    """
    batch, heads, positions, size = query
    keys = key[-2]
    pairs = positions * (positions + 1) / 2 if causal and positions == keys else positions * keys
    return 2.0 * batch * heads * pairs * (size + value[-1])


def _product(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, float]:
    bound = _bind(func, args, kwargs)
    left, right = (bound[name] for name in _PRODUCTS[func.overloadpacket])
    flops = 2.0 * left.numel() * right.shape[-1]  # [.., m, k] @ [.., k, n]
    return path_of(left.dtype, left.device.type), flops


def _attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, float]:
    bound = _bind(func, args, kwargs)
    query, key, value = bound["query"], bound["key"], bound["value"]
    masked = any(bound.get(name) is not None for name in ("attn_mask", "attn_bias"))
    flops = attention_flops(query.shape, key.shape, value.shape, causal=masked or bool(bound.get("is_causal")))
    return path_of(query.dtype, query.device.type), flops * _ATTENTION[func.overloadpacket]


def _bind(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments by their names in the operator's schema; those left at their defaults are absent."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
