"""What one rank, and the first rank of a host, find out by themselves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bessemer.inspect.takeoff_records import (
    DiskState,
    Hello,
    HostState,
    LinkState,
    MemoryState,
    Product,
    RankState,
    Request,
)
from bessemer.runtime.device import Device
from bessemer.runtime.disk import measure_disk
from bessemer.runtime.host import cpu_identity
from bessemer.runtime.host_state import read_limits, read_versions, torch_versions
from bessemer.runtime.known_answer import FORMATS, Burn, Burner
from bessemer.runtime.links import read_links
from bessemer.runtime.memory_patterns import test_memory
from bessemer.runtime.nvml import read_gpus
from bessemer.runtime.sustained import measure_copy

__all__ = ["Effort", "check_host", "check_rank", "effort_of", "merged", "set_threads"]

_CPU_SHORT = ("fp32", "bf16", "int8", "fp64")
"""fp16 and FP8 have no units in most CPUs, and take seconds for one product."""
_SIZES = {"cpu": 512, "cuda": 4096, "musa": 4096}
_CHOOSING = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE",
             "CUBLAS_WORKSPACE_CONFIG")  # fmt: skip
"""Variables by which users choose another code for the same product."""
_SLICE_S = 5.0  # of a burn-in: long enough to be steady, short enough that formats take turns


@dataclass(frozen=True)
class Effort:
    """How much of everything. `cycles` times all formats have a slice of `slice_s`; `rounds`: of pairs between hosts,
    at most."""

    formats: tuple[str, ...]
    cycles: int
    slice_s: float
    copy_bytes: int
    memory_bytes: int
    memory_s: float
    disk_bytes: int
    rounds: int

    @property
    def seconds(self) -> float:
        """About how long the local checks take."""
        return len(self.formats) * self.cycles * self.slice_s + self.memory_s


def effort_of(request: Request) -> Effort:
    """The short mode fits in 20 s with the start of the ranks; of a burn-in products get three quarters."""
    on_cpu = request.device == "cpu"
    copied = 1 << 26 if on_cpu else 1 << 30
    if request.minutes is None:
        formats = _CPU_SHORT if on_cpu else FORMATS
        return Effort(formats, 2, 0.25, copied, 1 << 24 if on_cpu else 1 << 30, 0.0, 1 << 25, 64)
    seconds = 60 * request.minutes
    cycles = max(2, round(0.75 * seconds / (len(FORMATS) * _SLICE_S)))
    slice_s = 0.75 * seconds / (len(FORMATS) * cycles)
    tested = 1 << 28 if on_cpu else 1 << 35
    return Effort(FORMATS, cycles, slice_s, copied, tested, 0.15 * seconds, 1 << 30, 1 << 20)


def check_rank(request: Request, device: Device, place: Hello) -> RankState:
    """Products, memory and versions of one rank."""
    start = time.perf_counter()
    effort = effort_of(request)
    products = _products(device, effort)
    copied = measure_copy(device, 0.3, effort.copy_bytes)
    tested = test_memory(device, _granted(device, effort.memory_bytes), seconds=effort.memory_s)
    return RankState(
        rank=place.rank,
        local_rank=place.local_rank,
        device=device.name,
        kind=device.kind,
        threads=torch.get_num_threads(),
        products=products,
        memory=MemoryState(copy_bytes_per_s=copied, tested_bytes=tested.tested_bytes, fault=tested.fault),
        versions=read_versions({**torch_versions(), **request.facts}),
        seconds=time.perf_counter() - start,
    )


def _granted(device: Device, wanted: int) -> int:
    """Of a GPU four fifths of what is free, at most."""
    if device.kind == "cpu":
        return wanted
    free, _ = torch.get_device_module(device.torch_device).mem_get_info(device.torch_device)
    return min(wanted, int(0.8 * free))


def _products(device: Device, effort: Effort) -> tuple[Product, ...]:
    burners: dict[str, Burner] = {}
    absent: dict[str, str] = {}
    for name in effort.formats:
        try:
            burners[name] = Burner(name, device, _SIZES[device.kind])
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # torch has no such product here
            absent[name] = " ".join(str(error).split())[:120]
    burns: dict[str, list[Burn]] = {name: [] for name in burners}
    for _ in range(effort.cycles):
        for name, burner in burners.items():
            burns[name].append(burner.burn(effort.slice_s))
    return tuple(
        Product(format=name, absent=absent[name])
        if name in absent
        else merged(burns[name], _key(device, burners[name]))
        for name in effort.formats
    )


def _key(device: Device, burner: Burner) -> str:
    """With what the checksum may be compared: equal products on what adds in the same order."""
    return f"{burner.name} {burner.size} on {device.name} ({_kind(device)}), torch {torch.__version__} {_path(device)}"


def _kind(device: Device) -> str:
    """What a device's name leaves open."""
    if device.kind == "cpu":
        return cpu_identity()
    about = torch.get_device_module(device.torch_device).get_device_properties(device.torch_device)
    return f"{about.major}.{about.minor}, {about.multi_processor_count} processors"


def _path(device: Device) -> str:
    """Through which code products run."""
    chosen = [f"{name}={os.environ[name]}" for name in _CHOOSING if name in os.environ]
    if device.kind == "cpu":
        return ", ".join([torch.backends.cpu.get_cpu_capability(), f"threads {torch.get_num_threads()}", *chosen])
    return ", ".join([str(torch.version.cuda or torch.version.git_version), *chosen])


def merged(burns: Sequence[Burn], key: str) -> Product:
    """One record of the slices of a format: the rate of the first at its start and of the last at its end."""
    rates = sorted(burn.rate for burn in burns)
    return Product(
        format=burns[0].format,
        key=key,
        repetitions=sum(burn.repetitions for burn in burns),
        rate=rates[len(rates) // 2],
        rate_start=burns[0].rate_start,
        rate_end=burns[-1].rate_end,
        checksum=burns[0].checksum,
        fault=next((burn.fault for burn in burns if burn.fault), ""),
    )


def check_host(request: Request, label: str, ranks: Sequence[int]) -> HostState:
    """Disks, limits and links of this host; its first rank calls it, after the load."""
    effort = effort_of(request)
    run = Path(request.run_folder)
    disks = []
    for purpose, folder in (("run", run), ("checkpoints", run / "checkpoints")):
        found = measure_disk(folder, effort.disk_bytes)
        need = request.need_bytes if purpose == "checkpoints" else 0
        disks.append(DiskState(purpose=purpose, need_bytes=need, **asdict(found)))
        if purpose == "run" and not (run / "checkpoints").is_dir():
            disks[0] = disks[0].model_copy(update={"need_bytes": request.need_bytes})
            break  # both are in one place
    links = tuple(LinkState(**asdict(link)) for link in read_links())
    return HostState(
        host=label,
        name=socket.gethostname(),
        ranks=tuple(ranks),
        disks=tuple(disks),
        limits=read_limits(),
        links=links,
        gpus=tuple(read_gpus()),
    )


def set_threads(device: Device, local_world_size: int) -> None:
    """As training does."""
    if "OMP_NUM_THREADS" not in os.environ:
        device.set_threads(max(1, (os.cpu_count() or 1) // local_world_size))
