"""Compiles and loads the CPU kernels of `csrc/`: plain C++17 behind ctypes.

They are compiled once for this machine's instruction set and kept in the user's cache under a name made of the
sources, the flags, the compiler and the processor, so that a changed source or another machine never meets an old
file. Several processes may compile at once: each writes aside and renames. Without a compiler `library()` is None,
`why_absent()` says why, and the operators take their torch path.

The object isn't linked with an OpenMP library: its symbols are those of the one that torch has loaded, so that both
share one thread pool instead of two that fight for the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["fallback_reason", "kernels", "library", "threads", "why_absent"]

_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "add_norm": (_P, _I, _P, _I, _P, _P, _P, _I, _P, _L, _I, _F, _I),
    "add_norm_backward": (_P, _I, _P, _P, _I, _P, _P, _P, _P, _I, _P, _L, _I, _I),
    "split_heads": (_P, _I, _P, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _F, _I),
    "split_heads_backward": (_P, _P, _P, _I, _P, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I),
    "swiglu": (_P, _P, _I, _L, _I, _I),
    "swiglu_backward": (_P, _P, _P, _I, _L, _I, _I),
    "cross_entropy": (_P, _I, _P, _P, _P, _L, _I, _I, _I),
    "attend": (_P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _F, _I),
    "tile_amax": (_P, _I, _P, _L, _L, _L, _L, _I),
    "encode_tiles": (_P, _I, _P, _P, _P, _I, _L, _L, _L, _L, _I),
    "decode_tiles": (_P, _P, _P, _I, _L, _L, _L, _L, _I),
    "attend_backward": (_P, _P, _P, _P, _P, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I, _I, _F, _I),
}

_loaded: ctypes.CDLL | None = None
_tried = False
_why = ""


def library() -> ctypes.CDLL | None:
    """The compiled kernels (`bessemer_<name>`), compiling them on the first call; None where that isn't possible."""
    global _loaded, _tried, _why
    if not _tried:
        _tried = True
        try:
            _loaded = _load(_build())
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            _why = _reason(error)
    return _loaded


class _Shapes:
    """Stands in for the kernels on the meta device: a tensor there has a shape, and nothing to compute."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object) -> None:
    pass


def kernels(x: Tensor) -> Any:
    """`library()` for an operator that has been chosen for `x`; on the meta device it runs too, with no effect, so
    that what it saves and allocates can be counted."""
    return _Shapes() if x.device.type == "meta" else library()


def why_absent() -> str:
    """Why the native kernels are not in use in this process; empty when they are."""
    library()
    return _why


def fallback_reason() -> str:
    """`why_absent()` in one line, for an event or a warning; empty when the native kernels are in use."""
    return " ".join(why_absent().split())


def threads() -> int:
    """Threads a kernel may use: what torch uses itself."""
    return torch.get_num_threads()


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"the compiler failed: {error.stderr.strip()[-400:]}"
    return f"{type(error).__name__}: {error}"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise OSError("no C++ compiler found (g++, clang++ or $CXX); Debian: apt-get install g++")


def _processor() -> str:
    """What -march=native depends on: the model and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))


def _build() -> Path:
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.cpp")):
        digest.update(source.read_bytes())
    for text in (version, *_FLAGS, _processor(), torch.__version__):
        digest.update(text.encode())
    target = _folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "bessemer" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        objects, shared = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        source = str(_SOURCES / "kernels.cpp")
        for command in (
            [compiler, *_FLAGS, "-c", source, "-o", str(objects)],
            [compiler, "-shared", str(objects), "-o", str(shared)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        os.replace(shared, target)


def _load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, f"bessemer_{name}")
        function.argtypes = arguments
        function.restype = None
    return found
