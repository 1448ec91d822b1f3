"""Which element of a result is bad, and which element of an operator's inputs made it so.

The second is found by trying, for any operator: with all elements of an input replaced by 1 the result is good; then,
with its own elements put back from the most suspicious one on (bad ones, then by size), there is a first one with
which it is bad again. That element is named. Some 25 runs for an input of a million elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bessemer.runtime.first_bad import bad_elements

__all__ = ["Element", "cause_of", "first_bad_element"]

Again = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""Runs the operator with these inputs in the place of its own; its outputs."""


@dataclass(frozen=True)
class Element:
    """An element of the tensor `name`, in the order of an operator's outputs or by the name of an input."""

    name: str
    index: tuple[int, ...]
    value: float

    def __str__(self) -> str:
        return f"{self.name}{list(self.index) if self.index else ''} = {self.value:g}"


def first_bad_element(tensors: Mapping[str, Tensor]) -> Element | None:
    """The first element that is NaN or infinite, in the order of the tensors and of their rows."""
    for name, tensor in tensors.items():
        bad = bad_elements(tensor)
        if bool(bad.any()):
            at = int(bad.flatten().int().argmax())
            return element_at(name, tensor, at)
    return None


def element_at(name: str, tensor: Tensor, at: int) -> Element:
    """The element at place `at` of the flattened tensor."""
    index = torch.unravel_index(torch.tensor(at), tensor.shape)
    return Element(name, tuple(int(i) for i in index), float(tensor.flatten()[at]))


def cause_of(again: Again, inputs: Mapping[str, Tensor], output: int, index: tuple[int, ...]) -> Element | None:
    """The element of a floating-point input without which element `index` of output `output` would be good.

    Where inputs share the blame, as the factors of a product that overflows, the one whose element is further from the
    usual size of its tensor. None where no input alone tells.
    """

    def is_bad(name: str, values: Tensor) -> bool:
        outputs = again({**inputs, name: values})
        return bool(bad_elements(outputs[output])[index])

    found: list[tuple[float, Element]] = []
    for name, own in inputs.items():
        if not own.is_floating_point() or not own.numel():
            continue
        try:
            if is_bad(name, torch.ones_like(own)) or not is_bad(name, own):
                continue
            cause = element_at(name, own, _first_needed(partial(is_bad, name), own))
        except RuntimeError:  # an operator may not take other values
            continue
        found.append((_strangeness(own, cause.value), cause))
    return max(found, key=lambda pair: pair[0], default=(0.0, None))[1]


def _strangeness(tensor: Tensor, value: float) -> float:
    """How many powers of e an element is from the usual size of its tensor's; infinite for a bad one, or a zero."""
    if not math.isfinite(value) or value == 0:
        return math.inf
    usual = float(tensor.float().abs().nan_to_num(0.0, 0.0, 0.0).median())
    return abs(math.log(abs(value) / usual)) if usual > 0 else math.inf


def _first_needed(is_bad: Callable[[Tensor], bool], own: Tensor) -> int:
    """The place of the element at which, put back one after the other, the result turns bad."""
    flat = own.flatten()
    size = flat.float().abs().nan_to_num(torch.inf, torch.inf, torch.inf)
    order = size.argsort(descending=True, stable=True)
    low, high = 0, len(order)  # good with the first `low` put back, bad with the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        values = torch.ones_like(flat)
        values[order[:middle]] = flat[order[:middle]]
        low, high = (low, middle) if is_bad(values.view_as(own)) else (middle, high)
    return int(order[high - 1])
