"""Which tensors a piece of code leaves behind, and how many bytes were alive at its worst moment.

    with AllocationSample() as sample:
        loss = model(batch)
    sample.alive_bytes()       # of all storages that were made inside and still exist

Counted are storages, each once however many views it has. What was made before the sample isn't seen; a storage that
was made inside is counted until it is freed, also after the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["AllocationSample"]


class AllocationSample(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch's operators return, so also the buffers of kernels that torch doesn't dispatch. May be entered
    again to go on; `peak_bytes` is the most that was alive after any operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[StorageWeakRef, int] = {}
        self._known: set[StorageWeakRef] = set()
        self.peak_bytes = 0

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Leave out the storages of tensors that were made before: a view of one is no allocation."""
        self._known.update(map(_storage, tensors))

    def alive_bytes(self) -> int:
        """Bytes of all storages that still exist."""
        self._sizes = {s: size for s, size in self._sizes.items() if not s.expired()}  # type: ignore[no-untyped-call]
        return sum(self._sizes.values())

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
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes())
        return out

    def _note(self, tensor: Any, *, made: bool) -> None:
        """An argument that wasn't made inside is older than the sample."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return
        storage = _storage(tensor)
        if storage in self._sizes or storage in self._known:
            return
        if made:
            self._sizes[storage] = tensor.untyped_storage().nbytes()
        else:
            self._known.add(storage)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
