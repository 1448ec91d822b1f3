"""Ranks that somebody else's launcher started: they find the services of their host, and one writes the run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fake_ranks import alive, job_in, until

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.keep.join import host_place
from bessemer.keep.launch import find_launch
from bessemer.keep.run_folder import RunFolder

JOIN = """
import os, signal, sys, time
from bessemer.core.errors import BessemerError, Stopped
from bessemer.core.job_file import load_job
from bessemer.keep.join import join_host
from bessemer.keep.launch import find_launch
from bessemer.keep.member import Member
try:
    member = join_host(Member, find_launch(), load_job(sys.argv[1]), vault=VAULT)
except BessemerError as error:
    print(error, file=sys.stderr)
    open(sys.argv[1] + ".refused", "w").close()
    sys.exit(error.exit_code)
def step(n):
    member.phase(n, "forward")
    if member.rank == 0: member.metric({"step": n, "loss": 1.0, "step_s": 0.01})
"""


@contextmanager
def launched(
    job: Job, body: str, *, vault: bool = False, seats: tuple[int, ...] = (0, 1), **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with the variables of a plain launcher on one host; `seats` are their ranks out of two."""
    job_file = Path(job.run.dir) / "job.toml"
    job_file.write_text(dump_job(job))
    code = JOIN.replace("VAULT", str(vault)) + body
    ranks = []
    for rank in seats:
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", **more}
        command = [sys.executable, "-c", code, str(job_file)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def ends(ranks: list[subprocess.Popen[str]], timeout_s: float = 40.0) -> list[tuple[int, str, str]]:
    told = [process.communicate(timeout=timeout_s) for process in ranks]
    return [(process.returncode, *texts) for process, texts in zip(ranks, told, strict=True)]


def names(folder: RunFolder) -> list[str]:
    return [e["event"] for e in folder.events()]


def test_two_ranks_share_one_host_s_services(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with launched(job, "for n in range(1, 6): step(n)\nif member.rank: member.event('other')\nmember.close()") as ranks:
        results = ends(ranks)
    assert [code for code, _, _ in results] == [0, 0], results
    folder = RunFolder(job)
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3, 4, 5]
    assert sorted(names(folder)) == ["finished", "other", "start"]
    assert names(folder)[0] == "start"
    assert names(folder)[-1] == "finished"
    assert " 5/5" in results[0][1]  # local rank 0's launcher shows the progress
    folder.lock()  # given back
    folder.unlock()


def test_the_vault_is_there_and_ends_with_the_run(tmp_path: Path) -> None:
    body = "open(sys.argv[1] + f'.{member.rank}', 'w').write(str(member.vault)); assert member.vault.exists()\n"
    body += "member.close()"
    job = job_in(tmp_path)
    with launched(job, body, vault=True) as ranks:
        results = ends(ranks)
        assert [code for code, _, _ in results] == [0, 0], results
    vaults = {Path((tmp_path / f"job.toml.{rank}").read_text()) for rank in (0, 1)}
    assert len(vaults) == 1
    assert not vaults.pop().exists()


def test_a_dead_rank_is_recorded_and_the_services_end(tmp_path: Path) -> None:
    body = "step(1); step(2)\nif member.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nmember.close()"
    job = job_in(tmp_path)
    with launched(job, body) as ranks:
        results = ends(ranks)
    assert results[1][0] == -signal.SIGKILL
    folder = RunFolder(job)
    lost = [e for e in folder.events() if e["event"] == "rank_lost"]
    assert [(e["rank"], e["step"], e["phase"]) for e in lost] == [(1, 2, "forward")]
    assert names(folder)[-1] == "failed"


def test_a_signal_to_the_ranks_stops_and_exits_3(tmp_path: Path) -> None:
    body = """
n = 0
while not member.stop_requested and n < 3000:
    n += 1; step(n); time.sleep(0.02)
sys.exit(member.failed(Stopped("on request", step=n)))
"""
    job = job_in(tmp_path, steps=4000)
    folder = RunFolder(job)
    with launched(job, body) as ranks:
        until(lambda: len(list(folder.metrics())) > 3, "some steps")
        ranks[1].send_signal(signal.SIGTERM)  # to one only: the services pass it on
        results = ends(ranks)
    assert [code for code, _, _ in results] == [3, 3], results
    assert "stop_requested" in names(folder)
    assert names(folder)[-1] == "stopped"
    assert "stopped on request after step" in results[0][2]


def test_a_folder_of_another_job_is_said_by_every_rank(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    folder = RunFolder(job)
    folder.lock()
    folder.claim()
    folder.unlock()
    folder.metrics_file.write_text('{"step": 1}\n')
    other = job.model_copy(update={"train": job.train.model_copy(update={"seed": 7})})
    with launched(other, "member.close()") as ranks:
        results = ends(ranks)
    for code, _, err in results:
        assert code == 2
        assert "train.seed: 1234 -> 7" in err
        assert "--set run.name=r-2" in err


def test_a_missing_master_address_is_said_before_anything_starts(tmp_path: Path) -> None:
    with launched(job_in(tmp_path), "member.close()", MASTER_ADDR="") as ranks:
        results = ends(ranks)
    assert [code for code, _, _ in results] == [2, 2]
    assert "MASTER_ADDR is not set" in results[0][2]
    assert not (tmp_path / "r").exists()


def test_a_wrong_number_of_processes_is_said_before_anything_starts(tmp_path: Path) -> None:
    with launched(job_in(tmp_path, dp=3), "member.close()") as ranks:
        results = ends(ranks)
    assert [code for code, _, _ in results] == [2, 2]
    assert "2 processes; the layout has 3 ranks" in results[0][2]


def test_two_processes_with_one_rank_are_told_apart(tmp_path: Path) -> None:
    body = "while not os.path.exists(sys.argv[1] + '.refused'): time.sleep(0.02)\nmember.close()"
    with launched(job_in(tmp_path), body, seats=(0, 1, 1)) as ranks:
        results = ends(ranks)
    assert sorted(code for code, _, _ in results) == [0, 0, 2], results
    assert "rank 1 is here already" in results[1][2] + results[2][2]


def test_killed_ranks_leave_no_services_behind(tmp_path: Path) -> None:
    body = (
        "if member.services: open(sys.argv[1] + '.pid', 'w').write(str(member.services.pid))\nstep(1)\ntime.sleep(60)"
    )
    job = job_in(tmp_path)
    with launched(job, body, vault=True) as ranks:
        until(lambda: len(list(RunFolder(job).metrics())) == 1, "a step")
        until(lambda: (tmp_path / "job.toml.pid").read_text() != "", "the services")
        services = int((tmp_path / "job.toml.pid").read_text())
        for process in ranks:
            process.kill()
        until(lambda: not alive(services), "the end of the services", 20)
    RunFolder(job).lock()


def test_what_killed_services_left_is_cleared_by_the_next_launch(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    body = "if member.rank == 0: open(sys.argv[1] + '.place', 'w').write(str(member.agent.parent))\nmember.close()"
    launch = find_launch({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": "29999"})  # fmt: skip
    assert launch is not None
    place = host_place(launch, job)
    (place / "vstale").mkdir()
    with launched(job, body) as ranks:
        results = ends(ranks)
    assert [code for code, _, _ in results] == [0, 0], results
    assert (tmp_path / "job.toml.place").read_text() == str(place)
    assert not place.exists()
