"""The loop of a rank in a run that goes on while groups are lost and join.

    share of a step -> kept contribution -> sum across groups -> vote -> commit -> update

What a lost group had to do of a step is done again by the survivors, in the same step: they keep what they have, add
the missing units, and sum again. A group that joins adds nothing to the sums, keeps them, takes a snapshot of the state
from a donor while all go on, applies what it has kept since, and is dealt units from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bessemer.core.errors import BessemerError
from bessemer.core.job import Job
from bessemer.data import Reader
from bessemer.data.cursor import deal, units_of_step
from bessemer.keep.cohort import Cohort, Epoch, Join
from bessemer.models.moe import moe_layers
from bessemer.parallel.across import Across, GivenUp, Link
from bessemer.train.alike import parameters_hash
from bessemer.train.evaluate import to_tensors
from bessemer.train.kept import Buffers, Kept
from bessemer.train.loop import Loop
from bessemer.train.passes import Batch, Contribution
from bessemer.train.restore import restore
from bessemer.train.step import StepResult, unit_micro_batches
from bessemer.train.transfer import Landing, Snapshot, deliver

__all__ = ["Connector", "ElasticLoop", "group_job"]

_LAND_S = 0.01
FENCED_S = 2.0
"""A rank that fails waits this long for word that its group is no part of the run any more."""


def group_job(job: Job) -> Job:
    """The job of one group: the same units, model and training, of one copy of the model."""
    layout = job.layout.model_copy(update={"dp": job.shard})
    replicas = None if job.layout.dp_shard == "none" else 1
    keep = job.keep.model_copy(update={"replicas": replicas, "unit": job.unit})
    return job.model_copy(update={"layout": layout, "keep": keep})


class Connector:
    """Makes the link of an epoch for this rank's place. Abstract: how depends on where the ranks meet."""

    def link(self, epoch: Epoch, index: int) -> Link:
        """`index` of the epoch's members is this rank's group. Blocks until all have come."""
        raise NotImplementedError


@dataclass
class _Work:
    """What this rank has of the step that is under way, since `start`, and what of its time new epochs took: waiting in
    sums that came to nothing, and running what lost groups had to. rerun: what a unit gives that all groups run."""

    kept: Kept
    rerun: int | None = None
    start: float = 0.0
    waited_s: float = 0.0
    redone_s: float = 0.0


@dataclass
class ElasticLoop(Loop):
    """`whole_job` is the run's, `parts` are those of one group's (`group_job`). joins: this group starts while the run
    goes on, so no checkpoint is read. saver: reserves for itself."""

    whole_job: Job
    cohort: Cohort
    connector: Connector
    landing: Landing
    secret: str
    exact: bool
    joins: bool = False

    def __post_init__(self) -> None:
        self._epoch: Epoch | None = None
        self._across: Across | None = None
        self._sent: set[tuple[int, int]] = set()
        self._concludes = False  # in the place of the group that led
        self._units = (1, 1)  # of the latest step: this group's, all
        self.cohort.share_of = self._share

    def run(self) -> None:
        """As `Loop.run`. Raises Fenced or Released where that is why it fails: a rank of the group that has heard of it
        first has left the others in the midst of what they do together."""
        try:
            super().run()
            self._await_conclusion()
        except BessemerError:
            raise
        except Exception:
            self.cohort.check(within_s=FENCED_S)
            raise

    def _await_conclusion(self) -> None:
        """The group that leads has saved the last step, and says so; where it is lost before, another one does it."""
        steps, concluded = self.job.train.steps, self.leads
        self.reporter.phase(steps, "waiting for the end")
        if concluded:
            self.cohort.done()
        while self.cohort.await_conclusion():
            if not concluded:
                self._concludes = concluded = True
                self._evaluate_if_due(steps)
                self._save(steps)
                self._note_saved(self.saver.wait())
                self._event("finished", step=steps)
            self.cohort.done()

    @property
    def job(self) -> Job:
        return self.whole_job

    @property
    def leads(self) -> bool:
        """Whether this group speaks for the run: writes its records and checkpoints, and evaluates."""
        return self._concludes or (self._epoch is not None and self._epoch.active[:1] == (self.cohort.seat.group,))

    @property
    def part_of_step(self) -> float:
        return self._units[1] / max(1, self._units[0])

    # ---- joining

    def _start(self) -> tuple[int, int]:
        """Come to the cohort with the newest saved state, or with none where this group is to join a run that goes on,
        and return when this group is dealt units. A spare waits here for as long as it isn't needed."""
        restored = None
        if not self.joins:
            restored = restore(self.parts, self.run_folder, self.train_data.fingerprint, self.origin)
        self.cohort.hello(None if restored is None else restored.step, self.landing.address)
        self.reporter.phase(0, "waiting as a spare")
        self.cohort.await_epoch()
        epoch = self._agreed_epoch()
        step = epoch.step
        if self.cohort.seat.group not in epoch.active:
            step = self._catch_up(step)
        elif restored is not None:
            self._epoch = epoch  # as far as who leads goes; it is entered with the first step
            self._event("loaded", **restored.told())
            self._tell_watch()
            self._epoch = None
        own = restored is not None and restored.path is not None and self.run_folder in Path(restored.path).parents
        return step, step if own else -1

    def _catch_up(self, step: int) -> int:
        """Take part with nothing to add; the sums since the snapshot wait in a queue until it has arrived."""
        me, queue, stands = self.cohort.seat.group, [], None  # stands: at which step this state is, None: at none
        start = time.monotonic()
        while True:
            self.reporter.phase(step + 1, "catching up")
            if self._enter(step).parked and stands is None:
                stands = self._land_parked(step)
                if stands == step and me in self._agreed_epoch().active:
                    self._event_of_group("joined", step=step, seconds=time.monotonic() - start)
                    return step
                continue
            work = self._new_work(step)
            queue.append((step, work, self._sum(step, work)))
            step += 1
            if stands is None:
                stands = self._land(queue[0][0])
            while stands is not None and queue:
                at, done, total = queue.pop(0)
                if at == stands:
                    self._apply(at, done, total)
                    stands += 1
            if stands == step:
                self.cohort.synced()
                assert self._epoch is not None
                if me in self._agreed_epoch().active:
                    self._event_of_group("joined", step=step, seconds=time.monotonic() - start)
                    return step

    def _land_parked(self, step: int) -> int | None:
        """As `_land`, of the step at which all stand still; waits for it, or for a newer epoch."""
        assert self._epoch is not None
        epoch, stands = self._epoch.number, None
        while stands is None and self._agreed_number() <= epoch:
            self.cohort.check()
            stands = self._land(step)
            time.sleep(_LAND_S)
        if stands is not None:
            self.cohort.synced()
            self.cohort.await_epoch(epoch + 1)
        return stands

    def _land(self, first: int) -> int | None:
        """The step of the snapshot that has arrived on all ranks of this group, put in place; else None. `first`: the
        step of the oldest sum that is kept."""
        assert self._epoch is not None
        join, found = self._epoch.joins.get(self.cohort.seat.group), self.landing.arrived
        here = join is not None and found is not None and (found.donor, found.step) == (join.donor, join.step)
        step = found.step if here and found is not None and found.step >= first else -1
        least = torch.tensor([float(-step)], dtype=torch.float64, device=self.parts.mesh.device)
        if -float(self.parts.mesh.max_over_world(least)) < 0 or found is None:
            return None
        self.reporter.phase(first + 1, "landing")  # and applying what was kept since, until the next step
        found.put(self.parts)
        self.landing.arrived = None
        return found.step

    # ---- a step

    def _batches(self, first_step: int) -> Iterator[Batch]:
        yield from ()  # each step reads what it is dealt

    def _run_step(self, step: int, batches: Iterator[Batch]) -> StepResult:
        del batches
        work = self._new_work(step)
        return self._apply(step, work, self._sum(step, work))

    def _new_work(self, step: int) -> _Work:
        passes = self.parts.step.passes
        start = time.perf_counter()
        passes.phases.at(step=step + 1)
        like = passes.run(iter(()), 0, step)
        spec = self.parts.spec
        if spec.moe is not None and moe_layers(spec):
            shape = (len(moe_layers(spec)), spec.moe.num_experts)
            like.expert_load = torch.zeros(shape, dtype=torch.float64, device=self.parts.mesh.device)
        return _Work(Kept(self.parts.optimizer, like, exact=self.exact), start=start)

    def _apply(self, step: int, work: _Work, total: Buffers) -> StepResult:
        self._units = len(work.kept.units), len(units_of_step(self.job, step))
        self._runs(list(work.kept.units))
        mine, stop = work.kept.give(total)
        return self.parts.step.commit(step, mine, work.start, stop)

    def _sum(self, step: int, work: _Work) -> Buffers:
        """The sum of step `step` over all groups, once it is true."""
        known, dealt = self._epoch, None  # type: Epoch | None, set[int] | None
        while True:
            epoch = self._enter(step)
            self.reporter.phase(step + 1, f"training (epoch {epoch.number})")
            share = self._share(step, epoch)
            dealt = set(share) if dealt is None else dealt
            todo = [u for u in share if u not in work.kept.units]
            begin = time.perf_counter()
            complete = self._compute(step, epoch, work, todo)
            others = sum(u not in dealt for u in todo)
            work.redone_s += (time.perf_counter() - begin) * others / max(1, len(todo))
            if not complete:
                continue  # a newer epoch has come
            begin = time.perf_counter()
            total = work.kept.buffers.copy()
            self.reporter.phase(step + 1, f"summing (epoch {epoch.number})")
            assert self._across is not None
            try:
                with self.parts.step.passes.phases("comm_s"):
                    self._across.reduce([total.gradients, total.sums, total.loose], [total.maxima])
            except GivenUp as gone:
                if gone.failed:
                    self.cohort.stuck(epoch.number, str(gone))
                self.cohort.await_epoch(epoch.number + 1)
            else:
                self.cohort.vote(epoch.number, step, self._digest(step, epoch, work, total))
                self.reporter.phase(step + 1, f"voted (epoch {epoch.number})")
                if self.cohort.await_outcome(epoch.number, step):
                    if epoch is not known:
                        self._tell_cost(step, epoch, work)
                    return total
            work.waited_s += time.perf_counter() - begin

    def _digest(self, step: int, epoch: Epoch, work: _Work, total: Buffers) -> str:
        """What all groups must have alike at this place: the sum, and every so often the parameters before it, and what
        a unit gives that all of them have run. A group that joins doesn't stand at these parameters yet."""
        every, said = self.job.inspect.hash_every, [total.digest()]
        if every and step % every == 0 and not epoch.joining:
            said.append(f"{parameters_hash(self.parts.optimizer.params.values()):x}")
        if work.rerun is not None and not epoch.joining:
            said.append(f"{work.rerun:x}")
        return "-".join(said)

    def _tell_cost(self, step: int, epoch: Epoch, work: _Work) -> None:
        """What new epochs cost this group in a step that is true now."""
        assert self._across is not None
        spent = {"waited_s": work.waited_s, "redone_s": work.redone_s, "connect_s": self._across.connect_s}
        self._event_of_group("adapted", step=step + 1, epoch=epoch.number, **spent)

    def _agreed_number(self, mine: int | None = None) -> int:
        """Of the newest epoch that any rank of this group has heard of. `mine`: what this rank says."""
        mesh = self.parts.mesh
        number = float(self.cohort.newest if mine is None else mine)
        return int(mesh.max_over_world(torch.tensor([number], dtype=torch.float64, device=mesh.device)))

    def _agreed_epoch(self) -> Epoch:
        """The newest epoch that any rank of this group has heard of, the same one on all of them. A coordinator that
        died while it told of an epoch may have reached some of them: then the one that follows it."""
        number = self._agreed_number()
        if self._epoch is not None and self._epoch.number == number:
            return self._epoch
        while True:
            found = self.cohort.await_epoch(number)
            newest = self._agreed_number(found.number)
            if newest == number:
                return found
            number = newest

    def _enter(self, step: int) -> Epoch:
        """The newest epoch, with its link under way, and the state for joiners too."""
        epoch = self._agreed_epoch()
        if epoch is self._epoch:
            return epoch
        if self._across is not None:
            self._across.drop()
        self._epoch = epoch
        members, number = epoch.members, epoch.number
        index = members.index(self.cohort.seat.group)
        connect = None if len(members) == 1 else (lambda: self.connector.link(epoch, index))
        self._across = Across(connect, given_up=lambda: self.cohort.newer_than(number))
        self._donate(step, epoch)
        return epoch

    def _compute(self, step: int, epoch: Epoch, work: _Work, todo: list[int]) -> bool:
        """Run these units of this group's share. False once a newer epoch has come."""
        if work.rerun is None and len(epoch.active) > 1 and not epoch.joining:  # who joins doesn't stand at this step
            work.rerun = self._rerun(step)
        passes, parallel = self.parts.step.passes, self.parts.parallel
        each = self.job.micro_batches
        shard = self.parts.mesh.at("shard")
        ids = [batch for unit in todo for batch in unit_micro_batches(self.job, step, unit, shard)]
        with Reader(self.train_data, ids, self.job.data.workers) as reader:
            batches = (to_tensors(batch, self.parts.mesh.device) for batch in reader)
            for unit in todo:
                stop = self.reporter.stop_requested
                self._runs([unit])
                mine = passes.run(batches, each, step)
                with passes.phases("comm_s"):
                    parallel.finish()
                work.kept.take(unit, self._with_load(mine), stop=stop)
                self.cohort.check()
                if self._agreed_number() > epoch.number:
                    return False
        return True

    def _share(self, step: int, epoch: Epoch) -> tuple[int, ...]:
        """What the epoch deals to this group. Shares of later steps of the same epoch follow from it alone."""
        me = self.cohort.seat.group
        if step >= self.job.train.steps:
            return ()
        if epoch.step == step:
            return epoch.shares.get(me, ())
        if me not in epoch.active:
            return ()
        dealt = deal(step, len(units_of_step(self.job, step)), len(epoch.active))
        return tuple(dealt[epoch.active.index(me)])

    def _with_load(self, mine: Contribution) -> Contribution:
        if mine.expert_load is None:
            return mine
        return replace(mine, expert_load=mine.expert_load.to(torch.float64))

    # ---- giving the state

    def _donate(self, step: int, epoch: Epoch) -> None:
        """Start sending this rank's state to each joiner that the epoch gives to this group, unless it is under way."""
        me = self.cohort.seat.group
        for joiner, join in epoch.joins.items():
            if join.donor != me or join.step != step or (joiner, join.step) in self._sent:
                continue
            self._sent.add((joiner, join.step))
            start = time.perf_counter()
            self.reporter.phase(step + 1, "donating")
            snapshot = Snapshot.take(self.parts, me, step)
            self._event_of_group("donated", step=step, to=joiner, stall_s=time.perf_counter() - start)

            wanted, tell = partial(self._wants, joiner, join), partial(self._tell_broken, step)
            how = {"wanted": wanted, "tell": tell}
            threading.Thread(
                target=deliver, args=(snapshot, join, self.secret), kwargs=how, name="bessemer-donor", daemon=True
            ).start()

    def _wants(self, joiner: int, join: Join) -> bool:
        """Whether the joiner still waits for this snapshot, as far as this rank knows."""
        return self._epoch is not None and self._epoch.joins.get(joiner) == join

    def _tell_broken(self, step: int, error: OSError) -> None:
        self._event_of_group("transfer_failed", step=step, why=str(error))

    def _event_of_group(self, name: str, **fields: Any) -> None:
        """One event for the group, from its first rank."""
        if self.parts.mesh.rank == 0:
            self.reporter.event(name, group=self.cohort.seat.group, **fields)
