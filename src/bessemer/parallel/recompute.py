"""Recompute: parts of a block are dropped after the forward pass and made again where the backward pass needs them.

    applied = apply_recompute(module, job)      # once, any time before the first forward pass
    print(applied)                              # what is made again, what it saves and costs

A part is a function of its inputs (`core.recompute.PARTS`), which the model calls through `Saving.part`. Autograd hands
every tensor that a node saves to a pack hook. Inside of a part the hook keeps a numbered, empty slot instead of the
tensor; behind it, where another node saves what the part returned, a slot for that output. Inputs are what stays: a
tensor that is kept anyway, or a slot of another part. The first slot that the backward pass opens runs the part once
more on its inputs and fills all slots that are still waiting; a slot goes with the node that holds it. The graph of the
second run is dropped at once: gradients flow through the nodes of the first, so that each acts once.

So a chain of parts, norm to projection to attention and so on, is made again from the block's input alone, and what
the last product of a dense block gives is never made again, since nothing needs it.

Exchanges inside of a part are made again with it. Every rank opens its slots in the same order, because all ranks of a
group run the same nodes; so they meet again in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from bessemer.core.job import Job
from bessemer.core.saved import kept_parts
from bessemer.models.decoder import Decoder
from bessemer.models.saving import Saving
from bessemer.parallel.recompute_budget import Applied, applied_recompute, rank_sizes

__all__ = ["Recomputing", "apply_recompute"]

T = TypeVar("T")


class _Slot:
    """A tensor that is to be made again. What autograd holds of it; `_Part` has weak references only."""

    __slots__ = ("__weakref__", "_part", "value")

    def __init__(self, part: _Part) -> None:
        self._part: _Part | None = part
        self.value: Tensor | None = None

    def open(self) -> Tensor:
        if self.value is None:
            assert self._part is not None
            self._part.run_again()
        self._part = None
        assert self.value is not None
        return self.value


class _View(NamedTuple):
    """A slot's tensor, or other strides over its storage; `offset` is counted from where that tensor begins."""

    slot: _Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def open(self) -> Tensor:
        value = self.slot.open()
        return value.as_strided(self.size, self.stride, value.storage_offset() + self.offset)


_Packed = Tensor | _Slot | _View


def _unpack(packed: _Packed) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.open()


class _Enough(Exception):
    """All that anybody waits for has been made."""


class _Part:
    """One call of a part, from its forward run to the second one."""

    def __init__(self, name: str, run: Callable[..., Any], inputs: list[Any], needs_grad: list[bool]) -> None:
        self.name = name
        self._run: Callable[..., Any] | None = run
        self._inputs, self._needs_grad = inputs, needs_grad
        self._saved: list[weakref.ref[_Slot] | None] = []
        self._returned: dict[int, weakref.ref[_Slot]] = {}
        self._at = 0

    def save(self, *, again: bool) -> _Slot | None:
        """A place for the next tensor that a node inside saves, and a slot if it is to be made again."""
        slot = _Slot(self) if again else None
        self._saved.append(None if slot is None else weakref.ref(slot))
        return slot

    def output(self, index: int) -> _Slot:
        """The slot of a returned tensor."""
        found = self._returned.get(index)
        slot = None if found is None else found()
        if slot is None:
            slot = _Slot(self)
            self._returned[index] = weakref.ref(slot)
        return slot

    def run_again(self) -> None:
        assert self._run is not None
        run, self._run = self._run, None
        inputs = [
            _unpack(i).detach().requires_grad_(needs) if isinstance(i, _Packed) else i
            for i, needs in zip(self._inputs, self._needs_grad, strict=True)
        ]
        self._inputs = []
        with torch.enable_grad(), saved_tensors_hooks(self._take, _never):
            try:
                outputs = _tuple(run(*inputs))
            except _Enough:
                return
        if self._at != len(self._saved):
            saved = f"{self._at} tensors where it had saved {len(self._saved)}"
            raise RuntimeError(f"the part {self.name!r} saved {saved} when it was made again")
        for index, reference in self._returned.items():
            _fill(reference, outputs[index])

    def _take(self, tensor: Tensor) -> None:
        """Fills the slot of the next saved tensor. The second run's own graph gets nothing: it is never run."""
        if self._at < len(self._saved):
            reference = self._saved[self._at]
            if reference is not None:
                _fill(reference, tensor)
        self._at += 1
        if self._at == len(self._saved) and not any(r() is not None for r in self._returned.values()):
            raise _Enough


def _fill(reference: weakref.ref[_Slot], tensor: Tensor) -> None:
    slot = reference()
    if slot is not None:
        slot.value = tensor.detach()


def _never(_packed: object) -> Tensor:
    raise AssertionError("the graph of a second run is not differentiated")


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


class _Output(NamedTuple):
    """Where a tensor comes from: an output of a part, and where that begins in its storage."""

    part: _Part
    number: int
    begin: int


class Recomputing(Saving):
    """Makes again, in each layer, the parts that it is told to. Layers are numbered as in the whole model; the blocks
    of multi-token prediction count as the last one."""

    def __init__(self, parts: Mapping[int, frozenset[str]]) -> None:
        self.parts = dict(parts)
        self._active: frozenset[str] = frozenset()
        self._outputs: dict[StorageWeakRef, _Output] = {}

    @contextmanager
    def layer(self, layer: int) -> Iterator[None]:
        parts = self.parts.get(layer, frozenset())
        if not parts or not torch.is_grad_enabled():
            yield
            return
        self._active = parts
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._active, self._outputs = frozenset(), {}

    def again(self, name: str) -> bool:
        return name in self._active

    def keeps(self, tensor: Tensor) -> bool:
        return not self._active or _storage(tensor) not in self._outputs  # a second run must get the first's answer

    def part(self, name: str, run: Callable[..., T], *inputs: Any) -> T:
        if name not in self._active:
            return run(*inputs)
        part, kept = self._begin(name, run, inputs)

        def pack(tensor: Tensor) -> _Packed:
            storage = _storage(tensor)
            parameter = tensor.is_leaf and tensor.requires_grad
            slot = part.save(again=not (parameter or storage in kept or storage in self._outputs))
            return self._pack(tensor) if slot is None else slot

        active, self._active = self._active, frozenset()  # parts inside of this one belong to it
        try:
            with saved_tensors_hooks(pack, _unpack):
                outputs = run(*inputs)
        finally:
            self._active = active
        self._end(part, kept, _tuple(outputs))
        return outputs

    def made(self, name: str, tensor: Tensor, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if name in self._active:
            part, kept = self._begin(name, run, inputs)
            self._end(part, kept, (tensor,))
        return tensor

    def _begin(self, name: str, run: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[_Part, set[StorageWeakRef]]:
        """A part, and the storages of its inputs."""
        tensors = [i for i in inputs if isinstance(i, Tensor)]
        needs_grad = [isinstance(i, Tensor) and i.requires_grad for i in inputs]
        packed = [self._pack(i) if isinstance(i, Tensor) else i for i in inputs]
        return _Part(name, run, packed, needs_grad), {_storage(t) for t in tensors}

    def _end(self, part: _Part, kept: set[StorageWeakRef], outputs: tuple[Tensor, ...]) -> None:
        """From here on the outputs of a part can be had from it. One that is a view of an input stays with that."""
        for number, output in enumerate(outputs):
            storage = _storage(output)
            if storage not in kept:
                self._outputs.setdefault(storage, _Output(part, number, _begin_of(output)))

    def _pack(self, tensor: Tensor) -> _Packed:
        """What is kept of a tensor: itself, or where it can be had from."""
        found = self._outputs.get(_storage(tensor))
        if found is None:
            return tensor.detach()  # a node that holds its own output would never be freed
        slot = found.part.output(found.number)
        return _View(slot, tensor.size(), tensor.stride(), _begin_of(tensor) - found.begin)


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Names the storage as long as it is referred to: another one can't take its place in memory before."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _begin_of(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def apply_recompute(module: Decoder, job: Job, rank: int = 0) -> Applied:
    """Have the blocks of `module`, what pipeline rank `rank` holds, made again as `train.recompute` says.

    Names and parameters stay as they are, so FSDP may have its blocks before or after. ValueError where a budget can't
    be met, which `bessemer check` finds out before.
    """
    applied = applied_recompute(job, module.spec, rank)
    if applied is None:
        raise ValueError(f"train.recompute_gb = {job.train.recompute_gb} is less than the inputs of the blocks take")
    parts = {layer: kept_parts(module.spec, layer, own, rank_sizes(job)) for layer, own in applied.parts.items()}
    if any(parts.values()):
        module.saving = Recomputing(parts)
    return applied
