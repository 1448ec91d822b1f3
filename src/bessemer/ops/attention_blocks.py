"""Attention of a run of queries to a run of keys: what attention over the tokens of several ranks is made of.

`attend_block` gives the result and its logsumexp, by which results over several runs of keys are put together
(`merge_blocks`). `attend_block_backward` gives what the block adds to the gradients, out of the result and logsumexp
over all keys. The CPU kernel is that of `attend`, which is one block of all queries and all keys.

Legend: B batch, S queries of the block, L keys of the block, N whole sequence, H query heads, K key/value heads,
E head dim. Values may be narrower than keys; what is made of them then is too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops import native
from bessemer.ops.registry import native_fits, register
from bessemer.runtime.kernels import native_kernel

__all__ = [
    "Block",
    "as_wide",
    "attend_block",
    "attend_block_backward",
    "filled",
    "merge_blocks",
    "run_backward",
    "run_forward",
]

_SCORE_BYTES = 64 << 20
"""Of float32 scores that the reference holds at once: some queries at a time, so that a long sequence fits."""


@dataclass(frozen=True)
class Block:
    """Queries q [B, H, S, E], and keys k and values v [B, K, L, E] of the same sequences of N tokens, each a run of
    consecutive tokens that begins at `first_query` and `first_key`. Query heads share key/value heads in groups.

    The query at position p sees the block's keys from position starts[b, p] (0 where starts is None) to p.
    starts: int32 [B, N] of the whole sequence, contiguous.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first_query: int = 0
    first_key: int = 0
    starts: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def offset(self) -> int:
        """Of the first query from the first key."""
        return self.first_query - self.first_key

    @property
    def scale(self) -> float:
        """The factor on q k^T."""
        return float(self.q.shape[-1] ** -0.5)

    def seen(self, rows: slice, keys: int) -> tuple[Tensor, Tensor]:
        """(first, end) of those of the first `keys` keys that the queries `rows` see, int64 or int32 [1 or B, S];
        a query for which first >= end sees none."""
        at_S = torch.arange(rows.start, rows.stop, device=self.device)
        end_BS = (at_S + (self.offset + 1)).clamp(0, keys)[None]
        if self.starts is None:
            return torch.zeros_like(end_BS), end_BS
        starts_BS = self.starts[:, self.first_query + rows.start : self.first_query + rows.stop]
        return (starts_BS - self.first_key).clamp_min(0), end_BS

    def flops(self, value_dim: int) -> float:
        """Of the forward pass over the pairs that are seen; blocks that no query sees are skipped."""
        batch, heads, queries, dim = self.q.shape
        first, end = self.seen(slice(0, queries), self.k.shape[2])
        pairs = int((end - first).clamp_min(0).expand(batch, queries).sum())
        return 2.0 * heads * pairs * (dim + value_dim)


class _View(ctypes.Structure):
    """`View` of csrc/attention.cpp."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("starts_row", ctypes.c_int64),
        ("keys", ctypes.c_int),
        ("first_key", ctypes.c_int),
        ("offset", ctypes.c_int),
    )


def _view(block: Block) -> _View:
    starts, at, row = block.starts, None, 0
    if starts is not None:
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        at, row = starts.data_ptr() + block.first_query * starts.element_size(), starts.shape[1]
    return _View(at, row, block.k.shape[2], block.first_key, block.offset)


def _sizes(block: Block) -> tuple[int | float, ...]:
    batch, heads, queries, dim = block.q.shape
    return batch, heads, block.k.shape[1], queries, dim, block.scale, native.threads()


def _types(inputs: torch.dtype, results: torch.dtype) -> int:
    """The number that `typed_pair` of csrc/attention.cpp has for them."""
    return {(torch.float32, torch.float32): 0, (torch.bfloat16, torch.bfloat16): 1, (torch.bfloat16, torch.float32): 2}[
        inputs, results
    ]


def as_wide(x: Tensor, width: int) -> Tensor:
    """Contiguous, filled up with zeros to `width`: the kernel has one width for keys and values."""
    return x.contiguous() if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def filled(block: Block) -> Block:
    """The block as the kernel reads it: contiguous, values as wide as keys."""
    return replace(block, q=block.q.contiguous(), k=block.k.contiguous(), v=as_wide(block.v, block.k.shape[-1]))


def run_forward(block: Block, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The kernel on a filled block -> (out [B, S, H, E] in `dtype`, logsumexp float32 [B, H, S])."""
    batch, heads, queries, dim = block.q.shape
    out = block.q.new_empty(batch, queries, heads, dim, dtype=dtype)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=block.device)
    view = _view(block)
    # float32 whatever the inputs: csrc/attention.cpp widens them before its products
    with native_kernel("attend", torch.float32, lambda: block.flops(value_dim)):
        native.kernels(block.q).bessemer_attend(
            *(t.data_ptr() for t in (block.q, block.k, block.v)),
            _types(block.q.dtype, dtype),
            ctypes.addressof(view),
            *(t.data_ptr() for t in (out, lse)),
            *_sizes(block),
        )
    return out, lse


def run_backward(
    block: Block, grad: Tensor, out: Tensor, lse: Tensor, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel on a filled block, with grad and out [B, S, H, E] as wide as its keys -> (dq, dk, dv) in `dtype`."""
    dq, dk, dv = (torch.empty_like(t, dtype=dtype) for t in (block.q, block.k, block.v))
    view = _view(block)
    with native_kernel("attend_backward", torch.float32, lambda: 2 * block.flops(value_dim)):
        native.kernels(block.q).bessemer_attend_backward(
            *(t.data_ptr() for t in (grad, block.q, block.k, block.v, out, lse)),
            _types(block.q.dtype, dtype),
            ctypes.addressof(view),
            *(t.data_ptr() for t in (dq, dk, dv)),
            *_sizes(block),
        )
    return dq, dk, dv[..., :value_dim]


def _rows_and_keys(block: Block) -> Iterator[tuple[slice, int]]:
    """Runs of queries whose scores fit into `_SCORE_BYTES`, and how many of the keys stand before each run's end."""
    batch, heads, queries, _ = block.q.shape
    keys = block.k.shape[2]
    step = max(1, _SCORE_BYTES // (4 * batch * heads * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield slice(start, stop), max(0, min(keys, stop + block.offset))


def _by_kv(x_BHSE: Tensor, kv: int) -> Tensor:
    """float32 [B, K, H / K * S, E]: one product with a key/value head for all query heads that share it."""
    batch, heads, rows, dim = x_BHSE.shape
    return x_BHSE.float().reshape(batch, kv, heads // kv * rows, dim)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """The way back of `_by_kv`."""
    batch, kv, rows, dim = x.shape
    return x.reshape(batch, heads, kv * rows // heads, dim)


def _scores(block: Block, rows: slice, keys: int) -> tuple[Tensor, Tensor]:
    """q k^T / sqrt(E) of some queries and the first keys, float32 [B, H, S, L], and which of them are hidden."""
    k_BKLE = block.k[:, :, :keys].float()
    scores = _by_kv(block.q[:, :, rows], k_BKLE.shape[1]) @ k_BKLE.transpose(2, 3) * block.scale
    first, end = (t[:, None, :, None] for t in block.seen(rows, keys))
    at_L = torch.arange(keys, device=scores.device)
    return _by_head(scores, block.q.shape[1]), (at_L < first) | (at_L >= end)


def _finite(lse: Tensor) -> Tensor:
    """0 for the -inf of queries that see nothing, so that exp(-inf - lse) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _reference(block: Block) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(E)) v over the keys that each query sees -> (out [B, S, H, E], the logarithm of each
    softmax's denominator [B, H, S]), float32. Not differentiated.

    A query that sees none of the keys gets 0, with a logsumexp of -inf.
    """
    heads, kv = block.q.shape[1], block.k.shape[1]
    outs, sums = [], []
    for rows, keys in _rows_and_keys(block):
        scores, hidden = _scores(block, rows, keys)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse_BHS = scores.logsumexp(-1)
        shares = (scores - _finite(lse_BHS)[..., None]).exp()
        out_BHSE = _by_head(_by_kv(shares, kv) @ block.v[:, :, :keys].float(), heads)
        outs.append(out_BHSE.transpose(1, 2))
        sums.append(lse_BHS)
    return torch.cat(outs, 1), torch.cat(sums, 2)


def _native(block: Block) -> tuple[Tensor, Tensor]:
    value_dim = block.v.shape[-1]
    out, lse = run_forward(filled(block), value_dim, torch.float32)
    return out[..., :value_dim], lse


def _backward_reference(
    block: Block, grad_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the block adds to the gradients of its queries, keys and values: float32, in their shapes.

    grad, out and lse belong to the queries' attention to *all* keys that they see, in whatever blocks: the shares are
    p = exp(score - lse), and a score's gradient is p (grad . v - grad . out) (Dao et al. 2022, arXiv 2205.14135).
    """
    heads, kv = block.q.shape[1], block.k.shape[1]
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (block.q, block.k, block.v))
    delta_BHS = (grad_BSHE.float() * out_BSHE.float()).sum(-1).transpose(1, 2)
    for rows, keys in _rows_and_keys(block):
        scores, hidden = _scores(block, rows, keys)
        shares = (scores - lse_BHS[:, :, rows, None]).exp().masked_fill(hidden, 0.0)
        grad = _by_kv(grad_BSHE[:, rows].transpose(1, 2), kv)
        dp = _by_head(grad @ block.v[:, :, :keys].float().transpose(2, 3), heads)
        ds = _by_kv(shares * (dp - delta_BHS[:, :, rows, None]) * block.scale, kv)
        dq[:, :, rows] = _by_head(ds @ block.k[:, :, :keys].float(), heads)
        dk[:, :, :keys] += ds.transpose(2, 3) @ _by_kv(block.q[:, :, rows], kv)
        dv[:, :, :keys] += _by_kv(shares, kv).transpose(2, 3) @ grad
    return dq, dk, dv


def _backward_native(
    block: Block, grad_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dim, dtype = block.q.shape[-1], block.q.dtype
    grad, out = (as_wide(t.to(dtype), dim) for t in (grad_BSHE, out_BSHE))
    return run_backward(filled(block), grad, out, lse_BHS.contiguous(), block.v.shape[-1], torch.float32)


def _fits(block: Block, *others: Tensor) -> bool:
    q, k, v = block.q, block.k, block.v
    return native_fits(q, k, v, *others) and q.dtype == k.dtype == v.dtype and v.shape[-1] <= k.shape[-1]


attend_block = register("attend_block", reference=_reference, native=_native, fits=_fits)
attend_block_backward = register(
    "attend_block_backward", reference=_backward_reference, native=_backward_native, fits=_fits
)


def merge_blocks(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of two blocks, out of that to each of them: out [B, S, H, E] and logsumexp [B, H, S] as
    `attend_block` gives them. Denominators add up, and each result counts by its share of their sum."""
    lse_BHS = torch.logaddexp(lse_a, lse_b)
    shares = [(lse - _finite(lse_BHS)).exp().transpose(1, 2)[..., None] for lse in (lse_a, lse_b)]
    return out_a * shares[0] + out_b * shares[1], lse_BHS
