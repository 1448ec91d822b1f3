"""Runs of groups whose coordinator dies, falls silent or is cut off: another one takes over, and no bit is lost."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.faults import Fault
from train.posts import Staffed
from train.test_elastic import _digests, _job, _undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)


def _named(fleet: Staffed, event: str) -> list[dict[str, Any]]:
    return [e for e in fleet.events if e["event"] == event]


def test_a_standby_takes_over_and_another_after_it(folder: Path) -> None:
    """The coordinator is killed twice; nobody is lost."""
    with Staffed(folder, _job(steps=30), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group)
        fleet.until(lambda m: m.step >= 3)
        fleet.signal_lead(signal.SIGKILL)
        fleet.until_led_by(1)
        fleet.post(0, standby_of=fleet.slots[1])
        fleet.until(lambda m: m.step >= 10 and m.term == 2)
        fleet.signal_lead(signal.SIGKILL)
        fleet.until_led_by(0)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed("one rank", 30)
    assert not _named(fleet, "group_lost")
    assert [e["term"] for e in _named(fleet, "epoch")][:2] == [1, 2]  # the third's may come when the run is over


@pytest.mark.parametrize("name", ["one rank", "tp"])
@pytest.mark.parametrize("point", ["forward", "reduce", "voted"])
def test_a_member_dies_with_the_coordinator(folder: Path, name: str, point: str) -> None:
    """The survivors, a majority, go on in the step that was under way."""
    with Staffed(folder, _job(name), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault(point, 4, signal.SIGSTOP) if group == 1 else None)
        fleet.silent_s = 1e9
        fleet.until_stopped(1)
        fleet.signal_lead(signal.SIGKILL)
        fleet.kill(1)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 10)
    assert _named(fleet, "took_over")[0]["lost"] == [1]


@pytest.mark.parametrize("name", ["one rank", "tp"])
@pytest.mark.parametrize("told", [0, 2])
def test_a_coordinator_dies_between_a_commit_and_its_receipt(folder: Path, name: str, told: int) -> None:
    """The step is true, and no rank or only some have heard of it: all apply it, once."""
    fleet = Staffed(folder, _job(name, 16), pause_s=0.05)
    fleet.dies = ("step", 5, told)
    with fleet:
        for group in range(3):
            fleet.start(group)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed(name, 16)
    assert [(e["term"], e["step"], e["lost"]) for e in _named(fleet, "took_over")] == [(2, 5, [])]
    assert not _named(fleet, "group_lost")
    assert all([m["step"] for m in end["metrics"]] == list(range(1, 17)) for end in ended.values() if end["metrics"])


@pytest.mark.parametrize("told", [0, 1, 6])
def test_a_coordinator_dies_at_the_last_commit(folder: Path, told: int) -> None:
    """Nobody, some or all have heard that the last step is true: all apply it, and the leading group saves it, once."""
    fleet = Staffed(folder, _job("tp"), pause_s=0.05)
    fleet.dies = ("step", 10, told)
    with fleet:
        for group in range(3):
            fleet.start(group)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed("tp", 10)
    assert {seat for seat, end in ended.items() if end["saves"]} == {(0, 0, 0), (0, 0, 1)}


@pytest.mark.parametrize("told", [1, 3])
def test_a_coordinator_dies_while_it_tells_of_an_epoch(folder: Path, told: int) -> None:
    """One rank of a group has heard of it and the other never does: both take up the one that follows."""
    fleet = Staffed(folder, _job("tp", 16), pause_s=0.05)
    fleet.dies = ("epoch", 2, told)
    with fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("forward", 4, signal.SIGKILL) if group == 1 else None)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed("tp", 16)
    assert [(e["term"], e["epoch"]) for e in _named(fleet, "took_over")] == [(2, 2)]


@pytest.mark.parametrize("name", ["one rank", "tp"])
def test_a_signal_to_a_rank_is_its_groups_wish_to_leave(folder: Path, name: str) -> None:
    with Staffed(folder, _job(name, 16), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group)
        fleet.until(lambda m: m.step >= 3)
        fleet.stop(1, signal.SIGTERM)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 16)
    gone = [end["ended"] for (group, _, _), end in ended.items() if group == 1]
    assert len(gone) == fleet.block and all(text.startswith("released") for text in gone)
    assert [e["group"] for e in _named(fleet, "left")] == [1] and not _named(fleet, "group_lost")


def test_a_run_is_scaled_down_and_up(folder: Path) -> None:
    with Staffed(folder, _job(steps=30), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group)
        fleet.until(lambda m: m.step >= 3)
        fleet.scale(1)
        fleet.until(lambda m: m.active == [0])
        fleet.scale(3)
        fleet.start(5, joins=True)
        fleet.start(6, joins=True)
        fleet.until(lambda m: m.active == [0, 5, 6] or m.step == 30)
        ended = fleet.wait()
    assert fleet.view.active == [0, 5, 6], "they were to join before the end"
    assert _digests(ended, groups=3) == _undisturbed("one rank", 30)


def test_a_coordinator_that_hangs_is_left(folder: Path) -> None:
    """A stopped coordinator keeps its connections; when it wakes up after the standby took over it is of no account."""
    with Staffed(folder, _job(steps=16), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group)
        fleet.until(lambda m: m.step >= 3)
        fleet.signal_lead(signal.SIGSTOP)
        fleet.until_led_by(1)
        fleet.until(lambda m: m.term == 2 and m.step >= 6)
        fleet.signal_slot(0, signal.SIGCONT)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed("one rank", 16)
