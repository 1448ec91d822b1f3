"""What a projection, or experts, keep beside their weights where a recipe quantises their products.

Legend: P logical tensors packed in a weight, X experts of a layer, H steps of history; three roles x, weight, grad.
"""

from __future__ import annotations

from functools import partial

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
from bessemer.precision.gpu import Path
from bessemer.precision.grouped import QuantGrouped, run_channels
from bessemer.precision.watch import TensorWatch

__all__ = ["Quantised", "QuantisedExperts"]


class Quantised(nn.Module):
    """Makes the products of a projection's calls, and keeps the states of delayed recipes (others have none).

    names: of the logical tensors in the weight's rows, in order; sizes: how many rows each has on this rank; smooth:
    the input is divided by a power of two per channel (Smooth-SwiGLU), found anew in each call; narrow: what only this
    projection and the activation before it keep for the backward pass is kept quantised; falls_back: it may go on
    without quantising (`models.watched`), and then is `fallen`. `watch`: counts, on sampled steps.
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
        narrow: bool = False,
        falls_back: bool = False,
    ) -> None:
        super().__init__()
        self.numerics, self.names, self.sizes = numerics, names, sizes
        self.smooth, self.narrow = smooth, narrow
        self.path: Path = "emulated"  # how the device multiplies, chosen once
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

    def products(self, x: Tensor, dtype: torch.dtype, split: Split, *, keeps: bool = True) -> How:
        """Of one call with input x [..., I]; keeps: whether x, unless quantised, is kept for this product alone.
        Without gradients, as in an evaluation, nothing is noted. Each rank draws for itself what its gradients are
        rounded by, in the call's own generator: so recomputing changes no draw."""
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
            coded=self.narrow and keeps and self.numerics.x.format.bits == 8,
            watch=self.watch if torch.is_grad_enabled() else None,
            path=self.path,
        )

    def _channels(self, x: Tensor, split: Split) -> Tensor:
        """Of all tokens of the micro-batch: ranks of tensor parallelism hold all of them, each of its own channels."""
        return channel_scales(x, None if split.context.degree == 1 else split.context.largest)


class QuantisedExperts(nn.Module):
    """Makes the products of weights of all experts of a layer that read the same rows, and keeps the states of delayed
    recipes (others have none), of each expert its own.

    names: of the stacked logical tensors; sizes: how many rows each has of an expert on this rank; experts: of the
    layer; smooth, narrow, falls_back, watch: as of `Quantised`, with channels of each expert; the experts of a layer
    are counted together, and fall back together.
    Buffers: `history` float32 [P, X, 3, H], the newest first, of all experts of the layer on every rank that holds some
    of them: so all of them know alike whether any is still without a history, and ask each other or don't. `seen`
    float32 [P, X, 3], the amaxes of the step so far, 0 of experts that live elsewhere.
    """

    history: Tensor
    seen: Tensor
    trouble: Tensor

    def __init__(
        self,
        numerics: Numerics,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        experts: int,
        device: torch.device,
        *,
        smooth: bool = False,
        narrow: bool = False,
        falls_back: bool = False,
    ) -> None:
        super().__init__()
        self.numerics, self.names, self.sizes = numerics, names, sizes
        self.smooth, self.narrow = smooth, narrow
        self.watch: TensorWatch | None = None
        self.falls_back, self.fallen = falls_back, False
        self.past: Tensor | None = None
        self.known = False
        self.key: tuple[int, ...] = ()
        """As of `Quantised`."""
        self.device = device
        if falls_back:
            self.register_buffer("trouble", torch.zeros(len(names), 2, device=device))
        if numerics.delayed:
            shape = (len(names), experts, 3)
            self.register_buffer("history", torch.zeros(*shape, numerics.history, device=device))
            self.register_buffer("seen", torch.zeros(shape, device=device))

    def refresh(self) -> Tensor:
        """As `Quantised.refresh`, float32 [P, X, 3]."""
        flat = reference_amax(self.history.flatten(0, 2), self.numerics.choice, self.numerics.margin)
        self.past = flat.view_as(self.seen)
        if self.smooth:
            self.past[..., ROLES.index("weight")] = 0
        return self.past

    def advance(self, seen: Tensor) -> None:
        """At the commit of a step: seen float32 [P, X, 3] over all ranks. What saw nothing, as the rows of an expert
        that got no token, keeps its history: that of the latest steps in which it saw something."""
        moved = advance(self.history.flatten(0, 2), seen.flatten()).view_as(self.history)
        self.history.copy_(torch.where(seen.unsqueeze(-1) == 0, self.history, moved))

    def products(
        self, x_TI: Tensor, counts_X: Tensor, dtype: torch.dtype, split: Split, *, keeps: bool = True
    ) -> QuantGrouped | None:
        """Of one call; see `Quantised.products`. None: in `dtype`."""
        if self.fallen:
            return None
        ranks, graded = split.experts, torch.is_grad_enabled()
        own = slice(ranks.rank * counts_X.shape[0], (ranks.rank + 1) * counts_X.shape[0])
        generator = None
        if self.numerics.stochastic and graded and self.device.type != "meta":
            place = (split.sequence.rank, ranks.rank, ranks.width_rank)
            generator = keyed_generator(*self.key, self.names[0], *place, device=self.device)
        return QuantGrouped(
            self.numerics,
            dtype,
            None if self.past is None else self.past[:, own],
            self.known,
            seen=self.seen[:, own] if self.numerics.delayed and graded else None,
            generator=generator,
            reduce=ranks.largest if ranks.shares else None,
            channels=run_channels(x_TI, counts_X, partial(ranks.largest, divided=True)) if self.smooth else None,
            coded=self.narrow and keeps and self.numerics.x.format.bits == 8,
            watch=self.watch if graded else None,
        )
