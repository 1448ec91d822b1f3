"""A run of groups for tests: a coordinator in a thread, ranks as processes, faults at named points.

with Fleet(folder, job, spares=1) as fleet:
    fleet.start(0, fault=Fault("reduce", step=3)); fleet.start(1); ...
    ended = fleet.wait()          # by (group, incarnation): how each ended, and the digest of its state
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import queue
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from train.loops import Recorder
from train.toy import SEQ, VOCAB

from bessemer.core.errors import BessemerError, Stopped
from bessemer.core.job import Job
from bessemer.keep.cohort import Cohort, Epoch, Seat
from bessemer.keep.coordinate import membership_of
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.links import listen_at

SECRET = "a secret of the tests"


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at a point of step `step` (from 0): the signal is sent to itself.

    forward, backward, reduce, voted, committed; epoch: while the link of epoch number `step` is made; donor, joiner: in
    the midst of a transfer. Without a signal, flip: a bit of the sum is wrong; slow: every step takes half a second
    longer. `place`: of the rank in its group."""

    point: str
    step: int
    number: int = signal.SIGKILL
    place: int = 0


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


class NoSaver:
    def save(self, step: int, slices: Any, meta: Any) -> float:
        return 0.0

    def poll(self) -> list[Any]:
        return []

    wait = poll


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
        self.coordinator = Coordinator(listen_at(self.address), membership_of(self.job), secret=SECRET)
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
            args = (str(self.folder), self.addresses_for(group), self.job, seat, joins, mine, self.pause_s)
            process = ranks._context.Process(target=member, args=args, daemon=True)
            process.start()
            self._processes[group, incarnation, place] = process

    def addresses_for(self, group: int) -> str:
        return self.address

    def host_of(self, group: int) -> str:
        return "here"

    @property
    def membership(self) -> Any:
        """What is known of who takes part and how far they are."""
        return self.coordinator.membership

    def lost(self, group: int, incarnation: int, why: str) -> None:
        """Tell the coordinator."""
        self.coordinator._lost(group, incarnation, why)

    def until(self, what: Any, timeout_s: float = 60.0) -> None:
        """Wait until `what(membership)` holds."""
        deadline = time.monotonic() + timeout_s
        while not what(self.membership):
            assert time.monotonic() < deadline, f"not in {timeout_s} s; {self._told()}"
            time.sleep(0.005)

    def stop(self, group: int, number: int, *, place: int = 0, incarnation: int = 0) -> None:
        os.kill(self._processes[group, incarnation, place].pid, number)

    def wait(self, timeout_s: float = 60.0) -> dict[tuple[int, int, int], dict[str, Any]]:
        """What each rank that ended by itself left behind, once all have ended."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank still runs after {timeout_s} s; {self._told()}"
        found = {}
        for path in sorted((self.folder / "out").iterdir()):
            found[tuple(int(n) for n in path.stem.split("-"))] = json.loads(path.read_text())
        return found


def digest(parts: Any) -> str:
    from bessemer.train.transfer import held_state

    made = hashlib.sha256()
    for name, tensor in held_state(parts):
        made.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def member(folder: str, addresses: str, job: Job, seat: Seat, joins: bool, fault: Fault | None, pause_s: float) -> None:
    """One rank. It leaves its end in a file, and ends without waiting for abandoned groups."""
    from train.toy import toy_parts

    from bessemer.parallel.across import connect_gloo
    from bessemer.train.elastic import Connector, ElasticLoop, group_job
    from bessemer.train.transfer import Landing

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
            return connect_gloo(store, index, size, 20.0)

    recorder = Recorder()
    cohort = Cohort(addresses, SECRET, seat)
    wishes: queue.SimpleQueue[int] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda number, frame: wishes.put(number))
    threading.Thread(target=lambda: (wishes.get(), cohort.leave()), daemon=True).start()
    landing = Landing(f"unix:{folder}/l-{name}", SECRET)
    loop = ElasticLoop(
        parts, ToyData(), None, recorder, NoSaver(), Path(folder) / "run", job, cohort, Files(), landing, SECRET,
        True, joins,
    )  # fmt: skip
    if fault is not None:
        inject(fault, loop)
    if pause_s:
        _slow_down(loop, pause_s)
    ended = "finished"
    try:
        loop.run()
    except Stopped:
        ended = "stopped"
    except BessemerError as error:
        ended = f"{error.code}: {error}"
    left = {"ended": ended, "digest": digest(parts), "metrics": recorder.metrics, "events": recorder.events}
    Path(folder, "out", f"{name}.tmp").write_text(json.dumps(left))
    os.rename(Path(folder, "out", f"{name}.tmp"), Path(folder, "out", f"{name}.json"))
    os._exit(0)


def _slow_down(loop: Any, pause_s: float) -> None:
    run = loop.parts.step.passes.run

    def slow(batches: Any, count: int, step: int = 0) -> Any:
        time.sleep(pause_s if count else 0)
        return run(batches, count, step)

    loop.parts.step.passes.run = slow


def inject(fault: Fault, loop: Any) -> None:
    """Make the loop send itself the fault's signal at its point."""
    from bessemer.train import elastic, transfer

    def strike() -> None:
        os.kill(os.getpid(), fault.number)

    passes, cohort = loop.parts.step.passes, loop.cohort
    at = {"step": -1}
    if fault.point == "slow":
        _slow_down(loop, 0.5)
        return
    if fault.point == "flip":
        digest = elastic.Buffers.digest

        def flipped(self: Any) -> str:
            if at["step"] == fault.step:
                self.gradients[3] ^= 1
            return digest(self)

        elastic.Buffers.digest = flipped
    run, vote, outcome = passes.run, cohort.vote, cohort.await_outcome

    def running(batches: Any, count: int, step: int = 0) -> Any:
        at["step"] = step
        if fault.point == "forward" and step == fault.step and count:
            strike()
        return run(batches, count, step)

    passes.run = running
    if fault.point == "backward":
        first = next(p for p in loop.parts.module.parameters() if p.requires_grad)
        first.register_hook(lambda g: strike() if at["step"] == fault.step else None)
    if fault.point == "voted":
        cohort.vote = lambda epoch, step, d: (vote(epoch, step, d), strike() if step == fault.step else None)
    if fault.point == "committed":

        def told(epoch: int, step: int) -> bool:
            made = outcome(epoch, step)
            if made and step == fault.step:
                strike()
            return made

        cohort.await_outcome = told
    if fault.point == "reduce":
        reduce = elastic.Across.reduce

        def summing(self: Any, sums: Any, maxima: Any = ()) -> None:
            if at["step"] == fault.step:
                self._wait(self._ready.is_set)
                self._link.start(sums[0], dist.ReduceOp.SUM)
                strike()
            reduce(self, sums, maxima)

        elastic.Across.reduce = summing
    if fault.point in ("donor", "joiner"):
        into, exactly = transfer._into, elastic.send

        def taking(link: Any, view: memoryview) -> None:
            if len(view) > 1000 and fault.point == "joiner":
                strike()
            into(link, view)

        def giving(snapshot: Any, join: Any, secret: str) -> None:
            if fault.point == "donor":
                strike()
            exactly(snapshot, join, secret)

        transfer._into, elastic.send = taking, giving
