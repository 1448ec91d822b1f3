"""The agent and fake ranks: records in order, deaths told from their consequences, stops, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from fake_ranks import ENDLESS, STEPS, AgentProcess, alive, job_in, options, until

from bessemer.core.errors import RequestError, RunFolderError
from bessemer.keep.agent import Options, run
from bessemer.keep.hub import Hub
from bessemer.keep.reception import RankState, Reception
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.wire import pack, short_temp_dir


def workplace(folder: RunFolder) -> Path:
    held = (folder.path / "lock").stat()
    name = hashlib.sha256(f"{held.st_dev}:{held.st_ino}".encode()).hexdigest()[:12]
    return short_temp_dir() / f"bessemer-{os.getuid()}" / name


def events(folder: RunFolder) -> list[str]:
    """Their names, but for those of the ranks' starts."""
    return [e["event"] for e in folder.events() if e["event"] != "rank_started"]


def test_records_arrive_in_order_and_the_run_finishes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = job_in(tmp_path)
    assert run(job, options("if member.rank == 0: member.event('loaded', step=0, path=None, why='new')\n" + STEPS)) == 0
    folder = RunFolder(job)
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3, 4, 5]
    assert events(folder) == ["start", "loaded", "finished"]
    start = next(folder.events())
    assert (start["job_hash"], start["identity"], start["world_size"]) == (job.hash, job.identity, 2)
    out = capfd.readouterr().out.splitlines()
    lines = [line.split() for line in out if line.lstrip().startswith(tuple("12345"))]
    assert [line[0] for line in lines] == [f"{n}/5" for n in range(1, 6)]
    assert lines[1][1:6] == ["4.0000", "1.5000", "3.00e-04", "10,000", "0.010"]


def test_ranks_get_the_environment_of_torchrun_and_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = job_in(tmp_path)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS GLOO_SOCKET_IFNAME BESSEMER_STORE BESSEMER_RUN"
    body = f"member.event('env', **{{n: os.environ.get(n) for n in {names.split()!r}}})\nmember.close()"
    assert run(job, options(body)) == 0
    seen = sorted((e for e in RunFolder(job).events() if e["event"] == "env"), key=lambda e: e["RANK"])
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, env in enumerate(seen):
        assert [env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
            str(rank),
            "2",
            str(rank),
            "2",
        ]
        assert env["OMP_NUM_THREADS"] == threads
        assert env["GLOO_SOCKET_IFNAME"] == "eth7"  # the user's own setting stays
        assert env["BESSEMER_RUN"] == str(tmp_path / "r")
        assert not Path(env["BESSEMER_STORE"]).exists()  # cleared at the end
    assert len(seen) == 2


def test_a_killed_rank_is_named_as_the_cause_although_another_complains_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
for n in range(1, 4): step(n)
if member.rank == 1:
    time.sleep(0.3)
    print("the last words of rank one", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(member.failed(RuntimeError("Connection closed by peer [127.0.0.1]:4242")))
"""
    job = job_in(tmp_path)
    assert run(job, options(body)) == 1
    folder = RunFolder(job)
    lost = [e for e in folder.events() if e["event"] == "rank_lost"]
    assert [(e["rank"], e["signal"], e["step"], e["phase"]) for e in lost] == [(1, "SIGKILL", 3, "forward")]
    failed = [e for e in folder.events() if e["event"] == "failed"]
    assert [(e["code"], e["rank"], e["step"]) for e in failed] == [("rank-lost", 1, 3)]
    err = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL" in err
    assert "the last words of rank one" in err
    assert "Connection closed" not in err
    assert "nothing is saved yet; 3 steps will be done again" in err
    assert f"bessemer train {tmp_path}/r/job.toml" in err


def test_an_exit_code_is_reported_with_the_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "step(1)\nif member.rank == 1: raise ZeroDivisionError('by nothing')\ntime.sleep(60)"
    job = job_in(tmp_path)
    assert run(job, options(body, grace_s=0.3)) == 1  # rank 0 never notices: it is ended after the grace
    lost = [e for e in RunFolder(job).events() if e["event"] == "rank_lost"]
    assert [(e["rank"], e["exit_code"]) for e in lost] == [(1, 1)]
    err = capfd.readouterr().err
    assert "rank 1 exited with code 1" in err
    assert "ZeroDivisionError: by nothing" in err


def test_a_rank_that_is_gone_before_its_hello_is_heard_does_no_harm(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "a")
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(str(tmp_path / "a"))
        rank.sendall(pack({"kind": "hello", "rank": 0}))
    reception = Reception({0: RankState(0)}, None, on_failed=lambda _: None, on_stop=lambda _: None)
    heard = [h for _ in range(2) for h in hub.poll(1.0)]
    assert [h.record is None for h in heard] == [False, True]
    for one in heard:
        reception.take(one)
    assert reception.ranks[0].link is not None
    hub.close()


def test_a_structured_failure_is_one_line_and_its_traceback_stays_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
step(1); step(2)
try:
    raise NonFinite("loss is nan; first bad tensor: layers.0.attn.q.weight", rank=0, step=2, fix="lower train.lr")
except Exception as error:
    sys.exit(member.failed(error))
"""
    job = job_in(tmp_path)
    assert run(job, options(body)) == 1
    err = capfd.readouterr().err
    assert "failed [non-finite] loss is nan; first bad tensor: layers.0.attn.q.weight (rank 0, step 2)" in err
    assert "-> lower train.lr" in err
    assert "bessemer train" not in err  # it would fail again
    assert "Traceback" not in err
    assert "NonFinite: loss is nan" in RunFolder(job).log_file(0).read_text()
    assert "rank_lost" not in events(RunFolder(job))


@pytest.mark.parametrize("kind", ["RequestError", "DataError"])
def test_a_wrong_request_found_by_a_rank_exits_2(tmp_path: Path, kind: str) -> None:
    body = f"from bessemer.core.errors import {kind}\nsys.exit(member.failed({kind}('no such', code='x')))"
    assert run(job_in(tmp_path), options(body)) == 2


def test_sigterm_lets_the_ranks_finish_and_exits_3(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=4000)
    folder = RunFolder(job)
    with AgentProcess(job, ENDLESS) as agent:
        until(lambda: len(list(folder.metrics())) > 3, "some steps")
        agent.signal(signal.SIGTERM)
        code, _, err = agent.end()
    assert code == 3, err
    last = max(m["step"] for m in folder.metrics())
    assert [e.get("signal") for e in folder.events() if e["event"] == "stop_requested"] == ["SIGTERM"]
    assert events(folder)[-2:] == ["save", "stopped"]
    assert f"stopped on request after step {last} of 4000" in err
    assert f"bessemer train {folder.job_file}" in err


def test_a_signal_to_one_rank_stops_the_whole_run(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=4000)
    folder = RunFolder(job)
    with AgentProcess(job, ENDLESS) as agent:
        until((folder.path / "pid-1").exists, "the second rank")
        until(lambda: len(list(folder.metrics())) > 3, "some steps")
        os.kill(int((folder.path / "pid-1").read_text()), signal.SIGTERM)
        code, _, err = agent.end()
    assert code == 3, err
    assert "stop_requested" in events(folder)


def test_a_rank_that_hangs_after_the_stop_is_killed_and_it_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
step(1)
if member.rank == 0: os.kill(os.getppid(), signal.SIGTERM)
if member.rank == 1:
    time.sleep(60)
while not member.stop_requested: time.sleep(0.01)
sys.exit(member.failed(Stopped("on request")))
"""
    job = job_in(tmp_path)
    assert run(job, options(body, stop_s=1.0)) == 1
    assert "did not finish and save within 1 s of the stop" in capfd.readouterr().err
    assert events(RunFolder(job))[-1] == "failed"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    body = "step(1)\nopen(os.environ['BESSEMER_RUN'] + '/up', 'w').close()\ntime.sleep(60)"
    job = job_in(tmp_path)
    with AgentProcess(job, body) as agent:
        until((tmp_path / "r/up").exists, "the ranks")
        agent.signal(signal.SIGINT)
        until(lambda: "stop_requested" in events(RunFolder(job)), "the first wish")
        until(lambda: agent.process.poll() is None, "life after the first wish")
        time.sleep(0.6)  # closer than half a second they would be one wish
        agent.signal(signal.SIGINT)
        code, _, err = agent.end(10)
    assert code == 1
    assert "a second signal (SIGINT)" in err
    assert "nothing is saved yet" in err


def test_a_stop_before_the_ranks_are_up_reaches_them_at_their_hello(tmp_path: Path) -> None:
    body = ENDLESS.replace("n < 3000", "n < 50")
    slow = "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getppid(), 15)\ntime.sleep(0.3)\n"
    job = job_in(tmp_path)
    given = options(body)
    assert run(job, Options(command=(*given.command[:2], slow + given.command[2]), vault=None)) == 3
    assert len(list(RunFolder(job).metrics())) < 50


def test_a_second_start_is_refused_and_names_the_first(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=4000)
    with AgentProcess(job, ENDLESS) as agent:
        until(lambda: len(list(RunFolder(job).metrics())) > 0, "a step")
        with pytest.raises(RunFolderError, match=f"in use by process {agent.process.pid} ") as caught:
            run(job, options(STEPS))
        assert f"`kill {agent.process.pid}`" in caught.value.fix
        assert caught.value.exit_code == 2
        agent.signal()
        assert agent.end()[0] == 3  # the refused start did it no harm


def test_kill_9_of_the_agent_leaves_no_process_and_no_lock(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=4000)
    folder = RunFolder(job)
    with AgentProcess(job, ENDLESS) as agent:
        until(lambda: (folder.path / "pid-0").exists() and (folder.path / "pid-1").exists(), "both ranks")
        until(lambda: len(list(folder.metrics())) > 3, "some steps")
        pids = [int((folder.path / f"pid-{rank}").read_text()) for rank in (0, 1)]
        agent.signal(signal.SIGKILL)
        agent.end()
        until(lambda: not any(alive(pid) for pid in pids), "the end of the ranks", 10)
    left = workplace(folder)
    assert left.exists()  # nobody could clear it; the next start of the run does
    assert run(job.model_copy(update={"train": job.train}), options(STEPS)) == 0
    assert [e["attempt"] for e in folder.events() if e["event"] == "start"] == [1, 2]
    assert not left.exists()


def test_a_run_whose_folder_was_deleted_keeps_its_sockets(tmp_path: Path) -> None:
    """Started again under the same name, a run must not clear the directory of the one that still goes on."""
    job = job_in(tmp_path, steps=4000)
    folder = RunFolder(job)
    with AgentProcess(job, ENDLESS) as agent:
        until(lambda: len(list(folder.metrics())) > 3, "some steps")
        first = workplace(folder)
        folder.path.rename(tmp_path / "gone")  # at once: the run still makes files while others are removed
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        assert run(job.model_copy(update={"train": job.train}), options(STEPS)) == 0
        assert first.exists()
        agent.signal(signal.SIGKILL)
        agent.end()
    shutil.rmtree(first)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    body = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(os.environ["BESSEMER_RUN"] + "/child", "w") as file: file.write(str(child.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(job_in(tmp_path, dp=1), options(body)) == 1
    until(lambda: not alive(int((tmp_path / "r/child").read_text())), "the end of the grandchild", 10)


def test_the_resumed_step_cuts_the_metrics_back_and_keeps_the_events(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert run(job, options(STEPS)) == 0
    body = (
        "if member.rank == 0: member.event('loaded', step=3, path='p', why='newest')\nstep(4, again=1)\nmember.close()"
    )
    assert run(job, options(body)) == 0
    folder = RunFolder(job)
    assert [(m["step"], m.get("again")) for m in folder.metrics()] == [(1, None), (2, None), (3, None), (4, 1)]
    assert events(folder) == ["start", "finished", "start", "cut", "loaded", "finished"]


def test_a_record_that_makes_no_sense_is_a_warning_and_no_more(tmp_path: Path) -> None:
    body = "member._send({'kind': 'metric'}); member._send({'kind': 'what'})\nstep(1)\nmember.close()"
    job = job_in(tmp_path, dp=1)
    assert run(job, options(body)) == 0
    warnings = [e["message"] for e in RunFolder(job).events() if e["event"] == "warning"]
    assert len(warnings) == 2
    assert len(list(RunFolder(job).metrics())) == 1


def test_a_wrong_number_of_processes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="3 processes were asked for, but the layout has 2 ranks"):
        run(job_in(tmp_path), Options(nproc=3))
    assert not (tmp_path / "r").exists()


def test_a_command_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'/no/such/thing' can't be run: No such file"):
        run(job_in(tmp_path), Options(command=("/no/such/thing",), vault=None))


def test_tensorboard_files_on_request(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    job = job_in(tmp_path, tensorboard=True)
    assert run(job, options("if member.rank == 0: member.event('loaded', step=0)\n" + STEPS)) == 0
    (file,) = (tmp_path / "r/tensorboard").iterdir()
    loss = {}
    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.tag == "loss":
                loss[event.step] = value.simple_value
    assert loss == pytest.approx({n: 8.0 / n for n in range(1, 6)})


def test_metrics_lines_are_json_even_for_nan(tmp_path: Path) -> None:
    job = job_in(tmp_path, dp=1)
    assert run(job, options("member.metric({'step': 1, 'loss': float('nan')})\nmember.close()")) == 0
    assert json.loads((tmp_path / "r/metrics.jsonl").read_text())["loss"] is None
