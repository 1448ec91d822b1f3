"""Products of rows sorted by expert: any load, empty experts included, forward and backward."""

import pytest
import torch

from bessemer import ops
from bessemer.ops import grouped
from bessemer.runtime.kernels import KernelSample

LOADS = {"even": [4, 4, 4, 4], "empty ones": [0, 9, 0, 7], "one takes all": [0, 0, 16, 0]}


@pytest.fixture(params=["grouped_mm", "loop"])
def path(request, monkeypatch):
    if request.param == "loop":
        monkeypatch.setattr(grouped, "_grouped_mm_works", lambda x: False)
    return request.param


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_meets_its_experts_weight(path, load, inputs, outputs, dtype):
    counts = torch.tensor(LOADS[load])
    expert = torch.arange(4).repeat_interleave(counts)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, inputs, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(4, outputs, inputs, generator=draw).requires_grad_()
    out = ops.grouped_linear(x, weight, counts)
    out.float().sum().backward()  # an expanded gradient, as a sum gives it
    wide, master = x.detach().float().requires_grad_(), weight.detach().to(dtype).float().requires_grad_()
    expected = torch.einsum("ti,toi->to", wide, master[expert])
    expected.sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(out.float(), expected, **close)
    torch.testing.assert_close(x.grad.float(), wide.grad, **close)
    torch.testing.assert_close(weight.grad, master.grad, **close)
    assert out.dtype == x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert (weight.grad[counts == 0] == 0).all()


def test_the_products_are_counted(path):
    x = torch.randn(16, 24, requires_grad=True)
    weight = torch.randn(4, 40, 24, requires_grad=True)
    with KernelSample() as sample:
        ops.grouped_linear(x, weight, torch.tensor(LOADS["empty ones"])).sum().backward()
    assert sample.flops == {"fp32": 3 * 2 * 16 * 24 * 40}


def test_shapes_on_the_meta_device():
    x = torch.empty(16, 24, device="meta", requires_grad=True)
    weight = torch.empty(4, 40, 24, device="meta", requires_grad=True)
    out = ops.grouped_linear(x, weight, torch.empty(4, dtype=torch.int64, device="meta"))
    out.sum().backward()
    assert out.shape == (16, 40) and x.grad.shape == x.shape and weight.grad.shape == weight.shape
