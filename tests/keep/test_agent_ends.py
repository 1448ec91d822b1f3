"""How an attempt ends in the cases that people meet: stopped early, a refused checkpoint, a full disk, a lost vault."""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path

import pytest
from fake_ranks import ENDLESS, STEPS, AgentProcess, job_in, options, until

from bessemer.core.errors import DataError, PeerLost
from bessemer.keep.agent import Options, run
from bessemer.keep.progress import Printer
from bessemer.keep.records import RecordWriter
from bessemer.keep.run_folder import RunFolder

PREPARE = """
import pathlib, time
def prepare(printer):
    pathlib.Path({note!r}).touch()
    try:
        time.sleep(60)
    except Exception:
        raise SystemExit("a handler of errors took the wish to stop for one")
"""


def events(folder: RunFolder) -> list[str]:
    return [e["event"] for e in folder.events() if e["event"] != "rank_started"]


def checkpoint(folder: RunFolder, step: int) -> Path:
    """What counts as a checkpoint before anybody verifies it."""
    path = folder.checkpoints / f"step-{step}"
    path.mkdir(parents=True)
    (path / "manifest.json").touch()
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_data_is_prepared_is_a_stop(tmp_path: Path, number: signal.Signals) -> None:
    job = job_in(tmp_path)
    folder = RunFolder(job)
    with AgentProcess(job, STEPS, prepare=PREPARE.format(note=str(tmp_path / "up"))) as agent:
        until((tmp_path / "up").exists, "the preparation")
        agent.signal(number)
        code, _, err = agent.end(20)
    assert code == 3, err
    assert events(folder) == ["start", "stop_requested", "stopped"]
    assert [e["signal"] for e in folder.events() if e["event"] == "stop_requested"] == [number.name]
    assert "stopped on request while the data was prepared" in err
    assert f"-> bessemer train {folder.job_file}" in err
    assert run(job, options(STEPS)) == 0, "the folder is free again"


def test_a_refused_checkpoint_is_not_announced_as_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = job_in(tmp_path, dp=1)
    folder = RunFolder(job)
    checkpoint(folder, 12)
    body = """
from bessemer.core.errors import CheckpointError
sys.exit(member.failed(CheckpointError("none can be used", code="checkpoint-none", fix="put back a copy")))
"""
    assert run(job, options(body)) == 1
    assert events(folder) == ["start", "failed"]
    out, err = capfd.readouterr()
    assert "failed [checkpoint-none] none can be used" in err
    assert "saved" not in out + err


def test_the_closing_words_name_what_was_loaded_and_not_the_newer_one_that_was_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_in(tmp_path, dp=1)
    folder = RunFolder(job)
    loaded, _ = checkpoint(folder, 8), checkpoint(folder, 12)
    body = f"member.event('loaded', step=8, path={str(loaded)!r})\nstep(9)\nos.kill(os.getpid(), signal.SIGKILL)"
    assert run(job, options(body)) == 1
    assert "saved" not in events(folder)
    assert "saved up to step 8 in" in capfd.readouterr().err


def test_a_checkpoint_in_the_place_of_a_damaged_one_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = job_in(tmp_path, dp=1)
    folder = RunFolder(job)
    loaded, damaged = checkpoint(folder, 8), checkpoint(folder, 12)
    body = f"member.event('loaded', step=8, path={str(loaded)!r})\nfor n in range(9, 13): step(n)\n"
    body += f"open({str(damaged / 'new')!r}, 'w').close(); os.rename({str(damaged / 'new')!r}, "
    body += f"{str(damaged / 'manifest.json')!r})\nos.kill(os.getpid(), signal.SIGKILL)"
    assert run(job, options(body)) == 1
    assert [e["step"] for e in folder.events() if e["event"] == "saved"] == [12]
    assert "saved up to step 12 in" in capfd.readouterr().err


def test_a_failure_is_told_although_the_log_is_on_a_full_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
import errno, io
from pathlib import Path
from unittest import mock
from bessemer.keep.records import write_atomically
sys.stderr = open("/dev/full", "w", buffering=1)
try:
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        write_atomically(Path(os.environ["BESSEMER_RUN"]) / "tokenizer.json", "{}")
except Exception as error:
    code = member.failed(error)
    os._exit(code)
"""
    assert run(job_in(tmp_path, dp=1), options(body)) == 1
    err = capfd.readouterr().err
    assert "failed [disk-full] no space left for" in err
    assert "-> free space on its disk: `df -h " in err


def test_a_vault_that_ends_in_order_while_ranks_run_is_told_with_its_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vault = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[sys.argv.index("--socket") + 1]); s.listen()
time.sleep(0.3)
"""
    job = job_in(tmp_path, dp=1)
    folder = RunFolder(job)
    given = options("time.sleep(1.0)\nmember.close()")
    assert run(job, Options(command=given.command, vault=(sys.executable, "-c", vault))) == 0
    (told,) = [e["message"] for e in folder.events() if e["event"] == "warning"]
    assert told == f"nothing is saved any more: the vault exited with code 0; its log: {folder.path}/logs/vault.log"
    assert told in capfd.readouterr().out


def test_events_of_the_vault_death_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    vault = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[sys.argv.index("--socket") + 1]); s.listen()
time.sleep(0.3); sys.exit(9)
"""
    given = options("step(1)\ntime.sleep(1.0)\nmember.close()")
    job = job_in(tmp_path, dp=1)
    code = run(job, Options(command=given.command, vault=(sys.executable, "-c", vault), timeouts=given.timeouts))
    assert code == 1
    assert any("the vault exited with code 9" in e.get("message", "") for e in RunFolder(job).events())
    assert "the vault exited with code 9" in capfd.readouterr().err


def test_a_full_disk_stops_the_run_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = RecordWriter.write

    def full(self: RecordWriter, record: dict[str, object]) -> None:
        if record.get("step") == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, record)

    monkeypatch.setattr(RecordWriter, "write", full)
    job = job_in(tmp_path, dp=1, steps=4000)
    assert run(job, options(ENDLESS)) == 1
    assert [m["step"] for m in RunFolder(job).metrics()] == [1, 2]  # no hole: nothing after the line that failed
    assert "can't be written: No space left on device" in capfd.readouterr().err


def test_a_vault_that_does_not_start_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    given = options(STEPS)
    job = job_in(tmp_path)
    vault = (sys.executable, "-c", "print('no room'); raise SystemExit(4)")
    with pytest.raises(PeerLost, match=r"the vault exited with code 4[^|]*\| no room"):
        run(job, Options(command=given.command, vault=vault, timeouts=given.timeouts))
    assert events(RunFolder(job)) == ["start", "failed"]
    folder = RunFolder(job)
    folder.lock()
    folder.unlock()


def test_a_checkpoint_that_outlived_its_rank_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
for n in range(1, 5):
    step(n)
    if n == 1: member.event("saved", step=1, path="one")
    if n == 3:
        os.makedirs(os.environ["BESSEMER_RUN"] + "/checkpoints/step-3")
        open(os.environ["BESSEMER_RUN"] + "/checkpoints/step-3/manifest.json", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""
    job = job_in(tmp_path, dp=1)
    assert run(job, options(body)) == 1
    told = [e for e in RunFolder(job).events() if e["event"] == "saved"]
    assert [(e["step"], e["path"]) for e in told] == [(1, "one"), (3, str(tmp_path / "r/checkpoints/step-3"))]
    assert "saved up to step 3 in" in capfd.readouterr().err


def test_what_comes_before_the_ranks_may_fail_and_is_recorded(tmp_path: Path) -> None:
    def prepare(printer: Printer) -> None:
        printer.line("data", "reading", "cyan")
        raise DataError("the corpus is gone", code="corpus-empty")

    job, given = job_in(tmp_path), options(STEPS)
    with pytest.raises(DataError, match="the corpus is gone"):
        run(job, Options(command=given.command, vault=None, prepare=prepare))
    assert events(RunFolder(job)) == ["start", "failed"]
    assert run(job, given) == 0, "the folder is free again"
