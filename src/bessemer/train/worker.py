"""A rank of a run: `python -m bessemer.train.worker`, started by the agent, or by another launcher through
`bessemer train JOB`. It is only the step loop, so that anything may kill it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from bessemer.comm import collectives as comm
from bessemer.core.errors import RequestError, RunFolderError
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.core.machine import load_machine
from bessemer.data import open_dataset, prepare
from bessemer.keep.join import rendezvous
from bessemer.keep.member import Member
from bessemer.keep.vault_client import VaultClient
from bessemer.parallel.mesh import Mesh, build_mesh
from bessemer.runtime.device import pick_device
from bessemer.runtime.recorder import Recorder
from bessemer.runtime.trace_signal import hold_trace_signal
from bessemer.train.assembly import assemble
from bessemer.train.dumps import dumps_of, profiler_of
from bessemer.train.loop import Loop
from bessemer.train.opened import keep_tokenizer
from bessemer.train.restore import Origin
from bessemer.train.startup import note_machine, tell_start

__all__ = ["join", "main", "run_rank"]


def main() -> int:
    """The rank that the agent's environment describes; returns the exit code."""
    member = Member.from_environment()
    assert member.run_folder is not None, "the agent names the run folder"
    job = load_job(member.run_folder / "job.toml")
    if job.keep.mode == "zero-interruption":
        from bessemer.train.elastic_worker import run_member

        return run_member(job, member)
    return _guarded(job, member)


def join(job: Job, beside: Callable[[Path, Path], AbstractContextManager[object]]) -> int:
    """Take part in `job` as the rank that a launcher's variables describe (torchrun, Slurm, MPI). `beside`: what rank 0
    runs beside itself, given the run folder and the socket of its host's services. RequestError for what only our own
    agent does."""
    hold_trace_signal()
    if job.keep.restarts:
        raise RequestError(
            f"keep.restarts = {job.keep.restarts} needs the agent that starts the ranks; a launcher started this one",
            code="needs-agent",
            fix="bessemer train JOB without a launcher, on one host; or keep.restarts = 0",
        )
    member = Member.from_environment(job)
    if member.rank != 0 or member.run_folder is None or member.agent is None:
        return _guarded(job, member)
    with beside(member.run_folder, member.agent):
        return _guarded(job, member)


def _guarded(job: Job, member: Member) -> int:
    """Run the rank; whatever goes wrong is reported to the agent before the process ends."""
    try:
        run_rank(job, member)
    except BaseException as error:
        return member.failed(error)
    member.close()
    return 0


def run_rank(job: Job, member: Member) -> None:
    """Set the rank up and train. A process group that may be stuck is left to the process's end."""
    machine = load_machine(job.machine.name)
    device = pick_device(machine.device, member.local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        device.set_threads(max(1, (os.cpu_count() or 1) // member.local_world_size))
    member.phase(0, "connecting the ranks")
    if job.layout.world_size > 1:
        dist.init_process_group(device.backend, rank=member.rank, world_size=member.world_size, **rendezvous(member))
    spec = resolve_model(job.model)
    assert member.run_folder is not None and member.vault is not None, "a rank of a run has both"
    box = member.run_folder / "blackbox" / f"rank-{member.rank}"
    recorder = Recorder(box, rank=member.rank, world=member.world_size, job_hash=job.hash)
    comm.record_to(recorder)
    mesh = build_mesh(job, member.rank, device.torch_device, spec)
    _same_folder(member, mesh)
    member.phase(0, "opening the data")
    prepared = prepare(job)
    if mesh.rank == 0:
        keep_tokenizer(member.run_folder, prepared.tokenizer_json)
    hosts = max(1, mesh.world_size // member.local_world_size)
    note_machine(job, machine, mesh, member, devices=mesh.world_size, hosts=hosts)
    member.phase(0, "building the model")
    parts = assemble(job, spec, mesh)
    parts.step.passes.phases.attach(recorder)
    parts.step.passes.dumps = dumps_of(job, mesh, member, recorder)
    with VaultClient(
        member.vault, rank=member.rank, world_size=member.world_size, local_world_size=member.local_world_size
    ) as saver:
        loop = Loop(
            parts=parts,
            train_data=open_dataset(job, "train", prepared),
            val_data=open_dataset(job, "val", prepared) if job.data.val_fraction > 0 else None,
            reporter=member,
            saver=saver,
            run_folder=member.run_folder,
            origin=Origin.of_environment(member.vault),
            profiler=profiler_of(job, mesh, member, parts.step.passes.phases),
        )
        if mesh.rank == 0:
            tell_start(job, spec, member)
        loop.run()


def _same_folder(member: Member, mesh: Mesh) -> None:
    """All hosts must see one run folder, or each would keep checkpoints that the others don't have."""
    own = member.folder_token()
    apart = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
    apart[mesh.rank] = own != mesh.broadcast_text(own)
    differ = mesh.sum_over_world(apart).nonzero().flatten().tolist()
    if differ:
        raise RunFolderError(
            f"ranks {', '.join(map(str, differ))} don't see the run folder of rank 0 at {member.run_folder}",
            code="other-folder",
            fix="set run.dir to a folder that all hosts mount at the same place",
        )


if __name__ == "__main__":
    raise SystemExit(main())
