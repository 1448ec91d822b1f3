"""The device of a rank behind one small interface: `pick_device("cpu" | "cuda" | "musa")`.

`musa` is Moore Threads' GPU through torch_musa, which adds a module `torch.musa` with the interface of `torch.cuda`;
both GPU kinds share one class here. Neither has been run on a machine of this project yet: the CPU has.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Protocol

import torch

from bessemer.core.errors import RequestError
from bessemer.core.units import counted
from bessemer.runtime.host import cpu_model, status_bytes

__all__ = ["Cpu", "Device", "Gpu", "available_kinds", "pick_device"]


class Device(Protocol):
    """What a step loop needs of a device. One object serves one rank."""

    kind: str  # "cpu", "cuda" or "musa": torch's device type
    backend: str  # of torch.distributed: "gloo", "nccl", "mccl"
    torch_device: torch.device

    @property
    def name(self) -> str:
        """The vendor's name of the device."""

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether matrix products in `dtype` run on the device; not whether they are fast."""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    def set_threads(self, count: int) -> None:
        """Threads of this process for work on the CPU. ValueError below 1."""

    def memory_in_use(self) -> int:
        """Bytes that this process holds on the device: allocated tensors, on the CPU the resident set."""

    def peak_memory(self) -> int:
        """The most bytes that this process has held so far."""

    def seed(self, seed: int) -> None:
        """Seed torch's default generators of the CPU and of this device."""


class _Threads:
    def set_threads(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads = {count}: at least 1")
        torch.set_num_threads(count)


class Cpu(_Threads):
    """This computer's processor, shared by all its ranks."""

    kind = "cpu"
    backend = "gloo"
    torch_device = torch.device("cpu")

    @property
    def name(self) -> str:
        return cpu_model()

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def synchronize(self) -> None:
        """Nothing to wait for: work on the CPU is done when its call returns."""

    def memory_in_use(self) -> int:
        return status_bytes("VmRSS")

    def peak_memory(self) -> int:
        return status_bytes("VmHWM")

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


class Gpu(_Threads):
    """One GPU, through `torch.cuda` or torch_musa's `torch.musa`."""

    def __init__(self, kind: str, local_rank: int = 0) -> None:
        self.kind = kind
        self.backend = {"cuda": "nccl", "musa": "mccl"}[kind]
        self._module = _gpu_module(kind)
        count = self._module.device_count()
        if local_rank >= count:
            raise RequestError(
                f"local rank {local_rank} has no device of its own: this host shows {count} of kind {kind!r}",
                code="device-count",
                fix=f"start at most {counted(count, 'rank')} on this host, or show it more devices",
            )
        self.torch_device = torch.device(kind, local_rank)
        self._module.set_device(self.torch_device)

    @property
    def name(self) -> str:
        return str(self._module.get_device_name(self.torch_device))

    def supports(self, dtype: torch.dtype) -> bool:
        if dtype == torch.bfloat16:
            return bool(self._module.is_bf16_supported())
        return dtype in (torch.float32, torch.float16, torch.float64)

    def synchronize(self) -> None:
        self._module.synchronize(self.torch_device)

    def memory_in_use(self) -> int:
        return int(self._module.memory_allocated(self.torch_device))

    def peak_memory(self) -> int:
        return int(self._module.max_memory_allocated(self.torch_device))

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._module.manual_seed(seed)


def available_kinds() -> tuple[str, ...]:
    """The kinds of device that torch can use on this host, the fastest first; always ends with "cpu"."""
    found = []
    for kind in ("cuda", "musa"):
        if kind == "musa" and importlib.util.find_spec("torch_musa") is None:
            continue
        if _gpu_module(kind).is_available():
            found.append(kind)
    return (*found, "cpu")


def pick_device(kind: str, local_rank: int = 0) -> Device:
    """The device of kind "cpu", "cuda" or "musa" for the rank `local_rank` of this host.

    RequestError `device-missing` where torch can't use that kind here: another kind is never taken in its place.
    """
    usable = available_kinds()
    if kind not in usable:
        raise RequestError(
            f"the machine of this job is of kind {kind!r}, which torch {torch.__version__} can't use on this host",
            code="device-missing",
            fix=f"a machine of kind {' or '.join(usable)} (machine.name), or a torch built for {kind!r}",
        )
    return Cpu() if kind == "cpu" else Gpu(kind, local_rank)


def _gpu_module(kind: str) -> ModuleType:
    if kind == "musa":
        import torch_musa  # noqa: F401  registers torch.musa
    module: ModuleType = getattr(torch, kind)
    return module
