"""The run folder: its lock, whose it is, and what a start finds in it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_ranks import job_in, until

from bessemer.core.errors import RunFolderError
from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.keep import run_folder
from bessemer.keep.run_folder import RunFolder


def with_train(job: Job, **fields: object) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update=fields)})


def claimed(job: Job) -> RunFolder:
    folder = RunFolder(job)
    folder.lock()
    try:
        folder.claim()
    finally:
        folder.unlock()
    return folder


def test_the_resolved_job_is_written_and_read_back_equal(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert load_job(claimed(job).job_file) == job


def test_attempts_are_counted_and_each_has_its_token(tmp_path: Path) -> None:
    folder = RunFolder(job_in(tmp_path))
    folder.lock()
    first, second = folder.claim(), folder.claim()
    folder.unlock()
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["token"] != second["token"]


def test_another_identity_is_refused_with_the_fields_and_the_fix(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    folder = claimed(job)
    before = folder.job_file.read_bytes()
    (folder.checkpoints / "step-4").mkdir(parents=True)
    (folder.checkpoints / "step-4/manifest.json").touch()
    other = with_train(job, lr=1e-4, steps=7)
    with pytest.raises(RunFolderError) as caught:
        claimed(other)
    text = str(caught.value)
    assert "train.lr: 0.003 -> 0.0001" in text
    assert "train.steps: 5 -> 7" in text
    assert "train.seed" not in text
    assert "--set run.name=r-2" in caught.value.fix
    assert f"--set run.resume={folder.checkpoints}/step-4" in caught.value.fix
    assert caught.value.exit_code == 2
    assert folder.job_file.read_bytes() == before


def test_a_job_that_never_made_a_step_gives_way_to_its_mended_self(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    folder = claimed(job)
    folder.events_file.write_text('{"event": "failed"}\n')
    mended = with_train(job, lr=1e-4)
    assert load_job(claimed(mended).job_file) == mended
    assert list(folder.events()) == []
    assert (folder.path / f"events-{job.identity}.jsonl").read_text() == '{"event": "failed"}\n'
    folder.metrics_file.write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match="belongs to another job"):
        claimed(job)


def test_another_layout_or_save_policy_is_the_same_run(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    claimed(job)
    keep = job.keep.model_copy(update={"every": 7})
    layout = job.layout.model_copy(update={"dp": 1})
    assert load_job(claimed(job.model_copy(update={"keep": keep, "layout": layout})).job_file).layout.dp == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fields": 3}'])
def test_a_damaged_run_json_is_said_and_nothing_is_written(tmp_path: Path, content: str) -> None:
    folder = claimed(job_in(tmp_path))
    (folder.path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        claimed(job_in(tmp_path))
    assert (folder.path / "run.json").read_text() == content


def test_resume_never_does_not_overwrite_a_run(tmp_path: Path) -> None:
    never = job_in(tmp_path, resume="never")
    folder = claimed(never)  # a new folder is fine
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2}\n')
    with pytest.raises(RunFolderError, match="already holds a run up to step 2"):
        claimed(never)


def test_the_newest_saved_step_is_by_number_and_needs_its_manifest(tmp_path: Path) -> None:
    folder = RunFolder(job_in(tmp_path))
    assert folder.newest_saved() is None
    for name, whole in (("step-9", True), ("step-10", True), ("step-11", False), ("step-x", True), ("old", True)):
        (folder.checkpoints / name).mkdir(parents=True)
        if whole:
            (folder.checkpoints / name / "manifest.json").touch()
    assert folder.newest_saved() == (10, folder.checkpoints / "step-10")


def test_a_lock_is_exclusive_and_names_its_holder(tmp_path: Path) -> None:
    first, second = RunFolder(job_in(tmp_path)), RunFolder(job_in(tmp_path))
    first.lock()
    with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()} on"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


@pytest.mark.parametrize("where", ["file/runs", "file"])
def test_a_folder_that_can_not_be_made_is_a_clear_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="can't be written: Not a directory"):
        RunFolder(job_in(tmp_path / where)).lock()


def test_a_file_system_without_locks_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunFolderError, match="has no locks"):
        RunFolder(job_in(tmp_path)).lock()


def hold(folder: RunFolder, body: str) -> subprocess.Popen[str]:
    """A process that takes the lock and then does `body`."""
    code = f"""
import os, subprocess, sys, time
from bessemer.core.job import Job
from bessemer.keep.run_folder import RunFolder
lock = RunFolder(Job.model_validate({{"run": {{"name": "r", "dir": {str(folder.path.parent)!r}}}}})).lock()
{body}
print("held", flush=True)
time.sleep(60)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_killed_process_never_holds_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(job_in(tmp_path))
    with hold(folder, "") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"by process {process.pid} "):
            folder.lock()
        process.kill()
    folder.lock()
    folder.unlock()


def test_a_child_without_the_descriptor_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(job_in(tmp_path))
    body = "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
    with hold(folder, body) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        try:
            folder.lock()
            folder.unlock()
        finally:
            os.kill(child, 9)


def test_a_vault_that_still_writes_keeps_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(job_in(tmp_path))
    vault = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    body = f"print(subprocess.Popen({vault}, pass_fds=(lock,)).pid, flush=True)"
    with hold(folder, body) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        try:
            monkeypatch.setattr(run_folder, "VAULT_WAIT_S", 0.2)
            with pytest.raises(RunFolderError, match=f"process {process.pid} is gone, but its vault"):
                folder.lock()
        finally:
            os.kill(child, 9)
        monkeypatch.setattr(run_folder, "VAULT_WAIT_S", 20.0)
        folder.lock()  # waits for the end of the vault, and no longer
        folder.unlock()


def test_metrics_are_cut_back_to_the_step_of_the_resume(tmp_path: Path) -> None:
    folder = claimed(job_in(tmp_path))
    folder.metrics_file.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 6)) + '{"st')
    assert folder.last_step() == 5
    assert folder.cut_metrics(3) == (2, {"step": 5})
    assert folder.last_step() == 3
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3]
    until(lambda: not list(folder.path.glob(".*tmp")), "the end of the aside file", 1)
