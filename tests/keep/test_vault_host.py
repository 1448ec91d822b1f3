"""The vault as its agent sees it: what follows when it dies, or doesn't start."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from train.loops import small_job

from bessemer.core.errors import PeerLost
from bessemer.keep import vault_host
from bessemer.keep.hub import Hub
from bessemer.keep.process import Child
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.vault_host import VaultHost


def host(folder: Path, *command: str) -> VaultHost:
    return VaultHost(command, RunFolder(small_job(folder)), folder, None)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with closing(Hub(tmp_path / "hub")) as made:
        yield made


def ended(vault: VaultHost, hub: Hub) -> None:
    """Wait for its end, as an agent hears of it."""
    deadline = time.monotonic() + 60
    while not any(heard.watched is vault for heard in hub.poll(0.1)):
        assert not vault.tend(hub, 0.1) and time.monotonic() < deadline
    vault.reap()


def test_the_next_one_waits_longer_the_more_in_a_row_have_ended_young(tmp_path: Path) -> None:
    vault = host(tmp_path)
    vault.exit_code, vault._opened = -9, time.monotonic()
    said = [vault.lose().partition("another is started")[2].partition(",")[0] for _ in range(8)]
    assert said == ["", "", "", " in 10 s", " in 30 s", " in 60 s", " in 300 s", " in 300 s"]
    vault._opened = time.monotonic() - vault_host.YOUNG_S - 1
    assert "is started," in vault.lose(), "it has lived"
    vault._opened = math.inf
    assert ["is started in" in vault.lose() for _ in range(4)] == [False] * 3 + [True], "never opened is young"
    assert vault.lost_text(ranks_run=False) == "", "the next one is due"


def test_one_that_is_due_is_started_and_its_end_is_heard_of(tmp_path: Path, hub: Hub) -> None:
    vault = host(tmp_path, sys.executable, "-c", "raise SystemExit(3)")
    assert vault.tend(hub) == "" and vault.child is None, "none is due"
    vault.lose()
    assert vault.tend(hub) == "" and vault.running
    ended(vault, hub)
    assert not vault.running and vault.lost_text(ranks_run=True).startswith("the vault exited with code 3; its log: ")


def test_one_that_opens_no_socket_or_is_stopped_is_ended_and_told(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = host(tmp_path, sys.executable, "-c", "import time; time.sleep(600)")
    vault.lose()
    vault.tend(hub)
    assert vault.child is not None
    vault.child.signal(signal.SIGSTOP)
    ended(vault, hub)
    assert "the vault was stopped for 0.1 s and ended; its log" in vault.lose()
    monkeypatch.setattr(vault_host, "START_S", 0.5)
    vault.tend(hub)
    ended(vault, hub)
    assert "the vault opened no socket within 0.5 s; its log" in vault.lose()


def test_a_vault_that_can_not_be_started_is_tried_again(tmp_path: Path, hub: Hub) -> None:
    vault = host(tmp_path, str(tmp_path / "nowhere"))
    vault.lose()
    said = [vault.tend(hub) for _ in range(4)]
    assert all("can't be started: No such file" in text for text in said[:2]) and said[3] == "", said
    assert not vault.running and "is started in 10 s" in said[2]


def test_a_start_in_vain_waits_less_where_the_last_save_is_due(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault_host, "PAUSES_S", (0.0, 600.0))
    vault = host(tmp_path, sys.executable, "-c", "raise SystemExit(3)")
    vault.lose()
    vault.tend(hub)
    assert not vault.running, "in 600 s"
    vault.tend(hub, hurry=True)
    assert vault.running
    ended(vault, hub)
    vault.lose()
    monkeypatch.setattr(vault_host, "HURRY_S", 60.0)
    vault.tend(hub, hurry=True)
    assert not vault.running, "nor at once"


def test_one_that_is_just_starting_is_waited_for(tmp_path: Path, hub: Hub) -> None:
    open_late = "import sys, time; time.sleep(0.5); open(sys.argv[2], 'w').close(); time.sleep(600)"
    vault = host(tmp_path, sys.executable, "-c", open_late)
    vault.lose()
    vault.tend(hub)
    assert vault.ready(hub) == "" and vault.socket.exists()
    vault.kill()
    ended(vault, hub)


def test_one_that_ends_while_it_starts_is_not_ready(tmp_path: Path, hub: Hub) -> None:
    vault = host(tmp_path, sys.executable, "-c", "raise SystemExit(3)")
    vault.lose()
    vault.tend(hub)
    assert "opens no socket" in vault.ready(hub)
    ended(vault, hub)


@pytest.mark.parametrize(
    ("program", "start_s", "why"),
    [("raise SystemExit(3)", 60.0, "exited with code 3"), ("import time; time.sleep(60)", 1.0, "no socket")],
)
def test_a_first_one_that_does_not_start_is_said_and_leaves_nothing(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, program: str, start_s: float, why: str
) -> None:
    monkeypatch.setattr(vault_host, "START_S", start_s)
    vault = host(tmp_path, sys.executable, "-c", program)
    with pytest.raises(PeerLost, match=why):
        vault.start(hub)
    assert not vault.running and vault.child is not None
    with pytest.raises(ProcessLookupError):
        os.kill(vault.child.pid, 0)


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
