"""The vault as its agent sees it: what follows when it dies, or doesn't start."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from train.loops import small_job

from bessemer.keep import vault_host
from bessemer.keep.hub import Hub
from bessemer.keep.process import Child
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.vault_host import PAUSES_S, VaultHost


def host(folder: Path, *command: str) -> VaultHost:
    return VaultHost(command, RunFolder(small_job(folder)), folder, None)


def test_the_next_one_waits_longer_the_more_in_a_row_have_ended_young(tmp_path: Path) -> None:
    vault = host(tmp_path)
    vault._opened = time.monotonic()
    assert [vault.pause_s() for _ in range(8)] == [0.0, 0.0, 0.0, 10.0, 30.0, 60.0, 300.0, 300.0]
    vault._opened = time.monotonic() - vault_host.YOUNG_S - 1
    assert vault.pause_s() == 0.0, "it has lived"
    vault._opened = math.inf
    assert [vault.pause_s() for _ in range(4)] == [*PAUSES_S[1:5]], "those that never opened are young"


@pytest.mark.parametrize(
    ("program", "why"), [("raise SystemExit(3)", "exited with code 3"), ("import time; time.sleep(60)", "no socket")]
)
def test_one_that_does_not_start_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(vault_host, "START_S", 2.0)
    vault = host(tmp_path, sys.executable, "-c", program)
    with closing(Hub(tmp_path / "hub")) as hub:
        assert why in vault.start_again(hub, lambda: None)
    assert not vault.running and vault.child is not None
    with pytest.raises(ProcessLookupError):
        os.kill(vault.child._process.pid, 0)


def test_a_stopped_child_is_seen_for_as_long_as_it_is_stopped() -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, None)
    child.start()
    try:
        assert child.stopped_s() == 0.0
        child.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not child.stopped_s() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert child.stopped_s() > 0.15
        child.signal(signal.SIGCONT)
        while child.stopped_s() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.stopped_s() == 0.0
    finally:
        child.kill_session()
        child.wait(10.0)
