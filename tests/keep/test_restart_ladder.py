"""Restarts in place: what each goes on from, when they end, and what is said of the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_ranks import alive, job_in, options

from bessemer.core.job import Job
from bessemer.keep.agent import run
from bessemer.keep.reception import RankState
from bessemer.keep.restarts import PROGRESS_STEPS, Ladder
from bessemer.keep.run_folder import RunFolder

SAYS = """
source = os.environ["BESSEMER_RESTORE"]
note = os.environ["BESSEMER_RUN"] + f"/pid-{member.rank}-{source}"
open(note, "w").write(str(os.getpid()))
if member.rank == 0: member.event("loaded", step=0, source=source or "seed", path=None, why="test")
"""


def died() -> RankState:
    return RankState(0, exit_code=-9, failed_at=1.0)


def reported(code: str) -> RankState:
    report = {"code": code, "message": "m", "fix": "", "rank": 0, "step": 1, "exit_code": 1}
    return RankState(0, report=report, failed_at=1.0)


def job_with(folder: Path, restarts: int) -> Job:
    job = job_in(folder)
    return job.model_copy(update={"keep": job.keep.model_copy(update={"restarts": restarts})})


def test_each_restart_changes_something_until_nothing_is_left() -> None:
    ladder, first = Ladder(10), died()
    assert [ladder.climb(first, 5, 3), *(ladder.climb(died(), 5, 3) for _ in range(5))] == [
        "memory", "disk", "older:1", "older:2", None, None,
    ]  # fmt: skip
    assert ladder.first is first


def test_the_budget_ends_a_row_and_progress_begins_another() -> None:
    ladder = Ladder(2)
    assert [ladder.climb(died(), 5, 9), ladder.climb(died(), 5 + PROGRESS_STEPS - 1, 9)] == ["memory", "disk"]
    assert ladder.climb(died(), 5 + PROGRESS_STEPS, 9) is None, "the furthest step counts, not that of the restart"
    later = died()
    assert ladder.climb(later, 5 + 2 * PROGRESS_STEPS, 9) == "memory"
    assert ladder.first is later


@pytest.mark.parametrize("code", ["peer-lost", "stranded", "vault-lost", "memory-damaged"])
def test_what_follows_from_the_death_of_others_is_tried_again(code: str) -> None:
    assert Ladder(1).climb(reported(code), 5, 0) == "memory"


@pytest.mark.parametrize("code", ["non-finite", "bad-data", "crash", "other-seed"])
def test_an_error_that_a_rank_reports_itself_would_come_again(code: str) -> None:
    ladder, last = Ladder(3), reported(code)
    assert ladder.climb(died(), 5, 3) == "memory"
    assert ladder.climb(last, 5, 3) is None
    assert ladder.first is last


def test_the_ranks_are_started_again_until_they_get_through(tmp_path: Path) -> None:
    body = SAYS + (
        "for n in range(1, 6): step(n)\n"
        "if source != 'disk':\n"
        "    time.sleep(0.2 if member.rank else 60)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "member.close()\n"
    )
    job = job_with(tmp_path, 3)
    assert run(job, options(body)) == 0
    folder = RunFolder(job)
    events = list(folder.events())
    assert [e.get("source") for e in events if e["event"] == "start"] == [None, "memory", "disk"]
    assert [e["source"] for e in events if e["event"] == "loaded"] == ["seed", "memory", "disk"]
    assert [e["rank"] for e in events if e["event"] == "rank_lost"] == [1, 1]
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3, 4, 5], "steps done again are in the records once"
    assert events[-1]["event"] == "finished"
    for note in (tmp_path / "r").glob("pid-*"):
        assert not alive(int(note.read_text()))


def test_the_first_failure_is_told_when_the_last_restart_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = SAYS + "step(1)\nos.kill(os.getpid(), signal.SIGKILL if source else signal.SIGSEGV)\n"
    job = job_with(tmp_path, 2)
    job = job.model_copy(update={"layout": job.layout.model_copy(update={"dp": 1})})
    assert run(job, options(body)) == 1
    assert "SIGSEGV" in capfd.readouterr().err
    assert [e["event"] for e in RunFolder(job).events()].count("start") == 3


@pytest.mark.parametrize(
    ("restarts", "body"),
    [
        (0, "os.kill(os.getpid(), signal.SIGKILL)\n"),
        (3, "sys.exit(member.failed(NonFinite('the loss is NaN', step=1)))\n"),
        (3, "sys.exit(member.failed(BessemerError('wrong', code='bad-data')))\n"),
    ],
    ids=["no budget", "non-finite", "bad data"],
)
def test_not_started_again(tmp_path: Path, restarts: int, body: str) -> None:
    job = job_with(tmp_path, restarts)
    assert run(job, options(SAYS + "step(1)\n" + body)) == 1
    assert [e["event"] for e in RunFolder(job).events()].count("start") == 1
