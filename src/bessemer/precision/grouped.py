"""The three products of quantised experts: what `ops.grouped_linear` runs in the place of a type.

Every expert's rows, weights and gradients are tensors of their own: with one scale a tensor each has its own, and no
block of scales holds numbers of two experts. All experts are quantised together, by what each row belongs to, so that
many of them cost no loop; an expert without rows has scale 1 and zeros for gradients. Rounding, kept operands and roles
are those of `precision.products`.

Legend: T rows sorted by expert, X experts of this rank, I inputs, O outputs, P weights that read the same rows, C
columns, N maxima of one call, S runs or blocks of rows; three roles x, weight, grad (in this order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.grouped import outer_runs, product_runs
from bessemer.precision.casts import amax, clamped_codes, decode, decode_finite
from bessemer.precision.formats import E4M3
from bessemer.precision.numerics import Numerics
from bessemer.precision.product import hadamard
from bessemer.precision.products import ROLES, Watch
from bessemer.precision.scaled import TENSOR, Scaled, Scheme, quantise, scale_from

__all__ = ["QuantGrouped", "run_amax", "run_channels"]

_ROTATED = 16  # rows that `hadamard` rotates together


class _Coded(NamedTuple):
    """Rows under one scale an expert."""

    codes: Tensor  # [T, C]
    scale: Tensor  # float32 [X]


def run_amax(x_TC: Tensor, expert_T: Tensor, experts: int) -> Tensor:
    """float32 [X]: max |x| over the rows of each expert, NaN or Inf if any element is, 0 without rows."""
    rows_T = _size(x_TC).amax(1) if x_TC.shape[1] else x_TC.new_zeros(x_TC.shape[0])
    return x_TC.new_zeros(experts).scatter_reduce_(0, expert_T, rows_T, "amax").float()


def run_channels(h_TF: Tensor, counts_X: Tensor, agree: Callable[[Tensor], Tensor]) -> Tensor:
    """float32 [X, F]: `smooth.channel_scales` of each expert's rows. agree: the elementwise maximum over the ranks that
    hold other rows of the same channels."""
    experts = expert_of_rows(counts_X, h_TF.shape[0])
    amax_XF = h_TF.new_zeros(counts_X.shape[0], h_TF.shape[1])
    amax_XF.scatter_reduce_(0, experts[:, None].expand_as(h_TF), _size(h_TF.detach()), "amax")
    return scale_from(agree(amax_XF.float()), 1.0)


def _size(x: Tensor) -> Tensor:
    """|x|, of bfloat16 through its bits."""
    return (x.view(torch.int16) & 0x7FFF).view(torch.bfloat16) if x.dtype == torch.bfloat16 else x.abs()


def _matrix_amax(weight_XOI: Tensor) -> Tensor:
    """float32 [X]."""
    if not weight_XOI[0].numel():
        return weight_XOI.new_zeros(weight_XOI.shape[0], dtype=torch.float32)
    rows = weight_XOI.flatten(1)
    return torch.maximum(rows.amax(1), -rows.amin(1)).float()


@dataclass(eq=False)
class QuantGrouped:
    """One call's products under a recipe, emulated (`ops.grouped.GroupedProducts`).

    dtype: bfloat16 or float32, of x, the result and gradients. past: float32 [P, X, 3], the amaxes that a delayed
    recipe scales by, 0 where nothing is known yet: then, and under current scaling, the tensor's own counts; `known`:
    nowhere 0 on any rank that `reduce` asks. seen: float32 [P, X, 3], if given, becomes max(seen, amax), in place.
    generator: for recipes that round gradients stochastically.
    reduce: float32 [X, N], the elementwise maximum over all ranks that hold a part of the same experts' tensors. It is
    called at most once for the result (x and weights together) and once for a gradient, by all of those ranks alike.
    channels: float32 [X, I], powers of two: x is divided and the weight multiplied by them before they are quantised
    (Smooth-SwiGLU); gradients are those of x and the weight. coded: keep x as its codes for wgrad also where that reads
    it along the other dimension, for which it is then quantised a second time.
    watch: is shown each expert's operands and results (under scales of rows or blocks those of all together), but not
    what wgrad quantises along rows.
    """

    numerics: Numerics
    dtype: torch.dtype
    past: Tensor | None = None
    known: bool = False
    seen: Tensor | None = None
    generator: torch.Generator | None = None
    reduce: Callable[[Tensor], Tensor] | None = None
    channels: Tensor | None = None
    coded: bool = False
    watch: Watch | None = None
    _weight_amax: list[Tensor] = field(default_factory=list, init=False)
    _outputs: list[int] = field(default_factory=list, init=False)
    _across: Tensor | None = field(default=None, init=False)

    @property
    def _whole(self) -> bool:
        return self.numerics.x.grain == TENSOR

    @property
    def _work(self) -> torch.dtype:
        """What to decode to: bfloat16 if the result is bfloat16 and the operands fit exactly, else float32."""
        n = self.numerics
        exact = self.dtype == torch.bfloat16 and n.x.exact and n.weight.exact and n.grad.exact
        return torch.bfloat16 if exact else torch.float32

    def output(
        self, x_TI: Tensor, weights: Sequence[Tensor], counts_X: Tensor
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """With one scale a tensor the codes of x are kept (a byte an element), otherwise x. Weights are quantised again
        from their masters in backward."""
        self._outputs = [w.shape[1] for w in weights]
        rows = self._smoothed(x_TI, counts_X)
        kept: tuple[Tensor, ...] = (x_TI,)
        if self._whole:
            [coded] = self._coded("x", [rows], counts_X, weights)
            x_wide, kept = self._wide(coded, "x", counts_X), tuple(coded)
        else:
            made = self._along(rows, "x", counts_X)
            x_wide = made.dequantise(self._work)
            if self.coded:
                kept = (made.codes, made.scale, *(() if made.tensor_scale is None else (made.tensor_scale,)))
        results = [
            product_runs(x_wide, self._weight(w, place).transpose(1, 2), counts_X).to(self.dtype)
            for place, w in enumerate(weights)
        ]
        self._show_results(x_TI, weights, results, counts_X)
        return results, kept

    def gradient(self, grad_TO: Tensor, counts_X: Tensor) -> list[Tensor] | list[_Coded]:
        """Of each weight's result the columns: quantised, where one scale serves both products; else as they came."""
        parts = list(torch.split(grad_TO, self._outputs, 1))
        return self._coded("grad", parts, counts_X) if self._whole else parts

    def input_gradient(self, grad: list[Tensor] | list[_Coded], weights: Sequence[Tensor], counts_X: Tensor) -> Tensor:
        """Weights with scales along O, which square tiles have already."""
        parts: Sequence[Tensor | _Coded] = grad
        sides = [self._grad(g, place, counts_X) for place, g in enumerate(parts)]
        turned = not self.numerics.weight.grain.symmetric
        wide = _joined([self._weight(w, place, turned=turned) for place, w in enumerate(weights)])
        return self._smoothed(product_runs(_joined(sides), wide, counts_X).to(self.dtype), counts_X)

    def weight_gradient(
        self,
        grad: list[Tensor] | list[_Coded],
        kept: tuple[Tensor, ...],
        counts_X: Tensor,
        place: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Summed over each expert's rows. x is made once for all weights, which come in their order."""
        own = grad[place]
        x_wide, self._across = self._across, None
        if isinstance(own, _Coded):
            g_wide = self._wide(own, "grad", counts_X)
            x_wide = self._wide(_Coded(*kept), "x", counts_X) if x_wide is None else x_wide
        else:
            g_wide = self._turned(own, "grad", counts_X)
            x_wide = self._turned(self._kept(kept, counts_X), "x", counts_X) if x_wide is None else x_wide
            counts_X = self._filled(counts_X, own.shape[0])
        if place + 1 < len(self._outputs):
            self._across = x_wide
        made = outer_runs(g_wide, x_wide, counts_X).to(self.dtype).to(dtype)
        return self._roughened(made)

    def _coded(self, role: str, parts: list[Tensor], counts_X: Tensor, weights: Sequence[Tensor] = ()) -> list[_Coded]:
        """Tensors of a role with one scale an expert; of the weights that go with them the amaxes to scale by stay."""
        experts = expert_of_rows(counts_X, parts[0].shape[0])
        own = [run_amax(part, experts, counts_X.shape[0]) for part in parts]
        heavy = [_matrix_amax(self._roughened(w)) for w in weights]
        roles = [(role, place) for place in range(len(parts))] + [("weight", place) for place in range(len(weights))]
        agreed = self._agreed(roles, own + heavy)
        for place in range(len(self._outputs)):
            self._observe(role, place, own[place] if len(own) > 1 else own[0])
        for place, seen in enumerate(heavy):
            self._observe("weight", place, seen)
        if weights:
            self._weight_amax = agreed[len(parts) :]
        made = []
        for place, (part, amax_X) in enumerate(zip(parts, agreed, strict=False)):
            scale_X = self._scale(role, amax_X)
            coded = _Coded(self._codes(role, part, scale_X.index_select(0, experts)[:, None]), scale_X)
            self._show_runs(role, place, part, coded, counts_X)
            made.append(coded)
        return made

    def _agreed(self, roles: list[tuple[str, int]], own: list[Tensor]) -> list[Tensor]:
        """The amaxes [X] to scale by, of each (role, place of the weight)."""
        own_XN = torch.stack(own, 1)
        past_XN = None
        if self.past is not None:
            past_XN = torch.stack([self.past[place, :, ROLES.index(role)] for role, place in roles], 1)
        if self.reduce is not None and not (past_XN is not None and self.known):
            agreed = self.reduce(own_XN)
            past_XN = agreed if past_XN is None else torch.where(past_XN == 0, agreed, past_XN)
        if past_XN is None:
            return own
        return list(torch.where(own_XN.isfinite() & (past_XN != 0), past_XN, own_XN).unbind(1))

    def _scheme(self, role: str) -> Scheme:
        found: Scheme = getattr(self.numerics, role)
        return found

    def _scale(self, role: str, amax: Tensor) -> Tensor:
        scheme = self._scheme(role)
        return scale_from(amax, scheme.format.max, power_of_two=scheme.exact)

    def _codes(self, role: str, x: Tensor, scale: Tensor) -> Tensor:
        """scale: spreads over x."""
        scheme = self._scheme(role)
        scaled = x / scale.to(x.dtype) if scheme.exact else x.float() / scale
        return clamped_codes(scaled, scheme.format, self._rounding(role))

    def _values(self, role: str, codes: Tensor, scale: Tensor) -> Tensor:
        """What `_codes` stand for."""
        if self._work == torch.bfloat16:  # codes are finite wherever their scale is
            return decode_finite(codes, self._scheme(role).format).mul_(scale.to(self._work))
        return decode(codes, self._scheme(role).format, self._work).mul_(scale)

    def _wide(self, coded: _Coded, role: str, counts_X: Tensor) -> Tensor:
        experts = expert_of_rows(counts_X, coded.codes.shape[0])
        return self._values(role, coded.codes, coded.scale.index_select(0, experts)[:, None])

    def _rounding(self, role: str) -> torch.Generator | None:
        return self.generator if role == "grad" and self.numerics.stochastic else None

    def _observe(self, role: str, place: int, amax_X: Tensor) -> None:
        if self.seen is not None:
            column = self.seen[place, :, ROLES.index(role)]
            column.copy_(torch.maximum(column, amax_X))

    def _weight(self, weight_XOI: Tensor, place: int, *, turned: bool = False) -> Tensor:
        """What the codes of a weight say [X, O, I]; turned: with scales along O."""
        scheme, weight_XOI = self.numerics.weight, self._roughened(weight_XOI)
        if self._whole:
            scale = self._scale("weight", self._weight_amax[place])[:, None, None]
            codes = self._codes("weight", weight_XOI, scale)
            for own, *coded in zip(weight_XOI, codes, scale, strict=True) if self.watch is not None else ():
                self._show("weight", place, own, _Coded(*coded))
            return self._values("weight", codes, scale)
        rows = weight_XOI.transpose(1, 2).contiguous() if turned else weight_XOI
        experts, count, columns = rows.shape
        tall = max(scheme.grain.rows, 1)
        filled = F.pad(rows, (0, 0, 0, -count % tall))  # a tile lies in one expert
        whole = None
        if scheme.scale_format is E4M3:
            whole = _matrix_amax(weight_XOI).repeat_interleave(filled.shape[1] // tall)[:, None]
        flat = filled.reshape(-1, columns)
        made = quantise(flat, scheme, whole=whole)
        if self.watch is not None:
            self.watch.operand("weight", place, flat, made)
        wide = made.dequantise(self._work).view(experts, -1, columns)[:, :count]
        return wide.transpose(1, 2) if turned else wide

    def _grad(self, grad: Tensor | _Coded, place: int, counts_X: Tensor) -> Tensor:
        if isinstance(grad, _Coded):
            return self._wide(grad, "grad", counts_X)
        return self._along(grad, "grad", counts_X, place).dequantise(self._work)

    def _along(self, x_TC: Tensor, role: str, counts_X: Tensor, place: int = 0) -> Scaled:
        """With scales along C."""
        scheme = self._scheme(role)
        whole = None
        if scheme.scale_format is E4M3:
            experts = expert_of_rows(counts_X, x_TC.shape[0])
            whole = run_amax(x_TC, experts, counts_X.shape[0]).index_select(0, experts)[:, None]
        made = quantise(x_TC, scheme, whole=whole, generator=self._rounding(role))
        if self.watch is not None:
            self.watch.operand(role, place, x_TC, made)
        return made

    def _turned(self, x_TC: Tensor, role: str, counts_X: Tensor) -> Tensor:
        """What the codes say with scales along T, each of rows of one expert; `_filled` says how many rows that are."""
        scheme = self._scheme(role)
        if self.numerics.hadamard:
            return self._rotated(x_TC, role, counts_X)
        piece_T, pieces = _pieces(counts_X, x_TC.shape[0], scheme.grain.cols)
        amax_SC = x_TC.new_zeros(pieces, x_TC.shape[1])
        amax_SC.scatter_reduce_(0, piece_T[:, None].expand_as(x_TC), _size(x_TC), "amax")
        scale_TC = self._scale(role, amax_SC.float()).index_select(0, piece_T)
        return self._values(role, self._codes(role, x_TC, scale_TC), scale_TC)

    def _rotated(self, x_TC: Tensor, role: str, counts_X: Tensor) -> Tensor:
        """`_turned` after a rotation of each 16 rows, for which each run is filled up with zeros."""
        scheme = self._scheme(role)
        counts, rows = counts_X.shape[0], x_TC.shape[0]
        experts = expert_of_rows(counts_X, rows)
        filled_X = self._filled(counts_X, rows)
        shift_X = (filled_X.cumsum(0) - filled_X) - (counts_X.cumsum(0) - counts_X)
        place_T = torch.arange(rows, device=x_TC.device) + shift_X.index_select(0, experts)
        most = (rows // _ROTATED + counts) * _ROTATED
        filled_CT = x_TC.new_zeros(most, x_TC.shape[1]).index_copy_(0, place_T, x_TC).t().contiguous()
        turned_CT = hadamard(filled_CT)
        blocks = expert_of_rows(filled_X // _ROTATED, most // _ROTATED)
        wide_X = run_amax(turned_CT.t(), expert_of_rows(filled_X, most), counts)
        made = quantise(turned_CT, scheme, whole=wide_X.index_select(0, blocks)[None], generator=self._rounding(role))
        return made.dequantise(self._work).t().contiguous()

    def _filled(self, counts_X: Tensor, rows: int) -> Tensor:
        """The rows of each expert that `_turned` returns; where they are filled up, the last expert gets what is left
        of a number that the host knows."""
        if not self.numerics.hadamard:
            return counts_X
        filled_X = (counts_X + _ROTATED - 1) // _ROTATED * _ROTATED
        filled_X[-1] += (rows // _ROTATED + counts_X.shape[0]) * _ROTATED - filled_X.sum()
        return filled_X

    def _kept(self, kept: tuple[Tensor, ...], counts_X: Tensor) -> Tensor:
        """x as wgrad quantises it."""
        if not self.coded:
            return self._smoothed(kept[0], counts_X)
        codes, scale, *of_tensor = kept
        nothing = scale.new_zeros((), dtype=torch.float32)
        return Scaled(codes, scale, of_tensor[0] if of_tensor else None, nothing, self.numerics.x).dequantise(
            self.dtype
        )

    def _smoothed(self, x_TI: Tensor, counts_X: Tensor) -> Tensor:
        """Divided by the channels: of x, and of its gradient, which is that of the quotient over them once more."""
        if self.channels is None:
            return x_TI
        return x_TI / self.channels.to(x_TI.dtype).index_select(0, expert_of_rows(counts_X, x_TI.shape[0]))

    def _roughened(self, weight_XOI: Tensor) -> Tensor:
        """Multiplied by the channels: the weight, and its gradient likewise."""
        return weight_XOI if self.channels is None else weight_XOI * self.channels.to(weight_XOI.dtype)[:, None]

    def _show_runs(self, role: str, place: int, x_TC: Tensor, coded: _Coded, counts_X: Tensor) -> None:
        if self.watch is None:
            return
        sizes = counts_X.tolist()
        runs = (torch.split(x_TC, sizes), torch.split(coded.codes, sizes), coded.scale)
        for own, *made in zip(*runs, strict=True):
            self._show(role, place, own, _Coded(*made))

    def _show(self, role: str, place: int, x_RC: Tensor, coded: _Coded) -> None:
        """One expert's."""
        assert self.watch is not None
        made = Scaled(coded.codes, coded.scale.view(1, 1), None, amax(x_RC), self._scheme(role))
        self.watch.operand(role, place, x_RC, made)

    def _show_results(self, x_TI: Tensor, weights: Sequence[Tensor], results: list[Tensor], counts_X: Tensor) -> None:
        if self.watch is None:
            return
        sizes = counts_X.tolist()
        made = torch.split(_joined(results), sizes)
        for expert, (x, y) in enumerate(zip(torch.split(x_TI, sizes), made, strict=True)):
            self.watch.result(x, torch.cat([w[expert] for w in weights]), y)


def expert_of_rows(counts_X: Tensor, rows: int) -> Tensor:
    """int64 [T]. No host read."""
    experts = torch.arange(counts_X.shape[0], device=counts_X.device)
    return experts.repeat_interleave(counts_X, output_size=rows)


def _pieces(counts_X: Tensor, rows: int, block: int) -> tuple[Tensor, int]:
    """Which run of at most `block` rows (0: whole expert) each row belongs to, int64 [T], and how many there may be."""
    experts, count = expert_of_rows(counts_X, rows), counts_X.shape[0]
    if not block:
        return experts, count
    blocks_X = (counts_X + block - 1) // block
    first_X, start_X = blocks_X.cumsum(0) - blocks_X, counts_X.cumsum(0) - counts_X
    inside_T = torch.arange(rows, device=counts_X.device) - start_X.index_select(0, experts)
    return first_X.index_select(0, experts) + inside_T // block, rows // block + count


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
