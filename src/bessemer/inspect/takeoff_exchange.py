"""Messages between all pairs of ranks, the difference of clocks, and the collectives, each with known contents."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.comm import collectives as comm
from bessemer.inspect.takeoff_records import Collective, Pair
from bessemer.runtime.device import Device

__all__ = ["SIZES", "measure_clocks", "measure_collectives", "measure_pairs"]

SIZES = {"cpu": (1 << 12, 1 << 18, 1 << 22), "cuda": (1 << 16, 1 << 24, 1 << 28), "musa": (1 << 16, 1 << 24, 1 << 28)}
"""Bytes of the collectives by kind of device: one where latency counts, one between, one where bandwidth does."""
_PAIR_BYTES = {"cpu": 1 << 21, "cuda": 1 << 26, "musa": 1 << 26}
_LATENCY_TURNS, _SPEED_TURNS, _CLOCK_TURNS, _COLLECTIVE_TURNS = 20, 4, 8, 5


def measure_pairs(device: Device, rank: int, rounds: Sequence[Mapping[int, int]]) -> list[Pair]:
    """What this rank measured with each partner of a higher rank, and what came to it wrong. All ranks call it with the
    same rounds."""
    found = []
    for partners in rounds:
        if rank in partners:
            other = partners[rank]
            pair = _exchange(device, rank, other)
            if rank < other or pair.fault:
                found.append(pair)
    return found


def _exchange(device: Device, rank: int, other: int) -> Pair:
    """Both ends: the median half turn of a small message, the best one of a large one, and whether it came whole."""
    first = rank < other
    token = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
    _turn(device, token, token, other, first)  # both are there; connections are made at the first message
    halves = [_timed(device, lambda: _turn(device, token, token, other, first)) / 2 for _ in range(_LATENCY_TURNS)]
    words = _PAIR_BYTES[device.kind] // 8
    mine, theirs = (_content(words, who, device) for who in (rank, other))
    got = torch.empty_like(mine)
    turns = [_timed(device, lambda: _turn(device, mine, got, other, first)) / 2 for _ in range(_SPEED_TURNS)]
    fault = "" if torch.equal(got, theirs) else "a message came back changed"
    a, b = sorted((rank, other))
    return Pair(a=a, b=b, latency_s=statistics.median(halves), bytes_per_s=8 * words / min(turns), fault=fault)


def _turn(device: Device, mine: Tensor, got: Tensor, other: int, first: bool) -> None:
    """There and back: the lower rank sends first."""
    for send in (first, not first):
        work = comm.isend(mine, other) if send else comm.irecv(got, other)
        assert work is not None
        work.wait()
    device.synchronize()


def _content(words: int, rank: int, device: Device) -> Tensor:
    """Words that differ between ranks and places."""
    return torch.arange(words, device=device.torch_device) * 0x9E3779B1 + rank


def _timed(device: Device, call: Callable[[], object]) -> float:
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - start


def measure_clocks(device: Device, rank: int, leaders: Sequence[int]) -> dict[int, tuple[float, float]]:
    """On the first of `leaders` (a rank of each host): the clock of each one against its own, and how uncertain that
    is, in seconds. Elsewhere nothing. Cristian's method: the turn that took the shortest time counts."""
    here, found = leaders[0], {}
    for other in leaders[1:]:
        if rank == here:
            found[other] = _clock_of(device, other)
        elif rank == other:
            for _ in range(_CLOCK_TURNS):
                _receive_time(device, here)
                _send_time(device, here)
    return found


def _clock_of(device: Device, other: int) -> tuple[float, float]:
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_TURNS):
        start = time.time_ns()
        _send_time(device, other)
        there = _receive_time(device, other)
        end = time.time_ns()
        error = (end - start) / 2e9
        if error < best[1]:
            best = ((there - (start + end) / 2) / 1e9, error)
    return best


def _send_time(device: Device, other: int) -> None:
    work = comm.isend(torch.tensor([time.time_ns()], device=device.torch_device), other)
    assert work is not None
    work.wait()


def _receive_time(device: Device, other: int) -> int:
    got = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
    work = comm.irecv(got, other)
    assert work is not None
    work.wait()
    return int(got)


def measure_collectives(device: Device, rank: int, world_size: int) -> Iterator[Collective]:
    """All-reduce, all-gather and all-to-all at three sizes (`comm.collectives` says what a size is), with contents that
    give known results. The median of some turns, as this rank saw them."""
    for name, make in (("all_reduce", _all_reduce), ("all_gather", _all_gather), ("all_to_all", _all_to_all)):
        for size in SIZES[device.kind]:
            words = max(1, size // 4 // world_size)  # of a rank's part
            run, check = make(device, rank, world_size, words)
            run()
            times = []
            for _ in range(_COLLECTIVE_TURNS):
                dist.barrier()
                times.append(_timed(device, run))
            seconds = statistics.median(times)
            moved = 4 * words * world_size
            share = (2.0 if name == "all_reduce" else 1.0) * (world_size - 1) / world_size
            fault = "" if check() else f"rank {rank} has a wrong result"
            yield Collective(
                operation=name, size_bytes=moved, seconds=seconds, bus_bytes_per_s=moved * share / seconds, fault=fault
            )


Made = tuple[Callable[[], object], Callable[[], bool]]


def _part(rank: int, words: int, device: Device) -> Tensor:
    """Whole numbers below 2^10, whose sums over ranks float32 holds exactly up to 2^14 ranks."""
    return ((torch.arange(words, device=device.torch_device) + rank) % 1024).float()


def _all_reduce(device: Device, rank: int, world_size: int, words: int) -> Made:
    own = torch.cat([_part(rank + at, words, device) for at in range(world_size)])
    out = torch.empty_like(own)

    def run() -> None:
        out.copy_(own)
        comm.all_reduce(out)

    def check() -> bool:
        sums = torch.zeros(1024, device=device.torch_device)  # by (word + part) % 1024
        for other in range(world_size):
            sums += _part(other, 1024, device)
        at = torch.arange(world_size * words, device=device.torch_device)
        return torch.equal(out, sums[(at // words + at % words) % 1024])

    return run, check


def _all_gather(device: Device, rank: int, world_size: int, words: int) -> Made:
    own = _part(rank, words, device)
    out = torch.empty(words * world_size, device=device.torch_device)
    known = torch.cat([_part(other, words, device) for other in range(world_size)])
    return lambda: comm.all_gather_single(out, own), lambda: torch.equal(out, known)


def _all_to_all(device: Device, rank: int, world_size: int, words: int) -> Made:
    own = torch.cat([_part(rank + 3 * other, words, device) for other in range(world_size)])
    out = torch.empty_like(own)
    known = torch.cat([_part(other + 3 * rank, words, device) for other in range(world_size)])
    return lambda: comm.all_to_all_single(out, own), lambda: torch.equal(out, known)
