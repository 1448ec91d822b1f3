"""Bytes that are alive, counted by storage."""

from __future__ import annotations

import torch

from bessemer import ops
from bessemer.runtime.allocations import AllocationSample


def test_storages_count_once_until_they_are_freed() -> None:
    before = torch.zeros(100)
    with AllocationSample() as sample:
        a = torch.ones(1000)
        b, c = a.view(10, 100), a[5:]
        older = before[:50]
        assert sample.alive_bytes() == 4000
        d = a * 2
        del a, b
        assert sample.alive_bytes() == 8000  # c still holds the first
        del c
        assert sample.alive_bytes() == 4000
        e = torch.cat((d, older))
    assert sample.alive_bytes() == 4000 + 4 * 1050
    assert sample.peak_bytes == 4000 + 4 * 1050
    del d, e
    assert sample.alive_bytes() == 0


def test_buffers_of_kernels_that_torch_does_not_dispatch_are_seen() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    with AllocationSample() as sample:
        sample.ignore(x)
        y = ops.swiglu(x)
        assert sample.alive_bytes() == 8 * 32 * 4
        y.sum().backward()
        del y
    assert x.grad is not None and sample.alive_bytes() == x.grad.nbytes
    assert sample.peak_bytes >= 2 * x.grad.nbytes


def test_a_sample_can_be_entered_again() -> None:
    sample, kept = AllocationSample(), []
    for _ in range(2):
        with sample:
            kept.append(torch.zeros(25))
    assert sample.alive_bytes() == sample.peak_bytes == 200
