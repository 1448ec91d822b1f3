"""The device interface on the CPU, and refusals."""

from __future__ import annotations

import types

import pytest
import torch

from bessemer.core.errors import RequestError
from bessemer.runtime import device as device_module
from bessemer.runtime.device import Cpu, Gpu, available_kinds, pick_device
from bessemer.runtime.host import cpu_model, status_bytes, usable_cores


def test_cpu_is_always_there() -> None:
    assert available_kinds()[-1] == "cpu"
    device = pick_device("cpu", local_rank=3)
    assert isinstance(device, Cpu)
    assert (device.kind, device.backend, device.torch_device) == ("cpu", "gloo", torch.device("cpu"))
    assert device.name == cpu_model()
    assert device.supports(torch.bfloat16)
    assert not device.supports(torch.float8_e4m3fn)
    device.synchronize()


def test_memory_grows_with_what_is_held() -> None:
    device = Cpu()
    before, size = device.memory_in_use(), 64 << 20
    held = torch.ones(size // 4)
    assert device.memory_in_use() - before > 0.9 * size
    assert device.peak_memory() >= device.memory_in_use()
    assert held.numel() * 4 == size


def test_threads_and_seed() -> None:
    device, threads = Cpu(), torch.get_num_threads()
    try:
        device.set_threads(1)
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="at least 1"):
            device.set_threads(0)
    finally:
        device.set_threads(threads)
    device.seed(7)
    first = torch.rand(3)
    device.seed(7)
    assert torch.equal(first, torch.rand(3))


def test_a_kind_that_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "available_kinds", lambda: ("cpu",))
    with pytest.raises(RequestError) as refused:
        pick_device("cuda")
    assert refused.value.code == "device-missing"
    assert "cpu" in refused.value.fix


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_gpu_module", lambda kind: types.SimpleNamespace(device_count=lambda: 2))
    with pytest.raises(RequestError) as refused:
        Gpu("cuda", local_rank=2)
    assert refused.value.code == "device-count"


def test_host_facts() -> None:
    assert usable_cores() >= 1
    assert cpu_model()
    assert status_bytes("VmHWM") >= status_bytes("VmRSS") > 0
    with pytest.raises(OSError, match="NoSuchField"):
        status_bytes("NoSuchField")


@pytest.mark.gpu
def test_events_time_kernels_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this host")
    from bessemer.runtime.kernels import KernelSample

    device = pick_device("cuda")
    a = torch.randn(2048, 2048, device=device.torch_device, dtype=torch.bfloat16)
    with KernelSample(device.torch_device) as sample:
        for _ in range(20):
            a @ a
    assert sample.flops == {"bf16": 20 * 2.0 * 2048**3}
    assert 0 < sample.kernel_s < 1
    assert device.memory_in_use() >= a.numel() * 2
