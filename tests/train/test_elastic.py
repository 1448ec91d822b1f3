"""Runs of groups in exact sums under faults at every point: the survivors end with the bits of the run without faults,
and nobody waits long."""

from __future__ import annotations

import functools
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.faults import Fault
from train.fleet import Fleet
from train.toy import MIXTRAL, toy_job

from bessemer.core.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"layout": {"dp": 3}},
    "tp": {"layout": {"dp": 3, "tp": 2}},
    "pp": {"layout": {"dp": 3, "pp": 2}, "keep": {"unit": 4}},
    "fsdp": {"layout": {"dp": 6, "dp_shard": "full"}, "keep": {"replicas": 3}},
    "experts in fp8": {
        "model": MIXTRAL | {"hidden_size": 64, "intermediate_size": 64},
        "layout": {"dp": 3},
        "precision": {"recipe": "fp8-delayed"},
    },
}


def _job(name: str = "one rank", steps: int = 10) -> Job:
    return toy_job(train={"steps": steps, "global_batch": 12, "micro_batch": 2}, **LAYOUTS[name])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)


def _wider(job: Job) -> Job:
    """With four groups."""
    return job.model_copy(update={"layout": job.layout.model_copy(update={"dp": 4})})


@functools.cache
def _undisturbed(name: str, steps: int) -> dict[int, str]:
    """By place the digest of the state after a run without faults."""
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:
        job = _job(name, steps)
        with Fleet(Path(path), job) as fleet:
            for group in range(3):
                fleet.start(group)
            ended = fleet.wait()
    return _digests(ended, groups=3)


def _digests(ended: dict[tuple[int, int, int], dict[str, Any]], groups: int) -> dict[int, str]:
    """By place, after checking that all groups that finished have the same."""
    finished = {seat: end for seat, end in ended.items() if end["ended"] == "finished"}
    assert len({seat[0] for seat in finished}) == groups, {seat: end["ended"] for seat, end in ended.items()}
    found: dict[int, str] = {}
    for (_, _, place), end in finished.items():
        assert found.setdefault(place, end["digest"]) == end["digest"]
    return found


def _longest_s(ended: dict[tuple[int, int, int], dict[str, Any]], after: int) -> float:
    return max(m["step_s"] for end in ended.values() for m in end["metrics"] if m["step"] > after)


POINTS = ["forward", "backward", "reduce", "voted", "receipt", "committed"]
NAMES = ["one rank", "tp", "pp"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_killed_at_any_point_changes_no_bit(folder: Path, point: str, name: str) -> None:
    with Fleet(folder, _job(name)) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault(point, 4, place=fleet.block - 1) if group == 1 else None)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 10)
    assert [e["event"] for e in fleet.events].count("group_lost") == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("point", ["forward", "reduce"])
def test_a_stopped_rank_is_given_up_after_the_lease(folder: Path, point: str, name: str) -> None:
    with Fleet(folder, _job(name), silent_s=0.5) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault(point, 4, signal.SIGSTOP) if group == 1 else None)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 10)
    assert _longest_s(ended, after=1) < 10, "nobody may wait for the timeout of the sum, 20 s"


@pytest.mark.parametrize("name", ["tp", "pp", "fsdp"])
@pytest.mark.parametrize("fault", [Fault("reduce", 4, place=1), Fault("forward", 4, signal.SIGSTOP)])
def test_a_group_of_several_ranks_is_lost_as_a_whole_and_another_joins(folder: Path, name: str, fault: Fault) -> None:
    with Fleet(folder, _job(name, 16), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group, fault=fault if group == 1 else None)
        fleet.start(5, joins=True)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed(name, 16)


def test_experts_and_amaxes_are_part_of_what_is_summed_again(folder: Path) -> None:
    name = "experts in fp8"
    with Fleet(folder, _job(name, 16), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("reduce", 4) if group == 1 else None)
        fleet.start(5, joins=True)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed(name, 16)


@pytest.mark.parametrize("name", NAMES)
def test_two_at_once(folder: Path, name: str) -> None:
    """Of four groups two die in the same step, in different parts of it."""
    with Fleet(folder, _wider(_job(name))) as fleet:
        for group, fault in enumerate((None, Fault("forward", 4), None, Fault("reduce", 4))):
            fleet.start(group, fault=fault)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 10)


@pytest.mark.parametrize("name", NAMES)
def test_every_group_but_one(folder: Path, name: str) -> None:
    with Fleet(folder, _job(name, 16), pause_s=0.1) as fleet:
        for group in range(3):
            fleet.start(group)
        fleet.until(lambda m: m.step >= 3)
        fleet.stop(0, signal.SIGKILL)
        fleet.stop(2, signal.SIGKILL)
        ended = fleet.wait()
    assert _digests(ended, groups=1) == _undisturbed(name, 16)


@pytest.mark.parametrize("name", NAMES)
def test_death_while_an_epoch_is_built(folder: Path, name: str) -> None:
    """Group 1 dies in a step, group 2 while the link of the epoch that follows is made."""
    with Fleet(folder, _job(name)) as fleet:
        for group, fault in enumerate((None, Fault("forward", 4), Fault("epoch", 2))):
            fleet.start(group, fault=fault)
        ended = fleet.wait()
    assert _digests(ended, groups=1) == _undisturbed(name, 10)
    assert _longest_s(ended, after=1) < 10


@pytest.mark.parametrize("name", NAMES)
def test_the_death_of_the_group_that_saves_the_last_step(folder: Path, name: str) -> None:
    """The last step is true, and the leading group dies as it saves it: the next one does, and all wait for that."""
    with Fleet(folder, _job(name)) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("saving", 10, place=fleet.block - 1) if group == 0 else None)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 10)
    saved = {seat: sorted(end["saves"]) for seat, end in ended.items() if end["saves"] and seat[0] != 0}
    assert saved == {(1, 0, place): ["10"] for place in range(fleet.block)}
    assert [e["group"] for e in fleet.events if e["event"] == "concludes"] == [1]


def test_a_spare_catches_up_while_the_others_go_on(folder: Path) -> None:
    with Fleet(folder, _job(steps=30), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("forward", 4) if group == 1 else None)
        fleet.start(5, joins=True)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed("one rank", 30)
    assert "joined" in [e["event"] for e in ended[5, 0, 0]["events"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_death_of_a_donor_in_the_transfer(folder: Path, name: str) -> None:
    """Group 5 is to have its state from group 2, of which a rank dies with a part of it sent; then from group 0."""
    with Fleet(folder, _job(name, 40), pause_s=0.05) as fleet:
        for group, fault in enumerate((None, Fault("forward", 4), Fault("donor", 0, place=fleet.block - 1))):
            fleet.start(group, fault=fault)
        fleet.start(5, joins=True)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 40)
    assert {seat[0] for seat, end in ended.items() if end["ended"] == "finished"} == {0, 5}
    assert [e["to"] for e in ended[0, 0, 0]["events"] if e["event"] == "donated"] == [5]


@pytest.mark.parametrize("name", NAMES)
def test_the_death_of_a_joiner_in_the_transfer(folder: Path, name: str) -> None:
    with Fleet(folder, _job(name, 40), pause_s=0.05) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("forward", 4) if group == 1 else None)
        fleet.start(5, joins=True, fault=Fault("joiner", 0))
        fleet.until(lambda m: m.step > 6 and 5 not in m.groups)
        fleet.start(6, joins=True)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed(name, 40)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", [Fault("slow", 0), Fault("clock", 4, 3600), Fault("clock", 4, -3600)], ids=str)
def test_who_is_slow_or_has_another_time_of_day_is_kept(folder: Path, name: str, fault: Fault) -> None:
    with Fleet(folder, _job(name)) as fleet:
        for group in range(3):
            fleet.start(group, fault=fault if group == 1 else None)
        ended = fleet.wait()
    assert _digests(ended, groups=3) == _undisturbed(name, 10)
    assert not [e for e in fleet.events if e["event"] == "group_lost"]


def test_a_rank_that_wakes_up_after_it_was_given_up_is_refused(folder: Path) -> None:
    with Fleet(folder, _job(steps=16), silent_s=0.5, pause_s=0.1, kills=False) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("forward", 4, signal.SIGSTOP) if group == 1 else None)
        fleet.until(lambda m: m.step >= 8)
        fleet.stop(1, signal.SIGCONT)
        ended = fleet.wait()
    assert ended[1, 0, 0]["ended"].startswith("fenced") and ended[1, 0, 0]["metrics"][-1]["step"] == 4
    assert _digests(ended, groups=2) == _undisturbed("one rank", 16)


def test_a_bit_flipped_in_a_sum_is_outvoted(folder: Path) -> None:
    """One of three sees another sum: it is fenced, its share is done again, and no bit of it is in any state."""
    with Fleet(folder, _job()) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("flip", 4) if group == 1 else None)
        ended = fleet.wait()
    assert ended[1, 0, 0]["ended"].startswith("fenced: its sum, its parameters or its rerun of step 5 differ")
    assert _digests(ended, groups=2) == _undisturbed("one rank", 10)


def test_units_do_not_depend_on_the_number_of_groups(folder: Path) -> None:
    """One group alone, in exact sums, ends with the bits of three."""
    job = _job()
    alone = job.model_copy(update={"layout": job.layout.model_copy(update={"dp": 1})})
    with Fleet(folder, alone) as fleet:
        fleet.start(0)
        ended = fleet.wait()
    assert _digests(ended, groups=1) == _undisturbed("one rank", 10)
