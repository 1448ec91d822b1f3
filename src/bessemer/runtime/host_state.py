"""What a host grants to processes, and which software it has: limits, shared memory, ports, versions. No torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Limits", "raise_open_files", "read_limits", "read_versions", "torch_versions"]

_PACKAGES = ("bessemer", "torch", "numpy", "safetensors", "triton", "torch_musa")
_DRIVERS = {
    "nvidia driver": Path("/proc/driver/nvidia/version"),
    "musa driver": Path("/proc/driver/mthreads/version"),
}
"""Where a loaded kernel module says its version; its first line counts."""

Limits = dict[str, int]
"""open_files, hard_open_files, shared_bytes (free in /dev/shm), locked_bytes, ports (that connections may leave by);
-1: no limit. What the system doesn't tell is absent."""


def read_limits() -> Limits:
    """Of this process and host."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"open_files": soft, "hard_open_files": hard}
    limits["locked_bytes"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        limits["shared_bytes"] = room.f_bavail * room.f_frsize
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        limits["ports"] = int(high) - int(low) + 1
    return limits


def raise_open_files() -> None:
    """Let this process and what it starts have as many files and connections open as the system grants: the usual soft
    limit of 1,024 is there for programs that use select(2), which nothing here does with so many. A coordinator needs
    one for each rank, and its host's agent two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # a hard limit that is above what the kernel grants by now can't be used
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_versions(more: Mapping[str, str]) -> dict[str, str]:
    """Name -> version of Python, packages, drivers and kernel; `more` is added."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "libc": " ".join(platform.libc_ver())}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name, file in _DRIVERS.items():
        with contextlib.suppress(OSError):
            found[name] = file.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    return {**found, **more}


def torch_versions() -> dict[str, str]:
    """Of the libraries that this torch was built with and finds."""
    import torch

    found = {"torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found
