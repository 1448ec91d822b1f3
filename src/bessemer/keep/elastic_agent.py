"""The agent of a run that goes on while groups of ranks are lost: starts the coordinator, groups and spares, tells the
coordinator which are lost, and starts new ones in their place.

A rank that ended is lost at once, one that is stopped (state T) after the lease, one that is alive while all others
wait for it after the longest step that can be expected. A lost rank takes its group with it. This process is the one
that judges, so that a rank whose interpreter is busy doesn't look dead.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from typing import Any

from bessemer.keep.agent import Agent
from bessemer.keep.coordinators import Coordinators, Post
from bessemer.keep.hub import Heard, Wishes
from bessemer.keep.kept_metrics import KeptMetrics
from bessemer.keep.links import SECRET
from bessemer.keep.process import usable_cores
from bessemer.keep.reception import RankState
from bessemer.keep.standstill import Standing, behind, least_far, standings_of
from bessemer.keep.starter import Group, Starter
from bessemer.keep.step_times import StepTimes
from bessemer.keep.template import ForkedChild

__all__ = ["CONTROL", "SEEK_S", "WATCH_S", "ElasticAgent"]

CONTROL = "agent.json"
"""In the run folder while the run goes on: where its agent listens."""
SEEK_S = 0.05
WATCH_S = 0.2
"""Between two looks at the ranks' states, and two signs of life to the coordinator."""
LEASE_S = 1.5
QUICK_DEATHS = 3
"""After so many groups in a row that died before they were active, no new one is started."""


class ElasticAgent(Agent):
    """One attempt of a run in mode "zero-interruption" on this host."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ranks.clear()
        self.block = self.world_size // self.job.replicas
        self._groups: dict[int, Group] = {}
        self._secret = os.environ.get(SECRET) or secrets.token_hex(32)
        self._starter = Starter(self.options.command, self._give_sign)
        self._names = 0
        self._incarnation = 0
        self._lease_s = self.job.keep.lease_s or LEASE_S
        self._replicas = self.job.replicas
        self._control = self.folder.path / CONTROL
        self.coordinators = self._new_coordinators()
        self._quick = 0
        self._proved: set[int] = set()  # groups that have been active
        self._active, self._joining = [], []  # type: list[int], list[int]
        self._finished = False
        self._progress, self._kept = StepTimes(), KeptMetrics()

    # ---- start

    def _start(self) -> None:
        environment = {**self._environment(0), "OMP_NUM_THREADS": self._threads}
        self._starter.start(environment, self.folder.path / "logs" / self._template_log, self._hub)
        self.vault.start(self._hub)
        self._starter.await_ready()
        self.coordinators.start()
        self._tell_where()
        for _ in range(self._share_of_groups(self.job.replicas)):
            self._start_group(joins=False)
        spares = f" and {self.job.keep.spares} spare" if self.job.keep.spares else ""
        text = f"{self.job.replicas} groups of {self.block} ranks{spares}, job {self.job.hash}"
        self.journal.printer.line("run", text, "bold")
        self._watch_ranks()

    _template_log = "template.log"

    def _tell_where(self) -> None:
        """To commands that ask something of the run."""
        self._control.write_text(json.dumps({"agent": str(self.place / "agent")}))

    def _forget_where(self) -> None:
        self._control.unlink(missing_ok=True)

    def _share_of_groups(self, replicas: int) -> int:
        """How many groups this host has where so many are to be active."""
        return replicas + self.job.keep.spares

    def _next_name(self) -> int:
        """Of a group."""
        self._names += 1
        return self._names - 1

    def _new_coordinators(self) -> Coordinators:
        return Coordinators(self.folder.path, self.place, self._hub, secret=self._secret, lease_s=self._lease_s)

    def _reset_ranks(self) -> None:
        """No copy of the model is left: coordinators and groups begin anew."""
        self.coordinators.kill()
        self.coordinators = self._new_coordinators()
        for store in (*self.place.glob("epoch-*"), *self.place.glob("store-*")):
            store.unlink()  # full of the keys of dead ranks
        for known in (self.ranks, self._groups, self._kept, self._proved):
            known.clear()
        self._active, self._joining, self._quick, self._finished = [], [], 0, False
        self._replicas, self._progress = self.job.replicas, StepTimes()
        self.coordinators.start()
        for _ in range(self._share_of_groups(self.job.replicas)):
            self._start_group(joins=False)
        self._watch_ranks()

    def _start_group(self, *, joins: bool) -> None:
        here = [g for g in self._groups.values() if not g.lost and any(not state.gone for state in g.states)]
        name, taken = self._next_name(), {g.slot for g in here}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        group = self._groups[name] = Group(name, [], slot)
        for place in range(self.block):
            number = name * self.block + place
            state = self.ranks[number] = RankState(number)
            environment = self._member_environment(group, place, joins)
            state.child = self._starter.child(environment, self.folder.log_file(number))
            state.child.start()
            self._hub.watch(state.child.pidfd, state)
            forked = isinstance(state.child, ForkedChild) and state.child.forked
            self.journal.event("rank_started", rank=number, group=name, pid=state.child.pid, forked=forked)
            group.states.append(state)

    def _member_environment(self, group: Group, place: int, joins: bool) -> dict[str, str]:
        ours = {
            "RANK": str(place),
            "WORLD_SIZE": str(self.block),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self.block),
            "BESSEMER_NUMBER": str(group.name * self.block + place),
            "BESSEMER_GROUP": str(group.name),
            "BESSEMER_INCARNATION": str(self._incarnation),
            "BESSEMER_DEVICE": str(group.slot * self.block + place),
            "BESSEMER_JOINS": "1" if joins else "",
            "BESSEMER_STORE": str(self.place / f"store-{group.name}"),
            "BESSEMER_COORDINATOR": self.coordinators.addresses,
            SECRET: self._secret,
        }
        return {"OMP_NUM_THREADS": self._threads, **self._environment(place), **ours}

    @property
    def _threads(self) -> str:
        return str(max(1, usable_cores() // self.world_size))

    # ---- watch

    def _turn(self, wishes: Wishes) -> None:
        super()._turn(wishes)
        if self._finished or (self.reception.stopping and not any(self._goes_on(g) for g in self._groups.values())):
            self._dismiss_spares()

    def _take(self, heard: Heard) -> None:
        record = heard.record or {}
        if heard.link is not None and heard.link is self.coordinators.link:
            if heard.record is None:
                self.coordinators.on_link_end()
                self._seek_coordinator()
            elif record["kind"] == "event":
                self._from_coordinator(record["event"], record["fields"])
        elif heard.watched is self._starter.template and heard.watched is not None:
            self.journal.event("warning", message=self._starter.ended(), rank=None)
        elif isinstance(heard.watched, Post):
            self._on_coordinator_end(heard.watched)
        elif heard.link is not None and record.get("kind") == "scale":
            heard.link.send(self._scale(int(record["replicas"])))
        elif heard.link is not None and record.get("kind") == "metric":
            self._take_metric(heard.link.rank, record["record"])
        else:
            super()._take(heard)

    def _take_metric(self, number: int | None, record: dict[str, Any]) -> None:
        """Every group tells of each step; what counts is the word of the one that leads, whose records have more. Of
        a step that it didn't live to tell of, that of another."""
        if number is None or number // self.block != min(self._active, default=-1):
            self._kept.keep(record)
        elif int(record["step"]) > self.journal.step:
            self._tell_missing(int(record["step"]) - 1)
            self.journal.metric(record)

    def _tell_kept(self) -> None:
        """The group that led can't tell of the last step any more."""
        self._tell_missing(self._kept.last)

    def _tell_missing(self, last: int) -> None:
        """Steps up to `last` that are true, and that no leader has told of."""
        for record in list(self._kept.after(self.journal.step, last)):
            self.journal.metric(record)

    def _from_coordinator(self, event: str, fields: dict[str, Any]) -> None:
        if event in ("commit", "took_over"):
            self._progress.note(int(fields["step"]))
            self._finished = self._progress.step >= self.job.train.steps and bool(self._active)  # else it begins there
        if event == "concludes":
            self._finished = True
            self._active = [name for name in self._active if name >= int(fields["group"])]
            self._tell_kept()
        if event == "commit":
            return  # the metrics have a line for each
        if event in ("leaving", "left") and int(fields["group"]) in self._groups:
            self._groups[int(fields["group"])].leaving = True
        self._note_event(event, fields)
        if event == "epoch":
            self._active, self._joining = list(fields["active"]), list(fields["joining"])
            self._proved |= set(self._active)
            self._progress.last = time.monotonic()

    def _note_event(self, event: str, fields: dict[str, Any]) -> None:
        """Of the coordinator, for the records."""
        self.journal.event(event, **fields)

    def _is_active(self, group: Group) -> bool:
        return group.name in self._active

    def _goes_on(self, group: Group) -> bool:
        return self._is_active(group) and not group.lost and any(not state.gone for state in group.states)

    def _scale(self, replicas: int) -> dict[str, Any]:
        """Ask for so many active groups from the next steps on; what answers the one who asked."""
        least, before = self.job.keep.min_replicas or 1, self._replicas
        if replicas < least:
            text = f"{replicas} groups are fewer than the run may have, {least} (keep.min_replicas)"
            return {"kind": "refused", "code": "scale-minimum", "message": text, "fix": f"--replicas {least} or more"}
        if self._finished or self.reception.stopping or self._failing:
            return {"kind": "refused", "code": "run-ending", "message": "the run is about to end", "fix": ""}
        self._replicas = replicas
        self.coordinators.tell("scale", {"kind": "scale", "replicas": replicas})
        return {"kind": "scaled", "before": before, "replicas": replicas, "started": self._start_missing()}

    def _start_missing(self) -> int:
        """Groups that are to be here and aren't; how many were."""
        here = sum(not g.lost and not g.leaving for g in self._groups.values())
        missing = max(0, self._share_of_groups(self._replicas) - here)
        for _ in range(missing):
            self._start_group(joins=True)
        return missing

    def _watch_ranks(self) -> None:
        """Every so often: a sign of life, and a look at those that stand still."""
        self._later(WATCH_S, self._watch_ranks)
        self._give_sign()
        text = self.vault.tend(self._hub, self._lease_s, hurry=self._finished or self.reception.stopping)
        if text:
            self.journal.event("warning", message=text, rank=None)
        for group in [g for g in self._groups.values() if not g.lost]:
            for state in [s for s in group.states if not s.gone]:
                stopped_s = 0.0 if state.child is None else state.child.stopped_s()
                if stopped_s > self._lease_s:
                    why = f"rank {state.rank} is stopped for {self._lease_s:g} s"
                    self._lose(group, why, state, silent_s=stopped_s)
                    break
        self._watch_progress(time.monotonic())

    def _give_sign(self) -> None:
        self.coordinators.give_sign()

    def _watch_progress(self, now: float) -> None:
        """Where no step comes true for too long, the groups that others wait for are lost."""
        standings = self._standings(now)
        for standing in behind(standings) if self._progress.due(now) else ():
            self._give_up_group(standing)

    def _give_up_group(self, standing: Standing) -> None:
        group = self._groups[standing.group]
        self._lose(group, standing.why, least_far(group.states), silent_s=standing.silent_s)

    def _standings(self, now: float) -> list[Standing]:
        """Of this host's members, while a step could come true: joiners too, unless too few are active to commit."""
        if self._finished or self.reception.stopping or self.coordinators.link is None:
            return []
        members = self._active + (self._joining if len(self._active) >= (self.job.keep.min_replicas or 1) else [])
        return standings_of([self._groups[n] for n in members if n in self._groups], self._progress, now)

    def _on_end(self, state: RankState) -> None:
        assert state.child is not None
        state.child.kill_session()
        state.exit_code, state.gone = state.child.exit_code(), True
        group = self._groups[state.rank // self.block]
        orderly = state.exit_code in (0, 3) and (self._finished or self.reception.stopping or state.said is not None)
        if group.lost or orderly or state.told_to_end:
            return
        if self._finished and state.report is not None and not any(self._goes_on(g) for g in self._groups.values()):
            state.failed_at = time.monotonic()  # it was the last that could save the last step
            return
        code = state.exit_code or 0
        self._lose(group, f"rank {state.rank} " + (f"exited with code {code}" if code >= 0 else
                   f"was killed by {signal.Signals(-code).name}"), state)  # fmt: skip

    def _on_failed(self, state: RankState) -> None:
        """A rank that said why it fails ends by itself; what follows is decided at its end."""

    def _lose(self, group: Group, why: str, state: RankState, *, silent_s: float = 0.0) -> None:
        """The group is gone: say so, end what is left of it, and start another in its place. silent_s: how long ago the
        first trace was."""
        group.lost = True
        state.failed_at = time.monotonic()
        how: dict[str, Any] = {} if state.exit_code is None else {"exit_code": state.exit_code}
        self.journal.event("rank_lost", rank=state.rank, group=group.name, why=why, step=state.step,
                           phase=state.phase, silent_s=silent_s, **how)  # fmt: skip
        self.coordinators.tell(
            ("lost", group.name),
            {"kind": "lost", "group": group.name, "incarnation": self._incarnation, "why": why},
        )
        for other in group.states:
            if other.child is not None and not other.gone:
                other.told_to_end = True
                other.child.signal(signal.SIGKILL)
        if self._is_last(group, why):
            self._failing = True
            self._later(0.0, lambda: self._signal_rest(signal.SIGKILL))
            return
        self._quick = 0 if group.name in self._proved else self._quick + 1
        if self._finished or self.reception.stopping or self._failing or group.leaving:
            return
        if self._quick >= QUICK_DEATHS:
            text = f"{self._quick} groups in a row died before they were active: no new one is started"
            self.journal.event("warning", message=text, rank=None)
            return
        self._start_group(joins=True)

    def _is_last(self, group: Group, why: str) -> bool:
        """Whether no group is left that holds the state."""
        return not any(not g.lost and self._is_active(g) for g in self._groups.values())

    def _on_vault_end(self) -> None:
        """The groups go on; the one that leads connects to the next vault with its next save. Of several hosts one may
        have no group for a while."""
        over = (self._finished or self.reception.stopping) and all(state.gone for state in self.ranks.values())
        if over or self.vault.finishing or self._failing or self._killed:
            super()._on_vault_end()
            return
        self.vault.reap()
        self.journal.event("warning", message=self.vault.lose(), rank=None)

    def _dismiss_spares(self) -> None:
        for group in self._groups.values():
            if not group.lost and not self._is_active(group):
                group.lost = True
                for state in group.states:
                    if state.child is not None and not state.gone:
                        state.told_to_end = True
                        state.child.signal(signal.SIGKILL)

    def _stop(self, signal_name: str) -> None:
        """The wish goes over the ranks' connections alone: a signal to a rank is a wish of its group to leave."""
        if signal_name:
            self.journal.event("stop_requested", signal=signal_name)
            self.journal.printer.line("stopping", f"{signal_name}: finishing the step and saving", "yellow")
        self.reception.ask_to_stop()
        why = f"the ranks did not finish and save within {self.timeouts.stop_s:g} s of the stop"
        self._later(self.timeouts.stop_s, lambda: self._kill(why))

    def _on_coordinator_end(self, post: Post) -> None:
        if post.runs:  # of the one before it
            return
        code = None if post.child is None else post.child.exit_code()
        if self._finished or not any(post is own for own in self.coordinators.posts):  # ended by us
            return
        self.journal.event("coordinator_lost", address=post.address, exit_code=code)
        why = self.coordinators.on_end(post)
        if why:
            self._kill(why)
        self._seek_coordinator()

    def _seek_coordinator(self) -> None:
        """Until the one that leads is found."""
        if self.coordinators.link is not None or self._finished or self._killed:
            return
        why = self.coordinators.seek()
        if why:
            self._kill(why)
        self._progress.last = time.monotonic()  # till then no step could come true
        self._later(SEEK_S, self._seek_coordinator)

    # ---- end

    def _judged(self) -> list[RankState]:
        """Lost groups were replaced, unless none was left."""
        return [state for g in self._groups.values() if self._failing or not g.lost for state in g.states]

    def _clear(self) -> None:
        self.coordinators.kill()
        self._forget_where()
        super()._clear()
        self.coordinators.reap()
        self._starter.close()
