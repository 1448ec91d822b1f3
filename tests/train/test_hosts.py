"""Runs on several "hosts" of this machine that die, fall silent and come back: the others go on, and the final state
has the bits of a run that nothing happened to."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.host_runs import HostRun, host_job

from bessemer.core.errors import RequestError
from bessemer.inspect.chaos_hosts import Hosts, Namespaces
from bessemer.inspect.chaos_target import child_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 30
WATCH = "bessemer.inspect.flight_watch"


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """The runs' common corpus and token shards."""
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> bytes:
    return _undisturbed(base, STEPS)


def _undisturbed(base: Path, steps: int) -> bytes:
    """The final state where nothing happens."""
    with HostRun(host_job(base, f"undisturbed-{steps}", steps=steps), Hosts.on_loopback(2)) as run:
        run.start()
        assert run.wait() == [0, 0]
        assert [r["step"] for r in run.read("metrics.jsonl")] == list(range(1, steps + 1))
        assert {e["host"] for e in run.events("host_started")} == {"127.0.0.2"}
        return run.state()


def _started(run: HostRun) -> None:
    """All groups train, and a standby is there."""
    run.start()
    run.until(lambda: run.step >= 2 and run.events("standby"), "the run's first steps")


def _ended(run: HostRun, undisturbed: bytes, numbers: list[int]) -> None:
    assert run.wait(numbers) == [0] * len(numbers), run.told()
    assert [r["step"] for r in run.read("metrics.jsonl")] == list(range(1, run.job.train.steps + 1)), run.told()
    assert [run.events()[at]["event"] for at in (0, -1)] == ["start", "finished"], "an attempt begins with its start"
    assert run.state() == undisturbed


def _lost(run: HostRun) -> set[int]:
    return {e["group"] for e in run.events("group_lost")}


def test_a_host_is_killed_and_a_spare_on_another_one_joins(base: Path) -> None:
    """Three hosts, four groups and a spare: 0 and 3, 1 and 4, 2. The last one dies; 1 or 4 takes the place of 2. So
    many steps that the spare has come before the end, however long it takes."""
    undisturbed = _undisturbed(base, 5 * STEPS)
    job = host_job(base, "killed", steps=5 * STEPS, spares=1, min_replicas=4)
    with HostRun(job, Hosts.on_loopback(3)) as run:
        run.start(0, 2)
        run.until(lambda: 2 in {e["group"] for e in run.events("arrived")}, "the group of the last host")
        run.start(1)
        run.until(lambda: {e["group"] for e in run.events("arrived")} == set(range(5)), "the spare")
        run.until(lambda: run.step >= 2 and run.events("standby"), "the run's first steps")
        assert 2 in run.active
        run.signal_host(2, signal.SIGKILL)
        _ended(run, undisturbed, [0, 1])
        assert _lost(run) == {2} and run.active == [0, 1, 3, 4]


def test_a_silent_host_is_given_up_and_comes_back_with_new_groups(base: Path, undisturbed: bytes) -> None:
    """Everything on the second host is stopped, and wakes up after it was given up: its ranks are refused."""
    with HostRun(host_job(base, "silent", steps=STEPS, min_replicas=4), Hosts.on_loopback(2)) as run:
        _started(run)
        run.signal_host(1, signal.SIGSTOP)
        run.until(lambda: _lost(run) == {1, 3}, "the loss of the host's groups")
        run.signal_host(1, signal.SIGCONT)
        _ended(run, undisturbed, [0, 1])
        assert all("silent" in e["why"] for e in run.events("group_lost"))
        assert run.active == [0, 2, 5, 7]


def test_a_host_that_sleeps_through_the_end_finds_that_the_run_is_over(base: Path, undisturbed: bytes) -> None:
    """It wakes up when nobody is left who could say so."""
    with HostRun(host_job(base, "asleep", steps=STEPS), Hosts.on_loopback(2)) as run:
        _started(run)
        run.signal_host(1, signal.SIGSTOP)
        assert run.wait([0]) == [0], run.told()
        run.signal_host(1, signal.SIGCONT)
        assert run.wait([1], timeout_s=100.0) == [0], run.told()
        _ended(run, undisturbed, [0])


def test_the_first_host_dies_with_the_coordinator_and_comes_back(base: Path, undisturbed: bytes) -> None:
    """The standby on the second host takes over, whose agent goes on with the records and has the run watched."""
    with HostRun(host_job(base, "first", steps=STEPS, min_replicas=4), Hosts.on_loopback(2)) as run:
        _started(run)
        assert [child_running(run.agents[n].pid, WATCH) is not None for n in (0, 1)] == [True, False]
        run.signal_host(0, signal.SIGKILL)
        run.until(lambda: run.events("took_over"), "the standby")
        run.until(lambda: child_running(run.agents[1].pid, WATCH), "the watch")
        run.start(0)
        _ended(run, undisturbed, [0, 1])
        assert run.events("took_over")[0]["lost"] == [0, 2]
        assert run.active == [1, 3, 4, 6]


def test_a_stop_at_one_host_stops_all(base: Path) -> None:
    with HostRun(host_job(base, "stopped", steps=3000), Hosts.on_loopback(2)) as run:
        _started(run)
        run.agents[1].send_signal(signal.SIGTERM)
        assert run.wait() == [3, 3]
        assert [e["step"] for e in run.events("stopped")] == [run.step]
        assert run.events("saved")[-1]["step"] == run.step


def test_a_host_that_is_cut_off_waits_and_the_larger_side_goes_on(base: Path, undisturbed: bytes) -> None:
    """Three network namespaces. The first host, which has the coordinator, loses the others: it commits nothing more.
    When it is connected again its coordinator ends, and its groups join the run anew."""
    try:
        hosts = Namespaces(3)
    except RequestError as error:
        pytest.skip(str(error))
    with HostRun(host_job(base, "cut", steps=STEPS, dp=3, min_replicas=3), hosts) as run:
        run.start()
        run.until(lambda: run.step >= 2 and run.events("standby"), "the run's first steps")
        hosts.cut(0)
        run.until(lambda: run.events("took_over"), "the larger side")
        took_over: dict[str, Any] = run.events("took_over")[0]
        assert took_over["lost"] == [0]
        hosts.mend(0)
        _ended(run, undisturbed, [0, 1, 2])
        assert [e["term"] for e in run.events("epoch")] == sorted(e["term"] for e in run.events("epoch"))
