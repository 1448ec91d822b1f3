"""The parts of runs on several hosts that need no ranks: who is where, claims to epochs, the agents' desk, records."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_ranks import job_in

from bessemer.core.errors import RequestError
from bessemer.keep.claims import Claim, Claims
from bessemer.keep.conclusion import Conclusion
from bessemer.keep.desk import STANDBY_S, Desk
from bessemer.keep.host_agent import HostAgent
from bessemer.keep.host_journal import HostJournal
from bessemer.keep.hosts import hosts_of_launch
from bessemer.keep.hosts_coordinator import STRANDED_S, HostsCoordinator
from bessemer.keep.launch import Launch
from bessemer.keep.links import await_challenge, connect, listen_at, proof
from bessemer.keep.membership import Membership
from bessemer.keep.progress import Printer
from bessemer.keep.reception import RankState
from bessemer.keep.record_tail import Tail
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.signs import Signs, give_signs
from bessemer.keep.standstill import Standing, behind, standings_of
from bessemer.keep.starter import Group
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


# ---- the desk


class Office:
    """A desk and what it has said to whom."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.json").write_text(json.dumps({"token": "t"}))
        self.desk = Desk(0, "tcp:one:1", folder, 1.0)
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.desk.send = lambda peer, record: self.said.append((peer.number, dict(record)))  # type: ignore[attr-defined]

    def come(self, number: int, *, token: str = "t", wrote: bool = False, newest: int = -1) -> Any:
        peer: Any = _Peer(number)
        record = {"host": f"host-{number}", "number": number, "token": token, "wrote": wrote, "newest": newest}
        self.desk.come(peer, record, begun=True, term=3, step=7)
        return peer

    def turn(self, *, later_s: float = 0.0, standby: bool = True, decides: bool = True) -> None:
        self.desk.turn(time.monotonic() + later_s, decides=decides, begun=True, standby=standby)

    def heard(self, number: int, kind: str) -> list[dict[str, Any]]:
        return [record for who, record in self.said if who == number and record["kind"] == kind]


class _Peer:
    def __init__(self, number: int) -> None:
        self.number = number


def test_one_agent_writes_and_gets_what_others_say(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first, second = office.come(0), office.come(1, wrote=True)
    office.desk.take(first, {"kind": "record", "of": "events", "record": {"event": "x"}})
    office.desk.note("epoch", {"epoch": 1})
    office.turn(decides=False)
    assert not office.heard(1, "write"), "one that may be cut off appoints nobody"
    office.turn()
    assert office.heard(1, "write") and not office.heard(0, "write"), "the one that wrote before goes on"
    assert [r["record"]["event"] for r in office.heard(1, "record")] == ["x", "epoch"]
    assert office.heard(0, "resend")
    office.desk.gone(second)
    office.turn()
    assert not office.heard(0, "write"), "it may come back"
    office.turn(later_s=1.1)
    assert office.heard(0, "write") == [{"kind": "write", "begun": True}]


def test_one_that_wrote_before_and_comes_back_hears_of_the_other(tmp_path: Path) -> None:
    """It was silent while another was appointed: else it would have the run watched beside that one."""
    office = Office(tmp_path)
    office.come(0)
    office.turn(later_s=2.0)
    assert office.heard(0, "write") and not office.heard(0, "resend")
    office.come(1, wrote=True)
    assert office.heard(1, "resend") and not office.heard(1, "write")


def test_an_agent_of_another_run_folder_is_refused(tmp_path: Path) -> None:
    office = Office(tmp_path)
    stranger = office.come(1, token="other")
    assert [r["code"] for r in office.heard(1, "refused")] == ["other-folder"] and not office.desk.hosts
    with pytest.raises(ValueError, match="not welcome"):
        office.desk.take(stranger, {"kind": "done"})


def test_a_standby_is_asked_for_on_other_hosts_in_turn(tmp_path: Path) -> None:
    office = Office(tmp_path)
    for number in (0, 1, 2):
        office.come(number)
    office.turn(standby=False)
    office.turn(standby=False)
    assert [len(office.heard(n, "stand_by")) for n in (0, 1, 2)] == [0, 1, 0]
    office.turn(standby=False, later_s=STANDBY_S + 1)
    assert office.heard(2, "stand_by") == [{"kind": "stand_by", "of": "tcp:one:1"}]


def test_a_rank_that_is_to_go_is_looked_for_on_all_hosts(tmp_path: Path) -> None:
    office = Office(tmp_path)
    watching, _ = office.come(0), office.come(1)
    office.desk.take(watching, {"kind": "evict", "rank": 3, "why": "it is slow"})
    told = {"kind": "evict", "rank": 3, "why": "it is slow"}
    assert office.heard(0, "evict") == office.heard(1, "evict") == [told]

    ended: list[tuple[str, int]] = []

    class Agent(HostAgent):
        def __init__(self, name: str, *ranks: int) -> None:
            self.ranks = {rank: RankState(rank) for rank in ranks}
            self.coordinators: Any = SimpleNamespace(tell=lambda about, record: office.desk.take(watching, record))
            self.journal: Any = SimpleNamespace(event=lambda event, rank, why: ended.append((name, rank)), writes=True)
            for state in self.ranks.values():
                state.child = cast(Any, SimpleNamespace(signal=lambda number: None))

    here, there = Agent("here", 0, 2), Agent("there", 1, 3)
    here._evict(2, "it is slow")
    here._evict(3, "it is slow")
    assert office.heard(1, "evict") == [told, told] and ended == [("here", 2)]
    for agent in (here, there):
        agent._from_desk(told)
    assert ended == [("here", 2), ("there", 3)]


def test_an_agent_that_comes_late_hears_how_far_the_run_is(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.come(1)
    assert office.heard(1, "welcome")[0]["step"] == 7


def test_names_of_groups_go_on_where_a_host_comes_back(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.desk.saw(1, 7)
    office.come(1)
    assert office.heard(1, "welcome")[0]["newest"] == 7


def test_the_last_word_is_the_writers(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first, second = office.come(0), office.come(1)
    office.turn(later_s=1.1)
    office.desk.take(first, {"kind": "done"})
    office.turn()
    assert not office.heard(0, "last")
    office.desk.take(second, {"kind": "done"})
    office.turn()
    assert office.heard(0, "last") and not office.desk.over
    office.desk.take(first, {"kind": "concluded"})
    assert office.desk.over and office.heard(0, "over") and office.heard(1, "over")


def test_who_others_wait_for_is_lost_wherever_it_is(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first, second = office.come(0), office.come(1)
    late, also = [1, 4, 2, 0, "rank 1 makes no progress", 9.0], [3, 4, 2, 0, "rank 3 makes no progress", 9.0]
    office.desk.take(second, {"kind": "standings", "due": True, "standings": [late, also]})
    assert not office.heard(1, "lose"), "nobody waits for it"
    ahead = [2, 4, 2, 1, "rank 2 makes no progress", 9.0]
    office.desk.take(first, {"kind": "standings", "due": False, "standings": [ahead]})
    assert [r["standing"] for r in office.heard(1, "lose")] == [[1, 4, 2, 0], [3, 4, 2, 0]]
    assert not office.heard(0, "lose")


def test_before_anybody_finds_it_too_long_nobody_is_lost(tmp_path: Path) -> None:
    office = Office(tmp_path)
    for number, far in enumerate((0, 1)):
        peer = office.come(number)
        office.desk.take(peer, {"kind": "standings", "due": False, "standings": [[number, 4, 2, far, "", 9.0]]})
    assert not office.heard(0, "lose")


@pytest.mark.parametrize(
    ("phases", "late"),
    [
        ([(4, "training (epoch 2)"), (4, "summing (epoch 2)"), (4, "summing (epoch 2)")], [0]),
        ([(4, "summing (epoch 2)"), (4, "voted (epoch 2)"), (4, "voted (epoch 2)")], [0]),
        ([(4, "voted (epoch 2)"), (5, "summing (epoch 2)"), (5, "training (epoch 2)")], [0, 2]),
        ([(4, "catching up"), (4, "training (epoch 2)"), (4, "training (epoch 2)")], [0]),
        ([(4, "voted (epoch 1)"), (4, "training (epoch 2)"), (4, "summing (epoch 2)")], [0, 1]),
        ([(4, "summing (epoch 2)"), (4, "summing (epoch 2)"), (4, "summing (epoch 2)")], []),
        ([(4, "voted (epoch 2)"), (4, "voted (epoch 2)"), (4, "voted (epoch 2)")], []),
        # one hangs, the other waits for what it should have passed on: the sum fails, and in the next epoch it is clear
        ([(4, "summing (epoch 2)"), (4, "summing (epoch 2)"), (4, "voted (epoch 2)")], []),
        ([(4, "summing (epoch 2)"), (4, "summing (epoch 3)"), (4, "summing (epoch 3)")], [0]),
    ],
)
def test_who_is_less_far_holds_up_the_others(phases: list[tuple[int, str]], late: list[int]) -> None:
    found = behind(standings_of(_groups(phases), StepTimes(step=3, last=100.0, lengths=[1.0]), 120.0))
    assert [(s.group, s.silent_s) for s in found] == [(name, 19.0) for name in late]
    assert all("voted" in phases[s.group][1] or f"rank {2 * s.group + 1} " in s.why for s in found)


def _groups(phases: list[tuple[int, str]]) -> list[Group]:
    """Of two ranks each, of which the second is as far as it says, and the first has voted."""
    groups = []
    for name, (step, phase) in enumerate(phases):
        ranks = [RankState(2 * name), RankState(2 * name + 1)]
        ranks[0].step, ranks[0].phase = step, "voted (epoch 9)"
        ranks[1].step, ranks[1].phase = step, phase
        groups.append(Group(name, ranks, name))
    return groups


@pytest.mark.parametrize("work", ["evaluating", "saving", "donating", "landing"])
def test_work_that_takes_its_time_is_waited_for_and_so_is_the_step_after_it(work: str) -> None:
    progress = StepTimes(step=3, last=100.0, lengths=[1.0] * 5)
    waiting = (4, "summing (epoch 2)")
    assert not standings_of(_groups([(4, work), waiting]), progress, 160.0)
    after = _groups([(4, "training (epoch 2)"), waiting])
    assert not standings_of(after, progress, 165.0) and not progress.due(165.0)
    assert [s.group for s in behind(standings_of(after, progress, 171.0))] == [0] and progress.due(171.0)
    for_ever = standings_of(_groups([(4, work), waiting]), progress, 1000.0)
    assert [s.group for s in behind(for_ever)] == [0]


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
