"""What speaks against a host: rules over the records of a fleet. Pure, so that hundreds of hosts can be simulated.

    findings = judge(fleet, stored={}, floors=Floors())

A finding is "bad" where the host (or, without one, the fleet) must not start, else a doubt, which is only told.
docs/takeoff.md lists the rules and where their numbers come from.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bessemer.core.units import format_bytes, format_rate, format_seconds
from bessemer.inspect.takeoff_compare import LEAST, low_outliers, majority
from bessemer.inspect.takeoff_links import gpu_findings, link_findings, pair_findings
from bessemer.inspect.takeoff_records import Fleet, HostState, RankState
from bessemer.inspect.takeoff_verdict import Finding

__all__ = ["Floors", "judge", "needed_files", "relative_rates"]

RATE_DROP, FORMAT_DROP, COPY_DROP, DISK_DROP = 0.05, 0.20, 0.15, 0.50
"""Shares of the fleet's median: of all formats together as SuperBench (ATC 2024) has it; ours where noise is larger."""
HEAT_DROP, HEAT_BEYOND = 0.10, 0.05
"""Of the rate from the first to the last third; and how much more than the fleet's median."""
CLOCK_BAD_S, CLOCK_DOUBT_S = 0.5, 0.1
"""Records of two hosts can't be put in order beyond; a synchronised clock is within milliseconds."""
LEAST_INODES, LEAST_PORTS = 10_000, 4096
SHARED_BYTES_PER_RANK = 64 << 20
"""What a container gives by default, and NCCL finds too little (docs/launch.md)."""
_MAY_DIFFER = ("kernel", "libc")


@dataclass(frozen=True)
class Floors:
    """Absolute limits: operations/s by format, bytes/s of a copy. Empty where nothing is known of the device."""

    rate: Mapping[str, float] = field(default_factory=dict)
    copy_bytes_per_s: float = 0.0


def judge(fleet: Fleet, stored: Mapping[str, str], floors: Floors) -> list[Finding]:
    """All findings, those of one host together. stored: checksums of earlier checks by `Product.key`."""
    found = [
        *_silent(fleet),
        *_answers(fleet, stored),
        *_memory(fleet),
        *_rates(fleet, floors),
        *_heat(fleet),
        *_disks(fleet),
        *_clocks(fleet),
        *_versions(fleet),
        *_limits(fleet),
        *link_findings(fleet),
        *gpu_findings(fleet),
        *pair_findings(fleet),
        *_collectives(fleet),
    ]
    order = {state.host: at for at, state in enumerate(fleet.hosts)}
    return sorted(found, key=lambda f: (order.get(f.host, -1), not f.bad))


def needed_files(world_size: int) -> int:
    """Open files of one rank: 512 for itself, and four connections to every other rank (an estimate of ours: a
    connection for each kind of group that spans the job)."""
    return 512 + 4 * world_size


def relative_rates(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Device -> format -> rate as a share of the median of its kind. A GPU is a device of its own, called "host rank
    R"; the CPU of a host is shared by its ranks and counts once, with their median."""
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for state in fleet.ranks:
        for product in state.products:
            if product.rate:
                values[state.device, product.format][_device(fleet, state)].append(product.rate)
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for (_, name), rates in values.items():
        each = {device: statistics.median(found) for device, found in rates.items()}
        middle = statistics.median(each.values())
        for device, rate in each.items():
            shares[device][name] = rate / middle
    return dict(shares)


def _device(fleet: Fleet, state: RankState) -> str:
    host = fleet.host_of(state.rank)
    return host if state.kind == "cpu" else f"{host} rank {state.rank}"


def _host(device: str) -> str:
    return device.partition(" rank ")[0]


def _said(device: str) -> str:
    """ "rank 7: " of a GPU; nothing of a CPU, which is its host's."""
    _, found, rank = device.partition(" rank ")
    return f"rank {rank}: " if found else ""


def _silent(fleet: Fleet) -> Iterator[Finding]:
    """Ranks that say nothing; where all speak, what they say of an exchange that failed. Those that waited for a silent
    one failed for its sake."""
    for rank, what in sorted(fleet.silent.items()):
        yield Finding(fleet.host_of(rank), "silent", True, f"rank {rank} gave no answer: {what}")
    if not fleet.silent:
        for rank, what in sorted(fleet.errors.items()):
            yield Finding("", "exchange", True, f"rank {rank} on {fleet.host_of(rank)} could not exchange: {what}")


def _answers(fleet: Fleet, stored: Mapping[str, str]) -> Iterator[Finding]:
    answers: dict[str, dict[int, str]] = defaultdict(dict)
    for state in fleet.ranks:
        for product in state.products:
            if product.fault:
                what = f"rank {state.rank}, {product.format}: {product.fault}"
                yield Finding(fleet.host_of(state.rank), "answer", True, what)
            elif product.checksum:
                answers[product.key][state.rank] = product.checksum
    for key, of_rank in answers.items():
        yield from _checksums(fleet, key, of_rank, stored.get(key))


def _checksums(fleet: Fleet, key: str, of_rank: Mapping[int, str], before: str | None) -> Iterator[Finding]:
    values = set(of_rank.values())
    if len(values) == 1 and before in (None, *values):
        return
    right = before if before in values else majority(of_rank)
    if right is None or len(values) == 1:
        bad = len(values) > 1
        known = f", before it was {before}" if before else ""
        for host in _in_order(fleet.host_of(rank) for rank in of_rank):
            own = sorted({value for rank, value in of_rank.items() if fleet.host_of(rank) == host})
            yield Finding(host, "answer", bad, f"{key}: checksum {', '.join(own)}{known}; which is right is not known")
        return
    source = "as in earlier checks" if right == before else "as most have"
    for rank, value in of_rank.items():
        if value != right:
            what = f"rank {rank}: checksum {value} of {key}, not {right} {source}"
            yield Finding(fleet.host_of(rank), "answer", True, what)


def _memory(fleet: Fleet) -> Iterator[Finding]:
    for state in fleet.ranks:
        if state.memory.fault:
            yield Finding(fleet.host_of(state.rank), "memory", True, f"rank {state.rank}: {state.memory.fault}")


def _rates(fleet: Fleet, floors: Floors) -> Iterator[Finding]:
    shares = relative_rates(fleet)
    together = {device: statistics.geometric_mean(found.values()) for device, found in shares.items()}
    slow = low_outliers(together, RATE_DROP)
    for device, share in slow.items():
        formats = ", ".join(f"{name} {value:.2f}" for name, value in shares[device].items())
        yield Finding(
            _host(device), "rate", True, f"{_said(device)}products at {share:.2f} of the fleet's median ({formats})"
        )
    for name in sorted({name for found in shares.values() for name in found}):
        each = {device: found[name] for device, found in shares.items() if name in found}
        for device, share in low_outliers(each, FORMAT_DROP).items():
            if device not in slow:
                yield Finding(
                    _host(device), "rate", True, f"{_said(device)}{name} at {share:.2f} of the fleet's median"
                )
    yield from _copies(fleet, floors)
    for state in fleet.ranks:
        for product in state.products:
            least = floors.rate.get(product.format, 0.0)
            if product.rate and product.rate < least:
                rate, floor = format_rate(product.rate, "op"), format_rate(least, "op")
                what = f"rank {state.rank}: {product.format} at {rate}, below the floor of {floor}"
                yield Finding(fleet.host_of(state.rank), "rate", True, what)


def _copies(fleet: Fleet, floors: Floors) -> Iterator[Finding]:
    by_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for state in fleet.ranks:
        by_kind[state.device][_device(fleet, state)].append(state.memory.copy_bytes_per_s)
        if state.memory.copy_bytes_per_s < floors.copy_bytes_per_s:
            rate, floor = (format_rate(x, "B") for x in (state.memory.copy_bytes_per_s, floors.copy_bytes_per_s))
            what = f"rank {state.rank}: memory copies at {rate}, below the floor of {floor}"
            yield Finding(fleet.host_of(state.rank), "memory", True, what)
    for copies in by_kind.values():
        rates = {device: statistics.median(found) for device, found in copies.items()}
        for device, share in low_outliers(rates, COPY_DROP).items():
            what = f"{_said(device)}memory copies at {share:.2f} of the fleet's median"
            yield Finding(_host(device), "memory", True, what)


def _heat(fleet: Fleet) -> Iterator[Finding]:
    drops: dict[str, list[float]] = defaultdict(list)
    for state in fleet.ranks:
        drops[_device(fleet, state)] += [1 - p.rate_end / p.rate_start for p in state.products if p.rate_start]
    each = {device: statistics.median(found) for device, found in drops.items() if found}
    usual = statistics.median(each.values()) if each else 0.0
    kept = low_outliers({device: 1 - drop for device, drop in each.items()}, HEAT_BEYOND)
    for device, drop in each.items():
        if drop > HEAT_DROP:
            what = f"{_said(device)}the rate fell by {drop:.0%} from start to end; the fleet's median is {usual:.0%}"
            yield Finding(_host(device), "heat", device in kept, what)


def _disks(fleet: Fleet) -> Iterator[Finding]:
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for state in fleet.hosts:
        for disk in state.disks:
            where = f"{disk.purpose} folder {disk.folder}"
            if disk.fault:
                yield Finding(state.host, "disk", True, f"{where}: {disk.fault}")
                continue
            rates[disk.purpose][state.host] = disk.write_bytes_per_s
            if disk.free_bytes < disk.need_bytes:
                free, need = format_bytes(disk.free_bytes), format_bytes(disk.need_bytes)
                yield Finding(state.host, "disk", True, f"{where}: {free} free, the job will write {need}")
            if disk.free_inodes is not None and disk.free_inodes < LEAST_INODES:
                yield Finding(state.host, "disk", True, f"{where}: only {disk.free_inodes} files can still be made")
    for purpose, each in rates.items():
        for host, share in low_outliers(each, DISK_DROP).items():
            what = f"{purpose} folder: written at {format_rate(each[host], 'B')}, {share:.2f} of the fleet's median"
            yield Finding(host, "disk", True, what)


def _clocks(fleet: Fleet) -> Iterator[Finding]:
    known = {state.host: state for state in fleet.hosts if state.clock_s is not None}
    if len(known) < 2:
        return
    clocks = {host: state.clock_s or 0.0 for host, state in known.items()}
    few = len(clocks) < LEAST
    middle = next(iter(clocks.values())) if few else statistics.median(clocks.values())
    against = f"that of {next(iter(clocks))} (which of two is wrong is not known)" if few else "the fleet's median"
    for host, state in known.items():
        skew = clocks[host] - middle
        sure = abs(skew) - state.clock_error_s
        if sure > CLOCK_DOUBT_S:
            way = "ahead of" if skew > 0 else "behind"
            error = format_seconds(state.clock_error_s)
            what = f"its clock is {format_seconds(abs(skew))} (+- {error}) {way} {against}"
            yield Finding(host, "clock", sure > CLOCK_BAD_S, what)


def _versions(fleet: Fleet) -> Iterator[Finding]:
    if len({tuple(sorted(state.versions.items())) for state in fleet.ranks}) < 2:
        return
    for name in _in_order(name for state in fleet.ranks for name in state.versions):
        values = {state.rank: state.versions.get(name, "absent") for state in fleet.ranks}
        if len(set(values.values())) == 1:
            continue
        usual = majority(values)
        common = values[min(values)] if usual is None else usual
        source = f"as rank {min(values)} has (no majority)" if usual is None else "as most have"
        for host in _in_order(fleet.host_of(rank) for rank, value in values.items() if value != common):
            own = {v for rank, v in values.items() if fleet.host_of(rank) == host and v != common}
            what = f"{name} {', '.join(sorted(own))}, not {common} {source}"
            yield Finding(host, "version", name not in _MAY_DIFFER, what)


def _limits(fleet: Fleet) -> Iterator[Finding]:
    world_size = sum(len(state.ranks) for state in fleet.hosts)
    for state in fleet.hosts:
        files, need = state.limits.get("open_files", -1), needed_files(world_size)
        if 0 <= files < need:
            most = state.limits.get("hard_open_files", files)
            what = f"{files} open files allowed, {need} needed: ulimit -n {need}"
            yield Finding(state.host, "limit", 0 <= most < need, what)
        yield from _shared_memory(fleet, state)
        locked = state.limits.get("locked_bytes", -1)
        if (
            locked >= 0
            and _on_gpus(fleet, state)
            and any(link.kind == "ib" and link.fields.get("state") == "ACTIVE" for link in state.links)
        ):
            what = (
                f"only {format_bytes(locked)} may be locked, which InfiniBand needs without limit: ulimit -l unlimited"
            )
            yield Finding(state.host, "limit", True, what)
        ports = state.limits.get("ports", -1)
        if 0 <= ports < LEAST_PORTS:
            what = f"connections may leave by {ports} ports only: sysctl net.ipv4.ip_local_port_range"
            yield Finding(state.host, "limit", True, what)


def _shared_memory(fleet: Fleet, state: HostState) -> Iterator[Finding]:
    shared, need = state.limits.get("shared_bytes", -1), SHARED_BYTES_PER_RANK * len(state.ranks)
    if _on_gpus(fleet, state) and len(state.ranks) > 1 and 0 <= shared < need:
        what = f"{format_bytes(shared)} free in /dev/shm, {format_bytes(need)} needed by {len(state.ranks)} ranks"
        yield Finding(state.host, "limit", True, what)


def _on_gpus(fleet: Fleet, state: HostState) -> bool:
    return any(rank.kind != "cpu" for rank in fleet.ranks if rank.rank in state.ranks)


def _collectives(fleet: Fleet) -> Iterator[Finding]:
    for found in fleet.collectives:
        if found.fault:
            yield Finding(
                "", "collective", True, f"{found.operation} of {format_bytes(found.size_bytes)}: {found.fault}"
            )


def _in_order(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
