"""That what a test leaves behind is seen, told and ended, and that a fleet whose test fails leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from leftovers import TOKEN, Standing, end, left_since
from train.fleet import Fleet
from train.toy import toy_job

from bessemer.keep.memory import Geometry, Memory

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]


def test_a_process_that_a_test_leaves_is_seen_and_ended() -> None:
    before = Standing.now()
    child = subprocess.Popen(SLEEP)
    [text] = left_since(before, grace_s=0.1)
    assert str(child.pid) in text and "time.sleep(300)" in text
    end(before)
    assert child.wait(60) == -signal.SIGKILL
    assert left_since(before) == []


def test_so_is_one_whose_parent_has_gone() -> None:
    before = Standing.now()
    script = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", script], check=True)
    [text] = left_since(before, grace_s=0.1)
    assert "time.sleep(300)" in text
    end(before)
    assert left_since(before) == []


def test_shared_memory_is_seen_with_a_name_and_without() -> None:
    before = Standing.now()
    named = Path(f"/dev/shm/bessemer-left-by-{os.getpid()}")
    named.write_text("x")
    memory = Memory.create(Geometry(4096, 4096, 4096))
    told = left_since(before, grace_s=0.1)
    assert str(named) in told and any("memory file" in text for text in told), told
    memory.close()
    del memory  # the mapping goes with its last view
    end(before)
    assert not named.exists() and left_since(before) == []


@pytest.mark.slow
def test_a_fleet_whose_test_fails_leaves_nothing() -> None:
    before = Standing.now()
    job = toy_job(layout={"dp": 2}, train={"steps": 10**6, "global_batch": 8})
    with (
        tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as folder,
        pytest.raises(AssertionError, match="on purpose"),
        Fleet(Path(folder), job) as fleet,
    ):
        fleet.start(0)
        fleet.start(1)
        fleet.until(lambda m: m.step >= 2)
        fleet.stop(1, signal.SIGSTOP)
        raise AssertionError("on purpose")
    assert left_since(before) == []


def test_a_semaphore_of_somebody_elses_process_is_none_of_ours() -> None:
    """Another run of tests on the machine, say. It is mapped under a name that it had before."""
    script = "import multiprocessing as m; lock = m.get_context('spawn').Lock(); print('made', flush=True); input()"
    strangers = {name: value for name, value in os.environ.items() if name != TOKEN}
    for environment, count in ((strangers, 0), (dict(os.environ), 1)):
        before = Standing.now()
        with subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "made\n"
            assert len([name for name in left_since(before, grace_s=0.1) if "/dev/shm/sem." in name]) == count
            process.communicate("\n")
        assert process.returncode == 0
        assert left_since(before) == []
