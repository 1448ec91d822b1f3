"""The native kernels of quantising against the torch path: the same bits, for every bfloat16 number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bessemer import ops
from bessemer.ops import native
from bessemer.precision import Grain, Scheme, keyed_generator, numerics, quantise
from bessemer.precision.formats import E2M1, E4M3, E5M2, E8M0, Format
from bessemer.precision.scaled import ROW, TENSOR, _coded, _decoded

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.why_absent()[:80]}")

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
SCHEMES = {
    "tensor": Scheme(E4M3, TENSOR), "gradient": Scheme(E5M2, TENSOR), "row": Scheme(E4M3, ROW),
    "block": Scheme(E4M3, Grain(1, 128)), "square": Scheme(E4M3, Grain(128, 128)),
    "mx": Scheme(E4M3, Grain(1, 32), E8M0), "nvfp4": numerics("nvfp4").x, "nvfp4-2d": numerics("nvfp4").weight,
}  # fmt: skip


def _both(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    with ops.use("native"):
        ours = call()
    with ops.use("reference"):
        return ours.view(torch.uint8), call().view(torch.uint8)


def _every() -> Tensor:
    """All bfloat16 numbers, Inf and NaN among them, [1, 65536]."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[None]


def _same(ours: Tensor, theirs: Tensor, x: Tensor, fmt: Format) -> bool:
    """Codes of NaN in e2m1 mean nothing: its scale is NaN too."""
    differ = ours != theirs
    return not bool((differ & ~x.isnan()).any() if fmt is E2M1 else differ.any())


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_of_every_bfloat16_number(fmt: Format, dtype: torch.dtype) -> None:
    """Under scales of all sizes; of float32 also the numbers between, that a bfloat16 can't hold."""
    x = _every().to(dtype)
    if dtype == torch.float32:
        x = torch.cat((x, (_every().float().view(torch.int32) + 0x7FFF).view(torch.float32)), 1)
    for power in (*range(-126, 128, 11), -1, 0, 1):
        scale = torch.full((1, 1), 2.0**power)
        assert _same(*_both(lambda s=scale: _coded(x, s, Scheme(fmt, TENSOR), None)), x, fmt), power  # type: ignore[misc]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_that_is_not_a_number_spoils_all(fmt: Format, dtype: torch.dtype) -> None:
    ours, theirs = _both(lambda: _coded(_every().to(dtype), torch.full((1, 1), torch.nan), Scheme(fmt, TENSOR), None))
    assert torch.equal(ours, theirs) and ours.view(fmt.dtype).float().isnan().all()


def test_scales_that_are_no_powers_of_two_are_divided_by() -> None:
    """NVFP4's, in e4m3: the quotient is rounded to the type of x first, as torch does."""
    for code in range(1, 127, 5):
        scale = torch.full((1, 1), code, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        for x in (_every(), _every().float()):
            ours, theirs = _both(lambda x=x, s=scale: _coded(x, s, Scheme(E2M1, TENSOR), None))  # type: ignore[misc]
            assert _same(ours, theirs, x, E2M1), code


@FORMATS
def test_values_of_every_code(fmt: Format) -> None:
    codes = torch.arange(2**fmt.bits, dtype=torch.int32).to(torch.uint8)
    codes = codes[(codes & 0x7F) < (0x7C if fmt is E5M2 else 0x7F)][None].contiguous()  # the finite ones
    for power in (-126, -100, -7, 0, 1, 60, 100):
        scale = torch.full((1, 1), 2.0**power)
        ours, theirs = _both(lambda s=scale: _decoded(codes.view(fmt.dtype), s, Scheme(fmt, TENSOR)))  # type: ignore[misc]
        assert torch.equal(ours, theirs), power


@FORMATS
def test_draws_round_the_same_numbers_up(fmt: Format) -> None:
    x = torch.randn(96, 256, generator=keyed_generator(1)).bfloat16() * 3
    scale = torch.rand(96, 8, generator=keyed_generator(2)).log2().floor().exp2()
    ours, theirs = _both(lambda: _coded(x, scale, Scheme(fmt, Grain(1, 32)), keyed_generator(3)))
    assert torch.equal(ours, theirs)
    nearest, _ = _both(lambda: _coded(x, scale, Scheme(fmt, Grain(1, 32)), None))
    assert 0.05 < (ours != nearest).float().mean() < 0.4  # a quarter, where nothing saturates


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (100, 130), (1, 17), (129, 1)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_quantising_and_back(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Codes, scales, amax and values, with ragged tiles too, on one thread and on three."""
    draws = keyed_generator(7, *shape)
    x = (torch.randn(*shape, generator=draws) * torch.randn(shape[0], 1, generator=draws).exp()).to(dtype)
    x[0, 0] = 0
    with ops.use("reference"):
        want = quantise(x, scheme)
        values = want.dequantise(torch.bfloat16)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        with ops.use("native"):
            got = quantise(x, scheme)
            read = got.dequantise(torch.bfloat16)
        torch.set_num_threads(threads)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8)) and got.amax == want.amax
        assert torch.equal(read, values)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_infinity_shows(scheme: Scheme, bad: float) -> None:
    x = torch.ones(130, 140, dtype=torch.bfloat16)
    x[3, 5] = bad
    with ops.use("native"):
        made = quantise(x, scheme)
        read = made.dequantise(torch.bfloat16)
    with ops.use("reference"):
        want = quantise(x, scheme).dequantise(torch.bfloat16)
    assert not made.amax.isfinite() and torch.equal(read.isnan(), want.isnan()) and read[3].isnan().any()
