"""Tensor and sequence parallelism: columns and rows of weights, heads and vocabulary divided among a group's ranks.

    stream             enter                     leave
    whole              -                         all-reduce           (backward: all-reduce, -)
    divided (SP)       all-gather                reduce-scatter       (backward: reduce-scatter, all-gather)

A divided stream is cut along the sequence: rank r holds the r-th of equal contiguous shares. Collectives put the
ranks in front, so a value that all ranks need is [G, B, S / G, D] on the wire and is turned into [B, S, D] with one
copy (none where B is 1). They run in the type of the values: bfloat16 partial results are summed in bfloat16.

What overlaps. A projection is cut into `chunks` pieces of the rank's own sequence (of its tokens, where the stream is
whole), and the transfer of one runs under the products of others:

    columns, forward    the gathering of later chunks (SP) under a chunk's product
    columns, backward   the reduction of dx under later chunks' dx and the weight's gradient; so with one chunk too
    rows, forward       the reduction of a chunk under the product of later ones
    rows, backward      the gathering of later chunks (SP) under both products of a chunk

Autograd runs, of the nodes that are ready, the one that was created last. `columns` gives `ops.linear` an input
without history, so that its node computes nothing but the weight's gradient, and puts the input's gradient in a node
of its own, created after it and so run before; the node that waits for the reduction was created before both. What is
in flight never passes through autograd: a tensor without elements stands for it.

All ranks of a group must make the same calls in the same order, also of backward passes.

Legend: B batch, S sequence (whole, or of this rank), D model, T tokens, I inputs, O outputs, V vocabulary (rows that
this rank holds), G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bessemer import ops
from bessemer.comm import collectives as comm
from bessemer.models.split import TensorSplit
from bessemer.ops.cross_entropy import VocabularyShare
from bessemer.ops.linear import How, Products, products_of

__all__ = ["TensorParallel"]


@dataclass
class _Transfer:
    """A collective under way, and where its result will be."""

    result: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


@dataclass(frozen=True)
class _Ranks:
    """The collectives of a group, all started and not waited for."""

    group: dist.ProcessGroup
    degree: int
    divided: bool  # the stream, along the sequence

    def gather(self, x: Tensor) -> _Transfer:
        """[N, ...] -> [G, N, ...]."""
        into = x.new_empty(self.degree * x.shape[0], *x.shape[1:])
        work = comm.all_gather_single(into, x.contiguous(), group=self.group, async_op=True)
        return _Transfer(into.view(self.degree, *x.shape), work)

    def scatter(self, x: Tensor) -> _Transfer:
        """[G x N, ...] -> [N, ...]: the r-th part, summed."""
        into = x.new_empty(x.shape[0] // self.degree, *x.shape[1:])
        work = comm.reduce_scatter_single(into, x.contiguous(), group=self.group, async_op=True)
        return _Transfer(into, work)

    def sum(self, x: Tensor) -> _Transfer:
        """In place; x is contiguous."""
        return _Transfer(x, comm.all_reduce(x, group=self.group, async_op=True))

    def outwards(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] of the whole sequence -> [G, B, S / G, D]."""
        return x_BSD.view(len(x_BSD), self.degree, -1, x_BSD.shape[-1]).transpose(0, 1)

    def inwards(self, x_GBSD: Tensor) -> Tensor:
        """[G, B, S / G, D] -> [B, S, D]."""
        return x_GBSD.transpose(0, 1).flatten(1, 2)


def _sizes(length: int, pieces: int) -> list[int]:
    """`length` in as equal sizes as it goes, none of them 0."""
    pieces = min(pieces, length)
    return [length // pieces + (i < length % pieces) for i in range(pieces)]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _run(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return made


def _ranks_first(x_BGSI: Tensor) -> Tensor:
    """[B, G, S, I] -> [G x B x S, I]."""
    return x_BGSI.transpose(0, 1).flatten(0, 2)


def _no_elements(like: Tensor) -> Tensor:
    return like.new_empty(0)


class _Gather(torch.autograd.Function):
    """[B, S, D] of each rank -> [B, G x S, D]. Backward sums over the ranks (`enter`), or takes the rank's own part of
    a gradient that all have (`give_tokens`)."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, ranks: _Ranks, rank_of_own: int | None) -> Tensor:
        ctx.ranks, ctx.own = ranks, rank_of_own
        return ranks.inwards(ranks.gather(x_BSD).wait())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> Any:
        grad_GBSD = ctx.ranks.outwards(grad_BSD)
        if ctx.own is not None:
            return grad_GBSD[ctx.own], None, None
        return ctx.ranks.scatter(grad_GBSD.flatten(0, 1)).wait(), None, None


class _Slice(torch.autograd.Function):
    """[B, S, D] that all ranks hold -> this rank's [B, S / G, D]."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, ranks: _Ranks, rank: int) -> Tensor:
        ctx.ranks = ranks
        return ranks.outwards(x_BSD)[rank].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> Any:
        return ctx.ranks.inwards(ctx.ranks.gather(grad_BSD).wait()), None, None


class _SumGradients(torch.autograd.Function):
    """The identity; backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.ranks.sum(grad.clone(memory_format=torch.contiguous_format)).wait(), None


class _Leaving:
    """One passage of partial results into the stream, in pieces. A piece is [T, D], the ranks' parts one after the
    other where the stream is divided."""

    def __init__(self, ranks: _Ranks, batch: int, sizes: list[int]) -> None:
        self.ranks, self.batch, self.sizes = ranks, batch, sizes
        self._there: list[_Transfer] = []
        self._back: dict[int, _Transfer | Tensor] = {}

    def start(self, partial_TD: Tensor) -> None:
        """Takes `partial_TD` over: where the stream is whole it is summed in place."""
        self._there.append(self.ranks.scatter(partial_TD) if self.ranks.divided else self.ranks.sum(partial_TD))

    def finish(self) -> Tensor:
        """[B, S, D] in the stream; nobody else holds it."""
        parts = [transfer.wait() for transfer in self._there]
        self._there = []
        if self.ranks.divided:
            return _joined([torch.unflatten(p, 0, (self.batch, -1)) for p in parts], 1)
        return torch.unflatten(_joined(parts, 0), 0, (self.batch, -1))

    def start_back(self, grad_BSD: Tensor) -> None:
        """The last piece first: autograd asks for it first."""
        if self.ranks.divided:
            pieces = torch.split(grad_BSD, self.sizes, 1)
            for i in reversed(range(len(pieces))):
                self._back[i] = self.ranks.gather(pieces[i].flatten(0, 1))
        else:
            self._back = dict(enumerate(torch.split(grad_BSD.flatten(0, 1), self.sizes)))

    def finish_back(self, index: int) -> Tensor:
        """[T, D] of a piece."""
        back = self._back.pop(index)
        return back if isinstance(back, Tensor) else back.wait().flatten(0, 1)


class _Depart(torch.autograd.Function):
    """Starts the reduction of a piece; backward waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, partial_TD: Tensor, leaving: _Leaving, index: int) -> Tensor:
        ctx.leaving, ctx.index = leaving, index
        leaving.start(partial_TD)
        return _no_elements(partial_TD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return ctx.leaving.finish_back(ctx.index), None, None


class _Arrive(torch.autograd.Function):
    """Waits for all pieces and adds the bias; backward starts the way back. The bias's gradient is that of the tokens
    in the stream, summed in float32."""

    @staticmethod
    def forward(ctx: Any, leaving: _Leaving, bias_D: Tensor | None, *departed: Tensor) -> Tensor:
        ctx.leaving, ctx.bias_dtype = leaving, None if bias_D is None else bias_D.dtype
        out_BSD = leaving.finish()
        return out_BSD if bias_D is None else out_BSD.add_(bias_D.to(out_BSD.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> Any:
        db = None
        if ctx.needs_input_grad[1]:
            db = grad_BSD.flatten(0, 1).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        needs = ctx.needs_input_grad[2:]
        if any(needs):
            ctx.leaving.start_back(grad_BSD)
        return None, db, *(_no_elements(grad_BSD) if need else None for need in needs)


class _Entering:
    """The way back of one passage out of the stream, in pieces."""

    def __init__(self, ranks: _Ranks, shape: torch.Size, pieces: int, products: Products) -> None:
        self.ranks, self.shape, self.pieces, self.products = ranks, shape, pieces, products
        self._back: dict[int, _Transfer] = {}

    def start_back(self, grad_TO: Tensor, weight_OI: Tensor, index: int) -> None:
        """Makes the inputs' partial gradients and starts to sum them: those of piece `index`, the ranks' parts one
        after the other, where the stream is divided; otherwise those of all tokens."""
        if self.ranks.divided:
            self._back[index] = self.ranks.scatter(self._product(grad_TO, weight_OI))
        else:
            for i, piece_TO in enumerate(torch.split(grad_TO, _sizes(len(grad_TO), self.pieces))):
                self._back[i] = self.ranks.sum(self._product(piece_TO, weight_OI))

    def _product(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return self.products.input_gradient(self.products.gradient(grad_TO, again=True), weight_OI)

    def finish_back(self) -> Tensor:
        """[B, S, I] in the stream."""
        parts = [self._back[i].wait() for i in sorted(self._back)]
        self._back = {}
        if self.ranks.divided:
            return _joined([torch.unflatten(p, 0, (self.shape[0], -1)) for p in parts], 1)
        return _joined(parts, 0).view(self.shape)


class _Enter(torch.autograd.Function):
    """Stands for the stream; backward waits for its gradient. It is created before the products, so run after them."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, entering: _Entering) -> Tensor:
        ctx.entering = entering
        return _no_elements(x_BSD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return ctx.entering.finish_back(), None


class _InputGradient(torch.autograd.Function):
    """The identity on a product; backward makes the gradient of the product's input and starts to sum it, then hands
    the product's gradient on to the node that makes the weight's."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, weight_OI: Tensor, y: Tensor, entering: _Entering, index: int) -> Tensor:
        ctx.entering, ctx.index = entering, index
        ctx.save_for_backward(weight_OI)
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight_OI,) = ctx.saved_tensors
        grad = grad.contiguous()
        if not ctx.needs_input_grad[0]:
            return None, None, grad, None, None
        ctx.entering.start_back(grad.flatten(0, -2), weight_OI, ctx.index)
        return _no_elements(grad), None, grad, None, None


class TensorParallel(TensorSplit):
    """This rank's part in a group of `degree` ranks; `rank` is the one inside the group.

    sequence_parallel: the stream is divided along the sequence, whose length must be a multiple of `degree`.
    vocab_size: entries of the vocabulary. With c = ceil(vocab_size / degree), rank r holds those from r c on, and an
    embedding or a head has c rows on every rank; rows past the vocabulary are padding, with gradient 0.
    chunks: pieces that a projection is cut into, so that transfers run under products; the values don't depend on it
    beyond rounding.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        degree: int,
        rank: int,
        *,
        sequence_parallel: bool,
        vocab_size: int,
        chunks: int = 1,
    ) -> None:
        self.degree, self.rank = degree, rank
        self.sequence_parallel = sequence_parallel
        self.vocab_size, self.chunks = vocab_size, chunks
        self._ranks = _Ranks(group, degree, sequence_parallel)

    def enter(self, x_BSD: Tensor) -> Tensor:
        if self.sequence_parallel:
            return _run(_Gather, x_BSD, self._ranks, None)
        return _run(_SumGradients, x_BSD, self._ranks)

    def leave(self, x_BSD: Tensor) -> Tensor:
        return self._leave(x_BSD if self.sequence_parallel else x_BSD.clone(memory_format=torch.contiguous_format))

    def _leave(self, x_BSD: Tensor) -> Tensor:
        """`leave` of a tensor that may be overwritten."""
        rows_TD = (self._ranks.outwards(x_BSD).flatten(0, 1) if self.sequence_parallel else x_BSD).flatten(0, 1)
        in_stream = x_BSD.shape[1] // self.degree if self.sequence_parallel else len(rows_TD)
        leaving = _Leaving(self._ranks, x_BSD.shape[0], [in_stream])
        return _run(_Arrive, leaving, None, _run(_Depart, rows_TD, leaving, 0))

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        products = products_of(how)
        x = x.to(products.dtype)
        entering = _Entering(self._ranks, x.shape, self.chunks, products)
        entered = _run(_Enter, x, entering)
        fixed = weight.detach()
        if not self.sequence_parallel:
            y = ops.linear(x.detach(), weight, bias, how)
            return _run(_InputGradient, entered, fixed, y, entering, 0)
        pieces = torch.split(x.detach(), _sizes(x.shape[1], self.chunks), 1)
        made = []
        for i, (piece, transfer) in enumerate([(piece, self._ranks.gather(piece)) for piece in pieces]):
            x_GBSI = self.saving.made("gather", transfer.wait(), self._gathered, piece)
            y_TO = ops.linear(x_GBSI.flatten(0, 2), weight, bias, how)
            y_TO = _run(_InputGradient, entered, fixed, y_TO, entering, i)
            made.append(torch.unflatten(y_TO, 0, x_GBSI.shape[:3]).transpose(0, 1))
        return _joined(made, 2).flatten(1, 2)

    def _gathered(self, x_BSI: Tensor) -> Tensor:
        return self._ranks.gather(x_BSI).wait()

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        if self.sequence_parallel:
            x_BGSI = torch.unflatten(x, 1, (self.degree, -1))
            sizes = _sizes(x_BGSI.shape[2], self.chunks)
            parts = torch.split(x_BGSI, sizes, 2)
            pieces = [self.saving.part("gather", _ranks_first, piece_BGSI) for piece_BGSI in parts]
        else:
            rows_TI = x.flatten(0, 1)
            sizes = _sizes(len(rows_TI), self.chunks)
            pieces = list(torch.split(rows_TI, sizes))
        leaving = _Leaving(self._ranks, x.shape[0], sizes)
        departed = [_run(_Depart, ops.linear(p, weight, None, how), leaving, i) for i, p in enumerate(pieces)]
        return _run(_Arrive, leaving, bias, *departed)

    def embed(self, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        """Another rank's token looks up row `token % rows` here and is dropped, so that the gradients of what is
        dropped (zeros) spread over the rows. A token outside of the vocabulary raises IndexError on every rank."""
        rows = weight_VD.shape[0]
        known_BS = (tokens_BS >= 0) & (tokens_BS < self.vocab_size)
        looked_up_BSD = F.embedding(torch.where(known_BS, tokens_BS % rows, tokens_BS), weight_VD)
        return self._leave(looked_up_BSD.masked_fill((tokens_BS // rows != self.rank)[..., None], 0.0))

    def loss(self, hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        rows = weight_VD.shape[0]
        share = VocabularyShare(self.vocab_size, self.rank * rows, rows, lambda x: self._ranks.gather(x).wait())
        hidden_TD = self.enter(hidden_BSD).flatten(0, 1)
        return ops.linear_cross_entropy(hidden_TD, weight_VD, labels_BS.flatten(), weights_BS.flatten(), share)

    def stream_part(self, values: Tensor, dim: int = 1) -> Tensor:
        if not self.sequence_parallel:
            return values
        return torch.unflatten(values, dim, (self.degree, -1)).select(dim, self.rank)

    def take_tokens(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.sequence_parallel else _run(_Slice, x_BSD, self._ranks, self.rank)

    def give_tokens(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.sequence_parallel else _run(_Gather, x_BSD, self._ranks, self.rank)
