"""Starting, watching and ending child processes so that none outlives its parent. Linux only (pidfd, PDEATHSIG)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bessemer.runtime.trace_signal import hold_trace_signal

__all__ = ["Child", "exit_text", "usable_cores"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TAIL_BYTES = 16384


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass
class Child:
    """A child in a session of its own: Ctrl-C at the terminal doesn't reach it, SIGKILL of its parent does.

    Not so the vault: it finishes its write first, and sees its parent's end by that of the pipe that it reads.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None  # stdout and stderr are appended here; None: shared with the parent
    is_vault: bool = False
    pass_fds: tuple[int, ...] = ()
    pidfd: int = -1
    _log_start: int = 0
    _stopped_at: float | None = None
    _process: subprocess.Popen[bytes] = field(init=False, repr=False)

    def start(self) -> None:
        """OSError when the command can't be run, or no process is to be had; then there is none."""
        output: IO[bytes] | None = None
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            output = self.log.open("ab")
            self._log_start = output.seek(0, os.SEEK_END)
        try:
            self._process = subprocess.Popen(
                list(self.command),
                env=dict(self.env),
                stdin=subprocess.PIPE if self.is_vault else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
                pass_fds=self.pass_fds,
                preexec_fn=None if self.is_vault else _die_with(os.getpid()),  # noqa: PLW1509 - two syscalls
            )
        finally:
            if output is not None:
                output.close()
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def close_input(self) -> None:
        """Ends the pipe that a vault reads."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Reaps it and closes the pidfd when it has ended."""
        code = self._process.poll()
        if code is not None and self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            self.close_input()
        return code

    def has_ended(self) -> bool:
        """Whether it has, or was never started; without reaping it, since who watches the pidfd must hear of it."""
        if self.pidfd < 0:
            return True
        return os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.exit_code()

    def signal(self, number: int) -> None:
        """To the process alone; nothing happens when it has ended. It isn't reaped: who watches the pidfd does that."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def stopped_s(self) -> float:
        """For how long it has been seen to be stopped (state T: alive, and doing nothing); 0 where it isn't."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            text = ""
        if text.rpartition(")")[2].split()[:1] not in (["T"], ["t"]):
            self._stopped_at = None
            return 0.0
        self._stopped_at = self._stopped_at or time.monotonic()
        return max(time.monotonic() - self._stopped_at, 1e-9)

    def kill_session(self) -> None:
        """SIGKILL to the process and to whatever it started in its session. Safe only while it is not reaped."""
        if self.pidfd >= 0:  # -1: never started, or reaped
            os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines that it wrote to its log since `start`."""
        if self.log is None or not self.log.exists():
            return []
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return text.rstrip().splitlines()[-lines:]


def _die_with(parent: int) -> Callable[[], None]:
    """For preexec_fn: the kernel sends SIGKILL when the parent ends, even by kill -9. What asks for a trace waits until
    somebody takes it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def set_up() -> None:
        hold_trace_signal()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call: nobody would ever send the signal
            os._exit(1)

    return set_up


def exit_text(code: int) -> str:
    """How a process ended, in words; for a signal its name and what usually sends it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {
        "SIGKILL": "; often the kernel's out-of-memory killer: see `dmesg | tail`",
        "SIGBUS": "; often a full /dev/shm or disk behind mapped memory",
        "SIGSEGV": "; a crash in native code",
        "SIGILL": "; an instruction that this CPU lacks",
    }.get(name, "")
    return f"was killed by {name}{why}"
