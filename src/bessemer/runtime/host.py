"""This host's processor, read without torch."""

from __future__ import annotations

import os
import platform
import zlib
from pathlib import Path

__all__ = ["cpu_identity", "cpu_model", "status_bytes", "usable_cores"]

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_PARTS = ("cpu family", "model", "stepping", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
_ARITHMETIC = ("sse", "ssse", "avx", "amx", "fma", "f16c", "fp", "asimd", "sve", "sme", "i8mm", "bf16")
"""How the names of instruction sets for numbers begin. Which others a kernel lists depends on its version."""


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system gives it, e.g. "AMD EPYC 9654"."""
    return " ".join(_first_cpu(_CPUINFO).get("model name", "").split()) or platform.processor() or platform.machine()


def cpu_identity(cpuinfo: Path = _CPUINFO, caches: Path = _CACHES) -> str:
    """What tells processors of one name apart that may add in another order: family, model and stepping, a checksum of
    the instruction sets for numbers, the caches that libraries cut products by. Virtual machines often share a name."""
    first = _first_cpu(cpuinfo)
    parts = "/".join(first[name] for name in _PARTS if name in first)
    flags = (first.get("flags") or first.get("Features") or "").split()
    numeric = " ".join(sorted(flag for flag in set(flags) if flag.startswith(_ARITHMETIC)))
    sizes = []
    for index in sorted(caches.glob("index*")):
        try:
            kind, size = ((index / name).read_text().strip() for name in ("type", "size"))
        except OSError:
            continue
        sizes += [size] * (kind != "Instruction")
    return f"{parts or platform.machine()} {zlib.crc32(numeric.encode()):08x} {'/'.join(sizes) or 'no caches'}"


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    """The lines of the first processor there."""
    if not cpuinfo.is_file():
        return {}
    text = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def status_bytes(field: str) -> int:
    """A size of this process from /proc/self/status in bytes (VmRSS: resident now, VmHWM: its peak).

    OSError where the system has no such file or field.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
