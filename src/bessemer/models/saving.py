"""What a block keeps from its forward pass for its backward pass.

A block is made of parts (`core.recompute.PARTS`), each a function of its inputs. It calls them through `Saving`, so
that what they save and return can be dropped and made again; the recompute of `bessemer.parallel` derives from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["Saving"]

T = TypeVar("T")


class Saving:
    """Keeps all that autograd saves.

    Whatever may be made again is made by the same call in the backward pass: so it depends on its inputs, on
    parameters and on nothing else that changes in between. Ranks call the parts of a layer alike, since one may hold
    exchanges.
    """

    def layer(self, layer: int) -> AbstractContextManager[None]:
        """Around the forward pass of the block of a layer."""
        del layer
        return nullcontext()

    def again(self, name: str) -> bool:
        """Whether the part is made again in the layer that runs. Inside of a part that is, none is by itself."""
        del name
        return False

    def keeps(self, tensor: Tensor) -> bool:
        """Whether a node that saves `tensor` adds to what is kept: it isn't had again from a part."""
        del tensor
        return True

    def part(self, name: str, run: Callable[..., T], *inputs: Any) -> T:
        """run(*inputs), a tensor or a tuple of them: the part `name`."""
        del name
        return run(*inputs)

    def made(self, name: str, tensor: Tensor, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """`tensor`, which has no history and is what run(*inputs) returns: as a part whose first run is over."""
        del name, run, inputs
        return tensor
