"""Attention in blocks: parts add up to the whole for any cuts, the kernel is the reference, nothing seen is no NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer import ops
from bessemer.ops import attention_blocks
from bessemer.runtime.kernels import KernelSample

TYPES = [torch.float32, torch.bfloat16]
LIMIT = 5e-6  # of the largest entry: sums of about a hundred terms in another order. Results are float32 in any type
needs_kernels = pytest.mark.skipif(bool(ops.why_absent()), reason=f"no native kernels: {ops.why_absent()}")
PATHS = ["reference", pytest.param("native", marks=needs_kernels)]


def rand(*shape, dtype=torch.float32, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(found, expected, limit=LIMIT):
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert float((found.double() - expected.double()).abs().max()) <= limit * max(1.0, float(expected.abs().max()))


def whole(q, k, v, grad, starts):
    """out [B, N, H, E], logsumexp [B, H, N] and the gradients of q, k, v, in float64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    group, at = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * q.shape[3] ** -0.5
    hidden = (at[None, None, :] > at[None, :, None]) | (at[None, None, :] < starts[:, :, None])
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    out = (scores.softmax(-1) @ v.repeat_interleave(group, 1)).transpose(1, 2)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad.double())


@st.composite
def cut_sequences(draw):
    """(length, first keys of two sequences, ends of the blocks of queries, ends of the blocks of keys)."""
    seq = draw(st.sampled_from([1, 9, 70, 150]))
    share = torch.rand(2, seq, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    starts = (share ** draw(st.sampled_from([0.0, 0.2, 9.0])) * torch.arange(seq)).to(torch.int32)
    ends = [sorted({*draw(st.lists(st.integers(1, seq), max_size=3)), seq}) for _ in range(2)]
    return seq, starts, *ends


@pytest.mark.parametrize("path", PATHS)
@given(cut_sequences())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_blocks_add_up_to_the_whole(path, cut):
    seq, starts, query_ends, key_ends = cut
    q, k, v, grad = rand(2, 4, seq, 8), rand(2, 2, seq, 8), rand(2, 2, seq, 5), rand(2, seq, 4, 5)
    expected, lse_expected, *grads_expected = whole(q, k, v, grad, starts)
    made = [torch.zeros_like(t) for t in (q, k, v)]
    for rows in pieces(query_ends):
        out, lse = expected[:, rows], lse_expected[:, :, rows]
        merged = torch.zeros(out.shape), torch.full(lse.shape, -torch.inf)
        for keys in pieces(key_ends):
            block = ops.Block(q[:, :, rows], k[:, :, keys], v[:, :, keys], rows.start, keys.start, starts)
            with ops.use(path):
                merged = ops.merge_blocks(*merged, *ops.attend_block(block))
                grads = ops.attend_block_backward(block, grad[:, rows], out.float(), lse.float())
            for total, one, span in zip(made, grads, (rows, keys, keys), strict=True):
                total[:, :, span] += one
        close(merged[0], out)
        close(merged[1], lse)
    for total, one in zip(made, grads_expected, strict=True):
        close(total, one)


def pieces(ends):
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


BLOCKS = {
    "on the diagonal": (128, 128, 100, 100),
    "all seen": (128, 0, 100, 128),
    "none seen": (0, 128, 100, 70),
    "a diagonal between two blocks": (96, 64, 130, 150),
    "queries that begin before the keys": (40, 64, 130, 90),
    "more keys than the last query sees": (64, 0, 64, 256),
}


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (24, 10)])
def test_the_kernel_is_the_reference(dtype, documents, dim, value_dim):
    seq = 300
    starts = (torch.arange(seq) // 37 * 37).to(torch.int32) if documents else torch.zeros(seq, dtype=torch.int32)
    starts = torch.stack((starts, torch.zeros_like(starts))) if documents else None
    for first_query, first_key, queries, keys in BLOCKS.values():
        q, k, v = (
            rand(2, n, s, e, dtype=dtype) for n, s, e in ((6, queries, dim), (2, keys, dim), (2, keys, value_dim))
        )
        block = ops.Block(q, k, v, first_query, first_key, starts)
        grad, out = (rand(2, queries, 6, value_dim, dtype=dtype, seed=seed) for seed in (1, 2))
        lse = rand(2, 6, queries) + 5
        with ops.use("reference"):
            expected = *ops.attend_block(block), *ops.attend_block_backward(block, grad, out, lse)
        with ops.use("native"):
            found = *ops.attend_block(block), *ops.attend_block_backward(block, grad, out, lse)
        unseen = expected[1] == -torch.inf
        assert torch.equal(unseen, found[1] == -torch.inf) and not found[0].transpose(1, 2)[unseen].any()
        for a, b in zip(found, expected, strict=True):
            close(*(t.masked_fill(t == -torch.inf, 0) for t in (a, b)))


@pytest.mark.parametrize("path", PATHS)
def test_queries_that_see_nothing_give_no_nan(path):
    q, k, v = rand(1, 2, 6, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8, seed=3)
    with ops.use(path):
        out, lse = ops.attend_block(ops.Block(q, k, v, 2, 4))
    assert torch.equal(lse == -torch.inf, torch.tensor([[[True] * 2 + [False] * 4] * 2]))
    assert (out[:, :2] == 0).all() and out.isfinite().all()
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    assert torch.equal(ops.merge_blocks(*nothing, *nothing)[0], nothing[0])
    assert torch.equal(ops.merge_blocks(*nothing, *nothing)[1], nothing[1])
    for merged in (ops.merge_blocks(out, lse, *nothing), ops.merge_blocks(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


@pytest.mark.parametrize("path", PATHS)
def test_broken_values_come_through(path):
    for spoilt in range(3):
        parts = [rand(1, 1, 9, 8, seed=seed) for seed in range(3)]
        parts[spoilt].view(-1)[3] = torch.nan
        with ops.use(path):
            out, lse = ops.attend_block(ops.Block(*parts, first_query=9))
            assert not out.isfinite().all()
            fine = torch.zeros_like(out), torch.zeros_like(lse)
            assert not ops.merge_blocks(out, lse, *fine)[0].isfinite().all()


def test_the_reference_takes_a_few_queries_at_a_time(monkeypatch):
    q, k, v, grad = rand(2, 4, 33, 8), rand(2, 2, 50, 8), rand(2, 2, 50, 5), rand(2, 33, 4, 5)
    block = ops.Block(q, k, v, 20, 7)
    found = []
    for limit in (1 << 30, 4 * 8 * 50 * 6):
        monkeypatch.setattr(attention_blocks, "_SCORE_BYTES", limit)
        with ops.use("reference"):
            out, lse = ops.attend_block(block)
            found.append((out, lse, *ops.attend_block_backward(block, grad, out, lse)))
    assert len(list(attention_blocks._rows_and_keys(block))) == 6
    for a, b in zip(*found, strict=True):
        close(a, b)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_the_pairs_that_a_block_sees_are_counted(dtype):
    q, k, v = rand(2, 3, 40, 24, dtype=dtype), rand(2, 3, 50, 24, dtype=dtype), rand(2, 3, 50, 10, dtype=dtype)
    starts = (torch.arange(100) // 30 * 30).to(torch.int32).expand(2, 100).contiguous()
    block = ops.Block(q, k, v, 45, 20, starts)
    positions, keys = torch.arange(45, 85)[:, None], torch.arange(20, 70)[None]
    pairs = 2 * int(((keys <= positions) & (keys >= starts[0, 45:85, None])).sum())
    with KernelSample() as sample:
        out, lse = ops.attend_block(block)
        assert sample.flops == {"fp32": 2.0 * 3 * pairs * 34}
        ops.attend_block_backward(block, torch.ones_like(out), out, lse)
    assert sample.flops == {"fp32": 3 * 2.0 * 3 * pairs * 34}
