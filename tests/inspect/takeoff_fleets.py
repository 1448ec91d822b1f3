"""Simulated fleets for the rules of take-off: hosts with jitter, and one fault in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from bessemer.inspect.takeoff_records import (
    DiskState,
    Fleet,
    HostState,
    LinkState,
    MemoryState,
    Pair,
    Product,
    RankState,
)
from bessemer.inspect.takeoff_rounds import partners

RATES = {"fp32": 5e13, "bf16": 7e14, "fp16": 7e14, "fp8": 1.2e15}
VERSIONS = {"torch": "2.13.0", "nvidia driver": "580.95", "nccl": "2.30.7", "job": "0123456789abcdef", "kernel": "6.8"}
GIB = 1 << 30


def fleet(
    hosts: int, *, ranks: int = 1, jitter: float = 0.01, seed: int = 0, rounds: int = 64, device: str = "NVIDIA H100"
) -> Fleet:
    """`hosts` sound hosts of `ranks` GPUs. jitter: standard deviation of every rate, as a share."""
    draw = random.Random(seed)

    def near(value: float, spread: float = jitter) -> float:
        return value * max(0.5, draw.gauss(1.0, spread))

    states, gpus = [], []
    for host in range(hosts):
        own = tuple(range(host * ranks, (host + 1) * ranks))
        states.append(_host(f"node{host:03d}", own, near, draw))
        gpus += [_rank(rank, rank - own[0], device, near) for rank in own]
    met, taken = partners([state.ranks for state in states], rounds)
    pairs = []
    for partner in met:
        for a, b in partner.items():
            if a < b:
                inside = a // ranks == b // ranks
                pairs.append(Pair(a=a, b=b, latency_s=near(4e-6 if inside else 2e-5, 0.05),
                                  bytes_per_s=near(3.5e11 if inside else 4.6e10, 0.03)))  # fmt: skip
    return Fleet(hosts=tuple(states), ranks=tuple(gpus), pairs=tuple(pairs), rounds=taken)


def _host(name: str, ranks: tuple[int, ...], near: Callable[..., float], draw: random.Random) -> HostState:
    disk = DiskState(purpose="run", folder="/shared/runs", write_bytes_per_s=near(2e9, 0.1), fsync_s=near(2e-3, 0.2),
                     free_bytes=900 * GIB, need_bytes=200 * GIB, free_inodes=10**7)  # fmt: skip
    links = [LinkState(kind="pci", name=f"0000:{at:02x}:00.0", fields={"role": "gpu", "device": "0x10de:0x2330",
             "speed": "32.0 GT/s PCIe", "most_speed": "32.0 GT/s PCIe", "width": "16", "most_width": "16"})
             for at in range(0x1B, 0x1B + len(ranks))]  # fmt: skip
    links.append(LinkState(kind="ib", name="mlx5_0/1", fields={"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}))
    limits = {"open_files": 1 << 20, "locked_bytes": -1, "shared_bytes": 64 * GIB, "ports": 28232}
    return HostState(
        host=name, name=name, ranks=ranks, disks=(disk,), links=tuple(links), clock_s=draw.gauss(0.0, 0.002),
        clock_error_s=2e-5, limits=limits,
    )  # fmt: skip


def _rank(rank: int, local: int, device: str, near: Callable[..., float]) -> RankState:
    products = tuple(
        Product(format=name, key=f"{name} 8192 on {device}, torch 2.13.0", repetitions=100, rate=near(rate),
                rate_start=near(rate), rate_end=near(0.97 * rate), checksum=f"{name}-0123456789")
        for name, rate in RATES.items()
    )  # fmt: skip
    memory = MemoryState(copy_bytes_per_s=near(2.6e12), tested_bytes=GIB)
    return RankState(rank=rank, local_rank=local, device=device, kind="cuda", threads=0, products=products,
                     memory=memory, versions=VERSIONS)  # fmt: skip


def with_rank(of: Fleet, at: int, change: Callable[[RankState], RankState]) -> Fleet:
    return of.model_copy(update={"ranks": tuple(change(s) if s.rank == at else s for s in of.ranks)})


def with_host(of: Fleet, at: int, **update: object) -> Fleet:
    hosts = list(of.hosts)
    hosts[at] = hosts[at].model_copy(update=update)
    return of.model_copy(update={"hosts": tuple(hosts)})


def slower(share: float) -> Callable[[RankState], RankState]:
    """All products of the rank at `share` of their rate."""

    def change(state: RankState) -> RankState:
        found = tuple(p.model_copy(update={"rate": share * p.rate}) for p in state.products)
        return state.model_copy(update={"products": found})

    return change


def with_slow_links(of: Fleet, share: float, bad: Callable[[Pair], bool]) -> Fleet:
    slow = [p.model_copy(update={"bytes_per_s": share * p.bytes_per_s}) if bad(p) else p for p in of.pairs]
    return of.model_copy(update={"pairs": tuple(slow)})
