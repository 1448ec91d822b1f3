"""Links of an epoch: letting go of one never holds up the rank that does it."""

from __future__ import annotations

import threading

import pytest

from bessemer.parallel.across import _Gloo


class SlowToEnd:
    """As gloo's groups: its destructor waits for what is pending."""

    def __init__(self, ended_in: list[threading.Thread]) -> None:
        self._ended_in = ended_in

    def __del__(self) -> None:
        self._ended_in.append(threading.current_thread())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_group_that_failed_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Also where the other thread is so quick that it has ended before `start` returns."""
    ended_in: list[threading.Thread] = []
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)
        if at_once:
            thread.join()

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    _Gloo(SlowToEnd(ended_in)).drop(hangs=False)
    started[0].join(30)
    assert ended_in == started


def test_a_group_that_hangs_is_kept() -> None:
    ended_in: list[threading.Thread] = []
    _Gloo(SlowToEnd(ended_in)).drop(hangs=True)
    assert ended_in == []
