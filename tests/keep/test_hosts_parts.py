"""The parts of runs on several hosts that need no ranks: who is where, claims to epochs, an end, records."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import job_in

from bessemer.core.errors import RequestError
from bessemer.keep.claims import Claim, Claims
from bessemer.keep.conclusion import Conclusion
from bessemer.keep.desk import Desk
from bessemer.keep.host_agent import HostAgent
from bessemer.keep.host_journal import HostJournal
from bessemer.keep.hosts import hosts_of_launch
from bessemer.keep.hosts_coordinator import STRANDED_S, HostsCoordinator
from bessemer.keep.launch import Launch
from bessemer.keep.links import await_challenge, connect, listen_at, proof
from bessemer.keep.membership import Membership
from bessemer.keep.progress import Printer
from bessemer.keep.record_tail import Tail
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.signs import Signs, give_signs
from bessemer.keep.standstill import Standing
from bessemer.keep.step_times import StepTimes
from bessemer.keep.takeover import Decision
from bessemer.keep.wire import Frames, pack


def launch(**fields: Any) -> Launch:
    place: dict[str, Any] = {"launcher": "env", "rank": 1, "world_size": 3, "local_rank": 0, "local_world_size": 1}
    return Launch(**place | fields)


# ---- who is where


def test_hosts_are_those_of_the_launch_and_share_the_groups() -> None:
    hosts = hosts_of_launch(launch(), {"BESSEMER_HOSTS": "one, two,fe80::3", "MASTER_PORT": "29500"})
    assert (hosts.number, hosts.name, hosts.count) == (1, "two", 3)
    assert hosts.coordinators == ("tcp:one:29500", "tcp:two:29500", "tcp:[fe80::3]:29500")
    shares = [hosts.__class__(n, hosts.names, hosts.port).share_of(5) for n in range(3)]
    assert shares == [2, 2, 1]


@pytest.mark.parametrize(
    ("fields", "env", "code"),
    [
        ({"world_size": 2}, {"BESSEMER_HOSTS": "one,two", "MASTER_PORT": "x"}, "no-hosts"),
        ({}, {"BESSEMER_HOSTS": "one,two", "MASTER_PORT": "29500"}, "no-hosts"),
        ({}, {"BESSEMER_HOSTS": "one,two,two", "MASTER_PORT": "29500"}, "no-hosts"),
        ({"local_world_size": 8}, {"BESSEMER_HOSTS": "one,two,three", "MASTER_PORT": "29500"}, "agent-per-host"),
    ],
)
def test_half_a_description_is_refused(fields: dict[str, Any], env: dict[str, str], code: str) -> None:
    with pytest.raises(RequestError) as raised:
        hosts_of_launch(launch(**fields), env)
    assert raised.value.code == code and raised.value.fix


# ---- claims


def test_of_two_coordinators_one_has_the_epoch(tmp_path: Path) -> None:
    one, two = Claims(tmp_path, "token"), Claims(tmp_path, "token")
    assert one.take(4, 1, [2, 3]) is None
    assert one.take(4, 1, [2, 3]) is None, "it is still its own"
    assert two.take(4, 5, [0, 1], since=4) == Claim(1, (2, 3))
    assert two.take(3, 5, [0, 1], since=3) == Claim(1, ()), "who heard of an earlier epoch last is too late as well"
    assert two.take(5, 5, [0], since=5) is None
    assert one.take(6, 1, [0]) == Claim(5, (0,)), "what follows from an epoch of the other's is not one's own"


def test_claims_of_an_earlier_attempt_are_of_no_account(tmp_path: Path) -> None:
    assert Claims(tmp_path, "first").take(2, 1, [0]) is None
    assert Claims(tmp_path, "second").take(2, 7, [1]) is None
    Claims(tmp_path, "third").clear()
    assert not list((tmp_path / "claims").iterdir())


# ---- nobody to go on with


@pytest.mark.parametrize("how", ["nobody came", "forestalled"])
def test_a_coordinator_that_can_not_go_on_gives_up_in_the_end(tmp_path: Path, how: str) -> None:
    """Whether the groups with the state are dead or only out of reach: for ever nobody waits."""
    (tmp_path / "run.json").write_text('{"token": "t"}')
    membership = Membership(replicas=1, block=1, steps=100, units_of=lambda step: 4)
    desk, said = Desk(1, "", tmp_path, 1.0), []  # type: Desk, list[Any]
    desk.tell_all = said.append  # type: ignore[method-assign]
    known = Decision(term=1, epoch=3, step=7, replicas=1, active=(0,)) if how == "nobody came" else None
    addresses = ("unix:/nowhere/0", "unix:/nowhere/1")
    coordinator = HostsCoordinator(
        listen_at("tcp:127.0.0.1:0"), membership, desk, addresses, secret="s", takes_over=known
    )
    try:
        if known is None:
            coordinator._parked = coordinator._forestalled = True
        for at_s, told in ((0.0, 0), (STRANDED_S - 1, 0), (STRANDED_S + 1, 1)):
            coordinator._check_stranded(1000.0 + at_s)
            assert [r["kind"] for r in said] == ["give_up"] * told
        coordinator._conclusion = Conclusion(1, 3, [0], told=True)
        coordinator._check_stranded(3000.0)
        assert len(said) == 1
    finally:
        coordinator.close()


def test_after_the_last_commit_agents_are_told_which_groups_hold_its_state(tmp_path: Path) -> None:
    """By a coordinator that took over before any of them came: an agent ends those that are not among them."""
    (tmp_path / "run.json").write_text('{"token": "t"}')
    membership = Membership(replicas=2, block=1, steps=7, units_of=lambda step: 4)
    desk = Desk(1, "", tmp_path, 1.0)
    known = Decision(term=1, epoch=3, step=7, replicas=2, active=(0, 2))
    addresses = ("unix:/nowhere/0", "unix:/nowhere/1")
    server = listen_at("tcp:127.0.0.1:0")
    coordinator = HostsCoordinator(server, membership, desk, addresses, secret="s", takes_over=known)
    try:
        coordinator.turn(0.0)
        assert coordinator.finished and not coordinator.membership.active
        with connect(f"tcp:127.0.0.1:{server.getsockname()[1]}", 5.0) as link:
            coordinator.turn(1.0)
            frames = Frames()
            shown = proof("s", await_challenge(link, frames)["nonce"])
            hello = {"host": "h", "number": 0, "token": "t", "newest": 2, "wrote": True}
            link.sendall(pack({"kind": "hello", "role": "agent", "proof": shown} | hello))
            coordinator.turn(1.0)
            (welcome,) = (r for r in frames.feed(link.recv(1 << 16)) if r["kind"] == "welcome")
        assert welcome["step"] == 7 and welcome["members"] == [[0, 2], []]
    finally:
        coordinator.close()


def test_a_host_that_was_away_reads_that_the_run_has_ended(tmp_path: Path) -> None:
    """Of this attempt: what stands in the records from before it doesn't count."""
    path, dismissed = tmp_path / "events.jsonl", []  # type: Path, list[bool]
    path.write_text('{"event":"stopped"}\n')

    class Agent(HostAgent):
        def __init__(self) -> None:
            self._finished = self._over = self._failing = False
            self._welcome, self._active, self._end_at = {"begun": True}, [1], 0.0
            self.reception: Any = SimpleNamespace(stopping=False)
            self._progress = StepTimes(step=3, last=time.monotonic() - 60.0)
            self._events = Tail(path, from_end=True)

        def _standings(self, now: float) -> list[Standing]:
            return []

        def _dismiss_spares(self) -> None:
            dismissed.append(True)

    agent = Agent()
    agent._watch_progress(time.monotonic())
    assert not agent._over and not dismissed
    with path.open("a") as file:
        file.write('{"event":"saved"}\n{"event":"finished"}\n{"event":"arrived"}\n')
    agent._watch_progress(time.monotonic() + 60.0)
    assert agent._finished and agent._over and not agent._active and dismissed


# ---- signs of life


def test_a_host_gives_signs_as_long_as_its_agent_lives(tmp_path: Path) -> None:
    signs = Signs(tmp_path, 0, 3)
    assert signs.fresh() == []
    with give_signs(tmp_path, 2, 0.01), give_signs(tmp_path, 0, 0.01):
        for _ in range(2):
            deadline = time.monotonic() + 60
            while signs.fresh() != [2]:
                assert time.monotonic() < deadline
                time.sleep(0.005)
    (tmp_path / "hosts").mkdir(exist_ok=True)
    (tmp_path / "hosts" / "1").write_text("17")
    assert Signs(tmp_path, 0, 3).fresh() == [], "of one that is dead"


# ---- records


def test_records_wait_until_somebody_writes(tmp_path: Path) -> None:
    folder = RunFolder(job_in(tmp_path))
    folder.lock()
    try:
        folder.claim()
        journal = HostJournal(folder, Printer(5, quiet=True))
        sent: list[Any] = []
        journal.event("one")
        journal.send = lambda record: bool(sent.append(record) or True)
        journal.event("two")
        assert [r["record"]["event"] for r in sent] == ["one", "two"] and not folder.events_file.exists()
        journal.begin(begun=True)
        journal.event("three")
        journal.take("metrics", {"step": 4, "loss": 1.0})
        journal.take("metrics", {"step": 4, "loss": 2.0})
        journal.cease()
        journal.send = lambda record: False
        journal.event("four")
        assert not journal.idle
        journal.begin(begun=True)
        assert [e["event"] for e in folder.events()] == ["three", "four"]
        assert [m["loss"] for m in folder.metrics()] == [1.0] and journal.step == 4
        journal.close()
    finally:
        folder.unlock()
