"""The spectrum of formats: known answers, and what makes a format native, emulated or absent."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bessemer.api import lab
from bessemer.core.errors import RequestError
from bessemer.lab import formats
from bessemer.lab.formats import NAMES, FormatRow, probe
from bessemer.runtime.device import pick_device

EXACT_TO = {
    "FP64": 2**53, "FP32": 2**24, "BF16": 2**8, "FP16": 2**11, "FP8 e4m3": 16, "FP8 e5m2": 8, "MXFP8": 16, "FP4": 4,
    "INT8": 127,
}  # fmt: skip
"""By the formats' definitions: 2^(mantissa bits + 1), and what int8 holds."""
ERROR = {
    "FP64": (0, 1e-15), "FP32": (1e-8, 1e-6), "BF16": (2e-3, 4e-3), "FP16": (2e-4, 5e-4), "FP8 e4m3": (0.035, 0.04),
    "FP8 e5m2": (0.055, 0.065), "MXFP8": (0.035, 0.04), "FP4": (0.12, 0.16), "INT8": (0.008, 0.02),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, FormatRow]:
    heard: list[tuple[int, str]] = []
    found = probe(pick_device("cpu"), lambda done, name: heard.append((done, name)), size=128)
    assert heard == list(enumerate(NAMES))
    return {row.name: row for row in found}


def test_known_answers(rows: dict[str, FormatRow]) -> None:
    assert tuple(rows) == NAMES
    for name, exact_to in EXACT_TO.items():
        row = rows[name]
        assert row.exact_to == exact_to and row.sums_exact, row
        assert row.relative_error is not None and row.operations_per_s is not None
        assert ERROR[name][0] <= row.relative_error <= ERROR[name][1], row
        assert row.operations_per_s > 0


def test_what_a_cpu_supports(rows: dict[str, FormatRow]) -> None:
    """float64 and float32 anywhere; no CPU multiplies FP8 or FP4, and torch refuses MXFP8 and FP4 on one."""
    assert rows["FP64"].support == rows["FP32"].support == "native"
    for name in ("FP8 e4m3", "FP8 e5m2", "MXFP8", "FP4"):
        assert rows[name].support == "emulated" and rows[name].why, rows[name]
    assert rows["MXFP8"].why.startswith("F.scaled_mm: ")
    tf32 = rows["TF32"]
    assert tf32.support == ("absent" if tf32.exact_to is None else "native") and (tf32.exact_to or 2**11) == 2**11


def test_slow_products_are_no_native_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"torch.mm of float32": 100.0, "torch.mm of bfloat16": 119.0, "torch.mm of float16": 121.0}
    monkeypatch.setattr(formats, "_rate", lambda way, device, size: rates.get(way.how, 10.0))
    found = {row.name: row for row in probe(pick_device("cpu"))}
    assert found["BF16"].support == "emulated" and "1.19 of the rate of FP32" in found["BF16"].why
    assert found["FP16"].support == "native" and not found["FP16"].why
    monkeypatch.setattr(formats, "_rate", lambda way, device, size: 150.0 if "scaled_mm" in way.how else 100.0)
    assert {r.name for r in probe(pick_device("cpu")) if "scaled_mm" in r.how} == {"FP8 e4m3", "FP8 e5m2"}


def test_wrong_products_are_no_native_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: run(*args) * 2

    monkeypatch.setattr(torch, "_int_mm", twice(torch._int_mm))
    row = next(r for r in probe(pick_device("cpu"), size=128) if r.name == "INT8")
    assert row.support == "emulated" and row.why == "torch._int_mm gives another product than its operands"


def test_the_verb() -> None:
    found = lab.formats(device="cpu", size=128)
    printed = json.loads(json.dumps(found.as_json()))
    assert [row["name"] for row in printed["formats"]] == list(NAMES) and printed["size"] == 128
    assert printed["machine"].startswith("one core of ")
    text = str(found).splitlines()
    assert len(text) == len(NAMES) + 4 and all(name in line for name, line in zip(NAMES, text[2:], strict=False))
    with pytest.raises(RequestError, match="multiples of 128"):
        lab.formats(size=100)
