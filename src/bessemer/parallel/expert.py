"""Expert parallelism: rows travel to the ranks of their experts, and the results travel back.

Rank e x W + w of a group of E x W ranks holds share w of the width of the experts e X / E ... (e + 1) X / E - 1. Each
row goes to all W ranks of its expert, whose results are partial sums. There are two ways, *out* and *home*, and each
is the other's backward pass:

    dispatch   rows go out                          its backward: gradients come home, those of the W copies summed
    combine    results come home, W partials summed    its backward: gradients go out to all W ranks

With `coded` the way out carries FP8 with a scale for each 128 of a row, as DeepSeek-V3 does (arXiv 2412.19437, section
3.2.2); its backward pass takes the rounding for the identity. The way home stays as computed, since sums follow it.

What is computed between `dispatch` and `arrived()`, a shared expert say, runs while the rows travel. Autograd runs the
node that was created last first. So `dispatch` and `arrived` are a node each: backward, `arrived` starts the way home,
then the nodes created between them run, then `dispatch` waits for it. The one tensor between the two nodes is a
scalar without meaning, so that no tensor passes through autograd that is still being written.

All ranks of a group must call alike, with or without rows of their own: a rank that gets none takes part with zero.

Legend: T rows of this rank, R rows that its experts get, D model, X experts, L experts of this rank, E ranks of
experts, W ranks of an expert's width, G ranks of the group (E x W).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.comm import collectives as comm
from bessemer.models.split import ExpertSplit, Sent
from bessemer.parallel.wire import ROWS, coded_rows, decoded_rows

__all__ = ["ExpertParallel"]


class _Exchange:
    """The two ways of one call: how many rows go where, and the one transfer that is under way.

    Autograd's nodes keep it from forward to backward, so it holds no other tensor: what a recomputed forward pass
    makes anew must not live that long.
    """

    def __init__(self, group: dist.ProcessGroup, sent_E: list[int], received_G: list[int], *, coded: bool) -> None:
        self.group, self.sent, self.received = group, sent_E, received_G
        self.width = len(received_G) // len(sent_E)
        self._coded = coded
        self._under_way: tuple[Tensor, dist.Work] | None = None
        self._out: tuple[int, torch.dtype] = 0, torch.float32

    def _sent_to_each(self) -> list[int]:
        return [rows for rows in self.sent for _ in range(self.width)]

    def start_out(self, rows_TD: Tensor) -> None:
        """Start sending rows, sorted by expert, to every rank of their experts' width."""
        self._out = rows_TD.shape[1], rows_TD.dtype
        if self._coded:
            rows_TD = coded_rows(rows_TD, ROWS)
        if self.width > 1:
            rows_TD = torch.cat([part for part in torch.split(rows_TD, self.sent) for _ in range(self.width)])
        self._start(rows_TD, self._sent_to_each(), self.received)

    def start_home(self, rows_RD: Tensor) -> None:
        """Start sending rows, sorted by source, to where they came from."""
        self._start(rows_RD, self.received, self._sent_to_each())

    def _start(self, rows: Tensor, sent: list[int], received: list[int]) -> None:
        into = rows.new_empty(sum(received), *rows.shape[1:])
        work = comm.all_to_all_single(into, rows.contiguous(), received, sent, group=self.group, async_op=True)
        assert work is not None
        self._under_way = into, work

    def _wait(self) -> Tensor:
        assert self._under_way is not None
        into, work = self._under_way
        self._under_way = None
        work.wait()
        return into

    def finish_out(self) -> Tensor:
        """[R, D] sorted by source, then by expert, in the type that `start_out` was given."""
        rows = self._wait()
        return decoded_rows(rows, self._out[0], ROWS, self._out[1]) if self._coded else rows

    def finish_home(self) -> Tensor:
        """[T, D] in the order of `start_out`; partials are summed in float32 in the order of their ranks."""
        return _sum_copies(self._wait(), self._sent_to_each(), self.width)


def _sum_copies(rows: Tensor, sizes_G: list[int], width: int) -> Tensor:
    """The sum over the ranks of each expert's width of what they sent, in the type of the rows."""
    if width == 1:
        return rows
    parts = torch.split(rows, sizes_G)
    total = torch.cat(parts[::width]).float()
    for share in range(1, width):
        total += torch.cat(parts[share::width])
    return total.to(rows.dtype)


class _Depart(torch.autograd.Function):
    """Starts the way out; its backward pass waits for the gradients that `_Arrive` sent home."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start_out(rows_TD)
        return rows_TD.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return ctx.exchange.finish_home(), None


class _Arrive(torch.autograd.Function):
    """Waits for the rows and sorts them by expert; its backward pass starts their gradients' way home."""

    @staticmethod
    def forward(ctx: Any, _departed: Tensor, exchange: _Exchange, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(back_R)
        return exchange.finish_out().index_select(0, order_R)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        (back_R,) = ctx.saved_tensors
        ctx.exchange.start_home(grad_RD.index_select(0, back_R))
        return grad_RD.new_zeros(()), None, None, None


class _Combine(torch.autograd.Function):
    """The way home of results; of their gradients the way out."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, exchange: _Exchange, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(order_R)
        exchange.start_home(out_RD.index_select(0, back_R))
        return exchange.finish_home()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        (order_R,) = ctx.saved_tensors
        ctx.exchange.start_out(grad_TD)
        return ctx.exchange.finish_out().index_select(0, order_R), None, None, None


@dataclass(frozen=True)
class _Travelling:
    """Rows on their way. order: from the order of arrival to that by expert; back: its inverse."""

    exchange: _Exchange
    departed: Tensor
    counts: Tensor  # [L]
    order: Tensor  # [R]
    back: Tensor  # [R]

    def arrived(self) -> tuple[Tensor, Tensor]:
        rows_RD = _Arrive.apply(self.departed, self.exchange, self.order, self.back)  # type: ignore[no-untyped-call]
        return rows_RD, self.counts


def _order_by_expert(received_GL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(order, its inverse), int64 [R], of rows that come sorted by source and then by expert. No host read."""
    sources, experts = received_GL.shape
    expert_GL = torch.arange(experts, device=received_GL.device).repeat(sources)
    expert_R = expert_GL.repeat_interleave(received_GL.flatten(), output_size=rows)
    order_R = expert_R.argsort(stable=True)
    back_R = torch.empty_like(order_R)
    return order_R, back_R.scatter_(0, order_R, torch.arange(rows, device=order_R.device))


class ExpertParallel(ExpertSplit):
    """The experts of a layer divided among the ranks of `group`, ordered with the width fastest; None where that is
    this rank alone. `sequence_group`: the ranks that hold the tokens of the same sequences, None where that is one.

    Every exchange sends W x T rows a rank (those to itself counted): W T D x the type's bytes for each of dispatch,
    combine and their backward passes, and 8 W X bytes of counts in dispatch. With `coded` a row takes
    D + ceil(D / 128) bytes in dispatch and in combine's backward pass.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        degree: int,
        rank: int,
        width_degree: int,
        width_rank: int,
        sequence_group: dist.ProcessGroup | None,
        token_ranks: int,
        coded: bool = False,
    ) -> None:
        self.degree, self.rank = degree, rank
        self.width_degree, self.width_rank = width_degree, width_rank
        self.token_ranks, self._coded = token_ranks, coded
        self._group, self._sequence_group = group, sequence_group

    def dispatch(self, rows_TD: Tensor, counts_X: Tensor) -> Sent:
        """Exchanges counts, reads them on the host (an exchange needs its sizes there) and starts sending the rows."""
        if self._group is None:
            return super().dispatch(rows_TD, counts_X)
        counts_EL = counts_X.view(self.degree, -1)
        sent_GL = counts_EL.repeat_interleave(self.width_degree, 0)
        received_GL = torch.empty_like(sent_GL)
        comm.all_to_all_single(received_GL, sent_GL, group=self._group)
        exchange = _Exchange(self._group, *self._sizes(rows_TD, counts_EL, received_GL), coded=self._coded)
        departed = _Depart.apply(rows_TD, exchange)  # type: ignore[no-untyped-call]
        order_R, back_R = _order_by_expert(received_GL, sum(exchange.received))
        return _Travelling(exchange, departed, received_GL.sum(0), order_R, back_R)

    def _sizes(self, rows_TD: Tensor, counts_EL: Tensor, received_GL: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to the ranks of each expert, and come from each rank: the one read on the host."""
        del rows_TD
        sizes = torch.cat((counts_EL.sum(1), received_GL.sum(1))).tolist()
        return sizes[: self.degree], sizes[self.degree :]

    def combine(self, out_TD: Tensor, sent: Sent) -> Tensor:
        """Sends results home; the partial ones of an expert's ranks are summed in float32."""
        if self._group is None:
            return super().combine(out_TD, sent)
        assert isinstance(sent, _Travelling)
        back_TD: Tensor = _Combine.apply(out_TD, sent.exchange, sent.order, sent.back)  # type: ignore[no-untyped-call]
        return back_TD

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Summed over the sequence group, on a copy. Not differentiated."""
        if self._sequence_group is None:
            return counts
        total = counts.detach().clone()
        comm.all_reduce(total, group=self._sequence_group)
        return total

    @property
    def shares(self) -> bool:
        return bool(self._sharing())

    def largest(self, values: Tensor, *, divided: bool = False) -> Tensor:
        """One all-reduce of a table of all experts, where the ranks of a sequence and those of the experts lie in each
        other; otherwise both take turns until all have met."""
        groups = self._sharing()
        copies = math.lcm(self.token_ranks, self.degree * self.width_degree) // (self.degree * self.width_degree)
        if not groups or (divided and copies == 1):
            return values
        widths = self.width_degree if divided else 1
        place = self.rank * widths + (self.width_rank if divided else 0)
        table = values.new_zeros(self.degree * widths, *values.shape)
        table[place] = values.detach()
        for group in groups:
            comm.all_reduce(table, group=group, op=dist.ReduceOp.MAX)
        return table[place]

    def _sharing(self) -> list[dist.ProcessGroup]:
        """Over which groups a maximum goes, in order, until it is that of all ranks that hold tokens or weights of the
        same experts for the same sequences: the smallest run of ranks that is made of whole groups of either kind."""
        sequence, experts = self.token_ranks, self.degree * self.width_degree
        whole = math.lcm(sequence, experts)
        if whole == self.degree:  # each expert lives on one rank of them
            return []
        both = [(self._sequence_group, sequence), (self._group, experts)]
        around = [group for group, size in both if group is not None and size == whole]
        if around:
            return around[:1]
        return [group for group, _ in both if group is not None] * (whole // max(sequence, experts))
