"""Delayed scaling as pure functions of a history of amaxes (Transformer Engine's DelayedScaling).

The caller keeps the history (a module's buffer), reduces the amax of a step over all ranks that share the tensor or
the step, and calls `advance` once a committed step: state' = f(state, amax). A step that is redone changes nothing.
Legend: H steps of history (the newest first), R roles.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Choice", "advance", "reference_amax"]

Choice = Literal["max", "most_recent"]


def advance(history_RH: Tensor, amax_R: Tensor) -> Tensor:
    """The history after a step that saw `amax`. An amax that isn't finite never enters: the newest is repeated
    (the step itself must be refused, see `QuantLinear.refuse_non_finite`)."""
    newest = torch.where(amax_R.isfinite(), amax_R, history_RH[:, 0])
    return torch.cat((newest[:, None], history_RH[:, :-1]), 1)


def reference_amax(history_RH: Tensor, choice: Choice, margin: int = 0) -> Tensor:
    """The amax to scale by, float32 [R]: of the history, times 2^margin. 0 while the history is all zero, which
    `quantise` takes for the tensor's own amax (with scale 1, a first step would flush most gradients to zero)."""
    past = history_RH.amax(1) if choice == "max" else history_RH[:, 0]
    return past * 2.0**margin
