"""Products with known answers and memory patterns: sound ones pass, one flipped bit is found and placed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bessemer.runtime.device import Cpu
from bessemer.runtime.known_answer import FORMATS, Burner, WholeAnswer, first_difference, operands
from bessemer.runtime.memory_patterns import PATTERNS, pattern_fault, write_pattern
from bessemer.runtime.memory_patterns import test_memory as run_memory_test

CPU = Cpu()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sound_device_gives_the_same_bits_again(name: str) -> None:
    one, other = (Burner(name, CPU, 64).burn(0.0) for _ in range(2))
    assert not one.fault and one.checksum == other.checksum and len(one.checksum) == 16
    assert one.repetitions == 4 and one.rate > 0 and one.rate_start > 0 and one.rate_end > 0


@pytest.mark.parametrize("name", FORMATS)
def test_operands_are_whole_or_fill_the_mantissa(name: str) -> None:
    a, b = (x.double() for x in operands("whole", name, 64))
    assert set(a.unique().tolist()) == {-1.0, 0.0, 1.0} and not torch.equal(a, b)
    assert float((a @ b).abs().max()) <= 256, "every sum is exact in bfloat16"
    full = operands("full", name, 64)[0].double()
    least = 1.0 if name == "int8" else 0.5
    assert float(full.abs().max()) > least and len(full.unique()) > (10 if name == "fp8" else 100)


def _flipped(times: int, index: tuple[int, int], of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """torch.mm whose result has one wrong bit, the `times`-th time only."""
    calls = 0

    def mm(a: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = of(a, b)
        if calls == times:
            out.view(torch.int32)[index] ^= 1 << 20
        return out

    return mm


def test_one_wrong_bit_in_one_repetition_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", _flipped(4, (3, 5), torch.mm))
    burn = Burner("fp32", CPU, 64).burn(0.0)
    assert burn.fault.startswith("repetition 3 differs from the first at [3, 5]: 0x"), burn.fault


def test_a_wrong_whole_number_is_placed_by_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", _flipped(2, (7, 2), torch.mm))
    burn = Burner("fp32", CPU, 64).burn(0.0)
    a, b = operands("whole", "fp32", 64)
    right = int((a.double() @ b.double())[7, 2])
    assert "whole numbers: at [7, 2]: " in burn.fault and burn.fault.endswith(f"instead of {right}"), burn.fault


def test_sums_find_each_single_wrong_element() -> None:
    a, b = operands("whole", "bf16", 32)
    known, c = WholeAnswer(a, b, torch.device("cpu")), a @ b
    assert known.fault(c) == ""
    for at in ((0, 0), (31, 31), (4, 17)):
        wrong = c.clone()
        wrong[at] += 1
        assert f"1 wrong row and 1 wrong column, first at [{at[0]}, {at[1]}]" in known.fault(wrong)
        wrong[at] = float("nan")
        assert f"at [{at[0]}, {at[1]}]: nan instead of" in known.fault(wrong)


def test_differences_are_of_bits_not_of_values() -> None:
    nan, zero = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])
    assert first_difference(zero, -zero) == "[0]: 0x3f800000 instead of 0xbf800000"
    assert first_difference(torch.tensor([1.0, -0.0]), zero) == "[1]: 0x80000000 instead of 0x0"
    with pytest.raises(IndexError):
        first_difference(nan, nan.clone())  # the same NaN is no difference


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_comes_back_and_a_flipped_bit_is_placed(name: str) -> None:
    buffer = torch.empty((1 << 20) + 77, dtype=torch.int64)
    write_pattern(buffer, name)
    assert pattern_fault(buffer, name) == ""
    for at, bit in ((0, 0), ((1 << 20) + 5, 63), (12345, 31)):
        was = int(buffer[at])
        flipped = (was & (1 << 64) - 1) ^ (1 << bit)
        buffer[at] = flipped - (1 << 64) if flipped >> 63 else flipped
        fault = pattern_fault(buffer, name)
        assert fault.startswith(f"{name}: 1 word of 1,048,653 wrong, the first at byte {8 * at:#x} "), fault
        buffer[at] = was


def test_patterns_are_what_their_names_say() -> None:
    cpu = torch.device("cpu")
    assert PATTERNS["walking ones"](62, 3, cpu).tolist() == [1 << 62, -(1 << 63), 1]
    one, other = (x & (1 << 64) - 1 for x in PATTERNS["checkerboard"](0, 2, cpu).tolist())
    assert (one, other) == (0x5555555555555555, 0xAAAAAAAAAAAAAAAA)
    assert PATTERNS["inverse checkerboard"](0, 1, cpu).item() & (1 << 64) - 1 == other
    assert PATTERNS["own address"](7, 2, cpu).tolist() == [7, 8]


def test_a_sound_memory_passes() -> None:
    found = run_memory_test(CPU, 1 << 20)
    assert (found.tested_bytes, found.passes, found.fault) == (1 << 20, 1, "")
