"""A pattern test of a device's memory: write, read back, name the first bad address.

    test = test_memory(device, 1 << 26)
    test.fault          # "" or: walking ones: 1 of 8,388,608 words differ, first at byte 0x1a40 (address ...)

Patterns: all zeros and all ones (stuck bits), checkerboards (neighbours that pull on each other), a one that walks
through the word (lines that touch), and each word's own number (address lines: two addresses that reach one cell).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.core.units import counted
from bessemer.runtime.device import Device

__all__ = ["PATTERNS", "MemoryTest", "pattern_fault", "test_memory", "write_pattern"]

WORD_BYTES = 8
_CHUNK_WORDS = 1 << 20
_CHECKER = 0x5555555555555555


def _constant(value: int) -> Callable[[int, int, torch.device], Tensor]:
    return lambda start, count, device: torch.full((count,), value, dtype=torch.int64, device=device)


def _checkerboard(first: int) -> Callable[[int, int, torch.device], Tensor]:
    def words(start: int, count: int, device: torch.device) -> Tensor:
        return first ^ -((torch.arange(start, start + count, device=device)) % 2)  # -1 flips every bit

    return words


def _walking(start: int, count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.int64, device=device) << torch.arange(start, start + count, device=device) % 64


def _address(start: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + count, device=device)


PATTERNS: dict[str, Callable[[int, int, torch.device], Tensor]] = {
    "zeros": _constant(0),
    "ones": _constant(-1),
    "checkerboard": _checkerboard(_CHECKER),
    "inverse checkerboard": _checkerboard(~_CHECKER),
    "walking ones": _walking,
    "own address": _address,
}
"""Name -> the words from number `start` on, as int64."""


@dataclass(frozen=True)
class MemoryTest:
    """`fault`: "" or the first pattern that didn't come back, and where."""

    tested_bytes: int
    passes: int
    fault: str


def test_memory(device: Device, size_bytes: int, *, seconds: float = 0.0) -> MemoryTest:
    """Each pattern through a buffer of `size_bytes`; again until `seconds` are over. Stops at the first fault.

    torch's out-of-memory error (a RuntimeError) where the device hasn't that much.
    """
    buffer = torch.empty(size_bytes // WORD_BYTES, dtype=torch.int64, device=device.torch_device)
    end = time.perf_counter() + seconds
    passes, fault = 0, ""
    while not fault and (passes == 0 or time.perf_counter() < end):
        for name in PATTERNS:
            write_pattern(buffer, name)
            fault = pattern_fault(buffer, name)
            if fault:
                break
        passes += 1
    return MemoryTest(buffer.numel() * WORD_BYTES, passes, fault)


def write_pattern(buffer: Tensor, name: str) -> None:
    """Fill the int64 `buffer` with a pattern of PATTERNS."""
    for start in range(0, buffer.numel(), _CHUNK_WORDS):
        part = buffer[start : start + _CHUNK_WORDS]
        part.copy_(PATTERNS[name](start, part.numel(), buffer.device))


def pattern_fault(buffer: Tensor, name: str) -> str:
    """ "" where the buffer still holds the pattern; else how many words differ, and the first one."""
    num_bad, first = 0, ""
    for start in range(0, buffer.numel(), _CHUNK_WORDS):
        part = buffer[start : start + _CHUNK_WORDS]
        known = PATTERNS[name](start, part.numel(), buffer.device)
        bad = (part != known).nonzero().flatten()
        if bad.numel() and not first:
            at = int(bad[0])
            got, right = (int(x[at]) & (1 << 64) - 1 for x in (part, known))
            offset = (start + at) * WORD_BYTES
            address = buffer.data_ptr() + offset
            first = f"byte {offset:#x} of the buffer (address {address:#x}): {got:#018x} instead of {right:#018x}"
        num_bad += bad.numel()
    return f"{name}: {counted(num_bad, 'word')} of {buffer.numel():,} wrong, the first at {first}" if first else ""
