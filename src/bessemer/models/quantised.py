"""What a projection keeps beside its weight where a recipe quantises its products.

Legend: P logical tensors packed in a weight, H steps of history; three roles x, weight, grad.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bessemer.models.split import Split
from bessemer.ops.linear import How
from bessemer.precision import (
    ROLES,
    Numerics,
    QuantProducts,
    advance,
    channel_scales,
    keyed_generator,
    reference_amax,
)
from bessemer.precision.watch import TensorWatch

__all__ = ["Quantised"]


class Quantised(nn.Module):
    """Makes the products of a projection's calls, and keeps the states of delayed recipes (others have none).

    names: of the logical tensors in the weight's rows, in order; sizes: how many rows each has on this rank; smooth:
    the input is divided by a power of two per channel (Smooth-SwiGLU), found anew in each call; falls_back: it
    may go on without quantising (`models.watched`), and then is `fallen`. `watch`: counts, on sampled steps.
    Buffers: `history` float32 [P, 3, H], the newest first; `seen` float32 [P, 3], the amaxes of the step so far. Within
    a step the history doesn't change, so that recomputing and putting off give the same bits. `trouble` float32 [P, 2]
    of one that may fall back: samples in a row with trouble, and the step after which it fell back or 0.
    """

    history: Tensor
    seen: Tensor
    trouble: Tensor

    def __init__(
        self,
        numerics: Numerics,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        device: torch.device,
        *,
        smooth: bool = False,
        falls_back: bool = False,
    ) -> None:
        super().__init__()
        self.numerics, self.names, self.sizes, self.smooth = numerics, names, sizes, smooth
        self.watch: TensorWatch | None = None
        self.falls_back, self.fallen = falls_back, False
        self.past: Tensor | None = None
        self.known = False
        self.key: tuple[int, ...] = ()
        """What the draws of stochastic rounding depend on beside the name: seed, step, micro-batch."""
        self.device = device
        if falls_back:
            self.register_buffer("trouble", torch.zeros(len(names), 2, device=device))
        if numerics.delayed:
            self.register_buffer("history", torch.zeros(len(names), 3, numerics.history, device=device))
            self.register_buffer("seen", torch.zeros(len(names), 3, device=device))

    def refresh(self) -> Tensor:
        """After the history has changed: what the next step scales by, float32 [P, 3]. `known` is the caller's to set:
        whether none of it is 0."""
        roles = [reference_amax(past, self.numerics.choice, self.numerics.margin) for past in self.history]
        self.past = torch.stack(roles)
        if self.smooth:  # the weight is multiplied by channels that change from call to call: its own amax counts
            self.past[:, ROLES.index("weight")] = 0
        return self.past

    def advance(self, seen: Tensor) -> None:
        """At the commit of a step: seen float32 [P, 3] over all ranks."""
        self.history.copy_(torch.stack([advance(h, s) for h, s in zip(self.history, seen, strict=True)]))

    def products(self, x: Tensor, dtype: torch.dtype, split: Split) -> How:
        """Of one call with input x [..., I]. Without gradients, as in an evaluation, nothing is noted. Each rank draws
        for itself what its gradients are rounded by, in the call's own generator: so recomputing changes no draw."""
        if self.fallen:
            return dtype
        ranks = split.sequence
        noted = self.numerics.delayed and torch.is_grad_enabled()
        generator = None
        if self.numerics.stochastic and torch.is_grad_enabled() and self.device.type != "meta":
            generator = keyed_generator(*self.key, self.names[0], ranks.rank, device=self.device)
        return QuantProducts(
            self.numerics,
            dtype,
            self.sizes,
            self.past,
            self.known,
            seen=self.seen if noted else None,
            generator=generator,
            reduce=None if ranks.degree == 1 else ranks.largest,
            channels=self._channels(x, split) if self.smooth else None,
            watch=self.watch if torch.is_grad_enabled() else None,
        )

    def _channels(self, x: Tensor, split: Split) -> Tensor:
        """Of all tokens of the micro-batch: ranks of tensor parallelism hold all of them, each of its own channels."""
        return channel_scales(x, None if split.context.degree == 1 else split.context.largest)
