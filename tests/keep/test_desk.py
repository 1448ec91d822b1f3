"""The desk for the agents of several hosts: who writes, who stands by, whom others wait for, and who is to go."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bessemer.keep.desk import STANDBY_S, Desk
from bessemer.keep.host_agent import HostAgent
from bessemer.keep.reception import RankState
from bessemer.keep.standstill import behind, standings_of
from bessemer.keep.starter import Group
from bessemer.keep.step_times import StepTimes


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


@pytest.mark.parametrize("work", ["evaluating", "saving", "donating", "landing", "profiling", "dumping"])
def test_work_that_takes_its_time_is_waited_for_and_so_is_the_step_after_it(work: str) -> None:
    progress = StepTimes(step=3, last=100.0, lengths=[1.0] * 5)
    waiting = (4, "summing (epoch 2)")
    assert not standings_of(_groups([(4, work), waiting]), progress, 160.0)
    after = _groups([(4, "training (epoch 2)"), waiting])
    assert not standings_of(after, progress, 165.0) and not progress.due(165.0)
    assert [s.group for s in behind(standings_of(after, progress, 171.0))] == [0] and progress.due(171.0)
    for_ever = standings_of(_groups([(4, work), waiting]), progress, 1000.0)
    assert [s.group for s in behind(for_ever)] == [0]
