"""`Machine`: one accelerator (or this computer's CPU) with its peak rates, memory and links.

    machine = load_machine("h100")             # a name of `machine_names()`
    machine = load_machine("lab/node.toml")    # or the path of a file in the same form

A figure that no source gives is absent (None), never guessed. `Machine.origin_of(field)` tells whether a figure was
measured, published or modelled, and where it comes from. `cpu-local` is this computer: its memory is read when it is
loaded; its peaks are absent until a measurement is stored in `cpu_local_file()`.
"""

from __future__ import annotations

import functools
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from bessemer.core.errors import ConfigError
from bessemer.core.model import Frozen
from bessemer.core.paths import user_path
from bessemer.core.problem import Problem, nearest
from bessemer.core.units import toml_text

__all__ = ["DTYPES", "Machine", "Origin", "Peaks", "cpu_local_file", "load_machine", "machine_names"]

DTYPES = ("bf16", "fp16", "fp8", "fp4", "int8", "tf32", "fp32", "fp64")
DEFAULT_CACHE = "~/.cache/bessemer"


class Origin(Frozen):
    """Where a figure comes from."""

    kind: Literal["measured", "published", "modelled"]
    source: str = Field(min_length=1)


class Peaks(Frozen):
    """Dense peak rates in operations/s by data type of the operands (fp64: vector units); None: unknown or absent."""

    bf16: float | None = Field(default=None, gt=0)
    fp16: float | None = Field(default=None, gt=0)
    fp8: float | None = Field(default=None, gt=0)
    fp4: float | None = Field(default=None, gt=0)
    int8: float | None = Field(default=None, gt=0)
    tf32: float | None = Field(default=None, gt=0)
    fp32: float | None = Field(default=None, gt=0)
    fp64: float | None = Field(default=None, gt=0)


class Machine(Frozen):
    """One device of a cluster. All rates are of one device; None means that no source gives the figure.

    `origin` speaks for every figure that `origins` doesn't name; `origins` is keyed by field, the peaks as
    `peak_flops_per_s.bf16`. Dense rates only: a rate with structured sparsity never stands here.
    """

    name: str
    device: Literal["cpu", "cuda", "musa"]
    origin: Origin
    origins: dict[str, Origin] = Field(default_factory=dict)
    peak_flops_per_s: Peaks = Peaks()
    memory_bytes: int | None = Field(default=None, gt=0)  # nominal; vendors' GB are taken as 10^9 bytes
    usable_memory_bytes: int | None = Field(default=None, gt=0)  # what a process can see, where that was published
    memory_bytes_per_s: float | None = Field(default=None, gt=0)
    scaleup_link: str = ""  # NVLink4, MTLink ...
    scaleup_bidirectional_bytes_per_s: float | None = Field(
        default=None, gt=0
    )  # both directions together, as vendors print
    scaleup_domain: int | None = Field(default=None, gt=0)  # devices that reach each other over that link
    nic_bytes_per_s: float | None = Field(default=None, gt=0)  # one direction, network card of one device
    tdp_w: float | None = Field(default=None, gt=0)
    host_bytes_per_s: float | None = Field(default=None, gt=0)  # one direction, between device and host memory
    # how collectives run; None: by the compute units over a switch, as is usual
    scaleup_topology: Literal["switch", "full-mesh", "ring"] | None = None
    nic_efficiency: float | None = Field(default=None, gt=0, le=1)  # share of the card's rate that is reached
    fabric_pod: int | None = Field(default=None, gt=0)  # devices under one full-bandwidth part of the fabric
    fabric_oversubscription: float | None = Field(default=None, ge=1)  # of the links between such parts, e.g. 7 for 1:7
    mesh_efficiency: float | None = Field(default=None, gt=0, le=1)  # share of a mesh's bandwidth that is reached
    collective_start_s: float | None = Field(default=None, gt=0)  # from launch to the first byte
    launch_latency_factor: float | None = Field(default=None, gt=0)  # of a collective's launch, against usual
    engine_interference: float | None = Field(default=None, ge=0, le=1)  # 0: exchanges run on an engine of their own
    engine_compute_saved: float | None = Field(default=None, ge=0, lt=1)  # compute units given back by that engine
    reduction_bandwidth_saved: float | None = Field(default=None, ge=0, lt=1)  # reduction beside the memory
    reduction_latency_saved: float | None = Field(default=None, ge=0, lt=1)
    engine_dependency_s: float | None = Field(default=None, gt=0)  # hand-over between engines
    gpus_per_node: int = Field(default=8, gt=0)  # devices of one host, where the job doesn't say

    @property
    def scaleup_bytes_per_s(self) -> float | None:
        """One direction of the scale-up link: half of the bidirectional total."""
        total = self.scaleup_bidirectional_bytes_per_s
        return None if total is None else total / 2

    def without_engine(self) -> Machine:
        """The same device with its exchanges run by compute units, as most are: the share `engine_compute_saved` of the
        units is then theirs, and overlapped exchanges slow the rest down. ValueError where no such share is known."""
        if self.engine_compute_saved is None:
            raise ValueError(f"{self.name} names no share of compute units that an engine gives back")
        left = 1 - self.engine_compute_saved
        peaks = {k: None if v is None else v * left for k, v in self.peak_flops_per_s.model_dump().items()}
        changed = {"engine_interference": 1.0, "engine_compute_saved": None, "peak_flops_per_s": Peaks(**peaks)}
        return self.model_copy(update=changed)

    @property
    def limit_bytes(self) -> int | None:
        """The memory that a job must fit in: the usable part where known, else the nominal size."""
        return self.usable_memory_bytes or self.memory_bytes

    def peak(self, dtype: str) -> float | None:
        """Dense peak in operations/s for `dtype` (one of DTYPES); None where unknown. KeyError for another name."""
        if dtype not in DTYPES:
            raise KeyError(f"no such dtype: {dtype!r}; known: {', '.join(DTYPES)}")
        value: float | None = getattr(self.peak_flops_per_s, dtype)
        return value

    def origin_of(self, field: str) -> Origin:
        """The origin of one figure, e.g. "memory_bytes" or "peak_flops_per_s.bf16"."""
        return self.origins.get(field, self.origin)

    @classmethod
    def from_toml(cls, text: str, source: str) -> Machine:
        """Reads the form that `to_toml` writes. ConfigError with a problem for every key that is wrong."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            problems = [_problem("machine-file", "machine.name", f"{source} is not TOML: {error}", "", "mend the file")]
        except ValidationError as error:
            problems = [
                _problem(
                    "machine-file",
                    "machine.name",
                    f"{source}: {'.'.join(map(str, e['loc']))}: {e['msg']}",
                    "a machine file holds the fields of bessemer.core.machine.Machine",
                    _key_fix(e["type"], e["loc"]),
                )
                for e in error.errors()
            ]
        raise ConfigError(problems, source)

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back to an equal object; absent figures are left out."""
        return toml_text(self.model_dump(exclude_none=True, exclude_defaults=True))


def machine_names() -> tuple[str, ...]:
    """The machines that the package describes, sorted."""
    folder = resources.files("bessemer.core") / "machines"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def cpu_local_file(cache: str = DEFAULT_CACHE) -> Path:
    """Where measured figures of this computer are kept: a machine file named `cpu-local`."""
    return user_path(cache) / "machines" / "cpu-local.toml"


def load_machine(name: str, *, cache: str = DEFAULT_CACHE) -> Machine:
    """The machine of that name, or of the file at that path (a name with a slash or ending in .toml).

    For `cpu-local` the measured file `cpu_local_file(cache)` replaces the packaged description where it exists, and
    the memory is what this process may use now. ConfigError for an unknown name, a missing or a malformed file.
    """
    if "/" in name or name.endswith(".toml"):
        return _from_path(user_path(name))
    if name not in machine_names():
        near = nearest(name.lower().replace("_", "-"), machine_names()) or list(machine_names())
        why = "known machines: " + ", ".join(machine_names())
        fix = f'machine.name = "{near[0]}"' if len(near) == 1 else "machine.name = one of " + ", ".join(near)
        problem = _problem("machine-unknown", "machine.name", f"{name!r} is not a machine that is known", why, fix)
        raise ConfigError([problem], "the job")
    if name != "cpu-local":
        return _packaged(name)
    measured = cpu_local_file(cache)
    machine = _from_path(measured) if measured.is_file() else _packaged(name)
    origin = Origin(kind="measured", source="memory of this computer that this process may use, read at load")
    return machine.model_copy(
        update={"memory_bytes": local_memory_bytes(), "origins": {**machine.origins, "memory_bytes": origin}}
    )


def local_memory_bytes() -> int:
    """Physical memory in bytes, or the memory limit of this process's control group where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.is_file():
            text = limit.read_text().strip()
            if text.isdigit():
                total = min(total, int(text))
    return total


@functools.cache
def _packaged(name: str) -> Machine:
    file = resources.files("bessemer.core") / "machines" / f"{name}.toml"
    return Machine.from_toml(file.read_text(encoding="utf-8"), f"{name}.toml")


def _from_path(path: Path) -> Machine:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "a path of a machine file, or one of " + ", ".join(machine_names())
        raise ConfigError([_problem("machine-file", "machine.name", f"can't read {path}: {error}", "", fix)]) from error
    return Machine.from_toml(text, str(path))


def _key_fix(kind: str, loc: tuple[int | str, ...]) -> str:
    if kind != "extra_forbidden":
        return "mend that value"
    known = Peaks.model_fields if loc[0] == "peak_flops_per_s" else Machine.model_fields
    near = nearest(str(loc[-1]), known)
    return f"the nearest key is {near[0]}" if near else "known keys: " + ", ".join(known)


def _problem(code: str, where: str, what: str, why: str, fix: str) -> Problem:
    return Problem(code=code, where=where, what=what, why=why, fix=fix)
