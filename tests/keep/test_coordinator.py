"""Coordinators and the ranks' connections with them, without models: members are threads that vote at once."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from keep.stand_ins import OPEN, PATIENCE_S, SECRET, Host, Proxy

from bessemer.core.errors import BessemerError
from bessemer.keep.cohort import Cohort, Seat
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.links import await_challenge, connect, listen_at, proof
from bessemer.keep.membership import Membership
from bessemer.keep.takeover import Decision, DecisionLog, stand_by
from bessemer.keep.wire import Frames, pack

UNITS = 6


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)
        while OPEN:
            OPEN.pop().close()


def _until(what: Callable[[], Any], say: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, say()
        time.sleep(0.005)


class Serving:
    """A coordinator in a thread. `end` is its death: all its connections close at once."""

    def __init__(self, address: str, *, lease_s: float = 2.0, replicas: int = 3, **how: Any) -> None:
        m = Membership(replicas=replicas, block=1, steps=10**6, units_of=lambda step: UNITS)
        self.coordinator = Coordinator(listen_at(address), m, secret=SECRET, lease_s=lease_s, **how)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.coordinator._tell_agents = lambda event, **fields: self.events.append((event, fields))  # type: ignore[method-assign]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.coordinator.run(self._ends.is_set)

    @property
    def m(self) -> Membership:
        return self.coordinator.membership

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
        self.coordinator.close()


class Member:
    """A rank that has each sum at once, and votes for it. `steps` are those that it has applied, in order."""

    def __init__(self, addresses: str, group: int, *, host: str = "", silence_s: float = 5.0) -> None:
        seat = Seat(group, 0, 0, host or f"host-{group}")
        self.cohort = Cohort(addresses, SECRET, seat, silence_s=silence_s)
        self.cohort.share_of = lambda step, epoch: epoch.shares.get(group, ()) if epoch.step == step else ()
        self.steps: list[int] = []
        self.ended = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        OPEN.append(self)

    def close(self) -> None:
        self.cohort.close()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        cohort = self.cohort
        try:
            cohort.hello(0, "nowhere")
            step = cohort.await_epoch().step
            while True:
                epoch = cohort.await_epoch(cohort.newest)
                time.sleep(0.005)
                cohort.vote(epoch.number, step, "same")
                if cohort.await_outcome(epoch.number, step):
                    self.steps.append(step)
                    step += 1
                    cohort.synced()
        except BessemerError as error:
            self.ended = f"{error.code}: {error}"


def _until_step(serving: Serving, step: int) -> None:
    _until(lambda: serving.m.step >= step, lambda: (serving.m.step, serving.events[-8:]))


def _until_ended(member: Member) -> None:
    _until(lambda: member.ended)


def _three(addresses: str, **how: Any) -> list[Member]:
    return [Member(addresses, group, **how) for group in range(3)]


def test_the_next_coordinator_goes_on_where_the_last_one_was(folder: Path) -> None:
    """Each step is applied once by each member, although the coordinator dies three times."""
    slots = [f"unix:{folder}/c0", f"unix:{folder}/c1"]
    serving = Serving(slots[0], log=DecisionLog(folder / "log", anew=True))
    members = _three(",".join(slots))
    for turn in range(1, 4):
        _until_step(serving, 10 * turn)
        serving.end()
        known = DecisionLog.read(folder / "log")
        assert (known.term, known.epoch, known.step) == (turn, turn, serving.m.step)
        serving = Serving(slots[turn % 2], log=DecisionLog(folder / "log", anew=False), takes_over=known)
    _until_step(serving, 50)
    serving.end()
    assert serving.m.term == 4 and serving.m.active == [0, 1, 2]
    assert all(member.steps == list(range(len(member.steps))) and not member.ended for member in members)


def test_a_standby_knows_each_decision_before_the_members(folder: Path) -> None:
    serving = Serving(f"unix:{folder}/c0")
    found: list[Decision | None] = []
    watch = threading.Thread(target=lambda: found.append(stand_by(f"unix:{folder}/c0", SECRET, lease_s=5.0)))
    watch.start()
    members = _three(f"unix:{folder}/c0")
    _until_step(serving, 20)
    serving.end()
    watch.join(PATIENCE_S)
    known = found[0]
    assert known is not None and known.active == (0, 1, 2) and known.step == serving.m.step
    assert all(member.cohort.committed <= known.step for member in members)


def test_a_minority_never_commits_but_goes_on_when_the_others_are_known_to_be_dead(folder: Path) -> None:
    known = Decision(term=1, epoch=4, step=7, replicas=3, active=(0, 1, 2))
    serving = Serving(f"unix:{folder}/c", lease_s=0.3, takes_over=known)
    member = Member(f"unix:{folder}/c", 1)
    _until(lambda: any(event == "arrived" for event, _ in serving.events))
    time.sleep(1.0)
    assert serving.m.epoch == 0 and not member.steps
    agent = connect(f"unix:{folder}/c", 5.0)
    OPEN.append(agent)
    nonce = await_challenge(agent, Frames())["nonce"]
    agent.sendall(pack({"kind": "hello", "role": "agent", "host": "b", "proof": proof(SECRET, nonce)}))
    for group in (0, 2):
        agent.sendall(pack({"kind": "lost", "group": group, "incarnation": 0, "why": "killed"}))
    _until(lambda: serving.m.step > 8)
    serving.end()
    assert serving.m.active == [1] and serving.m.epoch == 5


def test_a_coordinator_that_was_replaced_is_refused_and_ends(folder: Path) -> None:
    slots = [f"unix:{folder}/c0", f"unix:{folder}/c1"]
    newer = Serving(slots[0], takes_over=Decision(term=4, replicas=3), lease_s=0.1)
    members = _three(",".join(slots))
    _until_step(newer, 3)
    assert newer.m.term == 5
    older = Serving(slots[1])
    newer.end()
    _until(lambda: older.coordinator.superseded)
    assert older.coordinator.superseded == 5 and older.m.epoch == 0 and not any(m.ended for m in members)
    older.end()


def test_a_silent_coordinator_is_left_for_one_that_answers(folder: Path) -> None:
    """A socket that is open and says nothing: as of a process that is stopped."""
    slots = [f"unix:{folder}/p", f"unix:{folder}/c1"]
    log = DecisionLog(folder / "log", anew=True)
    first = Serving(f"unix:{folder}/c0", log=log)
    proxy = Proxy(slots[0], f"unix:{folder}/c0")
    members = _three(",".join(slots), silence_s=0.5)
    _until_step(first, 3)
    proxy.cut = True
    time.sleep(0.1)
    second = Serving(slots[1], takes_over=DecisionLog.read(folder / "log"))
    _until_step(second, first.m.step + 5)
    assert second.m.active == [0, 1, 2] and all(m.steps == list(range(len(m.steps))) for m in members)
    first.end()
    second.end()


def test_a_host_that_is_cut_off_parks_and_is_fenced_when_it_comes_back(folder: Path) -> None:
    """Two hosts, of two groups and of one, each behind a link of its own; that of the one stops to pass anything."""
    serving = Serving(f"unix:{folder}/c", lease_s=1.5)
    proxies = {name: Proxy(f"unix:{folder}/{name}", f"unix:{folder}/c") for name in "ab"}
    _ = [Host(f"unix:{folder}/{name}", name) for name in "ab"]
    members = [Member(f"unix:{folder}/{name}", group, host=name, silence_s=0.5) for group, name in enumerate("aab")]
    _until_step(serving, 5)
    proxies["b"].cut = True
    _until(lambda: serving.m.active == [0, 1])
    at = serving.m.step
    stood = len(members[2].steps)
    _until_step(serving, at + 10)
    assert len(members[2].steps) == stood and not members[2].ended, "it must park: neither go on nor end"
    proxies["b"].cut = False
    _until_ended(members[2])
    assert members[2].ended.startswith("fenced")
    serving.end()


def test_where_most_fall_silent_and_the_standby_too_nothing_is_committed(folder: Path) -> None:
    """The other side may be the majority, and go on under a new term."""
    serving = Serving(f"unix:{folder}/c", lease_s=1.5)
    away = Proxy(f"unix:{folder}/b", f"unix:{folder}/c")
    _ = [Host(f"unix:{folder}/c", "a"), Host(f"unix:{folder}/b", "b")]
    threading.Thread(target=stand_by, args=(f"unix:{folder}/b", SECRET), kwargs={"lease_s": 1.5}, daemon=True).start()
    members = [Member(f"unix:{folder}/{'cbb'[g]}", g, host="abb"[g]) for g in range(3)]
    _until(lambda: serving.coordinator._had_standby and len(serving.coordinator._with_role("agent")) == 2)
    _until_step(serving, 5)
    away.cut = True
    _until(lambda: serving.m.waiting or len(serving.m.groups) == 1)
    at = serving.m.step
    time.sleep(1.0)
    assert serving.m.step == at and len(members[0].steps) <= at
    serving.end()


def test_a_group_that_wants_to_leave_is_let_go_and_the_last_is_not(folder: Path) -> None:
    serving = Serving(f"unix:{folder}/c")
    members = _three(f"unix:{folder}/c")
    for group in (2, 0):
        _until_step(serving, 3)
        members[group].cohort.leave()
        _until_ended(members[group])
        assert members[group].ended.startswith("released")
    members[1].cohort.leave()
    at = serving.m.step
    _until_step(serving, at + 5)
    assert serving.m.active == [1] and not members[1].ended
    assert [fields["group"] for event, fields in serving.events if event == "left"] == [2, 0]
    serving.end()


def test_a_wish_to_leave_outlives_the_coordinator(folder: Path) -> None:
    serving = Serving(f"unix:{folder}/c", log=DecisionLog(folder / "log", anew=True))
    members = _three(f"unix:{folder}/c")
    _until_step(serving, 3)
    serving.end()
    members[1].cohort.leave()
    serving = Serving(f"unix:{folder}/c", takes_over=DecisionLog.read(folder / "log"))
    _until_ended(members[1])
    assert members[1].ended.startswith("released") and serving.m.active == [0, 2]
    serving.end()


def test_what_happens_while_no_agent_is_there_is_told_to_the_next_one(folder: Path) -> None:
    """After a takeover the ranks may come before the agent does."""
    known = Decision(term=1, epoch=3, step=7, replicas=1, active=(0,))
    m = Membership(replicas=1, block=1, steps=10, units_of=lambda step: UNITS)
    coordinator = Coordinator(listen_at(f"unix:{folder}/c"), m, secret=SECRET, lease_s=0.01, takes_over=known)
    try:
        coordinator._takeover.dead(0)  # type: ignore[union-attr]
        _until(lambda: coordinator.turn(0.01) or coordinator._takeover is None)
        with connect(f"unix:{folder}/c", 5.0) as link:
            coordinator.turn(0.1)
            frames = Frames()
            shown = proof(SECRET, await_challenge(link, frames)["nonce"])
            link.sendall(pack({"kind": "hello", "role": "agent", "host": "a", "proof": shown}))
            coordinator.turn(1.0)
            told = frames.feed(link.recv(1 << 16))
        assert [(record["kind"], record["event"]) for record in told] == [("event", "took_over")]
    finally:
        coordinator.close()


@pytest.mark.parametrize(("epoch", "heard"), [(3, "commit"), (2, "fenced")])
def test_after_the_last_commit_a_group_of_its_epoch_is_believed_and_no_other(
    folder: Path, epoch: int, heard: str
) -> None:
    """One that was lost before, and stood one step before the end, has another state."""
    known = Decision(term=1, epoch=3, step=10, replicas=2, active=(0, 2))
    m = Membership(replicas=2, block=1, steps=10, units_of=lambda step: UNITS)
    coordinator = Coordinator(listen_at(f"unix:{folder}/c"), m, secret=SECRET, lease_s=0.01, takes_over=known)
    try:
        _until(lambda: coordinator.turn(0.01) or coordinator.finished)
        with connect(f"unix:{folder}/c", 5.0) as link:
            coordinator.turn(0.1)
            frames = Frames()
            hello = {"kind": "hello", "role": "rank", "group": 2, "incarnation": 0, "place": 0, "host": "a", "step": 9}
            hello |= {"address": "", "term": 1, "epoch": epoch, "state": "active", "share": [], "leaving": False}
            shown = proof(SECRET, await_challenge(link, frames)["nonce"])
            link.sendall(pack(hello | {"proof": shown}))
            coordinator.turn(1.0)
            assert [record["kind"] for record in frames.feed(link.recv(1 << 16))][:1] == [heard]
    finally:
        coordinator.close()


def test_a_number_of_groups_that_is_wished_for_is_a_decision_before_anybody_hears_of_it(folder: Path) -> None:
    """So that who wished for it needn't say it again to a later coordinator, when something else may be wished for."""
    serving = Serving(f"unix:{folder}/c", log=DecisionLog(folder / "log", anew=True))
    with connect(f"unix:{folder}/c", 5.0) as link:
        shown = proof(SECRET, await_challenge(link, Frames())["nonce"])
        link.sendall(pack({"kind": "hello", "role": "agent", "host": "a", "proof": shown}))
        link.sendall(pack({"kind": "scale", "replicas": 5}))
        _until(lambda: ("scale", {"replicas": 5}) in serving.events)
        assert DecisionLog.read(folder / "log").replicas == 5
    serving.end()


def test_the_wall_clock_decides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, jump = time.time, {"s": 0.0}
    monkeypatch.setattr(time, "time", lambda: real() + jump["s"])
    serving = Serving(f"unix:{folder}/c", lease_s=1.5)
    Host(f"unix:{folder}/c", "here")
    members = [Member(f"unix:{folder}/c", group, host="here") for group in range(3)]
    for jump["s"] in (3600.0, -3600.0, 0.0):
        _until_step(serving, serving.m.step + 10)
    serving.end()
    assert serving.m.epoch == 1 and not any(event == "group_lost" for event, _ in serving.events)
    assert not any(member.ended for member in members)


def test_what_a_replaced_coordinator_still_writes_is_of_no_account(folder: Path) -> None:
    log = DecisionLog(folder / "log", anew=True)
    old, new = Decision(1, 3, 8, 2, (0, 1)), Decision(2, 4, 8, 2, (0, 1))
    for decision, before in ((old, None), (new, old), (Decision(1, 5, 9, 2, (0,)), new)):
        log.write(decision.record(before))
    log.close()
    with (folder / "log").open("ab") as file:
        file.write(b'{"step": 1')  # torn
    assert DecisionLog.read(folder / "log") == new


def test_who_does_not_know_the_secret_is_not_heard(folder: Path) -> None:
    serving = Serving(f"unix:{folder}/c", replicas=1)
    with connect(f"unix:{folder}/c", 5.0) as link:
        await_challenge(link, Frames())
        link.sendall(pack({"kind": "hello", "role": "agent", "host": "x", "proof": "guessed"}))
        assert link.recv(1) == b""
    serving.end()
