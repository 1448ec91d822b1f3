"""The end of a run on several hosts: the agents wait for each other for as long as there is a sign of life."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.keep import host_agent
from bessemer.keep.host_agent import HostAgent
from bessemer.keep.hub import Wishes

SILENCE_S = 0.5


class Agent(HostAgent):
    """What `_end_vault` needs of one. The coordinator is heard until it `falls_silent_s`, and says `over_s` that the
    one that writes has said its last word."""

    def __init__(self, *, falls_silent_s: float, over_s: float) -> None:
        self.vault: Any = SimpleNamespace(running=False, finish=lambda: None)
        self.coordinators: Any = SimpleNamespace(tell=lambda about, record: None)
        self.journal: Any = SimpleNamespace(writes=False)
        self._over = self._alone = self._elsewhere = False
        self._start_s = self._heard = time.monotonic()
        self._falls_silent_s, self._over_s = falls_silent_s, over_s

    def _turn(self, wishes: Wishes) -> None:
        time.sleep(0.01)
        now = time.monotonic()
        if now - self._start_s < self._falls_silent_s:
            self._heard = now
            self._over = now - self._start_s > self._over_s


def test_the_others_last_save_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agent, "END_S", SILENCE_S)
    agent = Agent(falls_silent_s=1e9, over_s=4 * SILENCE_S)
    agent._end_vault(Wishes())
    assert agent._over


def test_nobody_waits_for_a_coordinator_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agent, "END_S", SILENCE_S)
    agent = Agent(falls_silent_s=0.1, over_s=1e9)
    agent._end_vault(Wishes())
    assert not agent._over and time.monotonic() - agent._start_s > SILENCE_S


def test_a_second_signal_ends_the_wait() -> None:
    agent = Agent(falls_silent_s=1e9, over_s=1e9)
    agent._end_vault(Wishes(["SIGTERM", "SIGTERM"]))
    assert not agent._over
