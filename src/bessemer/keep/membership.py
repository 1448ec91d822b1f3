"""Who takes part in a run, and which steps are true: the coordinator's decisions without sockets, clocks or torch.

A *group* is one full copy of the model, the unit of failure; it has `block` ranks, each at its *place*. Groups are
spare, joining (in the sums with a zero contribution, while a snapshot of its state travels) or active. An *epoch* is
one set of active and joining groups; their sums across groups belong to it. A step becomes true by its commit here and
by nothing else.

    step s of epoch e:   shares dealt -> each rank votes once it has the sum -> all voted: commit(s), next shares
    a group is lost:     epoch e + 1 for the same step: survivors keep what they have and take over what is missing
    planned changes:     a spare joins, a joiner becomes active, a group is released: at a commit, where nothing is lost

Every method notes what happened; `decide` returns the messages that follow, each for ranks of some groups:

    epoch   {term, epoch, step, active, joining, shares: {group: [unit]}, joins: {group: {donor, step}}, parked}
            step: how many are committed; a rank that stands one behind and has voted applies its sum first.
            parked: too few are active, so nothing is committed; a joiner says that it is synced without a sum.
    commit  {term, epoch, step, next: epoch or None, finished}       step: how many are committed now
    fenced  {why}      this rank is no part of the run any more      released {}      a wish to leave is granted
    failed  {code, message}                                          the run can't go on
Legend of names: a group's name is a number that never comes back to another group while this one lives; its
incarnation tells processes under the same name apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from bessemer.data.cursor import deal
from bessemer.keep.groups import Group, Message, Report, outvoted

__all__ = ["Group", "Membership", "Message", "Report"]


class Membership:
    """`replicas`: active groups that are wanted; `minimum`: fewer commit nothing; `units_of`: how many units a step
    (from 0) has; `steps`: of the whole run. `step`: how many are committed."""

    def __init__(
        self,
        *,
        replicas: int,
        block: int,
        steps: int,
        units_of: Callable[[int], int],
        minimum: int = 1,
        term: int = 1,
        step: int = 0,
    ) -> None:
        self.replicas, self.block, self.steps, self.minimum = replicas, block, steps, minimum
        self.term, self.epoch, self.step = term, 0, step
        self.groups: dict[int, Group] = {}
        self._shares: dict[int, list[int]] | None = {}
        self._dealt_to: list[int] = []
        self.begun = False
        self._units_of = units_of
        self._joins: dict[int, tuple[int, int, int]] = {}  # joiner -> donor, its incarnation, the step of the snapshot
        self._votes: list[dict[int, str]] = [{} for _ in range(block)]  # digests by place and group
        self._leavers: set[int] = set()
        self._names: dict[str, list[int]] = {}  # by state, as long as no group's changes
        self._voters = 0  # ranks whose votes the epoch needed when it was formed
        self._lost: list[Group] = []  # of the epoch, since it was formed
        self._held = False  # a lost group had voted: the others' votes may still make the step true
        self._renew = False
        self._out: list[Message] = []

    # ---- what happened

    @property
    def active(self) -> list[int]:
        return self._in("active")

    @property
    def joining(self) -> list[int]:
        return self._in("joining")

    @property
    def spare(self) -> list[int]:
        return self._in("spare")

    @property
    def joins(self) -> dict[int, tuple[int, int, int]]:
        """By joiner: its donor, the donor's incarnation, and the step of the snapshot."""
        return dict(self._joins)

    @property
    def shares(self) -> dict[int, list[int]]:
        """By active group its units of the step that is under way."""
        if self._shares is None:
            units = self._units_of(self.step) if self.step < self.steps else 0
            dealt = deal(self.step, units, len(self._dealt_to)) if self._dealt_to else []
            self._shares = dict(zip(self._dealt_to, dealt, strict=True))
        return self._shares

    def arrived(self, name: int, incarnation: int, place: int, step: int | None) -> None:
        """A rank said hello; `step` is where its state stands, None if it has none yet."""
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name, incarnation, step)
        if group.incarnation != incarnation or place in group.here or not 0 <= place < self.block:
            why = f"group {name} is another one by now"
            self._out.append(Message((name,), (place,), {"kind": "fenced", "why": why}))
            return
        group.here.add(place)
        if group.step != step:
            group.step = None
        if len(group.here) == self.block:
            self._set(name, "spare")

    def voted(self, name: int, place: int, epoch: int, step: int, digest: str) -> None:
        """A rank has the sum of step `step` (from 0) and would apply it. `digest`: of what all groups must have alike
        at this place. A vote for another epoch or step is of no account."""
        if epoch != self.epoch or step != self.step:
            return
        group = self.groups.get(name)
        if group is not None and group.state in ("active", "joining") and place in group.here:
            self._votes[place][name] = digest

    def stuck(self, epoch: int) -> None:
        """A rank's sum failed: nobody need wait for its vote any more."""
        if epoch == self.epoch:
            self._held = False

    def renew(self, epoch: int) -> None:
        """The sums of that epoch failed although nobody was lost: form another one of the same groups."""
        self._renew = epoch == self.epoch

    def synced(self, name: int, place: int) -> None:
        """A joiner's rank stands where the active ones stand."""
        group = self.groups.get(name)
        if group is not None and group.state == "joining":
            group.synced.add(place)

    def lost(self, name: int, incarnation: int) -> None:
        """A rank of the group has died, was fenced or fell silent: so the group as a whole is gone."""
        group = self.groups.get(name)
        if group is None or group.incarnation != incarnation:
            return
        self._forget(name)
        if group.state in ("active", "joining"):
            whole = all(name in votes for votes in self._votes)
            self._held = whole and (self._held or not self._lost)
            self._lost.append(group)

    def leave(self, name: int) -> None:
        """The group asks to be let go: it is, at the next commit, as long as others are left."""
        if name in self.groups:
            self.groups[name].leaving = True
            self._leavers.add(name)

    # ---- what follows

    def decide(self, *, force: bool = False) -> list[Message]:
        """Messages that follow from what happened since. `force`: a step that might still come true by the votes of
        the survivors alone is waited for no longer."""
        leavers = [name for name in self._leavers if self.groups[name].state == "spare"]
        for name in leavers:
            self._forget(name)
        self._tell(leavers, {"kind": "released"})
        if not self.begun:
            self._begin()
        elif self.settles(force=force):
            self._settle_losses()
        if self.begun and not self._lost and self.active:
            parked = len(self.active) < self.minimum
            if parked and self._change_members():
                self._form_epoch()
            elif not parked and self._all_voted():
                self._commit()
            elif self._renew:
                self._form_epoch()
        self._renew = False
        out, self._out = self._out, []
        return out

    @property
    def waiting(self) -> bool:
        """Whether losses wait for `decide(force=True)`."""
        return bool(self._lost)

    @property
    def lost_names(self) -> list[int]:
        """Groups of the epoch that were lost since it was formed, as long as `decide` has drawn no conclusion."""
        return [group.name for group in self._lost]

    def settles(self, *, force: bool) -> bool:
        """Whether `decide` would go on without the lost groups now."""
        return self.begun and bool(self._lost) and not (self._held and not force and not self._all_voted())

    def _in(self, state: str) -> list[int]:
        """Ascending. The list is shared: groups are many and change seldom."""
        if state not in self._names:
            self._names[state] = sorted(g.name for g in self.groups.values() if g.state == state)
        return self._names[state]

    def _set(self, name: int, state: Literal["spare", "joining", "active"]) -> None:
        self.groups[name].state = state
        self._names.clear()

    def _forget(self, name: int) -> None:
        del self.groups[name]
        self._leavers.discard(name)
        self._names.clear()

    def _tell(self, names: Sequence[int], record: dict[str, Any]) -> None:
        if names:
            self._out.append(Message(names, range(self.block), record))

    def _begin(self) -> None:
        if len(self.groups) < self.replicas:
            return
        ready = [self.groups[name] for name in self.spare if self.groups[name].step is not None]
        if len(ready) < self.replicas:
            return
        steps = {group.step for group in ready}
        if len(steps) > 1:
            shown = ", ".join(f"group {g.name} at step {g.step}" for g in ready)
            text = f"the groups don't start from the same state: {shown}"
            names = [group.name for group in ready]
            self._tell(names, {"kind": "failed", "code": "start-differs", "message": text})
            return
        self.step = next(iter(steps)) or 0
        self.begun = True
        for group in ready[: self.replicas]:
            self._set(group.name, "active")
        self._deal()
        self._form_epoch()

    def _deal(self) -> None:
        """The next step's units go to the active groups, once anybody asks for the shares."""
        self._shares, self._dealt_to = None, self.active

    def _strand(self) -> None:
        text = "no group is left that holds the state"
        self._tell(self.joining + self.spare, {"kind": "failed", "code": "stranded", "message": text})

    def _share_out(self, kept: dict[int, list[int]], missing: list[int]) -> None:
        """The groups keep what they have of the step, and share out what is missing."""
        dealt = deal(self.step, len(missing), len(kept)) if kept else []
        pairs = zip(kept.items(), dealt, strict=True)
        self._shares = {name: units + [missing[i] for i in places] for (name, units), places in pairs}

    def _settle_losses(self) -> None:
        """If all that live have voted, and so had the lost, the step is true; else it is done again for what is
        missing, by the survivors."""
        if self._held and self._all_voted():
            self._lost.clear()
            if self.active:
                self._commit(always_epoch=True)
                return
        self._lost.clear()
        self._held = False
        active = self.active
        if not active:
            self._strand()
            return
        left = set(active)
        missing = sorted(u for name, units in self.shares.items() if name not in left for u in units)
        self._share_out({name: self.shares[name] for name in active}, missing)
        if len(active) < self.minimum:
            self._change_members()
        self._form_epoch()

    def _all_voted(self) -> bool:
        if not self._lost:
            return 0 < self._voters == sum(map(len, self._votes))  # none of them is of a group that is gone
        members = self.active + self.joining
        return bool(members) and all(votes.keys() >= set(members) for votes in self._votes)

    def _commit(self, *, always_epoch: bool = False) -> None:
        wrong = outvoted(self._votes, self.active + self.joining)
        if wrong is None:
            text = f"no majority of the groups agrees on the sum, the parameters or the rerun of step {self.step + 1}"
            self._tell(self.active + self.joining, {"kind": "failed", "code": "sums-differ", "message": text})
            return
        if wrong:
            why = f"its sum, its parameters or its rerun of step {self.step + 1} differ from the majority's"
            self._tell(wrong, {"kind": "fenced", "why": why})
            for name in wrong:
                self.lost(name, self.groups[name].incarnation)
            self._held = False
            self._settle_losses()
            return
        self.step += 1
        self._forget_votes()
        before = self.active + self.joining
        finished = self.step >= self.steps
        changed = not finished and self._change_members()
        self._deal()
        record: dict[str, Any] = {"kind": "commit", "term": self.term, "epoch": self.epoch, "step": self.step}
        record |= {"finished": finished, "next": None}
        if changed or always_epoch:
            record["next"] = self._next_epoch()
        self._tell(before, record)
        if changed:
            released = [name for name in before if self.groups[name].state == "spare"]
            for name in released:
                self._forget(name)
            self._tell(released, {"kind": "released"})
        if record["next"] is not None:
            known = set(before)
            self._tell([name for name in self.joining if name not in known], record["next"])

    def _change_members(self) -> bool:
        """Planned changes, where no work is under way: whether there were any."""
        changed = False
        for name in self.joining:
            if len(self.groups[name].synced) == self.block:
                self._set(name, "active")
                self._joins.pop(name)
                changed = True
        active = self.active
        left = len(active)
        for name in reversed(active) if self._leavers or left > self.replicas else ():
            group = self.groups[name]
            if left > 1 and (group.leaving or left > self.replicas):
                self._set(name, "spare")  # until the commit has told it
                changed, left, group.step = True, left - 1, None
        wanted = self.replicas - left - len(self.joining)
        for name in [n for n in self.spare if not self.groups[n].leaving][: max(0, wanted)]:
            self._set(name, "joining")
            self.groups[name].synced.clear()
            changed = True
        return changed

    def _form_epoch(self) -> None:
        record = self._next_epoch()
        self._tell(self.active + self.joining, record)

    def _forget_votes(self) -> None:
        for votes in self._votes:
            votes.clear()

    def _next_epoch(self) -> dict[str, Any]:
        self.epoch += 1
        self._forget_votes()
        active = self.active
        for i, name in enumerate(self.joining):
            donor, incarnation, _ = self._joins.get(name, (-1, -1, 0))
            if donor not in active or self.groups[donor].incarnation != incarnation:
                donor = active[(name + i) % len(active)]
                self._joins[name] = (donor, self.groups[donor].incarnation, self.step)
                self.groups[name].synced.clear()
        self._joins = {name: join for name, join in self._joins.items() if name in self.groups}
        self._voters = (len(active) + len(self.joining)) * self.block
        return {
            "kind": "epoch",
            "term": self.term,
            "epoch": self.epoch,
            "step": self.step,
            "active": active,
            "joining": self.joining,
            "shares": {str(name): units for name, units in self.shares.items()},
            "parked": len(active) < self.minimum,
            "joins": {str(n): {"donor": donor, "step": step} for n, (donor, _, step) in self._joins.items()},
        }

    # ---- taking over

    @classmethod
    def recovered(
        cls,
        reports: Iterable[Report],
        *,
        epoch: int = 0,
        joins: Mapping[int, tuple[int, int, int]] | None = None,
        **shape: Any,
    ) -> Membership:
        """The membership as the ranks report it to a coordinator of a new term.

        The highest step that any of them has counts as committed: all have voted for it. What nobody reports of the
        step after it is dealt anew. `shape`: the arguments of the class, `term` above all earlier ones, and `step`,
        `epoch` and `joins` as far as they are known from elsewhere."""
        found = cls(**shape)
        reports = list(reports)
        found.epoch = max([r.epoch for r in reports] + [epoch])
        found.begun = found.epoch > 0
        found.step = max([r.step for r in reports if r.state == "active"] + [found.step])
        for report in reports:
            blank = found.begun and report.state in ("spare", "joining")
            found.arrived(report.group, report.incarnation, report.place, None if blank else report.step)
        for name, group in found.groups.items():
            states = {r.state for r in reports if r.group == name}
            if len(group.here) == found.block and states <= {"active", "joining"}:
                found._set(name, "active" if states == {"active"} else "joining")
        found._joins = {name: join for name, join in (joins or {}).items() if name in found.joining}
        kept = {r.group: list(r.share) for r in reports if r.state == "active" and r.step == found.step}
        taken = {u for name in found.active for u in kept.get(name, [])}
        units = found._units_of(found.step) if found.step < found.steps else 0
        found._share_out({n: kept.get(n, []) for n in found.active}, [u for u in range(units) if u not in taken])
        if found.begun and found.active:
            found._form_epoch()
        elif found.begun and found.step < found.steps:
            found._strand()
        return found
