"""What operators do differently while torch.compile traces them: no native kernel, which it can't look into, and the
compiler decides what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["made_again", "traced"]

T = TypeVar("T")


def traced() -> bool:
    """Whether torch.compile is tracing the caller."""
    return torch.compiler.is_compiling()


def made_again(run: Callable[..., T], *inputs: Any) -> T:
    """run(*inputs), something cheap that a compiled backward pass is to make again from its inputs.

    By itself the compiler keeps the smaller of the two: of each weight its copy in the type of the products, which then
    lives from forward to backward beside the master weight, or in the place of what FSDP frees.
    """
    if not traced():
        return run(*inputs)
    made: T = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return made
