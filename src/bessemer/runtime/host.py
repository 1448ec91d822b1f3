"""This host's processor, read without torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["cpu_model", "status_bytes", "usable_cores"]


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system gives it, e.g. "AMD EPYC 9654"."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def status_bytes(field: str) -> int:
    """A size of this process from /proc/self/status in bytes (VmRSS: resident now, VmHWM: its peak).

    OSError where the system has no such file or field.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
