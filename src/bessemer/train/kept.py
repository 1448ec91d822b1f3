"""What a group's units of a step have given so far, kept apart from the sum across groups, so that a sum that failed
can be done again, with the units of a lost group added.

*fast*: float32 gradients, in the order in which units and groups come. *exact*: 64-bit fixed point, whose sums don't
depend on any order or grouping: a run in which groups were lost ends with the same bits as one in which none was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bessemer.models.canonical import local
from bessemer.train.optim import Optimizer
from bessemer.train.passes import Batch, Contribution

__all__ = ["FRACTION_BITS", "Buffers", "Kept"]

FRACTION_BITS = 36
"""Of fixed-point gradients, which are sums over tokens: steps of 1.5e-11, up to 2^26 = 6.7e7 in magnitude for a sum."""
_SUM_BITS = 24
"""Of losses and weights: steps of 6e-8, up to 5e11 for a whole step."""
_LARGEST = 2.0**62


@dataclass
class Buffers:
    """What is reduced across groups: three are summed, of `maxima` the maximum counts.

    gradients int64 or float32 [all elements of this rank]; sums int64 or float64: loss, weight, wishes to stop, units
    that were not finite, then the load of experts; loose float64: what only records read; maxima float32."""

    gradients: Tensor
    sums: Tensor
    loose: Tensor
    maxima: Tensor

    def copy(self) -> Buffers:
        """New memory: a sum that hangs may still write to what it was given."""
        return Buffers(self.gradients.clone(), self.sums.clone(), self.loose.clone(), self.maxima.clone())

    def digest(self) -> str:
        """A checksum that all groups have alike at a place once the sum is there. One read of the gradients."""
        words = self.gradients if self.gradients.dtype == torch.int64 else self.gradients.view(torch.int32)
        rest = self.sums if self.sums.dtype == torch.int64 else self.sums.view(torch.int64)
        return f"{int(words.sum(dtype=torch.int64)) & (2**64 - 1):x}-{int(rest.sum()) & (2**64 - 1):x}"


class Kept:
    """The contribution of this rank's units to one step, empty at first. `like`: one whose fields have the shapes that
    every contribution of the step will have."""

    def __init__(self, optimizer: Optimizer, like: Contribution, *, exact: bool) -> None:
        self.exact = exact
        self._optimizer = optimizer
        self._like = like
        self._params = [p for p in optimizer.params.values() if p.requires_grad]
        self._sizes = [local(p).numel() for p in self._params]
        device = local(self._params[0]).device
        wide, narrow = (torch.int64, torch.int64) if exact else (torch.float64, torch.float32)
        load = 0 if like.expert_load is None else like.expert_load.numel()
        loose = 0 if like.watch is None else like.watch.summed().numel()
        largest = 0 if like.watch is None else like.watch.largest().numel()
        amax = 0 if like.amax is None else like.amax.numel()
        self.units: list[int] = []
        """Those that are in here."""
        self.batches: list[Batch] = []
        """Their micro-batches."""
        self._bad: list[int] = []
        self.buffers = Buffers(
            torch.zeros(sum(self._sizes), dtype=narrow, device=device),
            torch.zeros(4 + load, dtype=wide, device=device),
            torch.zeros(loose, dtype=torch.float64, device=device),
            torch.zeros(amax + largest, dtype=torch.float32, device=device),
        )

    def take(self, unit: int, mine: Contribution, *, stop: bool) -> None:
        """Add what unit `unit` has given, its gradients too, which are cleared."""
        b, bad = self.buffers, False
        for view, param in zip(torch.split(b.gradients, self._sizes), self._params, strict=True):
            if param.grad is not None:
                bad |= self._add(view, local(param.grad).flatten())
        self._optimizer.clear()
        found = [float(mine.loss_sum), float(mine.weight_sum), float(stop and not self.units)]
        numbers = torch.tensor(found, dtype=torch.float64)
        bad |= not bool(numbers.isfinite().all())
        head = torch.cat((numbers.nan_to_num(0.0, 0.0, 0.0), torch.tensor([float(bad)], dtype=torch.float64)))
        if mine.expert_load is not None:
            head = torch.cat((head, mine.expert_load.flatten().double().cpu()))
        head = head.to(b.sums.device)
        b.sums += (head * 2.0**_SUM_BITS).round().to(torch.int64) if self.exact else head
        if mine.watch is not None:
            b.loose += mine.watch.summed()
        torch.maximum(b.maxima, _maxima(mine, b.maxima), out=b.maxima)
        self.units.append(unit)
        self.batches += mine.batches
        self._bad += [unit] if bad else []

    def _add(self, into: Tensor, gradient: Tensor) -> bool:
        """Whether it isn't finite, or beyond what the fixed point holds; then nothing of it is added."""
        if not self.exact:
            into += gradient
            return not bool(gradient.abs().sum().isfinite())
        scaled = gradient.double() * 2.0**FRACTION_BITS
        if not bool(scaled.abs().amax() < _LARGEST) and gradient.numel():
            return True
        into += scaled.round_().to(torch.int64)
        return False

    def give(self, total: Buffers) -> tuple[Contribution, bool]:
        """Put the sum over all groups where the step reads it: gradients into `.grad`, the rest into a contribution of
        this rank's place; and whether anybody wishes to stop. A unit that wasn't finite makes the loss NaN."""
        made = total.gradients
        wide = (made.double() * 2.0**-FRACTION_BITS).float() if self.exact else made
        for view, param in zip(torch.split(wide, self._sizes), self._params, strict=True):
            param.grad = _like(param, view)
        sums = total.sums.double() * 2.0**-_SUM_BITS if self.exact else total.sums
        loss, weight, stop, bad = sums[:4].tolist()
        mine = Contribution(float("nan") if bad else loss, weight, batches=self.batches, bad_units=tuple(self._bad))
        if self._like.expert_load is not None:
            mine.expert_load = sums[4:].round().view_as(self._like.expert_load)
        amax = 0 if self._like.amax is None else self._like.amax.numel()
        if self._like.amax is not None:
            mine.amax = total.maxima[:amax].view_as(self._like.amax).clone()
        if self._like.watch is not None:
            mine.watch = self._like.watch
            mine.watch.put_summed(total.loose)
            mine.watch.put_largest(total.maxima[amax:])
        return mine, stop > 0


def _maxima(mine: Contribution, like: Tensor) -> Tensor:
    parts = [] if mine.amax is None else [mine.amax.flatten()]
    parts += [] if mine.watch is None else [mine.watch.largest().flatten()]
    return torch.cat(parts).to(like) if parts else like


def _like(param: Tensor, flat: Tensor) -> Tensor:
    """`flat`, this rank's elements, as a gradient of the parameter."""
    shaped = flat.view(local(param).shape)
    if not isinstance(param, DTensor):
        return shaped
    return DTensor.from_local(
        shaped, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
