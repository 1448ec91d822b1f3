"""Every native kernel against its reference: values and gradients, in both types; and what only the kernels promise."""

import math

import pytest
import torch
import torch.nn.functional as F

from bessemer import ops
from bessemer.runtime.kernels import KernelSample

SEED = 5
TYPES = [torch.float32, torch.bfloat16]
# Relative to the largest entry. fp32: sums of about a hundred terms in another order. bf16: results are rounded
# once (2^-9 relative), and a gradient of rounded inputs is compared after one more rounding.
LIMIT = {torch.float32: 5e-6, torch.bfloat16: 2e-2}

needs_kernels = pytest.mark.skipif(bool(ops.why_absent()), reason=f"no native kernels: {ops.why_absent()}")


def rand(*shape, dtype=torch.float32, seed=SEED):
    out = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float32)
    return out.to(dtype).requires_grad_()


def both(function, inputs, types_out):
    """Outputs and gradients of every input through the reference and through the kernel."""
    found = []
    for path in ("reference", "native"):
        with ops.use(path):
            outs = function(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        cot = [torch.cos(torch.arange(o.numel()).float()).view(o.shape).to(o.dtype) for o in outs]
        grads = torch.autograd.grad(outs, [i for i in inputs if i is not None], cot)
        found.append([*outs, *grads])
    for reference, kernel in zip(*found, strict=True):
        assert reference.dtype == kernel.dtype and reference.shape == kernel.shape
        limit = LIMIT[types_out] * max(1.0, float(reference.detach().abs().max()))
        assert float((reference - kernel).detach().abs().max()) <= limit
    return found[1]


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [48, 7, 256])
@pytest.mark.parametrize("delta", [None, torch.float32, torch.bfloat16])
def test_add_norm(dtype, width, delta):
    x, w = rand(3, 50, width), rand(width)
    d = None if delta is None else rand(3, 50, width, dtype=delta, seed=9)
    both(lambda *a: ops.add_norm(a[0], d, a[1], None, 1e-5, "rmsnorm", dtype), [x, w], dtype)
    if d is not None:
        both(lambda a, b, c: ops.add_norm(a, b, c, None, 1e-5, "rmsnorm", dtype), [x, d, w], torch.bfloat16)


@needs_kernels
def test_add_norm_of_a_bf16_stream():
    x, d, w = rand(4, 9, 32, dtype=torch.bfloat16), rand(4, 9, 32, dtype=torch.bfloat16, seed=8), rand(32)
    both(lambda *a: ops.add_norm(*a, None, 1e-5, "rmsnorm", torch.bfloat16), [x, d, w], torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rotation"), [(32, "shared"), (18, "shared"), (64, "each"), (32, "none")])
def test_split_heads(dtype, normed, dim, rotation):
    heads = ops.Heads(4, 2, dim)
    qkv = rand(2, 70, 8 * dim, dtype=dtype)
    angles = torch.arange(70)[:, None] / (1 + torch.arange(dim // 2))
    angles = angles if rotation == "shared" else torch.stack([angles, angles + 3])
    rope = None if rotation == "none" else (angles.cos(), angles.sin())
    if normed:
        both(
            lambda a, q, k: ops.split_heads(a, heads, rope, (q, k), 1e-6),
            [qkv, rand(dim), rand(dim, seed=6)],
            dtype,
        )
    else:
        both(lambda a: ops.split_heads(a, heads, rope, None, 1e-6), [qkv], dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [5, 96])
def test_swiglu(dtype, width):
    both(ops.swiglu, [rand(37, 2 * width, dtype=dtype)], dtype)


SEGMENTS = torch.tensor([[0] * 30 + [1] * 1 + [2] * 70 + [3] * 32, [4] * 133, [0] * 64 + [1] * 69])


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [32, 20, 80])
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "both"])
def test_attend(dtype, dim, mask):
    batch, seq = SEGMENTS.shape
    starts = ops.first_keys(
        SEGMENTS if mask in ("documents", "both") else None, batch, seq, 17 if mask in ("window", "both") else None
    )
    assert (starts is None) == (mask == "causal")
    q, k, v = (
        rand(batch, 6, seq, dim, dtype=dtype),
        rand(batch, 2, seq, dim, dtype=dtype),
        rand(batch, 2, seq, dim, dtype=dtype, seed=3),
    )
    both(lambda a, b, c: ops.attend(a, b, c, starts), [q, k, v], dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("documents", [False, True])
def test_attend_with_narrower_values(dtype, documents):
    batch, seq = SEGMENTS.shape
    starts = ops.first_keys(SEGMENTS, batch, seq, None) if documents else None
    q, k, v = (rand(batch, 3, seq, width, dtype=dtype, seed=width) for width in (24, 24, 10))
    both(lambda a, b, c: ops.attend(a, b, c, starts), [q, k, v], dtype)
    assert ops.attend(q, k, v, starts).shape == (batch, seq, 3, 10)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("documents", [False, True])
def test_attend_counts_the_pairs_that_are_seen_in_the_precision_of_its_products(dtype, window, documents):
    batch, seq = SEGMENTS.shape
    starts = ops.first_keys(SEGMENTS if documents else None, batch, seq, window)
    q, k, v = (rand(batch, 3, seq, width, dtype=dtype, seed=width).requires_grad_() for width in (24, 24, 10))
    seen_BSS = torch.ones(batch, seq, seq, dtype=torch.bool).tril()
    if window is not None:
        seen_BSS &= torch.ones(seq, seq, dtype=torch.bool).triu(-(window - 1))
    if documents:
        seen_BSS &= SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    forward = 2 * 3 * int(seen_BSS.sum()) * (24 + 10)
    with KernelSample() as sample:
        out = ops.attend(q, k, v, starts)
        forward_flops = dict(sample.flops)
        out.float().sum().backward()
    assert forward_flops == {"fp32": forward} and sample.flops == {"fp32": 3 * forward}


def test_first_keys_say_documents_and_windows():
    starts = ops.first_keys(torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]]), 2, 5, None)
    assert starts.tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert ops.first_keys(torch.zeros(2, 5, dtype=torch.int32), 2, 5, None) is None
    assert ops.first_keys(None, 2, 5, 5) is None
    assert ops.first_keys(None, 1, 5, 2).tolist() == [[0, 0, 1, 2, 3]]
    both_rules = ops.first_keys(torch.tensor([[0, 0, 1, 1, 1]]), 1, 5, 2)
    assert both_rules.tolist() == [[0, 0, 2, 2, 3]]


def test_documents_equal_separate_sequences():
    """Attention over packed documents is attention over each of them."""
    q, k, v = rand(1, 4, 50, 16), rand(1, 2, 50, 16), rand(1, 2, 50, 16, seed=3)
    starts = ops.first_keys(torch.tensor([[0] * 21 + [1] * 29]), 1, 50, None)
    parts = [ops.attend(q[:, :, s], k[:, :, s], v[:, :, s], None) for s in (slice(0, 21), slice(21, 50))]
    torch.testing.assert_close(ops.attend(q, k, v, starts), torch.cat(parts, 1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("path", ["reference", "native"])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 2000])
@pytest.mark.parametrize("dtype", TYPES)
def test_linear_cross_entropy_equals_torch(monkeypatch, path, chunk_bytes, dtype):
    if path == "native" and ops.why_absent():
        pytest.skip(ops.why_absent())
    monkeypatch.setattr("bessemer.ops.cross_entropy._CHUNK_BYTES", chunk_bytes)
    hidden, weight = rand(61, 24, dtype=dtype), rand(93, 24)
    labels = torch.randint(0, 93, (61,), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(61, generator=torch.Generator().manual_seed(2))
    weights[::5], labels[::5] = 0, 10**6
    logits = F.linear(hidden, weight.to(dtype)).float()
    per_row = F.cross_entropy(logits, torch.where(weights == 0, 0, labels), reduction="none")
    expected = (per_row * weights).sum()
    want = torch.autograd.grad(expected / 7, (hidden, weight))
    with ops.use(path):
        loss = ops.linear_cross_entropy(hidden, weight, labels, weights)
    got = torch.autograd.grad(loss / 7, (hidden, weight))
    assert loss.dtype == torch.float32 and got[1].dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=3e-6 if dtype == torch.float32 else 2e-3, atol=0)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= LIMIT[dtype] * b.abs().max()
    assert (got[0][::5] == 0).all()


def test_labels_outside_of_the_vocabulary_are_refused():
    with pytest.raises(IndexError, match=r"label 93 outside of the vocabulary \[0, 93\)"):
        ops.linear_cross_entropy(rand(4, 8), rand(93, 8), torch.tensor([0, 1, 93, 2]), torch.ones(4))


def test_a_spent_loss_says_so():
    loss = ops.linear_cross_entropy(rand(4, 8), rand(9, 8), torch.tensor([0, 1, 3, 2]), torch.ones(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", TYPES)
def test_non_finite_values_come_through(bad, dtype):
    """A broken tensor must reach the loop's check, not be washed out by a clamp or a maximum."""

    def spoilt(*shape):
        x = rand(*shape, dtype=dtype).detach()
        x.view(-1)[3] = bad
        return x

    assert not ops.add_norm(spoilt(4, 32), None, torch.ones(32), None, 1e-5, "rmsnorm", dtype)[1][0].isfinite().all()
    assert not ops.swiglu(spoilt(4, 32)).isfinite().all()
    k, v = rand(1, 1, 9, 32, dtype=dtype).detach(), rand(1, 1, 9, 32, dtype=dtype).detach()
    assert not ops.attend(spoilt(1, 1, 9, 32), k, v, None).isfinite().all()
    assert not ops.attend(k, k, spoilt(1, 1, 9, 32), None).isfinite().all()
    logits = spoilt(4, 32)
    assert not ops.cross_entropy_rows(logits, torch.arange(4), torch.ones(4), True).isfinite().all()


@needs_kernels
def test_results_are_bitwise_the_same_again_and_for_any_number_of_threads():
    q, k, v = rand(2, 4, 100, 32), rand(2, 2, 100, 32), rand(2, 2, 100, 32, seed=3)
    x, w = rand(300, 64), rand(64)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            out = ops.attend(q, k, v, None)
            y = ops.add_norm(x, None, w, None, 1e-5, "rmsnorm", torch.float32)[1]
            found.append([out, y, *torch.autograd.grad((out.sin().sum() + y.sin().sum()), (q, k, v, x, w))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_linear_gives_gradients_in_the_parameters_types():
    x, w, b = rand(5, 7, 16), rand(24, 16), rand(24)
    out = ops.linear(x, w, b, torch.bfloat16)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and all(t.grad.dtype == torch.float32 for t in (x, w, b))
    torch.testing.assert_close(w.grad, x.detach().bfloat16().float().sum((0, 1)).expand(24, 16), rtol=1e-2, atol=2e-2)
    assert torch.equal(b.grad, torch.full((24,), 35.0))


@pytest.mark.parametrize("rows", [1, 15, 16, 77])
def test_float32_linear_equals_torchs(rows):
    x, w, b = rand(2, rows, 24), rand(40, 24), rand(40)
    got, want = ops.linear(x, w, b, torch.float32), F.linear(x, w, b)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)
    grads = [torch.autograd.grad(y, (x, w, b), torch.cos(want.detach())) for y in (got, want)]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, atol=2e-5, rtol=1e-5)


def test_layernorm_is_torchs():
    x, w, b = rand(5, 16), rand(16), rand(16, seed=2)
    y = ops.add_norm(x, None, w, b, 1e-5, "layernorm", torch.float32)[1]
    torch.testing.assert_close(y, F.layer_norm(x, (16,), w, b, 1e-5))
