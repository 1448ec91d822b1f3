"""The measured peak: what is counted, when it is measured again, and what a job declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.core.machine import Machine, cpu_local_file, load_machine
from bessemer.runtime import peaks
from bessemer.runtime.peaks import declared_peaks, ensure_peaks, measure_peaks


def test_rate_is_flops_over_the_fastest_product() -> None:
    ticks = iter([0.0, 0.0, 0.5, 1.0, 1.25, 2.0, 2.5, 9.0])  # three products, of 0.5, 0.25 and 0.5 s
    found = measure_peaks(("fp32",), seconds=2.0, sizes=(64,), clock=lambda: next(ticks))
    assert found == {"fp32": 2 * 64**3 / 0.25}


def test_real_rates_are_plausible_and_threads_restored() -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_peaks(seconds=0.2, sizes=(256,))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert set(found) == {"bf16", "fp32"}
    assert all(1e8 < rate < 1e15 for rate in found.values())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the measurement; grows by one each time it is asked for."""
    calls: list[int] = []

    def fake(dtypes: tuple[str, ...] = ("bf16", "fp32"), seconds: float = 1.0) -> dict[str, float]:
        calls.append(1)
        return {name: 1e11 * len(calls) for name in dtypes}

    monkeypatch.setattr(peaks, "measure_peaks", fake)
    monkeypatch.setattr(peaks.os, "getloadavg", lambda: (0.0, 9.0, 9.0))
    return calls


def test_measured_once_then_read(tmp_path: Path, counted: list[int]) -> None:
    cache = str(tmp_path)
    first = ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    again = ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    assert len(counted) == 1
    assert first.peak("bf16") == again.peak("bf16") == 1e11
    assert first.origin.kind == "measured"
    kept = Machine.from_toml(cpu_local_file(cache).read_text(), "kept")
    assert kept.memory_bytes is None  # read at each load instead
    assert [p.name for p in cpu_local_file(cache).parent.iterdir()] == ["cpu-local.toml"]


@pytest.mark.parametrize(("what", "value"), [("cpu_model", "Other CPU"), ("usable_cores", 77)])
def test_another_processor_is_measured_again(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch, what: str, value: object
) -> None:
    cache = str(tmp_path)
    ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    monkeypatch.setattr(peaks, what, lambda: value)
    machine = ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    assert len(counted) == 2
    assert str(value) in machine.origin.source


def test_another_torch_is_measured_again(tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path)
    ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    monkeypatch.setattr(peaks.importlib.metadata, "version", lambda name: "9.9")
    ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    assert len(counted) == 2


def test_a_torn_file_is_measured_again(tmp_path: Path, counted: list[int]) -> None:
    machine = load_machine("cpu-local", cache=str(tmp_path))
    file = cpu_local_file(str(tmp_path))
    file.parent.mkdir(parents=True)
    file.write_text("name = 'cpu-lo")
    assert ensure_peaks(machine, cache=str(tmp_path)).peak("fp32") == 1e11
    assert len(counted) == 1


def test_a_busy_computer_is_measured_again_until_it_was_quiet(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, loads = str(tmp_path), iter([99.0, 50.0, 0.1])
    monkeypatch.setattr(peaks.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    rates = iter([{"bf16": 3e11, "fp32": 1e11}, {"bf16": 2e11, "fp32": 2e11}, {"bf16": 4e11, "fp32": 1.5e11}])
    monkeypatch.setattr(peaks, "measure_peaks", lambda seconds: next(rates))
    found = [ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache) for _ in range(5)]
    assert [m.peak("bf16") for m in found] == [3e11, 3e11, 4e11, 4e11, 4e11]
    assert [m.peak("fp32") for m in found] == [1e11, 2e11, 2e11, 2e11, 2e11]
    assert "load average 0.1 before" in found[-1].origin.source


def test_other_machines_are_left_alone(tmp_path: Path, counted: list[int]) -> None:
    h100 = load_machine("h100")
    assert ensure_peaks(h100, cache=str(tmp_path)) is h100
    assert not counted


def test_declared_peak_of_a_job(tmp_path: Path, counted: list[int]) -> None:
    cpu = ensure_peaks(load_machine("cpu-local", cache=str(tmp_path)), cache=str(tmp_path))
    assert declared_peaks(cpu, devices=4) == {"bf16": 1e11, "fp32": 1e11}  # four ranks share one computer
    assert declared_peaks(cpu, devices=4, hosts=2)["fp32"] == 2e11
    h100 = load_machine("h100")
    assert declared_peaks(h100, devices=16)["bf16"] == 16 * h100.peak("bf16")


def test_reading_a_kept_peak_needs_no_torch(tmp_path: Path, counted: list[int]) -> None:
    cache = str(tmp_path)
    ensure_peaks(load_machine("cpu-local", cache=cache), cache=cache)
    code = (
        "import sys; from bessemer.core.machine import load_machine; from bessemer.runtime.peaks import ensure_peaks; "
        f"m = ensure_peaks(load_machine('cpu-local', cache={cache!r}), cache={cache!r}); "
        "assert m.peak('fp32') == 1e11 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
