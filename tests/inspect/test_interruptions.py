"""What the ledger charges to losses of groups, from records that are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_builder import RunBuilder, make_job

from bessemer.inspect.ledger import Ledger, read_ledger

STEP_S = 0.5


class Book(RunBuilder):
    """A run of four groups of which one is lost; steps take `STEP_S` and what is added."""

    def took(self, number: int, seconds: float) -> None:
        begin = self.now
        self.wait(seconds)
        batch = self.job.train.global_batch
        samples = [(number - 1) * batch, number * batch]
        self.metrics.append(
            {"step": number, "samples": samples, "step_s": self.now - begin, "phases": {}, "t": self.now}
        )

    def epoch(self, number: int, step: int, active: list[int], *, ago_s: float = 0.0, joining: Any = ()) -> None:
        self.event("epoch", epoch=number, step=step, active=active, joining=list(joining), term=1)
        self.events[-1]["t"] -= ago_s

    def adapted(self, step: int, epoch: int, group: int, waited: float, redone: float, connect: float) -> None:
        self.event("adapted", step=step, epoch=epoch, group=group, waited_s=waited, redone_s=redone, connect_s=connect)


def book() -> Book:
    job = make_job(dp=4, keep={"mode": "zero-interruption", "spares": 1, "sums": "exact"})
    made = Book(job, world_size=4, sample_every=10_000)
    made.start(set_up_s=3.0)
    made.epoch(1, 0, [0, 1, 2, 3])
    for step in (1, 2, 3, 4):
        made.took(step, STEP_S)
    return made


def read(made: Book, folder: Path) -> Ledger:
    found = read_ledger(made.write(folder / "run"))
    assert sum(found.wall.lost_s.values()) == pytest.approx(found.wall.wall_s - found.wall.committed_s, abs=1e-6)
    return found


def test_a_loss_is_split_by_cause(tmp_path: Path) -> None:
    """A rank stood still for 1.5 s before that was known; its unit was run by group 1 in 0.2 s."""
    made = book()
    made.took(5, STEP_S + 1.4 + 0.2 + 0.03)
    end = made.now
    made.now = end - 0.3
    made.event("rank_lost", rank=3, group=3, silent_s=1.5)
    made.event("group_lost", group=3, step=4)
    made.wait(0.02)
    made.epoch(2, 4, [0, 1, 2])
    made.now = end
    for group, redone in ((0, 0.0), (1, 0.2), (2, 0.0)):
        made.adapted(5, 2, group, waited=1.4 + 0.01 * group, redone=redone, connect=0.03 - 0.01 * group)
    lost = read(made, tmp_path).wall.lost_s
    assert lost["detection"] == pytest.approx(1.4)
    assert lost["redone"] == pytest.approx(0.2)
    assert lost["epoch"] == pytest.approx(0.03)
    assert read_ledger(tmp_path / "run").wall.committed_s == pytest.approx(5 * STEP_S)


def test_waiting_counts_only_from_the_first_trace_on(tmp_path: Path) -> None:
    """What survivors waited for a slow peer before it was killed is no detection."""
    made = book()
    made.took(5, STEP_S)
    end = made.now
    made.now = end - 0.1
    made.event("group_lost", group=2, step=4)
    made.wait(0.02)
    made.epoch(2, 4, [0, 1, 3])
    made.now = end
    made.adapted(5, 2, 0, waited=0.3, redone=0.0, connect=0.0)
    made.event("rank_lost", rank=2, group=2, silent_s=0.0)  # the agent may come to know of it later
    made.epoch(3, 5, [0, 1, 3], joining=[4])
    made.took(6, STEP_S)
    made.adapted(6, 3, 0, waited=0.3, redone=0.0, connect=0.0)
    assert read(made, tmp_path).wall.lost_s["detection"] == pytest.approx(0.02)


def test_steps_of_too_few_groups_and_copies_for_joiners(tmp_path: Path) -> None:
    made = book()
    made.epoch(2, 4, [0, 1, 2])
    made.took(5, 0.7)
    made.event("donated", step=5, group=0, stall_s=0.04)
    made.epoch(3, 5, [0, 1, 2], joining=[4])
    made.took(6, 0.64)
    made.epoch(4, 6, [0, 1, 2, 4])
    made.took(7, STEP_S)
    lost = read(made, tmp_path).wall.lost_s
    assert lost["donor"] == pytest.approx(0.04)
    assert lost["fewer"] == pytest.approx(0.2 + 0.1)


def test_fewer_groups_on_request_are_no_loss(tmp_path: Path) -> None:
    made = book()
    made.event("scale", replicas=3)
    made.epoch(2, 4, [0, 1, 2])
    made.took(5, 0.7)
    found = read(made, tmp_path)
    assert found.wall.lost_s["fewer"] == 0
    assert found.factors["stability"].value == pytest.approx(2.7 / (2.7 + 3.0))


def test_no_step_is_charged_more_than_it_took(tmp_path: Path) -> None:
    made = book()
    made.event("group_lost", group=3, step=4, silent_s=100.0)
    made.epoch(2, 4, [0, 1, 2])
    made.took(5, STEP_S)
    made.adapted(5, 2, 0, waited=90.0, redone=5.0, connect=1.0)
    found = read(made, tmp_path)
    assert found.wall.lost_s["detection"] == pytest.approx(STEP_S)
    assert found.wall.committed_s == pytest.approx(4 * STEP_S)
