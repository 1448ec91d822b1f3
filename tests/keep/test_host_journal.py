"""The records of a run on several hosts where the disk is full, the run is long, or another agent comes to write."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import job_in

from bessemer.keep.host_agent import HostAgent
from bessemer.keep.host_journal import HostJournal
from bessemer.keep.journal import Journal
from bessemer.keep.kept_metrics import KeptMetrics
from bessemer.keep.progress import Printer
from bessemer.keep.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(job_in(tmp_path, steps=100_000))
    made.lock()
    try:
        made.claim()
        yield made
    finally:
        made.unlock()


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether the disk is full from now on."""
    real = os.write

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda is_full: monkeypatch.setattr(os, "write", full if is_full else real)


def host_journal(folder: RunFolder) -> HostJournal:
    return HostJournal(folder, Printer(100_000, quiet=True))


def steps(folder: RunFolder) -> list[int]:
    return [metric["step"] for metric in folder.metrics()]


def names(folder: RunFolder) -> list[str]:
    return [event["event"] for event in folder.events()]


def test_what_waits_for_room_is_handed_to_the_next_writer(folder: RunFolder, fill: Callable[[bool], None]) -> None:
    """The first agent writes up to step 2 when the disk becomes full; the second one takes over at step 6."""
    first, second = host_journal(folder), host_journal(folder)
    first.begin(begun=True)
    for step in (1, 2):
        first.metric({"step": step})
    first.event("before")
    fill(True)
    for step in (3, 4, 5):
        first.metric({"step": step})
    first.event("waits")
    first.cease()
    assert not first.broken and not first.idle

    second.begin(begun=True)
    assert second.step == 2
    for step in (6, 7):
        second.metric({"step": step})
    second.event("later")
    first.send = lambda record: bool(second.take(record["of"], record["record"]) or True)
    first.hand_on()
    assert first.idle
    fill(False)
    second.metric({"step": 8})
    second.close()
    assert steps(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert names(folder) == ["before", "later", "waits"]


def test_an_agent_that_hears_of_another_writer_hands_on_what_waits(
    folder: RunFolder, fill: Callable[[bool], None]
) -> None:
    class Agent(HostAgent):
        """What word of another writer needs of one."""

        def __init__(self, journal: HostJournal) -> None:
            self.journal, self.said = journal, []
            self.coordinators: Any = SimpleNamespace(say=lambda record: bool(self.said.append(record) or True))
            self._active, self._kept, self._beside = [], KeptMetrics(), ExitStack()
            journal.send = self._send_record

    agent = Agent(host_journal(folder))
    agent.journal.begin(begun=True)
    fill(True)
    agent.journal.metric({"step": 3})
    agent.journal.event("waits")
    agent._from_desk({"kind": "resend"})
    assert [record["of"] for record in agent.said] == ["metrics", "events"]
    assert agent.journal.idle and not agent.journal.writes


def test_what_comes_late_is_left_out_where_later_steps_are_written(
    folder: RunFolder, fill: Callable[[bool], None]
) -> None:
    journal = host_journal(folder)
    journal.begin(begun=True)
    journal.metric({"step": 2})
    journal.take("metrics", {"step": 1})
    fill(True)
    journal.metric({"step": 5})
    for step in (1, 2, 3, 5):
        journal.take("metrics", {"step": step})
    fill(False)
    journal.close()
    assert steps(folder) == [2, 3, 5]


def test_a_writer_that_comes_back_leaves_out_what_was_written_meanwhile(
    folder: RunFolder, fill: Callable[[bool], None]
) -> None:
    journal = host_journal(folder)
    journal.begin(begun=True)
    fill(True)
    for step in (1, 2, 3):
        journal.metric({"step": step})
    journal.cease()
    fill(False)
    folder.metrics_file.write_text('{"step":1}\n{"step":2}\n')
    journal.begin(begun=True)
    journal.metric({"step": 4})
    journal.close()
    assert steps(folder) == [1, 2, 3, 4] and journal.idle


def test_going_back_on_a_full_disk_drops_what_waits_as_well(folder: RunFolder, fill: Callable[[bool], None]) -> None:
    journal = Journal(folder, Printer(100_000, quiet=True))
    for step in (1, 2, 3):
        journal.metric({"step": step, "t": float(step)})
    fill(True)
    for step in (4, 5):
        journal.metric({"step": step, "t": float(step)})
    journal.event("loaded", step=4, source="memory")
    fill(False)
    journal.metric({"step": 5, "again": True})
    journal.close()
    assert steps(folder) == [1, 2, 3, 4, 5] and list(folder.metrics())[-1] == {"step": 5, "again": True}
    [cut] = [event for event in folder.events() if event["event"] == "cut"]
    assert (cut["step"], cut["steps"], cut["last_t"]) == (4, 1, 5.0)


@pytest.mark.parametrize("kind", [Journal, HostJournal])
def test_a_long_run_holds_nobody_up(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, kind: type[Journal]) -> None:
    """Whoever begins to write, or goes on from a checkpoint, parses a few lines, however many there are."""
    lines = [json.dumps({"step": step, "t": float(step)}) + "\n" for step in range(1, 30_001)]
    folder.metrics_file.write_text("".join(lines))
    parsed: list[Any] = []
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or real(text))
    journal = kind(folder, Printer(100_000, quiet=True))
    if isinstance(journal, HostJournal):
        journal.begin(begun=False)
        assert journal.step == 30_000
    journal.event("loaded", step=20_000, source="disk", path="checkpoints/step-20000")
    journal.close()
    assert len(parsed) < 50 and journal.step == 20_000
    monkeypatch.undo()
    assert steps(folder) == list(range(1, 20_001))
    [cut] = [event for event in folder.events() if event["event"] == "cut"]
    assert (cut["step"], cut["steps"], cut["last_t"]) == (20_000, 10_000, 30_000.0)


def test_nothing_is_found_of_a_run_that_has_finished(folder: RunFolder) -> None:
    """The watch beside it may be slow; who asks whether a run has finished reads the last line."""
    journal = Journal(folder, Printer(5, quiet=True))
    journal.event("finding", text="early")
    journal.event("finished", step=5)
    journal.event("finding", text="late")
    journal.close()
    assert names(folder) == ["finding", "finished"]
