"""What a take-off check finds, as records: made by the ranks, sent as JSON, judged by pure functions. No torch.

fleet = Fleet.model_validate_json(text)
"""

from __future__ import annotations

import functools

from pydantic import Field

from bessemer.core.model import Frozen

__all__ = [
    "Collective",
    "DiskState",
    "Exchanged",
    "Fleet",
    "Hello",
    "HostState",
    "LinkState",
    "MemoryState",
    "Pair",
    "Product",
    "RankState",
]


class Request(Frozen):
    """What is asked of a check. `minutes`: of a burn-in, None for the short mode. `run_folder` and `need_bytes`: of the
    job, where there is one; `facts`: what must be equal everywhere beside the versions (the job's hash)."""

    device: str = "cpu"
    minutes: float | None = None
    run_folder: str = "."
    need_bytes: int = 0
    facts: dict[str, str] = Field(default_factory=dict)


class Product(Frozen):
    """Repeated products of one format on one rank (`runtime.known_answer.Burn`). `key`: with what the checksum may be
    compared: device, library, threads, format and size. `absent`: why the device has no such product."""

    format: str
    key: str = ""
    repetitions: int = 0
    rate: float = 0.0  # operations/s
    rate_start: float = 0.0
    rate_end: float = 0.0
    checksum: str = ""
    fault: str = ""
    absent: str = ""


class MemoryState(Frozen):
    copy_bytes_per_s: float  # read and written together
    tested_bytes: int
    fault: str = ""


class RankState(Frozen):
    """One rank's own checks. `versions`: of all that must be equal everywhere, the job's hash among it."""

    rank: int
    local_rank: int
    device: str  # the vendor's name
    kind: str  # "cpu", "cuda" or "musa"
    threads: int
    products: tuple[Product, ...]
    memory: MemoryState
    versions: dict[str, str]
    seconds: float = 0.0


class DiskState(Frozen):
    """`need_bytes`: what the job will write there (0: not known). `purpose`: "run" or "checkpoints"."""

    purpose: str
    folder: str
    write_bytes_per_s: float
    fsync_s: float
    free_bytes: int
    need_bytes: int = 0
    free_inodes: int | None = None
    fault: str = ""


class LinkState(Frozen):
    kind: str
    name: str
    fields: dict[str, str]


class HostState(Frozen):
    """One host's checks, made by its first rank. `clock_s`: its clock against that of the first host, give or take
    `clock_error_s`; None where there is only one."""

    host: str
    name: str  # of the network; two hosts of tests may share it
    ranks: tuple[int, ...]
    disks: tuple[DiskState, ...] = ()
    limits: dict[str, int] = Field(default_factory=dict)
    links: tuple[LinkState, ...] = ()
    gpus: tuple[dict[str, int], ...] = ()
    clock_s: float | None = None
    clock_error_s: float = 0.0


class Pair(Frozen):
    """Messages between ranks a < b. `fault`: what came back wrong."""

    a: int
    b: int
    latency_s: float
    bytes_per_s: float
    fault: str = ""


class Collective(Frozen):
    """One operation over all ranks. `bus_bytes_per_s`: as nccl-tests define it."""

    operation: str
    size_bytes: int
    seconds: float
    bus_bytes_per_s: float
    fault: str = ""


class Exchanged(Frozen):
    """What one rank measured with others. `clocks`: on the first rank, (clock, uncertainty) by rank."""

    pairs: tuple[Pair, ...] = ()
    collectives: tuple[Collective, ...] = ()
    clocks: dict[int, tuple[float, float]] = Field(default_factory=dict)
    error: str = ""


class Hello(Frozen):
    """The place of a rank: what is known of one that falls silent."""

    rank: int
    local_rank: int
    name: str  # of its host


class Fleet(Frozen):
    """Everything that was found. `silent`: ranks that gave no answer, and what is known of it. `errors`: what ranks
    said that could not exchange. `rounds`: rounds of pairs between hosts that were taken, of how many."""

    hosts: tuple[HostState, ...]
    ranks: tuple[RankState, ...]
    pairs: tuple[Pair, ...] = ()
    collectives: tuple[Collective, ...] = ()
    silent: dict[int, str] = Field(default_factory=dict)
    errors: dict[int, str] = Field(default_factory=dict)
    rounds: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    minutes: float | None = None  # of a burn-in; None: the short mode

    def host_of(self, rank: int) -> str:
        """The host of a rank; KeyError for one that none has."""
        return self.host_by_rank[rank]

    @functools.cached_property
    def host_by_rank(self) -> dict[int, str]:
        return {rank: state.host for state in self.hosts for rank in state.ranks}
