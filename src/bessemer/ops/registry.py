"""Which implementation of each operator runs: a reference in plain torch, or a native CPU kernel.

    with ops.use("reference"): ...      # tests and comparisons
    ops.paths()                         # {"add_norm": "native", ...}: what this process would take on the CPU

The native kernels are taken for CPU tensors whenever they could be compiled, and on the meta device, where they only
make shapes; everything else (a GPU, tensor subclasses, a block that torch.compile traces) takes the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from bessemer.ops import native
from bessemer.ops.tracing import traced

__all__ = ["Path", "native_fits", "paths", "register", "use"]

Path = Literal["auto", "reference", "native"]

_wanted: Path = "auto"
_has_native: dict[str, bool] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "meta")
_TYPES = (torch.float32, torch.bfloat16)


def register(
    name: str,
    *,
    reference: Callable[..., Any],
    native: Callable[..., Any] | None = None,
    fits: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """The operator `name`, whose first argument is a tensor: calls `native` where it is wanted, compiled (or not
    needed) and `fits(*args)`, else `reference`."""
    _has_native[name] = native is not None

    def operator(*args: Any, **kwargs: Any) -> Any:
        if native is not None and fits is not None and _native_on(args[0]) and fits(*args, **kwargs):
            return native(*args, **kwargs)
        if _wanted == "native":
            raise RuntimeError(f"operator {name} has no native kernel for these arguments")
        return reference(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = reference.__doc__
    return operator


def native_fits(*tensors: torch.Tensor | None) -> bool:
    """Whether every tensor given is a plain CPU or meta tensor in a type that the kernels read (None is left out)."""
    return all(type(t) in _PLAIN and t.device.type in _DEVICES and t.dtype in _TYPES for t in tensors if t is not None)


def _native_on(x: torch.Tensor | None = None) -> bool:
    """`x`: the meta device needs no compiled kernels to tell what they would make."""
    if _wanted == "reference" or traced():
        return False
    return (x is not None and x.device.type == "meta") or native.library() is not None


@contextmanager
def use(path: Path) -> Iterator[None]:
    """Takes only that path inside the block: "reference", or "native" (an operator without one then raises)."""
    global _wanted
    before, _wanted = _wanted, path
    try:
        yield
    finally:
        _wanted = before


def paths() -> dict[str, str]:
    """Per operator what a CPU tensor would take now: "native" or "reference"."""
    return {n: "native" if has and _native_on() else "reference" for n, has in sorted(_has_native.items())}
