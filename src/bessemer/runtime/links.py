"""Links of this host as Linux's sysfs tells them: PCI devices, network cards, InfiniBand ports. No torch.

    read_links()            # [Link("pci", "0000:1b:00.0", {"speed": "32.0 GT/s PCIe", "width": "16", ...}), ...]

Fields are those of the kernel's ABI documents (sysfs-bus-pci, sysfs-class-net, sysfs-class-infiniband). What a file
doesn't say is left out: virtual machines show few of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Link", "read_links"]

_PCI_CLASSES = {"0x03": "gpu", "0x12": "gpu", "0x02": "network", "0x0108": "nvme"}
"""By the first digits of the PCI class code (PCI Code and ID Assignment): display, accelerator, network, NVM."""
_VIRTUAL = "virtual"  # /sys/devices/virtual/net: bridges, loopback


@dataclass(frozen=True)
class Link:
    """kind: "pci", "net" or "ib"; name: the address, the interface, or device and port."""

    kind: str
    name: str
    fields: dict[str, str]


def read_links(root: Path = Path("/sys")) -> list[Link]:
    """All links below `root`, sorted by kind and name."""
    return [*_pci(root / "bus" / "pci" / "devices"), *_net(root / "class" / "net"), *_ib(root / "class" / "infiniband")]


def _pci(folder: Path) -> list[Link]:
    found = []
    for device in _sorted(folder):
        code = _text(device / "class")
        role = next((name for prefix, name in _PCI_CLASSES.items() if code.startswith(prefix)), None)
        if role is None:
            continue
        fields = {
            "role": role,
            "device": f"{_text(device / 'vendor')}:{_text(device / 'device')}",
            "speed": _text(device / "current_link_speed"),
            "most_speed": _text(device / "max_link_speed"),
            "width": _text(device / "current_link_width"),
            "most_width": _text(device / "max_link_width"),
            "errors": _aer(device),
        }
        found.append(_link("pci", device.name, fields))
    return found


def _aer(device: Path) -> str:
    """Uncorrected errors that the device has reported (advanced error reporting), "" where it doesn't count them."""
    lines = [line for name in ("aer_dev_fatal", "aer_dev_nonfatal") for line in _text(device / name).splitlines()]
    totals = [int(line.split()[-1]) for line in lines if line.startswith("TOTAL_ERR_")]
    return str(sum(totals)) if totals else ""


def _net(folder: Path) -> list[Link]:
    found = []
    for interface in _sorted(folder):
        if _VIRTUAL in interface.resolve().parts:
            continue
        fields = {
            "state": _text(interface / "operstate"),
            "mbit_per_s": _text(interface / "speed"),
            "mtu": _text(interface / "mtu"),
            "errors": _text(interface / "statistics" / "rx_errors"),
            "losses": _text(interface / "carrier_down_count"),
        }
        if fields["mbit_per_s"].startswith("-"):  # the driver doesn't know
            fields["mbit_per_s"] = ""
        found.append(_link("net", interface.name, fields))
    return found


def _ib(folder: Path) -> list[Link]:
    found = []
    for device in _sorted(folder):
        for port in _sorted(device / "ports"):
            fields = {
                "state": _text(port / "state").partition(": ")[2],
                "physical": _text(port / "phys_state").partition(": ")[2],
                "rate": _text(port / "rate"),
                "errors": _text(port / "counters" / "symbol_error"),
                "losses": _text(port / "counters" / "link_downed"),
            }
            found.append(_link("ib", f"{device.name}/{port.name}", fields))
    return found


def _link(kind: str, name: str, fields: dict[str, str]) -> Link:
    return Link(kind, name, {key: value for key, value in fields.items() if value})


def _sorted(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    """ "" where there is no such file, or the driver refuses to be asked (a card that is down has no speed)."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
