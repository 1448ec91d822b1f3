"""Links of an epoch: letting go of one never holds up the rank that does it."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from bessemer.parallel import across


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
    across._Gloo(SlowToEnd(ended_in)).drop(hangs=False)
    started[0].join(30)
    assert ended_in == started


class Sum:
    """An operation that hangs until `over`."""

    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over


class HangingLink:
    def __init__(self, ended_in: list[threading.Thread]) -> None:
        self.group: SlowToEnd | None = SlowToEnd(ended_in)
        self.sum = Sum()

    def start(self, buffer: torch.Tensor, op: object) -> Sum:
        return self.sum

    def done(self, work: Sum) -> bool:
        return work.over

    def drop(self, *, hangs: bool) -> None:
        assert hangs


def test_what_a_hanging_sum_may_write_to_is_kept_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_in: list[threading.Thread] = []
    graveyard: list[across._Buried] = []
    monkeypatch.setattr(across, "_GRAVEYARD", graveyard)
    links = [HangingLink(ended_in)]
    running, buffer = links[0].sum, torch.zeros(4)
    epoch = across.Across(links.pop, given_up=lambda: True)
    epoch._ready.wait(30)
    with pytest.raises(across.GivenUp):
        epoch.reduce([buffer])
    del epoch
    gc.collect()
    across.Across(None, given_up=lambda: False)
    assert [buried.held[1] for buried in graveyard] == [[buffer]] and not ended_in
    running.over = True
    across.Across(None, given_up=lambda: False)
    assert graveyard == []
    deadline = time.monotonic() + 30
    while not ended_in and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended_in and ended_in[0] is not threading.current_thread()
