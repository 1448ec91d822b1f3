"""`bessemer takeoff` as a whole: ranks of this host, two hosts of a launcher, and faults that are put in."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from rich.console import Console
from takeoff_fleets import fleet, slower, with_host, with_rank

from bessemer.api import _takeoff
from bessemer.api._check import check as check_job
from bessemer.core.errors import ConfigError, RequestError
from bessemer.inspect import takeoff, takeoff_local, takeoff_worker
from bessemer.inspect.takeoff import Takeoff, hosts_text, summary
from bessemer.inspect.takeoff_local import Effort, effort_of, merged
from bessemer.inspect.takeoff_records import Fleet, Request
from bessemer.inspect.takeoff_rules import Floors, judge
from bessemer.inspect.takeoff_verdict import verdict_of
from bessemer.inspect.takeoff_worker import Site
from bessemer.keep.launch import Launch
from bessemer.runtime.known_answer import Burn

TINY = Effort(("fp32", "bf16"), 2, 0.0, 1 << 20, 1 << 16, 0.0, 1 << 16, 64)


def _judged(of: Fleet, places: int | None = None) -> Takeoff:
    findings = judge(of, {}, Floors())
    return Takeoff(of, verdict_of([state.host for state in of.hosts], findings, places))


# ---- ranks that find things out


def _leave_group() -> None:
    """The ranks of tests come with a group, and a check makes its own. None leaves before all have come."""
    dist.barrier()
    dist.destroy_process_group()


def check_with(rank: int, world_size: int, folder: str, fault: str, hosts: int) -> str | None:
    """One rank's whole check, tiny, with a fault in the last rank."""
    takeoff_worker.GROUP_S = 20.0
    takeoff_worker.effort_of = takeoff_local.effort_of = lambda request: TINY  # type: ignore[assignment]
    takeoff_local._SIZES["cpu"] = 64
    _leave_group()
    last = rank == world_size - 1
    if fault == "bit" and last:
        sound = torch.mm
        torch.mm = lambda a, b: sound(a, b).index_fill_(0, torch.tensor([3]), 7.0)  # type: ignore[assignment]
    if fault == "message" and last:
        sound_content = takeoff_worker.measure_pairs.__globals__["_content"]
        takeoff_worker.measure_pairs.__globals__["_content"] = lambda *given: sound_content(*given).neg_()
    if fault == "silent" and last:
        return None
    if fault == "version" and last:
        takeoff_local.torch_versions = lambda: {"torch": "1.0"}  # type: ignore[assignment]
    per_host = world_size // hosts
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    site = Site(
        store, rank, world_size, rank % per_host, per_host, Path(folder), join_s=3.0 if fault == "silent" else 90.0
    )
    request = Request(run_folder=folder)
    found = takeoff_worker.check(request, site)
    return None if found is None else found.model_dump_json()


def _checked(world_size: int, folder: Path, fault: str = "", hosts: int = 1) -> Fleet:
    text = run_ranks(world_size, check_with, str(folder), fault, hosts, timeout_s=100.0)[0]
    return Fleet.model_validate_json(text)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_sound_hosts(tmp_path: Path) -> None:
    of = _checked(3, tmp_path, hosts=3)
    name = socket.gethostname()
    assert [state.host for state in of.hosts] == [f"{name}/0", f"{name}/1", f"{name}/2"]
    assert {(p.a, p.b) for p in of.pairs} == {(0, 1), (0, 2), (1, 2)} and of.rounds == (3, 3)
    assert len(of.collectives) == 9 and not any(found.fault for found in of.collectives)
    checksums = {p.key: {q.checksum for r in of.ranks for q in r.products if q.key == p.key}
                 for p in of.ranks[0].products}  # fmt: skip
    assert len(checksums) == 2 and all(len(found) == 1 for found in checksums.values())
    assert of.hosts[0].clock_s == 0.0 and all(abs(state.clock_s or 0.0) < 60.0 for state in of.hosts)
    assert not of.silent and not of.errors
    told = judge(of, {}, Floors())
    # times are this computer's, and others may use it: what isn't a time must be sound
    assert not [f for f in told if f.check in ("answer", "version", "silent", "exchange", "collective", "link")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("bit", "answer", "whole numbers:"),
        ("message", "pair", "came back changed"),
        ("version", "version", "torch 1.0"),
    ],
)
def test_a_fault_in_one_of_two_hosts_is_found(tmp_path: Path, fault: str, check: str, words: str) -> None:
    of = _checked(2, tmp_path, fault, hosts=2)
    told = [f for f in judge(of, {}, Floors()) if f.bad and f.check == check]
    assert {f.host for f in told} == {of.hosts[1].host} and words in told[0].what


@pytest.mark.timeout(240)
def test_a_rank_that_gives_no_answer_is_named_and_nothing_waits_for_it(tmp_path: Path) -> None:
    of = _checked(2, tmp_path, "silent", hosts=2)
    assert of.silent == {1: "it never came"} and not of.pairs
    assert _judged(of).verdict.bad == (of.hosts[1].host,) and of.hosts[1].host == "host-of-rank-1"
    assert "rank 1 gave no answer: it never came" in "\n".join(summary(_judged(of)))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_of_this_host_that_is_killed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: int
) -> None:
    (tmp_path / "dying_worker.py").write_text(
        "import os, signal, sys\n"
        "from bessemer.inspect import takeoff_worker\n"
        f"if sys.argv[-1] == '{last}':\n"
        "    print('the last words', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
        "sys.exit(takeoff_worker.main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(takeoff, "_WORKER", "dying_worker")
    of = takeoff.check_this_host(Request(run_folder=str(tmp_path)), 2)
    assert "was killed by SIGILL" in of.silent[last] and "the last words" in of.silent[last]
    assert _judged(of).verdict.bad == (socket.gethostname(),) and _judged(of).exit_code == 4
    assert _printed(_judged(of))


def test_slices_of_a_format_become_one_record() -> None:
    burn = Burn("fp32", 64, 10, 100.0, 110.0, 90.0, "aa", "")
    later = dataclasses.replace(burn, rate=80.0, rate_start=85.0, rate_end=70.0)
    whole = merged([burn, dataclasses.replace(burn, rate=95.0), later], "key")
    assert (whole.rate, whole.rate_start, whole.rate_end, whole.repetitions) == (95.0, 110.0, 70.0, 30)
    assert merged([burn, dataclasses.replace(later, fault="a bit")], "key").fault == "a bit"


def test_a_burn_in_takes_its_minutes() -> None:
    for minutes in (1.0, 30.0):
        effort = effort_of(Request(minutes=minutes))
        assert 0.8 * 60 * minutes < effort.seconds < 60 * minutes and effort.cycles >= 2 and effort.rounds > 10_000
    assert effort_of(Request()).seconds < 5


# ---- before training


def train_with(rank: int, world_size: int, port: int, name: str, fault: str) -> tuple[int, float, str]:
    """Its code, the sum of a group that meets at the same port behind it, as training does, and what it printed."""
    _leave_group()
    takeoff_worker.effort_of = takeoff_local.effort_of = lambda request: TINY  # type: ignore[assignment]
    takeoff_local._SIZES["cpu"] = 64
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    host = name.format(rank=rank)
    socket.gethostname = lambda: host  # type: ignore[assignment]
    if fault and rank == 1:
        takeoff_local.torch_versions = lambda: {"torch": fault}  # type: ignore[assignment]
    checked = check_job(os.devnull, ["layout.dp=2", f"data.cache={tempfile.gettempdir()}/none-{port}"])
    assert checked.job is not None and checked.spec is not None, checked
    launch = Launch(launcher="env", rank=rank, world_size=world_size, local_rank=0, local_world_size=1)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code, kept = _takeoff.before_training(checked.job, checked.spec, launch)
    store = next(dist.rendezvous("env://", rank, world_size))[0]  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert kept is not None
    return code, float(total), said.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "fault", "code", "checked"),
    [("node{rank}", "1.0", 4, True), ("node", "1.0", 0, False)],
)
def test_several_hosts_are_checked_before_training_and_meet_again(
    name: str, fault: str, code: int, checked: bool
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    found = run_ranks(2, train_with, port, name, fault)
    assert [end[:2] for end in found] == [(code, 2.0)] * 2
    said = "".join(end[2] for end in found)
    assert said.count("take-off: 2 hosts, 2 ranks") == int(checked)
    assert ("node1: version: torch 1.0" in said) == (code == 4)


def test_one_host_is_not_checked_and_a_job_may_say_never() -> None:
    checked = check_job(os.devnull, ["layout.dp=2"])
    assert checked.job is not None and checked.spec is not None
    one = Launch(launcher="env", rank=0, world_size=2, local_rank=0, local_world_size=2)
    assert _takeoff.before_training(checked.job, checked.spec, one) == (0, None)
    assert _takeoff.before_training(checked.job, checked.spec, None) == (0, None)
    never = check_job(os.devnull, ["layout.dp=2", "run.takeoff=never"]).job
    two = dataclasses.replace(one, local_world_size=1)
    assert never is not None and _takeoff.before_training(never, checked.spec, two) == (0, None)


# ---- what is printed


def _printed(takeoff: Takeoff, width: int = 80) -> str:
    console = Console(width=width, no_color=True, highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(takeoff)
    return capture.get()


def test_the_report_fits_in_a_hundred_columns_and_says_what_is_bad() -> None:
    of = with_rank(fleet(40, rounds=4), 7, slower(0.9))
    of = with_host(of, 39, clock_s=2.0)
    text = _printed(_judged(of, places=36))
    lines = text.splitlines()
    assert lines[0] == "take-off: 40 hosts, 40 ranks, short, 0.00 us"
    assert max(len(line) for line in lines if not line.startswith(("bad:", "verdict:"))) <= 100
    assert "bad: node007: rate: rank 7: products at 0.9" in text
    assert "verdict: 2 bad hosts (node007, node039), 38 good" in text and "node007 -> node036, a spare" in text
    rows = [line.split() for line in lines if line.startswith("node")]
    assert len(rows) == 32 and [row[-1] for row in rows].count("bad") == 2, "no row is broken at 80 columns"
    assert "... 8 more" in text and "node039" in text, "bad hosts are among those that are listed"


def test_json_and_exit_codes() -> None:
    good, bad = _judged(fleet(4)), _judged(with_rank(fleet(8), 1, slower(0.8)))
    assert (good.exit_code, bad.exit_code) == (0, 4)
    told = json.loads(json.dumps(bad.as_json()))
    assert told["verdict"]["bad"] == ["node001"] and not told["verdict"]["ok"]
    assert told["verdict"]["findings"][0]["severity"] == "bad" and len(told["ranks"]) == 8
    assert hosts_text(bad.verdict) == "".join(f"node00{at}\n" for at in (0, 2, 3, 4, 5, 6, 7))
    assert summary(good)[0].startswith("take-off: 4 hosts, 4 ranks, all good")


# ---- the verb


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No launcher, and a cache of its own."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_takeoff, "DEFAULT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"minutes": 0.0}, "takeoff-number"),
        ({"ranks": -1}, "takeoff-number"),
        ({"rounds": 2}, "takeoff-patrol"),
        ({"history": "x"}, "takeoff-patrol"),
        ({"sets": ["train.steps=1"]}, "no-job"),
    ],
)
def test_wrong_requests(alone: Path, given: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        _takeoff.takeoff(**given)
    assert caught.value.code == code and caught.value.fix


def test_a_job_with_problems_is_refused(alone: Path) -> None:
    job = alone / "job.toml"
    job.write_text("[train]\nglobal_batch = 7\n")
    with pytest.raises(ConfigError, match="batch-split"):
        _takeoff.takeoff(str(job))


def test_a_job_gives_the_request(alone: Path) -> None:
    job = alone / "job.toml"
    job.write_text(
        f'[run]\ndir = "{alone}"\n[layout]\ndp = 4\n[train]\nmicro_batch = 4\n[machine]\ngpus_per_node = 2\n'
    )
    asked = _takeoff._asked(str(job), ["train.steps=400"], None, None)
    assert (asked.places, asked.ranks, asked.request.run_folder) == (2, 2, str(alone / "run"))
    assert asked.request.need_bytes == 4 * 12 * 5_770_496, "four checkpoints of parameters and two moments in float32"
    for sets, checkpoints in ((["train.steps=90"], 2), (["train.steps=400", "keep.every=0"], 1),
                              (["train.steps=400", "keep.keep_every=200"], 6)):  # fmt: skip
        need = _takeoff._asked(str(job), sets, None, None).request.need_bytes
        assert need == checkpoints * 12 * 5_770_496, sets
    assert len(asked.request.facts["job"]) == 16


def test_a_patrol_takes_a_host_out_and_puts_it_back(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = iter([False, True, True, False, False, False])
    monkeypatch.setattr(
        _takeoff, "check_this_host", lambda request, ranks: with_rank(fleet(8), 5, slower(0.8 if next(slow) else 1.0))
    )
    ended = _takeoff.takeoff(
        patrol=True, rounds=5, every=1e-6, history=str(alone / "h"), hosts_file=str(alone / "hosts")
    )
    lines = capsys.readouterr().err.splitlines()
    assert [("out of service: node005" in line) for line in lines] == [False, False, True, True, True]
    assert ended.exit_code == 0 and ended.verdict.bad == ("node005",)
    assert (alone / "hosts").read_text().split() == [f"node00{at}" for at in (0, 1, 2, 3, 4, 6, 7)]
    _takeoff.takeoff(patrol=True, rounds=1, history=str(alone / "h"))
    assert "out of service" not in capsys.readouterr().err, "three good results in a row"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_checks_this_host(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'[run]\ndir = "{tmp_path}"\n[layout]\ndp = 2\n[data]\ncache = "{tmp_path}/cache"\n')
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "bessemer.cli", "takeoff", str(job), "--json", "--hosts-file", str(tmp_path / "h")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"]["ok"] and len(told["ranks"]) == 2 and len(told["collectives"]) == 9
    assert (tmp_path / "h").read_text() == f"{socket.gethostname()}\n"
    stored = json.loads((tmp_path / "cache" / "takeoff" / "checksums.json").read_text())
    assert len(stored) == 4
    assert not list(tmp_path.glob(".takeoff-*")) and not (tmp_path / "run").exists()
