"""Context parallelism: the tokens of every sequence divided among the ranks of a group, and attention across them.

A sequence is cut into 2n equal pieces for n ranks; rank r holds the pieces r and 2n - 1 - r. So every rank has an early
and a late piece, and causal attention is the same work for all. Three kinds of exchange, one data layout:

* ring (`context_ring.py`): keys and values go around, each hop under the attention to the block that is there;
* allgather: every rank gathers all keys and values, and its two pieces of queries meet those before them;
* ulysses: tokens are swapped for heads, so that a rank has some heads of whole sequences, and back.

Bytes that a rank sends for one layer, with q = B S H E, k = B S K E, v = B S K E_v and o = B S H E_v its own elements
(S its own tokens) of `e` bytes each:

    kind       forward                     backward
    ring       (n-1) e (k+v)               (n-1) e (k+v) + n 4 (k+v)
    allgather  (n-1) e (k+v)               (n-1) e (k+v) + (n-1) 4 (k+v)
    ulysses    (n-1)/n e (q+o+m(k+v))      the same

where gradients of keys and values travel in float32 while they are summed, and m = n / gcd(K, n) is how often Ulysses
repeats each key/value head so that every rank gets whole ones (1 where n divides K). Collectives count as (n-1)/n of
what is gathered, scattered or swapped, which is the least that any algorithm sends.

Legend: B batch, S tokens of this rank, P tokens of a piece (S / 2), N whole sequence (2 n P), H query heads,
K key/value heads, E head dim (E_v of values).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer import ops
from bessemer.comm import collectives as comm
from bessemer.models.split import ContextSplit
from bessemer.parallel.context_pieces import Packed, Ranks, cut, in_order, join, spread
from bessemer.parallel.context_ring import ring_attend

__all__ = ["ContextParallel"]


class ContextParallel(ContextSplit):
    """The share of rank `rank` of `group` (its number inside it) in every sequence, of `degree` ranks."""

    def __init__(
        self, group: dist.ProcessGroup, degree: int, rank: int, kind: Literal["ring", "allgather", "ulysses"]
    ) -> None:
        assert 0 <= rank < degree == dist.get_world_size(group)
        self.degree, self.rank, self.kind = degree, rank, kind
        self._ranks = Ranks(group, degree, rank)

    def positions(self, seq: int, device: torch.device) -> Tensor:
        return self.part(torch.arange(seq, device=device)[None])[0]

    def part(self, values_BN: Tensor) -> Tensor:
        pieces = 2 * self.degree
        assert values_BN.shape[1] % pieces == 0, "a sequence of other than 2 x degree equal pieces"
        cut = values_BN.chunk(pieces, 1)
        return torch.cat([cut[piece] for piece in self._ranks.pieces()], 1)

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts: Tensor | None) -> Tensor:
        """`ContextSplit.attend`; differentiable once. All ranks of the group call it, with the same `starts`."""
        if self.kind == "ring":
            return ring_attend(q_BHSE, k_BKSE, v_BKSE, starts, self._ranks)
        if self.kind == "allgather":
            out: Tensor = _Gathered.apply(q_BHSE, k_BKSE, v_BKSE, starts, self._ranks)  # type: ignore[no-untyped-call]
            return out
        return _by_heads(q_BHSE, k_BKSE, v_BKSE, starts, self._ranks)

    def largest(self, values: Tensor) -> Tensor:
        """One all-reduce, on a copy."""
        agreed = values.detach().clone()
        comm.all_reduce(agreed, group=self._ranks.group, op=dist.ReduceOp.MAX)
        return agreed


def _gathered_blocks(
    pieces_2BHPE: Tensor, own_2Z: Tensor, starts_BN: Tensor | None, form: Packed, ranks: Ranks
) -> list[ops.Block]:
    """Each of this rank's two pieces of queries with all keys up to the piece's end. Gathers the keys and values."""
    gathered = own_2Z.new_empty(2 * ranks.degree, own_2Z.shape[1])
    comm.all_gather_single(gathered, own_2Z, group=ranks.group)
    k, v = (in_order(list(t)) for t in form.views(gathered))
    length, blocks = pieces_2BHPE.shape[3], []
    for q, piece in zip(pieces_2BHPE, ranks.pieces(), strict=True):
        end = (piece + 1) * length
        blocks.append(ops.Block(q, k[:, :, :end], v[:, :, :end], first_query=piece * length, starts=starts_BN))
    return blocks


class _Gathered(torch.autograd.Function):
    """Backward gathers keys and values again, so that no rank keeps those of the others in between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ranks: Ranks) -> Tensor:
        form, pieces = Packed.of(k, v), cut(q)
        own = form.pack(k, v)
        parts = [ops.attend_block(block) for block in _gathered_blocks(pieces, own, starts, form, ranks)]
        out = torch.cat([out for out, _ in parts], 1).to(q.dtype)
        ctx.save_for_backward(pieces, own, out, torch.stack([lse for _, lse in parts]), starts)
        ctx.form, ctx.ranks = form, ranks
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        pieces, own, out, lse, starts = ctx.saved_tensors
        form, ranks, dtype = ctx.form, ctx.ranks, pieces.dtype
        early, late = _gathered_blocks(pieces, own, starts, form, ranks)
        (grad_early, grad_late), (out_early, out_late) = grad.chunk(2, 1), out.chunk(2, 1)
        made = torch.zeros(2 * ranks.degree, own.shape[1], device=own.device)
        dq_late, *totals = ops.attend_block_backward(late, grad_late, out_late, lse[1])
        dq_early, *parts = ops.attend_block_backward(early, grad_early, out_early, lse[0])
        for total, part, views in zip(totals, parts, form.views(made), strict=True):
            total[:, :, : part.shape[2]] += part
            spread(total, list(views))
        mine = torch.empty_like(own, dtype=torch.float32)
        comm.reduce_scatter_single(mine, made, group=ranks.group)
        return join(torch.stack((dq_early, dq_late))).to(dtype), *form.unpack(mine, dtype), None, None


def _by_heads(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ranks: Ranks) -> Tensor:
    """Ulysses (Jacobs et al. 2023, arXiv 2309.14509): attention of some heads over whole sequences."""
    repeats = ranks.degree // math.gcd(k.shape[1], ranks.degree)
    # gradients of the copies are summed by expand's own backward, which adds bfloat16 up in float32
    k, v = (t.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2) for t in (k, v))
    q, k, v = _ToHeads.apply(ranks, q, k, v)  # type: ignore[no-untyped-call]
    out_BNHE = ops.attend(q, k, v, starts)
    out_BHSE: Tensor = _ToTokens.apply(ranks, out_BNHE.transpose(1, 2))  # type: ignore[no-untyped-call]
    return out_BHSE.transpose(1, 2)


class _ToHeads(torch.autograd.Function):
    """[B, H, S, E] of this rank's tokens -> [B, H / n, N, E] of this rank's heads; several tensors in one exchange."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        return _to_heads(ranks, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_to_tokens(ctx.ranks, grads)


class _ToTokens(torch.autograd.Function):
    """The way back of `_ToHeads`, of one tensor."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x_BHNE: Tensor) -> Tensor:
        ctx.ranks = ranks
        return _to_tokens(ranks, (x_BHNE,))[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *_to_heads(ctx.ranks, (grad,))


def _swap(buffer: Tensor, ranks: Ranks) -> Tensor:
    """Row i of the result is what rank i sent: its row for this rank."""
    swapped = torch.empty_like(buffer)
    comm.all_to_all_single(swapped, buffer, group=ranks.group)
    return swapped


def _columns(rows: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Rows [n, elements] as views [n, *shape], one beside the other."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    starts = [0, *ends[:-1]]
    return [rows[:, a:b].view(-1, *shape) for a, b, shape in zip(starts, ends, shapes, strict=True)]


def _to_heads(ranks: Ranks, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    by_rank = [torch.stack(t.chunk(ranks.degree, 1)) for t in tensors]  # [n, B, H / n, S, E]
    swapped = _swap(torch.cat([t.flatten(1) for t in by_rank], 1), ranks)
    parts = _columns(swapped, [tuple(t.shape[1:]) for t in by_rank])
    return tuple(in_order([half for row in part for half in row.chunk(2, 2)]) for part in parts)


def _to_tokens(ranks: Ranks, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    degree = ranks.degree
    shapes = [(*t.shape[:2], t.shape[2] // degree, t.shape[3]) for t in tensors]  # [B, H / n, S, E]
    buffer = tensors[0].new_empty(degree, sum(math.prod(shape) for shape in shapes))
    for x_BHNE, part in zip(tensors, _columns(buffer, shapes), strict=True):
        spread(x_BHNE, [half for row in part for half in row.chunk(2, 2)])
    return tuple(part.movedim(0, 1).flatten(1, 2) for part in _columns(_swap(buffer, ranks), shapes))
