"""State of NVIDIA GPUs from the driver's management library, by ctypes: nothing is installed for it. No torch.

    read_gpus()        # [{"index": 0, "temperature_c": 41, "ecc_uncorrected": 0, "pcie_width": 16, ...}], [] without it

Functions and constants are those of NVIDIA's NVML API reference. What a device doesn't support is absent. It was never
run on a GPU of this project; tests call it through a library in its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["SLOWDOWNS", "open_library", "read_gpus"]

_LIBRARY = "libnvidia-ml.so.1"
_GPU_IS_LOST = 15
_SUCCESS, _GPU_SENSOR, _UNCORRECTED, _VOLATILE = 0, 0, 1, 0
_MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""nvmlClocksEventReasons that speak of heat or power; a power cap (0x04) is usual under load."""


def open_library() -> Any:
    """The driver's library, or None where there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def read_gpus(library: Any = None) -> list[dict[str, int]]:
    """One dictionary a GPU of this host, in NVML's order. [] without the library or where it fails to start."""
    library = library or open_library()
    if library is None or library.nvmlInit_v2() != _SUCCESS:
        return []
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [_gpu(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> dict[str, int]:
    handle = ctypes.c_void_p()
    code = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    if code != _SUCCESS:  # most often this process may not use it: it is another job's
        return {"index": index, "lost": 1} if code == _GPU_IS_LOST else {"index": index}
    found = {"index": index}
    asked: dict[str, tuple[Callable[..., int], tuple[int, ...], type[Any]]] = {
        "temperature_c": (library.nvmlDeviceGetTemperature, (_GPU_SENSOR,), ctypes.c_uint),
        "ecc_uncorrected": (library.nvmlDeviceGetTotalEccErrors, (_UNCORRECTED, _VOLATILE), ctypes.c_ulonglong),
        "slowdowns": (library.nvmlDeviceGetCurrentClocksThrottleReasons, (), ctypes.c_ulonglong),
        "pcie_generation": (library.nvmlDeviceGetCurrPcieLinkGeneration, (), ctypes.c_uint),
        "most_pcie_generation": (library.nvmlDeviceGetMaxPcieLinkGeneration, (), ctypes.c_uint),
        "pcie_width": (library.nvmlDeviceGetCurrPcieLinkWidth, (), ctypes.c_uint),
        "most_pcie_width": (library.nvmlDeviceGetMaxPcieLinkWidth, (), ctypes.c_uint),
    }
    for name, (function, arguments, kind) in asked.items():
        value = kind()
        if function(handle, *arguments, ctypes.byref(value)) == _SUCCESS:
            found[name] = int(value.value)
    pending = _remapped(library, handle)
    return {**found, **pending, **_nvlinks(library, handle)}


def _remapped(library: Any, handle: ctypes.c_void_p) -> dict[str, int]:
    """Rows of memory that were replaced: how many for uncorrectable errors, whether a reset is needed, whether one
    could not be replaced."""
    corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
    outs = [ctypes.byref(value) for value in (corrected, uncorrected, pending, failed)]
    if library.nvmlDeviceGetRemappedRows(handle, *outs) != _SUCCESS:
        return {}
    return {"rows_remapped": uncorrected.value, "remap_pending": pending.value, "remap_failed": failed.value}


def _nvlinks(library: Any, handle: ctypes.c_void_p) -> dict[str, int]:
    states = []
    for link in range(_MAX_NVLINKS):
        value = ctypes.c_uint()
        if library.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(value)) == _SUCCESS:
            states.append(value.value)
    return {"nvlinks_up": sum(states), "nvlinks": len(states)} if states else {}
