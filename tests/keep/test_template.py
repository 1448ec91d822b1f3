"""Ranks that are forked from a template: what they are, how they end, and what is left when somebody is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bessemer.keep.process import Child
from bessemer.keep.template import ForkedChild, Template

RANK = """
import os, sys, threading, time
loaded_in = os.getpid()
def main():
    print("hello from", os.environ["NAME"], flush=True)
    facts = (os.getppid(), os.getsid(0) == os.getpid(), threading.active_count(), loaded_in != os.getpid(),
             "EARLIER" in os.environ)
    print(*facts, flush=True)
    end = os.environ["END"]
    if end == "raise":
        raise ValueError("by design")
    if end == "exit":
        sys.exit(5)
    if end == "sleep":
        time.sleep(300)
    return int(end)
"""
THREADED = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()\nmain = print\n"
)


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_rank.py").write_text(RANK)
    (tmp_path / "a_thread.py").write_text(THREADED)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "EARLIER": "1"}


@pytest.fixture
def template(tmp_path: Path, modules: dict[str, str]) -> Iterator[Template]:
    made = Template("a_rank", ["json"], env=modules, log=tmp_path / "template.log")
    made.start()
    yield made
    made.close()


def rank(template: Template, folder: Path, end: str, name: str = "one") -> ForkedChild:
    env = {"NAME": name, "END": end, "PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", "import sys, a_rank; sys.exit(a_rank.main())"]
    child = ForkedChild(template, command, env, folder / f"{name}.log", lambda: None)
    child.start()
    return child


def until(what: object, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("3", 3), ("exit", 5), ("raise", 1)])
def test_a_forked_rank_is_a_child_of_the_agent(template: Template, tmp_path: Path, end: str, code: int) -> None:
    child = rank(template, tmp_path, end)
    assert child.forked and child.wait(30) == code
    assert child.exit_code() == code and child.pidfd == -1
    lines = child.tail()
    assert lines[0] == "hello from one"
    assert lines[1] == f"{os.getpid()} True 1 True False"
    assert end != "raise" or lines[-1] == "ValueError: by design"


def test_it_is_stopped_signalled_and_killed_like_any_child(template: Template, tmp_path: Path) -> None:
    child = rank(template, tmp_path, "sleep")
    until(lambda: len(child.tail()) == 2)
    assert child.exit_code() is None and not child.stopped_s()
    child.signal(signal.SIGSTOP)
    until(child.stopped_s)
    child.kill_session()
    assert child.wait(30) == -signal.SIGKILL
    child.signal(signal.SIGTERM)
    child.kill_session()  # nothing is done to a process that has been reaped


def test_the_end_of_the_template_takes_no_rank_along(template: Template, tmp_path: Path) -> None:
    child = rank(template, tmp_path, "sleep", "before")
    template.child.signal(signal.SIGKILL)
    until(lambda: template.child.exit_code() is not None)
    later = rank(template, tmp_path, "4", "after")
    assert not later.forked and later.wait(30) == 4
    assert "killed by SIGKILL" in template.ended()
    assert child.exit_code() is None
    child.kill_session()
    assert child.wait(30) == -signal.SIGKILL


def test_a_template_with_threads_forks_nothing(tmp_path: Path, modules: dict[str, str]) -> None:
    """What a thread holds at a fork is held for ever in the child."""
    made = Template("a_rank", ["a_thread"], env=modules, log=tmp_path / "template.log")
    made.start()
    try:
        assert not made.await_ready()
        assert made.problem == "its imports started 1 threads"
        child = rank(made, tmp_path, "0")
        assert not child.forked and child.wait(30) == 0
    finally:
        made.close()


AGENT = """
import os, sys, time
from pathlib import Path
from bessemer.keep.template import ForkedChild, Template
folder = Path(sys.argv[1])
template = Template("a_rank", [], env=dict(os.environ), log=folder / "template.log")
template.start()
env = {"NAME": "one", "END": "sleep"}
children = [ForkedChild(template, [], env, folder / "one.log", lambda: None) for _ in range(2)]
for child in children:
    child.start()
print(template.child.pid, *(child.pid for child in children), flush=True)
time.sleep(300)
"""


def test_nothing_is_left_when_the_agent_is_killed(tmp_path: Path, modules: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], env=modules, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        assert len(pids) == 3 and all(_runs(pid) for pid in pids)
        agent.kill()
    until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_a_plain_child_has_the_same_face(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(5)"], dict(os.environ), tmp_path / "log")
    child.start()
    assert child.pid > 0 and child.wait(30) == 5
