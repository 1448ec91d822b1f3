"""The coordinator's decisions: scripted cases, and fleets of simulated ranks with random losses and orders."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from bessemer.keep.membership import Membership, Message, Report

UNITS = 7


def _membership(**given: int) -> Membership:
    shape = {"replicas": 3, "block": 2, "steps": 20, "minimum": 1} | given
    return Membership(units_of=lambda step: UNITS, **shape)


def _arrive(m: Membership, name: int, step: int | None = 0, incarnation: int = 0) -> list[Message]:
    for place in range(m.block):
        m.arrived(name, incarnation, place, step)
    return m.decide()


def _begun(**given: int) -> Membership:
    m = _membership(**given)
    for name in range(m.replicas):
        _arrive(m, name)
    return m


def _vote_all(m: Membership, *, but: tuple[int, ...] = ()) -> list[Message]:
    for name in m.active + m.joining:
        for place in range(m.block):
            if name not in but:
                m.voted(name, place, m.epoch, m.step, "same")
    return m.decide()


def _kinds(messages: list[Message]) -> set[tuple[int, str]]:
    return {(group, message.record["kind"]) for message in messages for group in message.groups}


def _covered(shares: dict[int, list[int]]) -> bool:
    return sorted(u for units in shares.values() for u in units) == list(range(UNITS))


def test_it_begins_when_enough_groups_are_whole() -> None:
    m = _membership()
    assert not _arrive(m, 0) and not _arrive(m, 1)
    m.arrived(2, 0, 0, 0)
    assert not m.decide()
    m.arrived(2, 0, 1, 0)
    assert _kinds(m.decide()) == {(0, "epoch"), (1, "epoch"), (2, "epoch")}
    assert m.epoch == 1 and _covered(m.shares)


def test_groups_that_start_apart_are_refused() -> None:
    m = _membership(replicas=2)
    _arrive(m, 0, step=5)
    assert _kinds(_arrive(m, 1, step=6)) == {(0, "failed"), (1, "failed")}


def test_a_step_is_true_when_all_have_voted() -> None:
    m = _begun()
    assert not _vote_all(m, but=(1,)) and m.step == 0
    m.voted(1, 0, m.epoch, 0, "same")
    assert not m.decide()
    m.voted(1, 1, m.epoch, 0, "same")
    assert _kinds(m.decide()) == {(0, "commit"), (1, "commit"), (2, "commit")} and m.step == 1


def test_votes_of_another_epoch_or_step_do_not_count() -> None:
    m = _begun(replicas=1, block=1)
    m.voted(0, 0, m.epoch + 1, 0, "same")
    m.voted(0, 0, m.epoch, 1, "same")
    m.voted(9, 0, m.epoch, 0, "same")
    assert not m.decide()


def test_survivors_keep_their_share_and_take_over_what_is_missing() -> None:
    m = _begun()
    before = {name: list(units) for name, units in m.shares.items()}
    m.lost(1, 0)
    messages = m.decide()
    assert _kinds(messages) == {(0, "epoch"), (2, "epoch")} and m.epoch == 2 and m.step == 0
    assert _covered(m.shares) and all(m.shares[n][: len(before[n])] == before[n] for n in (0, 2))


def test_two_lost_at_once_make_one_epoch() -> None:
    m = _begun()
    m.lost(1, 0)
    m.lost(2, 0)
    assert _kinds(m.decide()) == {(0, "epoch")} and m.epoch == 2 and sorted(m.shares[0]) == list(range(UNITS))


def test_the_contribution_of_a_group_that_died_after_its_vote_counts_if_the_others_vote() -> None:
    m = _begun()
    for place in range(2):
        m.voted(1, place, m.epoch, 0, "same")
    m.decide()
    m.lost(1, 0)
    assert not m.decide() and m.waiting
    messages = _vote_all(m)
    assert m.step == 1 and {r.record["kind"] for r in messages} == {"commit"}
    assert all(r.record["next"]["epoch"] == 2 for r in messages) and _covered(m.shares)


@pytest.mark.parametrize("how", ["force", "stuck"])
def test_it_is_done_again_if_they_cannot(how: str) -> None:
    m = _begun()
    for place in range(2):
        m.voted(1, place, m.epoch, 0, "same")
    m.lost(1, 0)
    if how == "stuck":
        m.stuck(m.epoch)
    assert _kinds(m.decide(force=how == "force")) == {(0, "epoch"), (2, "epoch")} and m.step == 0


def test_a_sum_that_failed_without_a_loss_is_tried_again_in_a_new_epoch() -> None:
    m = _begun()
    shares, epoch = m.shares, m.epoch
    m.renew(epoch)
    assert _kinds(m.decide()) == {(n, "epoch") for n in range(3)} and m.epoch == epoch + 1 and m.shares == shares
    m.renew(epoch)
    assert not m.decide()


def test_a_spare_joins_at_a_commit_and_counts_once_it_has_caught_up() -> None:
    m = _begun()
    m.lost(1, 0)
    m.decide()
    assert not _arrive(m, 7, step=None)  # in the midst of a step
    messages = _vote_all(m)
    assert m.joining == [7] and (7, "epoch") in _kinds(messages) and 7 not in m.shares
    assert all(r.record["next"]["joins"]["7"]["donor"] in (0, 2) for r in messages if r.record["kind"] == "commit")
    _vote_all(m)
    assert m.joining == [7]
    for place in range(2):
        m.synced(7, place)
    _vote_all(m)
    assert m.active == [0, 2, 7] and _covered(m.shares)


def test_the_death_of_a_donor_gives_the_joiner_another_one() -> None:
    m = _begun()
    m.lost(1, 0)
    m.decide()
    _arrive(m, 7, step=None)
    record = next(r.record["next"] for r in _vote_all(m) if r.record["kind"] == "commit")
    donor = record["joins"]["7"]["donor"]
    m.synced(7, 0)  # only one of its ranks was done
    m.lost(donor, 0)
    join = next(r.record["joins"]["7"] for r in m.decide())
    assert join["donor"] == ({0, 2} - {donor}).pop() and join["step"] == m.step
    m.synced(7, 1)
    _vote_all(m)
    assert m.joining == [7], "what it had from the dead donor must not count"


def test_below_the_minimum_nothing_is_committed_until_a_joiner_has_caught_up() -> None:
    m = _begun(replicas=2, minimum=2)
    m.lost(1, 0)
    m.decide()
    assert not _vote_all(m) and m.step == 0
    messages = _arrive(m, 5, step=None)
    assert (5, "epoch") in _kinds(messages) and m.joining == [5]
    for place in range(2):
        m.synced(5, place)
    assert (5, "epoch") in _kinds(m.decide()) and m.active == [0, 5]
    _vote_all(m)
    assert m.step == 1


def test_a_group_that_comes_back_after_it_was_replaced_is_fenced() -> None:
    m = _begun()
    m.lost(1, 0)
    m.decide()
    _arrive(m, 1, step=None, incarnation=1)
    m.arrived(1, 0, 0, 3)
    assert [r.record["kind"] for r in m.decide()] == ["fenced"]


def test_a_wish_to_leave_is_granted_at_a_commit_but_not_to_the_last() -> None:
    m = _begun(replicas=2)
    m.leave(0)
    assert _kinds(_vote_all(m)) == {(0, "commit"), (1, "commit"), (0, "released")}
    assert m.active == [1] and _covered(m.shares)
    m.leave(1)
    _vote_all(m)
    assert m.active == [1]


def test_scaling_by_purpose() -> None:
    m = _begun(replicas=2)
    m.replicas = 3
    _arrive(m, 2, step=None)
    _vote_all(m)
    for place in range(2):
        m.synced(2, place)
    _vote_all(m)
    assert m.active == [0, 1, 2]
    m.replicas = 1
    assert (2, "released") in _kinds(_vote_all(m)) and m.active == [0]


def test_the_one_that_disagrees_is_fenced_and_its_share_done_again() -> None:
    m = _begun()
    for name in m.active:
        for place in range(2):
            m.voted(name, place, m.epoch, 0, "wrong" if (name, place) == (2, 1) else "same")
    assert _kinds(m.decide()) == {(2, "fenced"), (0, "epoch"), (1, "epoch")}
    assert m.step == 0 and _covered(m.shares)


def test_without_a_majority_nothing_is_committed() -> None:
    m = _begun(replicas=2)
    for name in m.active:
        for place in range(2):
            m.voted(name, place, m.epoch, 0, str(name))
    assert _kinds(m.decide()) == {(0, "failed"), (1, "failed")} and m.step == 0


def test_when_nobody_is_left_that_holds_the_state_it_says_so() -> None:
    m = _begun(replicas=1)
    _arrive(m, 4, step=None)
    m.lost(0, 0)
    assert {r.record["code"] for r in m.decide()} == {"stranded"}


def test_a_new_coordinator_goes_on_from_what_the_ranks_report() -> None:
    m = _begun()
    _vote_all(m)
    _vote_all(m)
    shares, behind = m.shares, {(1, 0): 1}
    reports = [
        Report(n, 0, p, "active", m.epoch, behind.get((n, p), 2), () if (n, p) in behind else tuple(shares[n]))
        for n in (0, 1) for p in range(2)
    ]  # fmt: skip
    found = Membership.recovered(reports, replicas=3, block=2, steps=20, units_of=lambda step: UNITS, term=2)
    assert found.active == [0, 1] and found.step == 2 and found.epoch == m.epoch + 1 and _covered(found.shares)
    assert all(found.shares[n][: len(shares[n])] == shares[n] for n in (0, 1))
    assert {r.record["term"] for r in found.decide()} == {2}
    _vote_all(found)
    assert found.step == 3


@dataclass
class _Fleet:
    """Ranks that answer at once, in an order that chance decides; each epoch or commit makes them vote."""

    m: Membership
    chance: random.Random
    mail: deque[Message] = field(default_factory=deque)
    inbox: list[tuple[int, int, dict]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    names: int = 0

    def come(self, step: int | None) -> None:
        for place in range(self.m.block):
            self.m.arrived(self.names, 0, place, step)
        self.names += 1

    def turn(self) -> None:
        step = self.m.step
        for message in self.m.decide(force=self.chance.random() < 0.2):
            record = message.record
            assert record["kind"] in ("epoch", "commit", "released"), record
            epoch = record.get("next") if record["kind"] == "commit" else record if record["kind"] == "epoch" else None
            now = epoch or {"epoch": record.get("epoch"), "step": record.get("step")}
            if record["kind"] != "released" and not record.get("finished"):
                self.inbox += [(group, place, now) for group in message.groups for place in message.places]
        if self.m.step != step:
            assert self.m.step == step + 1
            self.commits.append(self.m.step)
        assert self.m.step >= self.m.steps or _covered(self.m.shares)
        assert self.m.waiting or set(self.m.shares) <= set(self.m.active)

    def answer(self) -> None:
        self.chance.shuffle(self.inbox)
        for _ in range(self.chance.randint(0, len(self.inbox))):
            group, place, now = self.inbox.pop()
            if self.chance.random() < 0.5:
                self.m.synced(group, place)
            self.m.voted(group, place, now["epoch"], now["step"], "same")


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_losses_and_arrivals_ends_with_every_step_committed_once(seed: int) -> None:
    chance = random.Random(seed)
    m = _membership(replicas=chance.randint(1, 4), block=chance.randint(1, 3), minimum=1, steps=30)
    fleet = _Fleet(m, chance)
    for _ in range(m.replicas):
        fleet.come(0)
    for turn in range(5000):
        fleet.turn()
        if m.step >= m.steps:
            break
        fleet.answer()
        if chance.random() < 0.1 and len(m.active) > 1:
            m.lost(chance.choice(m.active), 0)
        if chance.random() < 0.05 and m.joining:
            m.lost(chance.choice(m.joining), 0)
        if chance.random() < 0.1 and len(m.groups) < 6:
            fleet.come(None)
        if turn % 50 == 0 and len(m.active) > 1:
            m.leave(chance.choice(m.active))
    assert fleet.commits == list(range(1, 31))
