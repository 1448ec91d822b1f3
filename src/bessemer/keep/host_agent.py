"""The agent of one host of a run that goes on while groups and hosts are lost.

Every host has one: it starts its share of the groups and spares, replaces those that are lost, and follows the
coordinator that leads, wherever that is. The first host begins the run; an agent that comes later, also one of a host
that was lost, joins a run that goes on. One of the agents writes the run's records (`host_journal.py`).
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

from bessemer.core.errors import PeerLost, RequestError, RunFolderError
from bessemer.keep.coordinate import PARTING_S
from bessemer.keep.coordinators import Post
from bessemer.keep.desk import token_of
from bessemer.keep.elastic_agent import SEEK_S, WATCH_S, ElasticAgent
from bessemer.keep.host_coordinators import HostCoordinators
from bessemer.keep.host_journal import HostJournal
from bessemer.keep.hosts import Hosts, secret_of
from bessemer.keep.hub import Heard, Wishes
from bessemer.keep.record_tail import Tail
from bessemer.keep.starter import Group
from bessemer.keep.verdict import cause_of, failure_text

__all__ = ["MEET_S", "HostAgent"]

MEET_S = 300.0
"""How long an agent waits for the first host: hosts of a large job start minutes apart."""
END_S = 120.0
"""How long the agents wait at the end for a coordinator of which nothing is heard."""
ENDED_S = 5.0
"""After so long without a step an agent asks the records whether the run has ended."""
_OVERDUE_S = 1.0


class HostAgent(ElasticAgent):
    """`founds`: it begins the run. `place` is this host's, `lock` only the first host's."""

    journal: HostJournal

    def __init__(self, hosts: Hosts, founds: bool, *args: Any) -> None:
        self.hosts, self._founds = hosts, founds
        self._welcome: dict[str, Any] = {}
        self._heard = time.monotonic()  # of the coordinator
        self._beat = time.monotonic()  # when this agent last did what it does every so often
        self._seeking = False
        self._overdue_at = self._end_at = 0.0
        self._alone = False  # all others are done
        self._over = False  # the one that writes has said its last word
        self._elsewhere = False  # the run may go on without this host, which can't
        self._beside, self._watches = ExitStack(), False  # what runs beside the agent that writes
        super().__init__(*args)
        self._events = Tail(self.folder.events_file, from_end=True)  # of this attempt, whoever writes them
        self._incarnation = int(time.time() * 10) & 0x7FFFFFFF
        self._names = hosts.number
        self._template_log = f"template-{hosts.number}.log"
        self.vault.log = self.folder.path / "logs" / f"vault-{hosts.number}.log"
        self.journal.send = self._send_record

    # ---- start

    def _new_coordinators(self) -> HostCoordinators:
        self._secret = secret_of()
        self.coordinators: HostCoordinators = HostCoordinators(
            self.folder.path, self.hosts, self._hub, secret=self._secret, lease_s=self._lease_s, founds=self._founds,
            hello=self._hello,
        )  # fmt: skip
        return self.coordinators

    def _hello(self) -> dict[str, Any]:
        return {
            "host": self.hosts.name,
            "number": self.hosts.number,
            "token": token_of(self.folder.path),
            "newest": max(self._groups, default=-1),
            "wrote": self.journal.wrote,
        }

    def _share_of_groups(self, replicas: int) -> int:
        return self.hosts.share_of(super()._share_of_groups(replicas))

    def _next_name(self) -> int:
        """Names of a host's groups leave its number when divided by the number of hosts, and none comes again."""
        name = self._names
        self._names += self.hosts.count
        return name

    def _tell_where(self) -> None:
        """Waits until the coordinator knows this host."""
        deadline = time.monotonic() + MEET_S
        while not self._welcome and time.monotonic() < deadline:
            self._beat = time.monotonic()
            for heard in self._hub.poll(0.1):
                self._take(heard)
            self.coordinators.seek()
        if not self._welcome:
            raise PeerLost(f"the coordinator gave no answer within {MEET_S:g} s", code="coordinator-lost")

    def _start_group(self, *, joins: bool) -> None:
        super()._start_group(joins=joins or bool(self._welcome["begun"]))

    def _member_environment(self, group: Group, place: int, joins: bool) -> dict[str, str]:
        ours = {"BESSEMER_ADDRESS": self.hosts.name, "BESSEMER_NUM_HOSTS": str(self.hosts.count)}
        return {**super()._member_environment(group, place, joins), **ours}

    # ---- watch

    def _watch_to_the_end(self, wishes: Wishes) -> None:
        """A host without groups may get some again."""
        super()._watch_to_the_end(wishes)
        while not (self._finished or self.reception.stopping or self._failing or self._killed):
            self._turn(wishes)
            super()._watch_to_the_end(wishes)

    def _turn(self, wishes: Wishes) -> None:
        now = time.monotonic()
        if all(at > now + WATCH_S for at, _ in self._plan):
            self._later(WATCH_S, self._give_sign)  # as long as this agent lives
        if self._seeking and all(action != self._seek_on for _, action in self._plan):
            self._later(0.0, self._seek_on)
        super()._turn(wishes)

    def _take(self, heard: Heard) -> None:
        record = heard.record
        if heard.link is None or heard.link is not self.coordinators.link:
            if heard.link is None or heard.link is not self.coordinators.former:
                super()._take(heard)
            return
        if self._was_silent():
            return
        self._heard = time.monotonic()
        if record is None:
            if not self._over:  # else it has nothing more to say
                self._part()
        elif record["kind"] == "event":
            self._from_coordinator(record["event"], record["fields"])
        else:
            self._from_desk(record)

    def _from_desk(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "welcome":
            self._on_welcome(record)
        elif kind == "refused":
            kinds = {"other-folder": RunFolderError}
            raise kinds.get(record["code"], RequestError)(record["message"], code=record["code"], fix=record["fix"])
        elif kind == "write":
            self.journal.printer.quiet = self.options.quiet
            if not self._watches:
                self._watches = True
                self._beside.enter_context(self.options.beside(self.folder.path, self.place / "agent"))
            self.journal.begin(begun=bool(record["begun"]))
            ElasticAgent._tell_where(self)
            self._tell_kept()
        elif kind == "resend":
            self._cease()
            self.journal.hand_on()
            self._tell_kept()
        elif kind == "record" and self.journal.writes:
            if record["of"] == "metrics" and int(record["record"]["step"]) > self.journal.step:
                self._tell_missing(int(record["record"]["step"]) - 1)
            self.journal.take(record["of"], record["record"])
        elif kind == "stand_by":
            self.coordinators.stand_by(record["of"])
        elif kind == "stop" and not self.reception.stopping:
            super()._stop("")
        elif kind == "give_up" and not self._failing and not self.reception.stopping:
            self._elsewhere = bool(record.get("elsewhere"))
            self._give_up(record["why"])
        elif kind == "evict" and int(record["rank"]) in self.ranks:
            self._evict(int(record["rank"]), str(record["why"]))
        elif kind == "lose":
            for standing in self._standings(time.monotonic()):
                if [standing.group, *standing.at] == record["standing"]:  # it still is where it was
                    self._give_up_group(standing)
        elif kind == "last":
            self._alone = True
        elif kind == "over":
            self._over = True

    def _on_welcome(self, record: dict[str, Any]) -> None:
        newest = int(record["newest"])
        self._welcome = record
        if record["members"] is not None:
            self._active, self._joining = (list(names) for names in record["members"])
        if newest >= self._names:
            self._names = newest + self.hosts.count
        self.coordinators.term = max(self.coordinators.term, int(record["term"]))
        self._progress.step, self._progress.last = int(record["step"]), time.monotonic()
        self._finished = self._finished or self._progress.step >= self.job.train.steps  # while nothing was heard here

    def _give_up(self, why: str) -> None:
        if self._elsewhere:
            self._cease()  # another agent writes the records of the run that goes on
        self._failing = True
        self._killed = self._killed or why
        self._later(0.0, lambda: self._signal_rest(signal.SIGKILL))

    def _part(self) -> None:
        """From the coordinator: what this host knows of the run is of yesterday."""
        self.journal.cease()  # what runs beside goes on: mostly this agent writes again
        self.coordinators.drop_link()
        self._seeking = True

    def _cease(self) -> None:
        """Another agent writes, and has the run watched."""
        self._beside.close()
        self._watches = False
        self.journal.cease()

    def _evict(self, rank: int, why: str) -> None:
        """The watch sees the ranks of all hosts."""
        if rank in self.ranks:
            super()._evict(rank, why)
        else:
            self.coordinators.tell(("evict", rank), {"kind": "evict", "rank": rank, "why": why})

    def _was_silent(self) -> bool:
        """Whether this agent stood still for so long that its host may have been given up; then it parts."""
        now = time.monotonic()
        silent_s, self._beat = now - self._beat, now
        if silent_s > self._lease_s:
            self._part()
        return silent_s > self._lease_s

    def _on_coordinator_end(self, post: Post) -> None:
        """Of the process on this host, which may have been a standby."""
        if post.runs:  # of the one before it
            return
        self.coordinators.on_end(post)
        code = None if post.child is None else post.child.exit_code()
        if code and self.coordinators.link is None and not self._finished:
            self.journal.event("coordinator_lost", address=post.address, exit_code=code)

    def _seek_on(self) -> None:
        why = self.coordinators.seek()
        if why:
            self._kill(why)
        self._seeking = self.coordinators.link is None
        if self._seeking:
            self._later(SEEK_S, self._seek_on)

    def _give_sign(self) -> None:
        self._was_silent()
        super()._give_sign()
        if self.coordinators.link is not None and time.monotonic() - self._heard > 3 * self._lease_s:
            self._part()

    def _from_coordinator(self, event: str, fields: dict[str, Any]) -> None:
        if event == "epoch":
            self.coordinators.term = max(self.coordinators.term, int(fields["term"]))
            self._welcome["begun"] = True
            led = self._leads_here
        super()._from_coordinator(event, fields)
        if event == "epoch" and self._leads_here and not led:
            self._tell_kept()
        elif event == "scale":
            self._replicas = int(fields["replicas"])
            self.coordinators.fulfilled("scale", {"kind": "scale", "replicas": self._replicas})
            if not self._finished and not self.reception.stopping and not self._failing:
                self._start_missing()

    def _note_event(self, event: str, fields: dict[str, Any]) -> None:
        if self.journal.writes:
            super()._note_event(event, fields)

    def _scale(self, replicas: int) -> dict[str, Any]:
        """The coordinator tells all agents, this one too, which start what is missing on their hosts."""
        before = self._replicas
        answer = super()._scale(replicas)
        return answer if answer["kind"] == "refused" else {**answer, "started": max(0, replicas - before)}

    # ---- records

    @property
    def _leads_here(self) -> bool:
        return bool(self._active) and min(self._active) in self._groups

    def _take_metric(self, number: int | None, record: dict[str, Any]) -> None:
        """All are kept for a while, in case that what was told of them is lost with another host."""
        super()._take_metric(number, record)
        self._kept.keep(record)

    def _tell_kept(self) -> None:
        """To the agent that writes, which may be this one: it leaves out what it has."""
        if self.journal.writes:
            self._tell_missing(self._kept.last if self._leads_here else 0)
        elif self._leads_here:
            for record in self._kept.after(0, self._kept.last):
                self._send_record({"kind": "record", "of": "metrics", "record": record})

    def _send_record(self, record: Any) -> bool:
        return self.coordinators.say(record)

    # ---- losses

    def _is_last(self, group: Group, why: str) -> bool:
        """A loss before the run has begun ends it; later the coordinator says when nobody is left."""
        if self._welcome["begun"]:
            return False
        self.coordinators.tell("give_up", {"kind": "give_up", "why": f"{why} on host {self.hosts.name}"})
        return True

    def _watch_progress(self, now: float) -> None:
        """As on one host, but who waits for whom is known to the coordinator alone. A host that has seen too few steps
        to know how long they take tells how far its groups are all the same."""
        standings = self._standings(now)
        if standings and now >= self._overdue_at:
            self._overdue_at = now + _OVERDUE_S
            self.coordinators.say({"kind": "standings", "due": self._progress.due(now), "standings": standings})
        if self._welcome["begun"] and now >= max(self._end_at, self._progress.last + ENDED_S):
            self._end_at = now + _OVERDUE_S
            with suppress(OSError):
                self._note_end([str(record.get("event")) for record in self._events.read()[1]])

    def _note_end(self, events: list[str]) -> None:
        """A host that was away may come back when the run has ended without it, and nobody is left to say so: then its
        groups, which were given up, go."""
        ended = [event for event in events if event in ("finished", "stopped")]
        if not ended or self._finished or self.reception.stopping or self._failing:
            return
        self._finished, self._over, self.reception.stopping = ended[-1] == "finished", True, ended[-1] == "stopped"
        self._active = []
        self._dismiss_spares()

    def _stop(self, signal_name: str) -> None:
        """A wish that reaches one host is for all."""
        super()._stop(signal_name)
        if signal_name:
            self.coordinators.tell("stop", {"kind": "stop", "signal": signal_name})

    # ---- end

    def _end_vault(self, wishes: Wishes) -> None:
        """And wait for the other hosts: the one that writes for all, the others for its last word. A last save takes as
        long as it takes: as long as the coordinator gives signs of life, it knows of an agent that isn't done."""
        super()._end_vault(wishes)
        self.coordinators.tell("done", {"kind": "done"})
        start = time.monotonic()
        while not (self._over or self._elsewhere) and len(wishes.names) < 2:
            if time.monotonic() - max(start, self._heard) > END_S:
                return
            if self.journal.writes and self._alone:
                self._alone = False
                self.coordinators.say({"kind": "concluded"})
            self._turn(wishes)

    def _clear(self) -> None:
        self._beside.close()
        if self._over:
            self.coordinators.let_end(2 * PARTING_S)
        super()._clear()

    def _forget_where(self) -> None:
        """Unless the run goes on: an agent that begins it again looks for it then."""
        if self._over and self.journal.wrote:
            super()._forget_where()

    def _conclude(self) -> int:
        if self.journal.writes:
            return super()._conclude()
        ranks = list(self._judged())
        cause = cause_of(ranks)
        if cause is not None:
            print(failure_text(cause, self.folder.log_file(cause.rank)), file=sys.stderr, flush=True)
            return int((cause.report or {"exit_code": 1})["exit_code"])
        if self._killed:
            print(f"failed [ended] {self._killed}", file=sys.stderr, flush=True)
            return 1
        return 3 if self.reception.stopping and not self._finished else 0
