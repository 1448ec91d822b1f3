"""Smooth-SwiGLU: the same function, and what it saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.linear import linear
from bessemer.precision import Call, QuantProducts, channel_scales, fold, numerics, quant_linear
from bessemer.precision.outliers import amplified_layer, down_errors, relative_error


def test_amplified_channels() -> None:
    """The figures of docs/precision.md."""
    plain, loud = (down_errors(*amplified_layer(a)) for a in (1, 128))
    for key in ("tensor", "row", "block", "mx", "smooth"):
        assert plain[key] == pytest.approx(0.0375, abs=0.0005)
    assert loud["tensor"] == pytest.approx(0.365, abs=0.02) and loud["zeros"] == pytest.approx(0.83, abs=0.02)
    assert loud["row"] == pytest.approx(0.085, abs=0.01) and loud["block"] == pytest.approx(0.054, abs=0.005)
    assert loud["mx"] == pytest.approx(0.042, abs=0.002) and loud["smooth"] == pytest.approx(0.0375, abs=0.0005)
    assert loud["smooth-zeros"] < 0.005 and plain["stale"] > 0.3 and loud["bf16"] < 0.003


def test_folding_leaves_the_function_bitwise() -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate, up, down = (torch.randn(*s, generator=generator) for s in ((40, 32), (64, 32), (64, 32), (32, 64)))
    up[5] *= 300
    for dtype in (torch.float32, torch.bfloat16):
        x_, gate_, up_, down_ = (t.to(dtype) for t in (x, gate, up, down))
        h = F.silu(x_ @ gate_.t()) * (x_ @ up_.t())
        scales = channel_scales(h)
        folded_up, folded_down = fold(up_, down_, scales)
        folded_h = F.silu(x_ @ gate_.t()) * (x_ @ folded_up.t())
        assert torch.equal(folded_h, h / scales.to(dtype)) and folded_h.abs().max() <= 1
        assert torch.equal(folded_h @ folded_down.t(), h @ down_.t())


def _smooth(h_TF: Tensor, down_DF: Tensor, recipe: str = "fp8-current") -> Tensor:
    return linear(h_TF, down_DF, None, QuantProducts(numerics(recipe), h_TF.dtype, channels=channel_scales(h_TF)))


def test_gradients_are_those_of_the_function() -> None:
    """In float32, so that only quantisation separates them; the loud channel is where plain scaling loses them."""
    h, down = amplified_layer(128, tokens=256, width=128, model=64)
    g = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))
    errors = {}
    for name in ("plain", "smooth"):
        h_, down_ = h.clone().requires_grad_(), down.clone().requires_grad_()
        plain = quant_linear(h_, down_, None, Call(numerics("fp8-current")))
        y = plain if name == "plain" else _smooth(h_, down_)
        y.backward(g)
        quiet = h_.grad[:, 2:], down_.grad[:, 2:]
        errors[name] = [
            relative_error(y.detach(), h.double() @ down.double().t()),
            relative_error(quiet[0], (g.double() @ down.double())[:, 2:]),
            relative_error(quiet[1], (g.double().t() @ h.double())[:, 2:]),
        ]
    assert all(e < 0.08 for e in errors["smooth"])
    assert errors["plain"][0] > 0.2 and errors["plain"][2] > 0.2


def test_scales_of_odd_channels() -> None:
    h = torch.tensor([[0.0, 3.0, 4.0, torch.inf], [0.0, -1.0, 2.0, 1.0]])
    scales = channel_scales(h)
    assert scales[:3].tolist() == [1.0, 4.0, 4.0] and scales[3].isnan()
    assert channel_scales(torch.zeros(0, 3)).tolist() == [1.0] * 3
    y = _smooth(h, torch.ones(2, 4))
    assert y.isnan().any()
