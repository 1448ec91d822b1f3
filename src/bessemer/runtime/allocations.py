"""Which tensors a piece of code leaves behind, and how many bytes were alive at its worst moment.

    with AllocationSample() as sample:
        loss = model(batch)
    sample.alive_bytes()       # of all storages that were made inside and still exist

Counted are storages, each once however many views it has. What was made before the sample isn't seen; a storage that
was made inside is counted until it is freed, also after the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["AllocationSample"]


class AllocationSample(TorchDispatchMode):
    """Sees what torch's operators return, so also the buffers of kernels that torch doesn't dispatch. May be entered
    again to go on; `peak_bytes` is the most that was alive after any operator since the start or `restart`.

    meta: count tensors on the meta device, which stand for real ones in a dry run, and only these; otherwise they are
    left out.
    """

    def __init__(self, *, meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meta = meta
        self._alive = 0
        # by storage: keeps it from being taken for another one at the same place, and tells when it goes
        self._known: dict[int, weakref.ref[Any]] = {}
        self.peak_bytes = 0

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Leave out the storages of tensors that were made before: a view of one is no allocation."""
        for tensor in tensors:
            self._note(tensor, made=False)

    def alive_bytes(self) -> int:
        """Bytes of all storages that still exist."""
        return self._alive

    def restart(self) -> int:
        """Bytes alive now, from which the peak is looked for anew."""
        self.peak_bytes = self._alive
        return self._alive

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, made=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._note(tensor, made=True)
        self.peak_bytes = max(self.peak_bytes, self._alive)
        return out

    def _note(self, tensor: Any, *, made: bool) -> None:
        """An argument that wasn't made inside is older than the sample."""
        if not isinstance(tensor, torch.Tensor) or (tensor.device.type == "meta") != self._meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if made else 0
        self._alive += size

        def gone(_: object) -> None:
            self._alive -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
