"""What the first rank of a run tells of its machine, operators and precision before the first step."""

from __future__ import annotations

import torch

from bessemer.core.job import Job
from bessemer.core.machine import Machine
from bessemer.core.model import ModelSpec
from bessemer.keep.member import Member
from bessemer.models.quantise import choice
from bessemer.ops import fallback_reason
from bessemer.parallel.mesh import Mesh
from bessemer.runtime.peaks import declared_peaks, ensure_peaks
from bessemer.train.assembly import quantising

__all__ = ["note_machine", "tell_start"]


def note_machine(job: Job, machine: Machine, mesh: Mesh, member: Member, *, devices: int, hosts: int) -> None:
    """The mesh's first rank measures this computer once, while the others of the mesh stand still, and notes the peak
    of all devices of the run."""
    if mesh.rank == 0:
        machine = ensure_peaks(machine, cache=job.data.cache)
        peaks = declared_peaks(machine, devices=devices, hosts=hosts)
        kind = machine.origin.kind
        member.event("machine", name=machine.name, peak_flops=peaks, kind=kind, source=machine.origin.source)
    mesh.sum_over_world(torch.zeros(1, device=mesh.device))


def tell_start(job: Job, spec: ModelSpec, member: Member) -> None:
    """Events: which operators run, which layers a recipe quantises, and that the rank is ready."""
    why = fallback_reason()
    member.event("operators", path="reference" if why else "native", why=why)
    if (how := quantising(job)) is not None:
        member.event("precision", recipe=job.precision.recipe, layers=choice(spec, how))
    member.event("ready")
