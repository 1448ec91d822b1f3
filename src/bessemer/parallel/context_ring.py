"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values go around the ranks, queries stay.

Each hop's transfer runs under the attention to the block that is there. Results over the blocks are put together by
their logsumexp in float32. Backward, keys and values go around again; the float32 gradients of a block travel one hop
behind it, each rank adding its queries' part, and their last hop brings them home.

Every rank makes every hop; what causality, documents or a window hide from both of a rank's pieces is not computed.

Legend: B batch, S tokens of this rank, P tokens of a piece, N whole sequence, H query heads, K key/value heads, E head
dim, Z elements of the keys and values of one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer import ops
from bessemer.comm import collectives as comm
from bessemer.parallel.context_pieces import Packed, Ranks, cut, join

__all__ = ["ring_attend"]


def ring_attend(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts_BN: Tensor | None, ranks: Ranks) -> Tensor:
    """Causal attention of this rank's queries to the keys and values of all ranks -> [B, S, H, E of v]."""
    out: Tensor = _Ring.apply(q_BHSE, k_BKSE, v_BKSE, starts_BN, ranks)  # type: ignore[no-untyped-call]
    return out


class _Hop:
    """A buffer on its way to the next rank, and that of the rank before on its way here.

    Different things that may be under way at once need different tags, which NCCL doesn't know: there the order in
    which they were started decides, and it is the same on all ranks.
    """

    def __init__(self, buffer: Tensor, ranks: Ranks, tag: int) -> None:
        self._leaving = buffer  # kept, and not written to, until it has left
        self._coming = torch.empty_like(buffer)
        after, before = (ranks.rank + 1) % ranks.degree, (ranks.rank - 1) % ranks.degree
        send = dist.P2POp(dist.isend, buffer, group=ranks.group, tag=tag, group_peer=after)
        receive = dist.P2POp(dist.irecv, self._coming, group=ranks.group, tag=tag, group_peer=before)
        self._works = comm.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        """What has come; the buffer that was sent may be written to again."""
        for work in self._works:
            work.wait()
        return self._coming


class _Queries:
    """This rank's queries, and which blocks of keys they see."""

    def __init__(self, pieces_2BHPE: Tensor, starts_BN: Tensor | None, ranks: Ranks) -> None:
        self.pieces, self._starts, self._ranks = pieces_2BHPE, starts_BN, ranks
        self._length = pieces_2BHPE.shape[3]
        # the first piece of keys that any query of a piece sees; on a GPU this waits for it, once a call
        self._first = [0, 0]
        if starts_BN is not None:
            lowest = [starts_BN[:, p * self._length : (p + 1) * self._length].min() for p in ranks.pieces()]
            self._first = [key // self._length for key in torch.stack(lowest).tolist()]

    def blocks(self, hop: int, keys: Tensor, values: Tensor) -> Iterator[tuple[int, int, ops.Block]]:
        """(which piece of queries, which piece of keys, block) for the keys [2, B, K, P, E] that are here after `hop`
        hops, as far as anything in them is seen."""
        source = self._ranks.pieces((self._ranks.rank - hop) % self._ranks.degree)
        for slot, piece in enumerate(self._ranks.pieces()):
            for key_slot, key_piece in enumerate(source):
                if self._first[slot] <= key_piece <= piece:
                    at = (piece * self._length, key_piece * self._length)
                    block = ops.Block(self.pieces[slot], keys[key_slot], values[key_slot], *at, self._starts)
                    yield slot, key_slot, block


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ranks: Ranks) -> Tensor:
        form, pieces = Packed.of(k, v), cut(q)
        own = here = form.pack(k, v)
        queries = _Queries(pieces, starts, ranks)
        merged: dict[int, tuple[Tensor, Tensor]] = {}
        for hop in range(ranks.degree):
            moving = _Hop(here, ranks, tag=0) if hop + 1 < ranks.degree else None
            for slot, _, block in queries.blocks(hop, *form.views(here)):
                part = ops.attend_block(block)
                merged[slot] = ops.merge_blocks(*merged[slot], *part) if slot in merged else part
            if moving is not None:
                here = moving.arrived()
        out = torch.cat([merged[slot][0] for slot in range(2)], 1).to(q.dtype)
        lse = torch.stack([merged[slot][1] for slot in range(2)])
        ctx.save_for_backward(pieces, own, out, lse, starts)
        ctx.form, ctx.ranks = form, ranks
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        pieces, here, out, lse, starts = ctx.saved_tensors
        form, ranks, dtype = ctx.form, ctx.ranks, pieces.dtype
        queries = _Queries(pieces, starts, ranks)
        grads, outs = grad.chunk(2, 1), out.chunk(2, 1)
        dq = torch.zeros_like(pieces, dtype=torch.float32)
        behind: _Hop | None = None
        for hop in range(ranks.degree):
            moving = _Hop(here, ranks, tag=0) if hop + 1 < ranks.degree else None
            made = torch.zeros_like(here, dtype=torch.float32)
            dk, dv = form.views(made)
            for slot, key_slot, block in queries.blocks(hop, *form.views(here)):
                parts = ops.attend_block_backward(block, grads[slot], outs[slot], lse[slot])
                for total, part in zip((dq[slot], dk[key_slot], dv[key_slot]), parts, strict=True):
                    total.add_(part)
            if behind is not None:
                made += behind.arrived()
            behind = _Hop(made, ranks, tag=1)
            if moving is not None:
                here = moving.arrived()
        assert behind is not None
        return join(dq).to(dtype), *form.unpack(behind.arrived(), dtype), None, None
