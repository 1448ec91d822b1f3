"""A rank of a run that goes on while groups are lost and join: what `worker.py` is to the other runs."""

from __future__ import annotations

import contextlib
import os
import threading

import torch.distributed as dist

from bessemer.comm import collectives as comm
from bessemer.core.errors import BessemerError
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.machine import load_machine
from bessemer.data import open_dataset, prepare
from bessemer.keep.cohort import SILENCE_S, Cohort, Epoch, Fenced, Released, Seat
from bessemer.keep.hosts import address_of
from bessemer.keep.join import rendezvous
from bessemer.keep.links import SECRET
from bessemer.keep.meeting_store import MeetingStore
from bessemer.keep.member import Member
from bessemer.keep.vault_client import VaultClient
from bessemer.parallel.across import Link, connect_gloo, connect_nccl
from bessemer.parallel.mesh import build_mesh
from bessemer.runtime.device import Device, pick_device
from bessemer.runtime.host_state import raise_open_files
from bessemer.runtime.recorder import Recorder
from bessemer.train.assembly import assemble
from bessemer.train.dumps import dumps_of, profiler_of
from bessemer.train.elastic import Connector, ElasticLoop, group_job
from bessemer.train.leader_saver import LeaderSaver
from bessemer.train.opened import keep_tokenizer
from bessemer.train.restore import Origin
from bessemer.train.startup import note_machine, tell_start
from bessemer.train.transfer import Landing

__all__ = ["run_member"]

LEASE_S = 1.5
SILENT_LEASES = 2
"""On several hosts the coordinator's may fall silent with no end of its connections."""
ACROSS_TIMEOUT_S = 60.0
"""Of a sum across groups. It is given up long before, when the coordinator knows who is lost."""


class MeetingConnector(Connector):
    """The ranks at one place of the groups of an epoch meet at the coordinator. `address`: of this host."""

    def __init__(self, cohort: Cohort, secret: str, device: Device, address: str) -> None:
        self._cohort, self._secret, self._device, self._address = cohort, secret, device, address

    def link(self, epoch: Epoch, index: int) -> Link:
        name = f"epoch-{epoch.term}-{epoch.number}-{self._cohort.seat.place}"
        store = MeetingStore(self._cohort.address, self._secret, name, timeout_s=ACROSS_TIMEOUT_S)
        size = len(epoch.members)
        if self._device.backend == "nccl":
            return connect_nccl(store, index, size, ACROSS_TIMEOUT_S)
        with contextlib.closing(store):  # gloo needs it for no longer
            return connect_gloo(store, index, size, ACROSS_TIMEOUT_S, self._address)


def run_member(job: Job, member: Member) -> int:
    """Train as a rank of a group; returns the exit code. What the process may still be stuck in ends with it."""
    code = 0
    raise_open_files()
    try:
        _run(job, member)
    except (Fenced, Released) as end:
        with contextlib.suppress(Exception):
            member.event("group_ended", group=int(os.environ["BESSEMER_GROUP"]), code=end.code, message=end.message)
        code = end.exit_code
        member.close(code)
    except BaseException as error:
        code = member.failed(error)
    else:
        member.close()
    os._exit(code)  # the destructor of a group that hangs would wait for its timeout


def _pass_wishes_on(member: Member, cohort: Cohort) -> None:
    """A signal to this rank, as of a host that is to be taken away, is its group's wish to leave."""
    assert member.leave_wishes is not None, "the agent names the group"
    member.leave_wishes.get()
    with contextlib.suppress(BessemerError):  # it is no part of the run any more: the loop says so
        cohort.leave()


def _run(job: Job, member: Member) -> None:
    environment = os.environ
    group, joins = int(environment["BESSEMER_GROUP"]), bool(environment["BESSEMER_JOINS"])
    address, hosts = environment.get("BESSEMER_ADDRESS", ""), int(environment.get("BESSEMER_NUM_HOSTS", 1))
    own, place = group_job(job), member.rank
    machine = load_machine(job.machine.name)
    device = pick_device(machine.device, int(environment["BESSEMER_DEVICE"]))
    if own.layout.world_size > 1:
        member.phase(0, "connecting the ranks")
        dist.init_process_group(device.backend, rank=place, world_size=member.world_size, **rendezvous(member))
    spec = resolve_model(job.model)
    assert member.run_folder is not None and member.vault is not None and member.agent is not None
    box = member.run_folder / "blackbox" / f"rank-{member.number}"
    recorder = Recorder(box, rank=member.number, world=member.world_size, job_hash=job.hash)
    comm.record_to(recorder)
    mesh = build_mesh(own, place, device.torch_device, spec)
    member.phase(0, "opening the data")
    prepared = prepare(job)
    first = group == 0 and not joins
    if first and mesh.rank == 0:
        keep_tokenizer(member.run_folder, prepared.tokenizer_json)
    if first:
        note_machine(job, machine, mesh, member, devices=job.layout.world_size, hosts=hosts)
    member.phase(0, "building the model")
    parts = assemble(own, spec, mesh)
    parts.step.passes.phases.attach(recorder)
    parts.step.passes.dumps = dumps_of(job, mesh, member, recorder)
    if first and mesh.rank == 0:
        tell_start(job, spec, member)
    secret, sockets = environment[SECRET], member.agent.parent
    vault = member.vault
    seat = Seat(group, int(environment["BESSEMER_INCARNATION"]), place, address or os.uname().nodename)
    saver = LeaderSaver(
        lambda patience_s: VaultClient(vault, rank=place, world_size=member.world_size, patience_s=patience_s)
    )
    silence_s = SILENT_LEASES * (job.keep.lease_s or LEASE_S) if address else SILENCE_S
    cohort = Cohort(environment["BESSEMER_COORDINATOR"], secret, seat, silence_s=silence_s)
    threading.Thread(target=_pass_wishes_on, args=(member, cohort), name="bessemer-leave", daemon=True).start()
    loop = ElasticLoop(
        parts=parts,
        train_data=open_dataset(job, "train", prepared),
        val_data=open_dataset(job, "val", prepared) if job.data.val_fraction > 0 else None,
        reporter=member,
        saver=saver,
        run_folder=member.run_folder,
        whole_job=job,
        cohort=cohort,
        connector=MeetingConnector(cohort, secret, device, address or "127.0.0.1"),
        landing=Landing(address_of(address, 0) if address else f"unix:{sockets}/l{member.number}", secret),
        secret=secret,
        exact=job.keep.sums == "exact",
        joins=joins,
        origin=Origin.of_environment(member.vault),
        profiler=profiler_of(job, mesh, member, parts.step.passes.phases),
    )
    saver.leads = lambda: loop.leads
    if mesh.rank == 0:
        saver.tell = lambda error: member.event("warning", message=f"step {error.step} is not saved: {error.message}")
    loop.run()
