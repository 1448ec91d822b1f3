"""Rules over links: PCI devices, network cards, GPUs of the driver's library, and messages between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from bessemer.core.units import format_rate, format_seconds
from bessemer.inspect.takeoff_compare import LEAST, blame, low_outliers, majority
from bessemer.inspect.takeoff_records import Fleet, LinkState, Pair
from bessemer.inspect.takeoff_verdict import Finding
from bessemer.runtime.nvml import SLOWDOWNS

__all__ = ["gpu_findings", "link_findings", "pair_findings"]

SPEED_DROP, LATENCY_DROP = 0.25, 0.50
"""Shares of the median of links of the same kind (NVIDIA's resiliency extension calls a rank slow at 0.75)."""
_COMPARED = {"pci": ("width", "speed"), "net": ("state", "mbit_per_s"), "ib": ("state", "physical", "rate")}
_WORKING = ("up", "active", "linkup")
_GPU_BAD = {
    "lost": "the driver can't reach it",
    "ecc_uncorrected": "uncorrectable memory errors since the last reset",
    "remap_failed": "a bad row of memory could not be replaced",
    "remap_pending": "a row of memory waits to be replaced: reset the GPU",
}
_HARDWARE = 0x08 | 0x40 | 0x80  # of SLOWDOWNS, those that the hardware itself makes

Ends = tuple[int, int]
Place = tuple[str, str]  # kind and name of a link


def link_findings(fleet: Fleet) -> Iterator[Finding]:
    """Links that are narrower, slower or further down than the same link of other hosts (at least three), or than
    others of the same kind on their host; without either, narrower than the device could be is a doubt."""
    of_host = {state.host: {(link.kind, link.name): link for link in state.links} for state in fleet.hosts}
    several = len(of_host) >= LEAST
    for host, links in of_host.items():
        for key, link in links.items():
            others = _same_link(of_host, key) if several else _same_kind(links.values(), link)
            for name in _COMPARED[link.kind]:
                if link.fields.get("role") == "gpu" and name == "speed":
                    continue  # it falls when the GPU has nothing to do
                usual = majority({who: fields[name] for who, fields in others.items() if name in fields})
                own = link.fields.get(name, "nothing")
                if len(others) >= LEAST and usual is not None and _worse(name, own, usual):
                    bad = several or link.kind == "pci"  # cards of one host may differ on purpose
                    yield Finding(host, "link", bad, f"{link.name}: {name} {own}, not {usual} as most have")
            yield from _alone(host, link, compared=len(others) >= LEAST)
    if several:
        yield from _vanished(of_host)


def _worse(name: str, own: str, usual: str) -> bool:
    """More than most have is no fault, nor is a port that is up where most are not used."""
    if own == usual or (name in ("state", "physical") and own.lower() in _WORKING):
        return False
    here, there = _number(own), _number(usual)
    return here is None or there is None or here < there


def _number(text: str) -> float | None:
    """What a field such as "16.0 GT/s PCIe" begins with."""
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None


def _same_link(of_host: Mapping[str, Mapping[Place, LinkState]], key: Place) -> dict[str, dict[str, str]]:
    return {host: links[key].fields for host, links in of_host.items() if key in links}


def _same_kind(links: Iterable[LinkState], link: LinkState) -> dict[str, dict[str, str]]:
    model = ("role", "device")
    return {
        other.name: other.fields
        for other in links
        if other.kind == link.kind and all(other.fields.get(name) == link.fields.get(name) for name in model)
    }


def _alone(host: str, link: LinkState, *, compared: bool) -> Iterator[Finding]:
    width, most = link.fields.get("width"), link.fields.get("most_width")
    if not compared and width and most and int(width) < int(most):
        yield Finding(host, "link", False, f"{link.name}: {width} PCIe lanes of {most}")
    if link.kind == "pci" and int(link.fields.get("errors", "0")):
        yield Finding(host, "link", False, f"{link.name}: {link.fields['errors']} uncorrected PCIe errors reported")
    if not compared and link.kind == "ib" and link.fields.get("state") != "ACTIVE":
        yield Finding(host, "link", False, f"{link.name}: state {link.fields.get('state', 'unknown')}")


def _vanished(of_host: Mapping[str, Mapping[Place, LinkState]]) -> Iterator[Finding]:
    """Devices that most hosts have at the same place."""
    for key in dict.fromkeys(key for links in of_host.values() for key in links):
        have = [host for host, links in of_host.items() if key in links]
        if 2 * len(have) > len(of_host):
            for host in of_host:
                if host not in have:
                    yield Finding(host, "link", True, f"{key[1]} ({key[0]}) is not there, as it is on most hosts")


def gpu_findings(fleet: Fleet) -> Iterator[Finding]:
    """What the driver's library says of the GPUs."""
    up = {(state.host, gpu["index"]): str(gpu["nvlinks_up"])
          for state in fleet.hosts for gpu in state.gpus if "nvlinks_up" in gpu}  # fmt: skip
    usual = majority(up) if len(up) >= LEAST else None
    for state in fleet.hosts:
        for gpu in state.gpus:
            name = f"GPU {gpu['index']}"
            for field, meaning in _GPU_BAD.items():
                if gpu.get(field):
                    yield Finding(state.host, "gpu", True, f"{name}: {meaning}")
            reasons = gpu.get("slowdowns", 0)
            words = [word for bit, word in SLOWDOWNS.items() if reasons & bit]
            if words:
                heat = f" at {gpu['temperature_c']} C" if "temperature_c" in gpu else ""
                what = f"{name}: clocks are held down by {', '.join(words)}{heat}"
                yield Finding(state.host, "gpu", bool(reasons & _HARDWARE), what)
            links = gpu.get("nvlinks_up")
            if usual is not None and links is not None and links < int(usual):
                yield Finding(state.host, "gpu", True, f"{name}: {links} NVLinks up, not {usual} as most have")


def pair_findings(fleet: Fleet) -> Iterator[Finding]:
    """Links that corrupt or are slow, and whose fault that is. Links inside a host are compared with each other, those
    between hosts too. On a CPU a slow exchange inside a host says only that the host is busy: a doubt."""
    on_cpu = all(state.kind == "cpu" for state in fleet.ranks)
    inside = [pair for pair in fleet.pairs if fleet.host_of(pair.a) == fleet.host_of(pair.b)]
    between = [pair for pair in fleet.pairs if fleet.host_of(pair.a) != fleet.host_of(pair.b)]
    wrong = {(p.a, p.b): p.fault for p in fleet.pairs if p.fault}
    yield from _blamed(fleet, wrong, fleet.pairs, are_bad=True)
    for pairs, are_bad in ((between, True), (inside, not on_cpu)):
        yield from _blamed(fleet, _slow(pairs), pairs, are_bad)


def _slow(pairs: Sequence[Pair]) -> dict[Ends, str]:
    """Pair of ranks -> how slow, in words."""
    speeds = {(p.a, p.b): p.bytes_per_s for p in pairs}
    quick = {(p.a, p.b): 1 / p.latency_s for p in pairs}
    found = {}
    for key, share in low_outliers(quick, LATENCY_DROP).items():
        found[key] = f"{format_seconds(1 / quick[key])} a message, {1 / share:.1f} times the median"
    for key, share in low_outliers(speeds, SPEED_DROP).items():
        found[key] = f"{format_rate(speeds[key], 'B')}, {share:.2f} of the median"
    return found


def _blamed(fleet: Fleet, found: Mapping[Ends, str], pairs: Sequence[Pair], are_bad: bool) -> Iterator[Finding]:
    """An end that explains several links is named with the first of them; else the link, of which the end of the later
    rank is left out: without it the link isn't used."""
    guilty, alone = blame(list(found), [(p.a, p.b) for p in pairs])
    for rank, count in guilty.items():
        first = next(key for key in found if rank in key)
        total = sum(rank in (p.a, p.b) for p in pairs)
        what = f"rank {rank}: {count} of its {total} links; the first, {_named(fleet, first)}: {found[first]}"
        yield Finding(fleet.host_of(rank), "pair", are_bad, what)
    for key in alone:
        what = f"the link {_named(fleet, key)}: {found[key]}"
        a, b = map(fleet.host_of, key)
        if a != b:
            yield Finding(a, "pair", False, f"{what}; {b} is left out for it, or this host may be")
        yield Finding(b, "pair", are_bad, what if a == b else f"{what}; which end is wrong is not known")


def _named(fleet: Fleet, ranks: Ends) -> str:
    a, b = map(fleet.host_of, ranks)
    return f"of ranks {ranks[0]} and {ranks[1]}" if a == b else f"of ranks {ranks[0]} ({a}) and {ranks[1]} ({b})"
