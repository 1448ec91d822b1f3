"""KernelSample: FLOPs against the closed form, by path, in forward, backward and custom functions; and its clock."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.runtime.kernels import KernelSample, KernelTotal, attention_flops, native_kernel, path_of

# B batch, S sequence, D model, H query heads, K key heads, N head size, M feed-forward
B, S, D, H, K, N, M = 2, 24, 32, 4, 2, 8, 48


class Layer(nn.Module):
    """A small transformer layer with grouped keys; `dtype` is that of the matrix products."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.qkv = nn.Linear(D, (H + 2 * K) * N, bias=False)
        self.o = nn.Linear(H * N, D)
        self.up = nn.Linear(D, M)
        self.down = nn.Linear(M, D, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            q, k, v = (
                t.view(B, S, -1, N).transpose(1, 2) for t in self.qkv(x_BSD).split([H * N, K * N, K * N], dim=-1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x_BSD = x_BSD + self.o(mixed.transpose(1, 2).reshape(B, S, H * N))
            return x_BSD + self.down(F.gelu(self.up(x_BSD)))


def closed_form() -> float:
    """FLOPs of forward and backward: 3 x (2 x tokens x weights + 4 x visible pairs x head size x heads)."""
    weights = D * (H + 2 * K) * N + H * N * D + 2 * D * M
    pairs = S * (S + 1) / 2
    return 3 * (2 * B * S * weights + 4 * B * H * pairs * N)


@pytest.mark.parametrize(("dtype", "path"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_flops_of_a_layer_equal_the_closed_form(dtype: torch.dtype, path: str) -> None:
    layer, x = Layer(dtype), torch.randn(B, S, D, requires_grad=True)
    with KernelSample() as sample:
        layer(x).float().sum().backward()
    assert sample.flops == {path: closed_form()}
    assert sample.kernel_s > 0


def test_paths_are_kept_apart() -> None:
    slow, fast = nn.Linear(D, M, bias=False), nn.Linear(D, M, bias=False)
    x = torch.randn(5, D, requires_grad=True)
    with KernelSample() as sample:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = fast(x)
        (slow(x) + a).sum().backward()
    each = 3 * 2 * 5 * D * M
    assert sample.flops == {"bf16": each, "fp32": each}


def test_masked_attention_counts_as_causal_and_rectangular_in_full() -> None:
    q, k = torch.randn(B, H, S, N), torch.randn(B, H, S + 8, N)
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    with KernelSample() as sample, torch.no_grad():
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert sample.flops["fp32"] == 4 * B * H * N * S * (S + 1) / 2
    with KernelSample() as sample, torch.no_grad():
        F.scaled_dot_product_attention(q, k, k)
    assert sample.flops["fp32"] == 4 * B * H * N * S * (S + 8)
    assert attention_flops(q.shape, k.shape, k.shape, causal=False) == 4 * B * H * N * S * (S + 8)


class Doubled(torch.autograd.Function):
    """A custom function whose forward and backward both use products that autograd doesn't see."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, torch.bmm(grad.t()[None], x[None])[0]


def test_custom_functions_are_seen_in_both_directions() -> None:
    x, w = torch.randn(6, D, requires_grad=True), torch.randn(M, D, requires_grad=True)
    with KernelSample() as sample:
        Doubled.apply(x, w).sum().backward()
    assert sample.flops["fp32"] == 3 * 2 * 6 * D * M
    assert {name: total.calls for (name, _), total in sample.totals.items()} == {"mm": 2, "bmm": 1}


def test_products_with_an_added_matrix_count_without_it() -> None:
    a, b, c = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(3, 4, 6)
    with KernelSample() as sample:
        torch.baddbmm(c, a, b)
        torch.addmm(c[0], a[0], b[0])
    assert sample.flops["fp32"] == 2 * 4 * 5 * 6 * (3 + 1)


class Slowed(TorchDispatchMode):
    """A slow operator, entered before the sample, so that it runs below it; keeps the seconds that it slept."""

    def __init__(self, packet: object) -> None:
        super().__init__()
        self.packet, self.slept = packet, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is self.packet:
            start = time.perf_counter()
            time.sleep(0.05)
            self.slept += time.perf_counter() - start
        return func(*args, **(kwargs or {}))


def test_a_sleep_inside_a_kernel_is_seen_and_one_beside_it_is_not() -> None:
    layer, x = nn.Linear(D, M, bias=False), torch.randn(5, D)
    with Slowed(torch.ops.aten.mm) as inside, KernelSample() as sample:
        layer(x).sum().backward()  # two products: x needs no gradient
    assert inside.slept > 0.1
    assert sample.kernel_s >= inside.slept
    start = time.perf_counter()
    with Slowed(torch.ops.aten.sum) as beside, KernelSample() as sample:
        layer(x).sum().backward()
    assert beside.slept > 0.05
    assert sample.kernel_s <= time.perf_counter() - start - beside.slept


def test_entering_again_adds_up() -> None:
    a = torch.randn(4, 4)
    sample = KernelSample()
    for _ in range(3):
        with sample:
            a @ a
    a @ a  # outside
    assert sample.flops == {"fp32": 3 * 2 * 4**3}


def test_clock_is_used_only_around_kernels() -> None:
    ticks = iter(range(100))
    a = torch.randn(4, 4)
    with KernelSample(clock=lambda: float(next(ticks))) as sample:
        (a @ a + a).sum()
        a @ a
    assert sample.kernel_s == 2.0
    assert next(ticks) == 4


class Wrapped(torch.Tensor):
    """A subclass with its own dispatch, as DTensor is: each call goes on with two local halves."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        made.whole = whole
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        left, right = (a.whole if isinstance(a, Wrapped) else a for a in args)
        half = left.shape[0] // 2
        return torch.cat([func(left[:half], right), func(left[half:], right)])


def test_a_tensor_subclass_is_counted_by_its_local_products() -> None:
    a, b = torch.randn(8, 4), torch.randn(4, 4)
    with KernelSample() as sample:
        torch.mm(Wrapped(a), b)
    assert sample.totals[("mm", "fp32")].calls == 2
    assert sample.flops["fp32"] == 2 * 8 * 4 * 4


def test_path_names_are_those_of_the_machine() -> None:
    from bessemer.core.machine import DTYPES

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn):
        assert path_of(dtype, "cpu") in DTYPES
    with pytest.raises(KeyError):
        path_of(torch.int32, "cpu")


def test_products_added_in_place_are_seen() -> None:
    a, b, c = torch.randn(4, 5), torch.randn(5, 6), torch.zeros(4, 6)
    with KernelSample() as sample:
        c.addmm_(a, b)
        torch.mm(a, b, out=c)
    assert sample.flops == {"fp32": 2 * 2 * 4 * 5 * 6}


def test_a_native_kernel_is_counted_where_it_says_so() -> None:
    asked: list[int] = []

    def flops() -> float:
        asked.append(1)
        return 128.0

    with native_kernel("attend", torch.bfloat16, flops):
        pass
    assert not asked  # no sample is running
    ticks = iter([0.0, 3.0])
    with KernelSample(clock=lambda: next(ticks)) as sample, native_kernel("attend", torch.bfloat16, flops):
        pass
    assert sample.totals == {("attend", "bf16"): KernelTotal(1, 128.0, 3.0)}
    with native_kernel("attend", torch.bfloat16, flops):
        pass
    assert len(asked) == 1


def test_products_of_codes_with_scales_are_counted_as_fp8() -> None:
    """`F.scaled_mm`: [6, 32] by [16, 32]^T."""
    a, b = (torch.ones(rows, 32).to(torch.float8_e4m3fn) for rows in (6, 16))
    one, tensor = torch.ones(1), F.ScalingType.TensorWise
    with KernelSample() as sample:
        F.scaled_mm(a, b.t(), one, tensor, one, tensor, output_dtype=torch.bfloat16)
    assert sample.flops == {"fp8": 2 * 6 * 16 * 32}
    assert ("_scaled_mm_v2", "fp8") in sample.totals
