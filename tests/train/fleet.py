"""A run of groups for tests: a coordinator in a thread, ranks as processes, faults at named points.

with Fleet(folder, job, spares=1) as fleet:
    fleet.start(0, fault=Fault("reduce", step=3)); fleet.start(1); ...
    ended = fleet.wait()          # by (group, incarnation): how each ended, and the digest of its state
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from train.faults import Fault, inject, slow_down
from train.loops import Recorder
from train.toy import SEQ, VOCAB

from bessemer.core.errors import BessemerError, Stopped
from bessemer.core.job import Job
from bessemer.keep.cohort import SILENCE_S, Cohort, Epoch, Seat
from bessemer.keep.coordinate import membership_of
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.links import listen_at

SECRET = "a secret of the tests"
STILL_S = 60.0
"""So long nothing at all happens only in a fleet that hangs."""


def patient(seconds: float) -> float:
    """So many seconds where a process runs when it can, and up to six times as many where others are in its way. For
    what may take longer without being wrong; no test is about these times."""
    return seconds * min(6.0, max(1.0, os.getloadavg()[0] / (2 * len(os.sched_getaffinity(0)))))


class ToyData:
    """Samples that follow from their ids alone."""

    fingerprint = "toy"

    def batch(self, ids: list[int]) -> Any:
        import numpy as np

        from bessemer.data import Batch

        rows = [np.random.default_rng(i).integers(0, VOCAB, SEQ + 1) for i in ids]
        window = np.stack(rows).astype(np.int64)
        weights = np.stack([(np.random.default_rng(i + 7).random(SEQ) < 0.7) for i in ids]).astype(np.float32)
        return Batch(window[:, :-1].copy(), window[:, 1:].copy(), weights, np.zeros((len(ids), SEQ), np.int32))


class Saves:
    """What was saved: by step a digest of this rank's slices."""

    def __init__(self) -> None:
        self.made: dict[int, str] = {}

    def save(self, step: int, slices: Any, meta: Any) -> float:
        self.made[step] = digest_of((s.name, s.tensor) for s in slices)
        return 0.0

    def poll(self) -> list[Any]:
        return []

    wait = poll


class Patience:
    """Says that a fleet hangs once nothing has happened in it for too long: no event, no step, no end of a rank. So a
    test takes as long as the machine needs, and a hang no longer than that."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._seen, self._since = fleet, (), time.monotonic()

    def check(self, what: str) -> None:
        fleet = self._fleet
        ended = sum(process.exitcode is not None for process in fleet._processes.values())
        seen = len(fleet.events), fleet.membership.step, ended
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        still_s = time.monotonic() - self._since
        assert still_s < patient(STILL_S), f"{what}, and nothing happens for {still_s:.0f} s; {fleet._told()}"


class Fleet:
    """`silent_s`: after that long in state T (stopped) the stand-in of an agent calls a rank lost, and `kills` it."""

    def __init__(
        self, folder: Path, job: Job, *, silent_s: float = 0.5, pause_s: float = 0.0, kills: bool = True
    ) -> None:
        self.folder, self.job, self.silent_s, self.pause_s, self.kills = folder, job, silent_s, pause_s, kills
        self.block = job.layout.world_size // job.replicas
        self.address = f"unix:{folder}/c"
        self.events: list[dict[str, Any]] = []
        self._processes: dict[tuple[int, int, int], Any] = {}
        self._stopped: dict[tuple[int, int, int], float] = {}
        self._done = threading.Event()

    def __enter__(self) -> Fleet:
        (self.folder / "out").mkdir(parents=True, exist_ok=True)
        how = {"secret": SECRET, "lease_s": patient(1.5)}
        self.coordinator = Coordinator(self._listen(), membership_of(self.job), **how)
        self.coordinator._tell_agents = lambda event, **fields: self.events.append({"event": event, **fields})
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._done.set()
        self._thread.join()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self.coordinator.close()

    def _serve(self) -> None:
        try:
            while not self._done.is_set():
                self.coordinator.turn(0.02)
                self._watch()
        except Exception:
            self.events.append({"event": "the coordinator broke", "why": traceback.format_exc()})

    def _watch(self) -> None:
        """What an agent does: stopped ranks are lost after a while."""
        for key, process in list(self._processes.items()):
            with suppress(OSError):
                state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "T":
                    self._stopped.pop(key, None)
                elif time.monotonic() - self._stopped.setdefault(key, time.monotonic()) > self.silent_s:
                    self.lost(key[0], key[1], "stopped")
                    if self.kills:
                        process.kill()

    def _told(self) -> str:
        """What is known of a run that hangs: the latest events, and where each rank is."""
        for process in self._processes.values():
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        stacks = [path.read_text() for path in sorted(self.folder.glob("stack-*"))]
        return "\n".join([str(self.events[-8:]), *stacks])

    def start(self, group: int, *, incarnation: int = 0, joins: bool = False, fault: Fault | None = None) -> None:
        for place in range(self.block):
            seat = Seat(group, incarnation, place, self.host_of(group))
            mine = fault if fault is not None and fault.place == place else None
            where = (str(self.folder), self.addresses_for(group), self.network_of(group))
            args = (*where, self.job, seat, joins, mine, self.pause_s)
            process = ranks._context.Process(target=member, args=args, daemon=True)
            process.start()
            self._processes[group, incarnation, place] = process

    def _listen(self) -> socket.socket:
        """Where the coordinator listens."""
        return listen_at(self.address)

    def addresses_for(self, group: int) -> str:
        return self.address

    def network_of(self, group: int) -> tuple[str, str]:
        """The network namespace in which the group's ranks are (empty: this one), and the address of their sums."""
        return "", "127.0.0.1"

    def host_of(self, group: int) -> str:
        return "here"

    @property
    def membership(self) -> Any:
        """What is known of who takes part and how far they are."""
        return self.coordinator.membership

    def lost(self, group: int, incarnation: int, why: str) -> None:
        """Tell the coordinator."""
        self.coordinator._lost(group, incarnation, why)

    def until(self, what: Any) -> None:
        """Wait until `what(membership)` holds, for as long as anything happens."""
        patience = Patience(self)
        while not what(self.membership):
            patience.check("it did not come to it")
            time.sleep(0.005)

    def stop(self, group: int, number: int, *, place: int = 0, incarnation: int = 0) -> None:
        os.kill(self._processes[group, incarnation, place].pid, number)

    def wait(self) -> dict[tuple[int, int, int], dict[str, Any]]:
        """What each rank that ended by itself left behind, once all have ended."""
        patience = Patience(self)
        for process in self._processes.values():
            while process.exitcode is None:
                patience.check(f"rank {process.pid} still runs")
                process.join(0.05)
        found = {}
        for path in sorted((self.folder / "out").iterdir()):
            found[tuple(int(n) for n in path.stem.split("-"))] = json.loads(path.read_text())
        return found


def enter(namespace: str) -> None:
    """This thread, and those that it starts, are in that network from now on."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {namespace}")


def digest(parts: Any) -> str:
    from bessemer.train.transfer import held_state

    return digest_of(held_state(parts))


def digest_of(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    made = hashlib.sha256()
    for name, tensor in named:
        made.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def member(
    folder: str,
    addresses: str,
    network: tuple[str, str],
    job: Job,
    seat: Seat,
    joins: bool,
    fault: Fault | None,
    pause_s: float,
) -> None:
    """One rank. It leaves its end in a file, and ends without waiting for abandoned groups."""
    from train.toy import toy_parts

    from bessemer.parallel.across import connect_gloo
    from bessemer.train.elastic import Connector, ElasticLoop, group_job
    from bessemer.train.transfer import Landing

    ranks.die_with_the_tests()
    if network[0]:
        enter(network[0])
    torch.set_num_threads(1)
    stack = open(f"{folder}/stack-{seat.group}-{seat.place}", "w")  # noqa: SIM115 (as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stack)
    name = f"{seat.group}-{seat.incarnation}-{seat.place}"
    own = group_job(job)
    if own.layout.world_size > 1:
        store = f"file://{folder}/store-{seat.group}-{seat.incarnation}"
        dist.init_process_group("gloo", init_method=store, rank=seat.place, world_size=own.layout.world_size)
    parts = toy_parts(own, seat.place)

    class Files(Connector):
        def link(self, epoch: Epoch, index: int) -> Any:
            if fault is not None and fault.point == "epoch" and epoch.number == fault.step:
                os.kill(os.getpid(), fault.number)
            size = len(epoch.members)
            store = dist.FileStore(f"{folder}/epoch-{epoch.term}-{epoch.number}-{seat.place}", size)
            return connect_gloo(store, index, size, 20.0, network[1])

    recorder, saver = Recorder(), Saves()
    cohort = Cohort(addresses, SECRET, seat, timeout_s=patient(30.0), silence_s=patient(SILENCE_S))
    wishes: queue.SimpleQueue[int] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda number, frame: wishes.put(number))
    threading.Thread(target=lambda: (wishes.get(), cohort.leave()), daemon=True).start()
    landing = Landing(f"unix:{folder}/l-{name}", SECRET)
    loop = ElasticLoop(
        parts, ToyData(), None, recorder, saver, Path(folder) / "run", job, cohort, Files(), landing, SECRET,
        True, joins,
    )  # fmt: skip
    if fault is not None:
        inject(fault, loop)
    if pause_s:
        slow_down(loop, pause_s)
    ended = "finished"
    try:
        loop.run()
    except Stopped:
        ended = "stopped"
    except BessemerError as error:
        ended = f"{error.code}: {error}"
    left = {"ended": ended, "digest": digest(parts), "metrics": recorder.metrics, "events": recorder.events,
            "saves": saver.made}  # fmt: skip
    Path(folder, "out", f"{name}.tmp").write_text(json.dumps(left))
    os.rename(Path(folder, "out", f"{name}.tmp"), Path(folder, "out", f"{name}.json"))
    os._exit(0)
