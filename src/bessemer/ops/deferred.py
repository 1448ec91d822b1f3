"""Gradients of linear weights, put off: a backward pass in two halves, of which the second can fill gaps.

    with put_off_weight_gradients() as queue:
        loss = model(x)
        loss.backward()              # I: gradients of inputs, and of everything that isn't a weight or bias of `linear`
        work = queue.take()
    work.run()                       # W: the rest, into .grad

The queue in force is an object of this module and not of a thread: autograd runs backward passes for a GPU, and what
they recompute, in threads of its own. So one process puts off for one pipeline at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WeightQueue", "WeightWork", "put_off_weight_gradients", "putting_off", "weight_gradient"]


class _Item(NamedTuple):
    leaf: Tensor
    make: Callable[[], Tensor]


class WeightWork:
    """Weight gradients still to be computed, in the order in which the backward pass came to them."""

    def __init__(self, items: Iterable[_Item]) -> None:
        self._items = deque(items)

    def __len__(self) -> int:
        return len(self._items)

    def run(self) -> None:
        """Computes each and adds it to its weight's `.grad`, as autograd does.

        The operands of a gradient go as soon as it is there; running again does nothing. Hooks of a leaf run here and
        in the backward pass that put its gradient off, so they don't tell when a gradient is complete.
        """
        with torch.no_grad():
            while self._items:
                leaf, make = self._items.popleft()
                torch.autograd.backward(leaf, make())


class WeightQueue:
    """Where the backward passes under `put_off_weight_gradients` leave their work."""

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def put(self, leaf: Tensor, make: Callable[[], Tensor]) -> None:
        self._items.append(_Item(leaf, make))

    def take(self) -> WeightWork:
        """What came in since the last take."""
        taken, self._items = self._items, []
        return WeightWork(taken)


_queue: WeightQueue | None = None


@contextmanager
def put_off_weight_gradients() -> Iterator[WeightQueue]:
    """Inside, backward passes queue the gradients of `linear`'s and `grouped_linear`'s weights and biases.

    Forward passes belong inside too: there `linear` takes its own autograd function in every case, and a recomputed
    forward has to take the same path as the first one.
    """
    global _queue
    before, _queue = _queue, WeightQueue()
    try:
        yield _queue
    finally:
        _queue = before


def putting_off() -> bool:
    """Whether weight gradients are put off now."""
    return _queue is not None


def weight_gradient(leaf: Tensor, make: Callable[[], Tensor]) -> Tensor | None:
    """For the backward of an autograd function: the gradient of its input `leaf`, or None where it is put off.

    `leaf` is the very tensor that forward got (one unpacked from `saved_tensors` may be another object, whose `.grad`
    nobody reads). A tensor that was computed from parameters gets its gradient at once: the rest of its own backward
    waits for it. `make` is called once, and holds just what the gradient needs.
    """
    if _queue is None or not leaf.is_leaf:
        return make()
    _queue.put(leaf, make)
    return None
