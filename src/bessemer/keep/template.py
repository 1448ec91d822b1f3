"""A process that has imported what a rank needs, and forks a rank on request: a new one starts without an import.

    python -m bessemer.keep.template --fd N MODULE [PRELOAD ...]      # a rank runs MODULE.main()

    agent    -> fork{env, log}
    template -> ready{threads} once, forked{pid}, refused{why}

It has one thread, has never computed a gradient and made no group, so that a fork of it is as a fresh interpreter. A
rank is forked twice: its parent is then the agent (which makes itself the reaper of orphans), so the agent sees its
exit code, the kernel kills it with the agent, and the end of the template takes no rank along. What libraries read from
the environment when they are loaded, such as OMP_NUM_THREADS, is that of the template; what they read later, the
rank's. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.keep.process import Child, exit_text
from bessemer.keep.wire import Frames, pack

__all__ = ["ForkedChild", "Template", "main"]

READY_S = 120.0
"""To import everything; a few seconds on a quiet machine."""
FORK_S = 10.0
"""From the request to the process number: about 20 ms on a quiet machine."""
_SLICE_S = 0.2
_ADOPTED_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Template:
    """The agent's side. `idle` is called every now and then while it waits for the template.

    `problem` says why it can fork no more; until then it is empty."""

    def __init__(self, module: str, preload: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.problem = ""
        self._frames = Frames()
        self._link, self._theirs = socket.socketpair()
        fd = self._theirs.fileno()
        command = [sys.executable, "-m", "bessemer.keep.template", "--fd", str(fd), module, *preload]
        # NumPy's own pool of threads would be there from its import on
        self.child = Child(command, {**env, "OPENBLAS_NUM_THREADS": "1"}, log, pass_fds=(fd,))
        self._ready = False

    def start(self) -> None:
        """Begin the imports, and adopt what is forked from now on until `close`."""
        _adopt_orphans(True)
        self.child.start()
        self._theirs.close()

    def await_ready(self, idle: Callable[[], None] = lambda: None) -> bool:
        """Whether it can fork ranks; waits until its imports are done."""
        if not self._ready and not self.problem:
            answer = self._answer(READY_S, idle)
            if answer is not None and answer["threads"] != 1:
                self._give_up(f"its imports started {answer['threads'] - 1} threads")
            self._ready = answer is not None
        return not self.problem

    def fork(self, env: Mapping[str, str], log: Path, idle: Callable[[], None] = lambda: None) -> int | None:
        """The number of a new process, a child of this one; None where the template can't fork any more."""
        if not self.await_ready(idle):
            return None
        try:
            self._link.settimeout(_SLICE_S)
            self._link.sendall(pack({"kind": "fork", "env": dict(env), "log": str(log)}))
        except OSError as error:
            self._give_up(f"it takes no request ({error.strerror or error})")
            return None
        answer = self._answer(FORK_S, idle)
        if answer is not None and answer["kind"] != "forked":
            self._give_up(answer["why"])
        return None if self.problem or answer is None else int(answer["pid"])

    def ended(self) -> str:
        """How the process ended, after it has."""
        code = self.child.exit_code()
        self._give_up("it has ended")
        return self.problem if code is None else f"{exit_text(code)} ({self.problem})"

    def close(self) -> None:
        """End it. Ranks that it forked go on."""
        self._give_up("it was closed")
        self.child.wait(5.0)
        _adopt_orphans(False)

    def _answer(self, timeout_s: float, idle: Callable[[], None]) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        self._link.settimeout(_SLICE_S)
        while time.monotonic() < deadline:
            try:
                data = self._link.recv(4096)
            except TimeoutError:
                idle()
                continue
            except OSError:
                data = b""
            if not data:
                self._give_up("it has ended")
                return None
            for record in self._frames.feed(data):
                return record
        self._give_up(f"it gave no answer within {timeout_s:g} s")
        return None

    def _give_up(self, why: str) -> None:
        self.problem = self.problem or why
        self._link.close()
        self.child.kill_session()


class ForkedChild(Child):
    """A rank that the template forked, or a fresh interpreter running `command` where it can't fork any more.

    `forked` says which of them it became."""

    def __init__(
        self, template: Template, command: Sequence[str], env: Mapping[str, str], log: Path, idle: Callable[[], None]
    ) -> None:
        super().__init__(command, env, log)
        self.forked = False
        self._template, self._idle = template, idle

    def start(self) -> None:
        assert self.log is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        pid = self._template.fork(self.env, self.log, self._idle)
        if pid is None:
            super().start()
            return
        self.forked = True
        self._process = _Adopted(pid)  # type: ignore[assignment]  # as much of Popen as a child without pipes needs
        self.pidfd = os.pidfd_open(pid)  # it is ours, so the number stays its own until we reap it


class _Adopted:
    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                import subprocess

                raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            time.sleep(0.01)
        return code


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


# ---- the template's side


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bessemer.keep.template", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--fd", type=int, required=True, help="the socket to the agent")
    parser.add_argument("module", help="whose main() a rank runs")
    parser.add_argument("preload", nargs="*", help="modules to import besides")
    given = parser.parse_args(arguments)
    link = socket.socket(fileno=given.fd)
    link.set_inheritable(False)
    entry = importlib.import_module(given.module).main
    for name in given.preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is here now is never collected, so that no collection in a rank copies its pages
    link.sendall(pack({"kind": "ready", "threads": len(os.listdir("/proc/self/task"))}))
    frames, agent = Frames(), os.getppid()
    while data := link.recv(1 << 16):
        for request in frames.feed(data):
            link.sendall(pack(_fork(request, entry, agent, link)))
    return 0


def _fork(request: Mapping[str, Any], entry: Callable[[], int], agent: int, link: socket.socket) -> dict[str, Any]:
    """Forks the process between, which forks the rank and ends."""
    read, write = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        return {"kind": "refused", "why": f"it can't fork: {error.strerror}"}
    if between == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.close(read)
            code = 0 if os.fork() else _rank(request, entry, agent, (link, write))
        os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        number = pipe.read()  # ends when the one between has ended, and the rank has closed its copy
    os.waitpid(between, 0)
    return {"kind": "forked", "pid": int(number)} if number else {"kind": "refused", "why": "it can't fork"}


def _rank(request: Mapping[str, Any], entry: Callable[[], int], agent: int, held: tuple[socket.socket, int]) -> int:
    """In the rank: make it what the agent's own children are, and run it. Returns the exit code."""
    link, write = held
    between = os.getppid()
    os.setsid()
    os.write(write, str(os.getpid()).encode())
    os.close(write)
    link.close()
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:  # it has ended, or the kernel gave this process to somebody else
        return 1
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    try:
        code = entry()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
