"""Ranks of another launcher that can't meet: all of them end soon, and say why."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from fake_ranks import job_in, until
from test_member_join import ends, launched, names

from bessemer.core.errors import PeerLost
from bessemer.keep import join
from bessemer.keep.launch import Launch
from bessemer.keep.member import Member
from bessemer.keep.run_folder import RunFolder

MEET = """
from bessemer.keep.join import rendezvous
try:
    open(sys.argv[1] + f".{member.rank}", "w").close()
    rendezvous(member)
except BaseException as error:
    sys.exit(member.failed(error))
"""


def test_all_ranks_end_soon_when_another_program_has_the_port(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with launched(job, MEET, MASTER_PORT=port) as ranks:
            results = ends(ranks)
    assert [code for code, _, _ in results] == [2, 2], results
    said = f"port {port} of this host is in use by another program, so rank 0 can't meet the others there (rank 0)"
    assert all(said in err for _, _, err in results), results
    folder = RunFolder(job)
    folder.lock(10.0)  # the services have ended, or do so now
    folder.unlock()
    failed = [e for e in folder.events() if e["event"] == "failed"]
    assert [(e["code"], e["rank"]) for e in failed] == [("port-in-use", 0)]


def test_a_stop_reaches_ranks_that_still_wait_for_each_other(tmp_path: Path) -> None:
    wait = "while member.rank == 0 and not member.stop_requested: time.sleep(0.02)\n"
    job = job_in(tmp_path)
    with launched(job, wait + MEET) as ranks:
        until((tmp_path / "job.toml.1").exists, "the rank that waits for rank 0")
        ranks[1].send_signal(signal.SIGTERM)
        results = ends(ranks)
    assert [code for code, _, _ in results] == [3, 3], results
    assert names(RunFolder(job)) == ["start", "stop_requested", "stopped"]


def test_ranks_that_do_not_meet_in_time_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "RENDEZVOUS_S", 1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as unused:  # bound and not listening: nobody answers there
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(unused.getsockname()[1]))
        member = Member(Launch(launcher="env", rank=1, world_size=2, local_rank=0, local_world_size=1))
        with pytest.raises(PeerLost, match=r"did not meet at 127\.0\.0\.1 port") as caught:
            join.rendezvous(member)
    assert caught.value.code == "ranks-not-met"
    assert "MASTER_ADDR=127.0.0.1" in caught.value.fix
