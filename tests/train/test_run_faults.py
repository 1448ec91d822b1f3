"""Whole runs, with their agent, in which what isn't a rank fails: the process of the memory checkpoints, and the disk.

A full disk is a file system of a few megabytes in memory (needs root), which the run has for itself until something
else fills it; and, everywhere, a vault that can't write more than a few bytes to any file."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disks import fill_up
from train.loops import small_job

from bessemer.core.job import Job
from bessemer.data import prepare
from bessemer.inspect.chaos_target import child_running
from bessemer.keep import vault_host
from bessemer.keep.agent import Options, run
from bessemer.keep.checkpoint import CheckpointFolder
from bessemer.keep.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 30
RANK = """
import sys, time
from pathlib import Path
from bessemer.train import elastic, leader_saver, worker

place, *dues = sys.argv[1:]

def come_to(at):
    Path(place).write_text(str(at))
    for due in dues:
        while at == int(due) and not Path(f"{place}-{due}").exists():
            time.sleep(0.01)

def slowly(whole):
    def step(self, at, batches):
        time.sleep(0.1)
        come_to(at)
        return whole(self, at, batches)
    return step

def at_the_end(whole):
    def wait(self):
        found = whole(self)
        come_to(STEPS)
        return found
    return wait

elastic.ElasticLoop._step = slowly(elastic.ElasticLoop._step)
leader_saver.LeaderSaver.wait = at_the_end(leader_saver.LeaderSaver.wait)
sys.exit(worker.main())
"""


IMPATIENT = """
from bessemer.train import leader_saver

leader_saver._SAVE_PATIENCE_S = leader_saver._LAST_PATIENCE_S = 1.0
"""
VAULT = """
import sys
from pathlib import Path

started = Path(sys.argv.pop(1))
if started.exists():
    sys.exit(3)
started.touch()
from bessemer.keep import vault

sys.exit(vault.main())
"""


def _job(folder: Path, restarts: int = 0, **sections: dict[str, Any]) -> Job:
    """Two groups that save every fourth step, on disk, and every step in memory."""
    keep = {"every": 4, "memory_every": 1, "mode": "zero-interruption", "sums": "exact", "restarts": restarts}
    job = small_job(folder, layout={"dp": 2}, train={"steps": STEPS}, keep=keep, data={"val_fraction": 0.0}, **sections)
    prepare(job)
    return job


def _run(
    job: Job, folder: Path, *acts: tuple[int, Callable[[], None]], rank: str = RANK, vault: Sequence[str] | None = None
) -> int:
    """The exit code of the run. Each act comes while ranks are at that step (from 0), in order: they wait for it. At
    STEPS a rank has nothing more to save."""
    script, at = folder / "rank.py", folder / "at"
    script.write_text(rank.replace("STEPS", str(STEPS)))
    dues = [str(due) for due, _ in acts]
    over = threading.Event()

    def step() -> int:
        text = at.read_text() if at.exists() else ""
        return int(text or -1)

    def act() -> None:
        for due, what in acts:
            while step() < due and not over.is_set():
                time.sleep(0.01)
            if not over.is_set():
                what()
                Path(f"{at}-{due}").touch()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        options = Options(command=(sys.executable, str(script), str(at), *dues), quiet=True)
        return run(job, options if vault is None else replace(options, vault=tuple(vault)))
    finally:
        over.set()
        thread.join()


def _vault(but: int = -1, name: str = "bessemer.keep.vault") -> int:
    """Its process; but: of one that is gone, so that another is to come; name: a word of its command."""
    deadline = time.monotonic() + 60
    while (pid := child_running(os.getpid(), name)) in (None, but):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pid is not None
    return pid


def _events(job: Job, name: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder(job).events() if event["event"] == name]


def _assert_whole(job: Job) -> None:
    """No step is missing from the records, nobody was lost, and the end is saved."""
    assert [metric["step"] for metric in RunFolder(job).metrics()] == list(range(1, STEPS + 1))
    assert not _events(job, "rank_lost") and not _events(job, "coordinator_lost")
    found = CheckpointFolder(job.run.folder / "checkpoints").newest_verified()
    assert found.checkpoint is not None and found.checkpoint.step == STEPS
    assert [e["event"] for e in RunFolder(job).events()][-1] == "finished"


def test_the_memory_checkpoints_process_dies(tmp_path: Path) -> None:
    """The groups go on; another one is started, and takes the saves from then on."""
    job = _job(tmp_path)
    assert _run(job, tmp_path, (6, lambda: os.kill(_vault(), signal.SIGKILL))) == 0
    _assert_whole(job)
    assert any("another is started" in event["message"] for event in _events(job, "warning"))
    assert [e["step"] for e in _events(job, "saved")][-1] == STEPS


def test_the_vault_dies_again_and_again_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is followed by another as often as it takes. One that is stopped would have a save wait for it."""
    monkeypatch.setattr(vault_host, "PAUSES_S", (0.0,))
    job, last = _job(tmp_path), -1

    def strike(number: signal.Signals) -> Callable[[], None]:
        def act() -> None:
            nonlocal last
            last = _vault(last)
            os.kill(last, number)

        return act

    acts = [(step, strike(signal.SIGKILL)) for step in (3, 6, 9)] + [(14, strike(signal.SIGSTOP))]
    assert _run(job, tmp_path, *acts) == 0
    _assert_whole(job)
    told = [event["message"] for event in _events(job, "warning") if "another is started" in event["message"]]
    assert len(told) == 4 and "was stopped for 1.5 s and ended" in told[-1], told


def test_a_vault_comes_for_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No group is held up for longer than a save may wait while none comes, and none is lost; where no other save
    follows, it doesn't keep one waiting for its time."""
    monkeypatch.setattr(vault_host, "PAUSES_S", (600.0,))
    job = _job(tmp_path)
    assert _run(job, tmp_path, (21, lambda: os.kill(_vault(), signal.SIGKILL))) == 0
    _assert_whole(job)
    told = [event["message"] for event in _events(job, "warning")]
    assert [text for text in told if "another is started in 600 s" in text]
    assert [int(text.split()[1]) for text in told if "is not saved" in text][:2] == [24, 28]


@pytest.mark.parametrize("restarts", [0, 1])
def test_no_vault_comes_any_more(tmp_path: Path, restarts: int) -> None:
    """Every step is made, and told of; but the run hasn't finished. Nor has it where it's started again in vain."""
    vault = tmp_path / "vault.py"
    vault.write_text(VAULT)
    job = _job(tmp_path, restarts=restarts)
    command = (sys.executable, str(vault), str(tmp_path / "started"))
    act = 21, lambda: os.kill(_vault(name=str(vault)), signal.SIGKILL)
    assert _run(job, tmp_path, act, rank=IMPATIENT + RANK, vault=command) == 1
    assert [metric["step"] for metric in RunFolder(job).metrics()] == list(range(1, STEPS + 1))
    refused = [int(e["message"].split()[1]) for e in _events(job, "warning") if "is not saved" in e["message"]]
    assert refused[:4] == [24, 28, STEPS, STEPS], "the last one by one group after the other"
    assert not [e for e in _events(job, "rank_lost") if e["step"] < 20]
    assert [e["event"] for e in RunFolder(job).events()][-1] == "failed"
    assert not _events(job, "finished")


def test_every_rank_dies_when_the_last_save_is_made(tmp_path: Path) -> None:
    """What starts again finds nothing left to train, and ends; as a finished run does that is trained again."""
    job = _job(tmp_path, restarts=1)

    def kill_all() -> None:
        folder = CheckpointFolder(job.run.folder / "checkpoints")
        while folder.steps()[-1:] != [STEPS]:
            time.sleep(0.01)
        for rank in {e["rank"]: e["pid"] for e in _events(job, "rank_started")}.values():
            os.kill(rank, signal.SIGKILL)

    assert _run(job, tmp_path, (STEPS, kill_all)) == 0
    _assert_ended(job)
    assert [e["step"] for e in _events(job, "loaded")] == [0, STEPS]
    assert _run(job, tmp_path) == 0
    _assert_ended(job)
    assert [e["step"] for e in _events(job, "loaded")] == [0, STEPS, STEPS]


def _assert_ended(job: Job) -> None:
    assert [metric["step"] for metric in RunFolder(job).metrics()] == list(range(1, STEPS + 1))
    assert [e["event"] for e in RunFolder(job).events()][-1] == "finished"
    assert CheckpointFolder(job.run.folder / "checkpoints").steps()[-1] == STEPS


def _assert_told_and_saved_again(job: Job) -> None:
    told = [event["message"] for event in _events(job, "warning")]
    refused = [int(text.split()[1]) for text in told if "is not saved" in text]
    saved = [event["step"] for event in _events(job, "saved")]
    assert refused and not set(refused) & set(saved), told
    assert max(refused) < max(saved) and min(saved) < min(refused)


def test_a_save_finds_no_room_and_a_later_one_does(tmp_path: Path) -> None:
    job = _job(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(soft: int) -> Callable[[], None]:
        return lambda: resource.prlimit(_vault(), resource.RLIMIT_FSIZE, (soft, limits[1])) and None

    assert _run(job, tmp_path, (6, limit(4096)), (18, limit(limits[0]))) == 0
    _assert_whole(job)
    _assert_told_and_saved_again(job)


def test_the_last_save_finds_no_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run has not finished then, and says so; what was saved before stays."""
    job = _job(tmp_path)
    full = (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert _run(job, tmp_path, (22, lambda: resource.prlimit(_vault(), resource.RLIMIT_FSIZE, full) and None)) == 1
    assert "failed [disk-full]" in capfd.readouterr().err
    assert [e["event"] for e in RunFolder(job).events()][-1] == "failed"
    found = CheckpointFolder(job.run.folder / "checkpoints").newest_verified()
    assert found.checkpoint is not None and found.checkpoint.step < STEPS


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[None]:
    """A file system of that size. Skips the test where none can be mounted."""
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small file system needs root; the variant with a limit runs everywhere")
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted ({made.stderr.strip()}); the variant with a limit runs everywhere")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_disk_is_full_for_a_while(tmp_path: Path) -> None:
    """Records wait in memory meanwhile, too, and so do the coordinator's decisions: nobody is lost, no line is."""
    small = tmp_path / "small"
    with small_disk(small, 64):
        job = _job(tmp_path, run={"name": "small", "dir": str(small)})
        assert _run(job, tmp_path, (6, lambda: fill_up(small / "filler")), (18, (small / "filler").unlink)) == 0
        _assert_whole(job)
        _assert_told_and_saved_again(job)
