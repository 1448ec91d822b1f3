"""What quantising does to each tensor, counted on sampled steps, and when a layer should do without it.

    watch = TensorWatch(sizes, device)       # one a projection; `QuantProducts(watch=...)` calls it
    table = Table.empty(names, device)       # of the whole model: sums and maxima, so that ranks add up
    table.take(places, watch)
    figures = table.figures()                # shares and errors

Inputs and weights are counted as the forward product reads them, gradients as backward reads them (twice under scales
of rows or blocks: along either dimension). Whatever is counted several times, by micro-batches, by ranks that hold
copies, stands in numerator and denominator alike.

Legend: R rows, C columns of an operand; T tokens, I inputs, O outputs; P logical tensors of a weight, N of the model;
three roles x, weight, grad; S sums, M maxima, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.precision.numerics import Numerics
from bessemer.precision.products import ROLES
from bessemer.precision.scaled import TENSOR, Grain, Scaled, Scheme

__all__ = [
    "EXPONENTS",
    "Figures",
    "Limits",
    "Table",
    "TensorWatch",
    "Window",
    "expected_error",
    "expected_result_error",
    "history_moves",
]

EXPONENTS = range(-24, 16)
"""The bins of a histogram: floor(log2(|x| / scale)), what lies outside in the first or last. e4m3 holds -9 to 8 (with
448 in the last), e5m2 -16 to 15; half the smallest value and less becomes 0."""

_SUMS = ("saturated", "flushed", "error", "norm")
_S = len(_SUMS) + len(EXPONENTS)
_TOPS = ("amax", "scale_high", "scale_low", "spread", "jump", "burst")
_M = len(_TOPS)
_LEAST = -1e30  # below every maximum; finite, so that a table can be printed and compared


@dataclass
class Window:
    """Shared by the watches of a model; open while a forward pass runs, and not one that is made again for backward."""

    forward: bool = False

    def __enter__(self) -> None:
        self.forward = True

    def __exit__(self, *_error: object) -> None:
        self.forward = False


@dataclass(eq=False)
class TensorWatch:
    """Counts the operands and results of one projection (`precision.products.Watch`) over the units of a step.

    sizes: rows of each logical tensor in the weight. sums: float64 [P, 3, S]; tops: float64 [P, 3, M], the smallest
    scale as minus its value; results: float64 [P, 2], squares of the error and of what it is an error of.
    """

    sizes: tuple[int, ...]
    device: torch.device
    window: Window = field(default_factory=Window)

    def __post_init__(self) -> None:
        count = len(self.sizes)
        self.sums = torch.zeros(count, 3, _S, dtype=torch.float64, device=self.device)
        self.tops = torch.full((count, 3, _M), _LEAST, dtype=torch.float64, device=self.device)
        self.results = torch.zeros(count, 2, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def operand(self, role: str, place: int, x_RC: Tensor, made: Scaled) -> None:
        """`place`: the logical tensor; an input belongs to all of them."""
        if (role != "grad" and not self.window.forward) or x_RC.numel() == 0:
            return
        wide, scales = x_RC.detach().float(), _by_element(made.scales(), made.scheme.grain, x_RC.shape)
        at = (slice(None) if role == "x" else place, ROLES.index(role))
        self.sums[at] += _counted(wide, scales, made)
        high, low = _used(scales, wide, made.amax)
        spread = _spread(wide) if role == "x" else torch.full_like(high, _LEAST)
        of_call = torch.stack((made.amax.float(), high, -low, spread)).double()
        self.tops[(*at, slice(4))] = torch.maximum(self.tops[(*at, slice(4))], of_call)

    @torch.no_grad()
    def result(self, x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor) -> None:
        """Against the product of the unquantised operands in the type of x, summed over the rows of each tensor."""
        if not self.window.forward:
            return
        want_TO = F.linear(x_TI, weight_OI.to(x_TI.dtype)).float()
        error_O, norm_O = (v.square_().sum(0).double() for v in (y_TO - want_TO, want_TO))
        for place, (error, norm) in enumerate(
            zip(_pieces(error_O, self.sizes), _pieces(norm_O, self.sizes), strict=True)
        ):
            self.results[place] += torch.stack((error.sum(), norm.sum()))


def _pieces(flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(flat, list(sizes))


def _counted(wide: Tensor, scales: Tensor, made: Scaled) -> Tensor:
    """float64 [S] of one operand, float32 [R, C]."""
    scheme = made.scheme
    read = made.dequantise(torch.bfloat16 if scheme.exact else torch.float32).float()  # exact either way
    sizes = (wide / scales).abs_()
    # the exponent fields of float32, of which 0 is that of zeros; their bias is 127
    fields = torch.bincount((sizes.view(torch.int32) >> 23).flatten(), minlength=256)
    low, high = EXPONENTS.start + 127, EXPONENTS.stop + 127
    bins = torch.cat((fields[1 : low + 1].sum()[None], fields[low + 1 : high - 1], fields[high - 1 :].sum()[None]))
    kept = torch.count_nonzero(read)
    saturated = torch.zeros_like(kept)
    if scheme.grain == TENSOR:  # other scales are made of the numbers themselves, and rounded up
        saturated = torch.count_nonzero(sizes > scheme.format.max)
    # squares below 10^-38 are lost: a tensor of nothing larger than 10^-19 has no error
    error, norm = (torch.linalg.vector_norm(v).double().square() for v in (read.sub_(wide), wide))
    counts = torch.stack((saturated, bins.sum() - kept))
    return torch.cat((counts.double(), torch.stack((error, norm)), bins.double()))


def _by_element(scales_AB: Tensor, grain: Grain, shape: torch.Size) -> Tensor:
    """Scales that broadcast against [R, C]."""
    if grain == TENSOR or scales_AB.numel() == 1:
        return scales_AB.view(())
    rows, cols = shape
    tall = scales_AB if grain.rows == 1 else scales_AB.repeat_interleave(grain.rows or rows, 0)[:rows]
    return tall if grain.cols == 0 else tall.repeat_interleave(grain.cols, 1)[:, :cols]


def _used(scales: Tensor, wide: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest scale of elements that aren't 0 (a tile of zeros has scale 1)."""
    if scales.dim() == 0:
        return torch.where(amax > 0, scales, _LEAST), torch.where(amax > 0, scales, -_LEAST)
    zero = wide == 0
    return torch.where(zero, _LEAST, scales).amax(), torch.where(zero, -_LEAST, scales).amin()


def _spread(x_RC: Tensor) -> Tensor:
    """log2 of the largest over the median amax of a channel (of those that aren't all 0), float32 ()."""
    channels = x_RC.abs().amax(0)
    middle = torch.where(channels > 0, channels, torch.nan).nanmedian()
    return torch.where(middle > 0, channels.amax() / middle, 1.0).log2()


def history_moves(history_H: Tensor) -> tuple[Tensor, Tensor]:
    """(jump, burst) of a history [..., H], the newest first, as log2: the largest move, up or down, from one step to
    the next; and by how much a step's amax was above those of all earlier steps in it. 0 where there are less than two
    steps with an amax."""
    logs = torch.where(history_H > 0, history_H, torch.nan).log2()
    steps = (logs[..., :-1] - logs[..., 1:]).nan_to_num(nan=0.0)
    past = torch.where(logs.isnan(), -torch.inf, logs).flip(-1).cummax(-1).values.flip(-1)[..., 1:]
    above = torch.where(past.isfinite(), logs[..., :-1] - past, 0.0).nan_to_num(nan=0.0)
    if history_H.shape[-1] < 2:
        return history_H.new_zeros(history_H.shape[:-1]), history_H.new_zeros(history_H.shape[:-1])
    return steps.abs().amax(-1), above.amax(-1).clamp(min=0.0)


@dataclass(eq=False)
class Table:
    """The counts of all N logical tensors: sums float64 [N, 3, S], tops float64 [N, 3, M], results float64 [N, 2];
    `trouble` float64 [N, 2], the fall-back's state: samples in a row with trouble, and the step that ended them."""

    names: tuple[str, ...]
    sums: Tensor
    tops: Tensor
    results: Tensor
    trouble: Tensor

    @classmethod
    def empty(cls, names: tuple[str, ...], device: torch.device) -> Table:
        """Nothing counted."""
        count = len(names)
        shapes = ((count, 3, _S), (count, 3, _M), (count, 2), (count, 2))
        sums, tops, results, trouble = (torch.zeros(s, dtype=torch.float64, device=device) for s in shapes)
        return cls(names, sums, tops.fill_(_LEAST), results, trouble)

    def take(self, places: list[int], watch: TensorWatch, history_P3H: Tensor | None) -> None:
        """Adds what a projection counted to the rows of its tensors. Several may share one (a layer's experts, whose
        history is [P, X, 3, H]: the largest move counts)."""
        tops = watch.tops.clone()
        if history_P3H is not None:
            moves = (move.flatten(1, -2).amax(1) if move.dim() > 2 else move for move in history_moves(history_P3H))
            tops[:, :, 4], tops[:, :, 5] = moves
        for row, place in enumerate(places):
            self.sums[place] += watch.sums[row]
            self.results[place] += watch.results[row]
            self.tops[place] = torch.maximum(self.tops[place], tops[row])

    def summed(self) -> Tensor:
        """What adds up over ranks, flat; `put_summed` takes it back."""
        return torch.cat((self.sums.flatten(), self.results.flatten()))

    def put_summed(self, flat: Tensor) -> None:
        sums, results = _pieces(flat, (self.sums.numel(), self.results.numel()))
        self.sums, self.results = sums.view_as(self.sums), results.view_as(self.results)

    def largest(self) -> Tensor:
        """Of what the maximum over ranks counts, flat; `put_largest` takes it back."""
        return torch.cat((self.tops.flatten(), self.trouble.flatten()))

    def put_largest(self, flat: Tensor) -> None:
        tops, trouble = _pieces(flat, (self.tops.numel(), self.trouble.numel()))
        self.tops, self.trouble = tops.view_as(self.tops), trouble.view_as(self.trouble)

    def figures(self) -> Figures:
        """On the host."""
        sums, tops, results = self.sums.cpu(), self.tops.cpu(), self.results.cpu()
        bins = sums[:, :, len(_SUMS) :]
        nonzero = bins.sum(-1)
        by_role: dict[str, dict[str, list[Any]]] = {}
        for role, name in enumerate(ROLES):
            mine = {"saturated": sums[:, role, 0] / nonzero[:, role], "flushed": sums[:, role, 1] / nonzero[:, role]}
            mine["error"] = (sums[:, role, 2] / sums[:, role, 3]).sqrt()
            mine |= {key: tops[:, role, i] for i, key in enumerate(_TOPS)}
            mine["scale_low"] = torch.where(mine["scale_low"] <= _LEAST, _LEAST, -mine["scale_low"])
            found = {key: _plain(values) for key, values in mine.items()}
            by_role[name] = {key: values for key, values in found.items() if any(v is not None for v in values)}
            by_role[name]["histogram"] = [_trimmed(row) for row in bins[:, role]]
        return Figures(self.names, by_role, _plain((results[:, 0] / results[:, 1]).sqrt()))


@dataclass(frozen=True)
class Figures:
    """One sample. roles: by role and figure a value a tensor, None where nothing was counted: `amax`, `scale_low` and
    `scale_high`, of the elements that aren't 0 the shares `saturated` (beyond what the scale holds) and `flushed` (to
    0), `error` |q - x| / |x|; of inputs `spread` (log2 of the largest over the median channel's amax); under delayed
    scaling `jump` and `burst` (`history_moves`); `histogram`, [first exponent, elements per ten thousand ...].
    results: error of the forward product against the one of unquantised operands."""

    names: tuple[str, ...]
    roles: dict[str, dict[str, list[Any]]]
    results: list[float | None]

    def as_json(self) -> dict[str, Any]:
        """For a record of metrics.jsonl; the names stand once in an event."""
        return self.roles | {"result": self.results}


def _plain(values_N: Tensor) -> list[float | None]:
    """Four digits are what a sample is worth."""
    return [float(f"{v:.4g}") if math.isfinite(v) and v > _LEAST else None for v in values_N.tolist()]


def _trimmed(bins_B: Tensor) -> list[int] | None:
    total = float(bins_B.sum())
    if not total > 0:
        return None
    parts = [round(1e4 * n / total) for n in bins_B.tolist()]
    some = [i for i, n in enumerate(parts) if n]
    return [EXPONENTS[some[0]], *parts[some[0] : some[-1] + 1]]


_NEAREST = 0.212
"""Root mean square of a number's relative rounding error, of normally distributed numbers, over 2^-mantissa_bits:
measured, to 1 % for e4m3 and e5m2 (tests/precision/test_watch.py)."""


def expected_error(scheme: Scheme, *, stochastic: bool = False) -> float:
    """|q - x| / |x| of normally distributed numbers that a scale holds well: 0.0265 of e4m3, 0.053 of e5m2. Rounding
    stochastically makes sqrt(2) times the error: 1/6 instead of 1/12 of a step squared."""
    return _NEAREST * 2.0**-scheme.format.mantissa_bits * (math.sqrt(2) if stochastic else 1.0)


def expected_result_error(numerics: Numerics) -> float:
    """Of the forward product: the errors of both operands, which are independent. 0.0375 for the recipes of FP8."""
    return math.hypot(expected_error(numerics.x), expected_error(numerics.weight))


@dataclass(frozen=True)
class Limits:
    """When a tensor is in trouble, and how long it may be.

    saturated: share of any role. Under delayed scaling a new amax in the tail of a gradient saturates a few elements in
    10^5; a hundredth is a scale that is wrong for the body of the tensor, and clips what carries the update.
    worse: times the error of well scaled numbers. Three times is what a scale per tensor reaches where one channel is
    some 64 times as large as the others (docs/precision.md, "Outliers"); ordinary layers stay below 1.2 times.
    samples: in a row, so that one unlucky batch costs nothing.
    """

    saturated: float = 0.01
    worse: float = 3.0
    samples: int = 2

    def trouble(self, figures: Figures, numerics: Numerics) -> list[str]:
        """Of each tensor what is wrong, with its figures; "" where nothing is."""
        expected = {r: expected_error(getattr(numerics, r), stochastic=numerics.stochastic) for r in ("grad",)}
        said = []
        for n in range(len(figures.names)):
            found = []
            for role, mine in figures.roles.items():
                share = mine["saturated"][n] if "saturated" in mine else None
                if share is not None and share > self.saturated:
                    found.append(f"{share:.2%} of {role} saturated, above {self.saturated:.0%}")
            mine, most = figures.roles["grad"], self.worse * expected["grad"]
            error = mine["error"][n] if "error" in mine else None
            if error is not None and error > most:
                found.append(f"error of grad {error:.3g}, above {most:.3g}")
            error, most = figures.results[n], self.worse * expected_result_error(numerics)
            if error is not None and error > most:
                found.append(f"error of the result {error:.3g}, above {most:.3g}")
            said.append("; ".join(found))
        return said
