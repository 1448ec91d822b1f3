"""The signal that asks for a trace: it waits for a rank that can't take it yet, instead of ending it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bessemer.keep.process import Child
from bessemer.runtime.trace_signal import TRACE_SIGNAL

pytestmark = pytest.mark.timeout(120)
EARLY = """
import os, sys, time

print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
from bessemer.runtime.trace_signal import take_trace_signal
take_trace_signal(lambda: print("asked", flush=True))
print("took", flush=True)
"""


def test_a_signal_from_the_first_moment_on_is_taken_later(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", EARLY, str(tmp_path / "go")], dict(os.environ), tmp_path / "log")
    child.start()
    try:
        child.signal(TRACE_SIGNAL)  # the interpreter hasn't even begun
        deadline = time.monotonic() + 60
        while not (tmp_path / "log").read_text():
            assert child.exit_code() is None and time.monotonic() < deadline
            time.sleep(0.01)
        child.signal(TRACE_SIGNAL)
        (tmp_path / "go").touch()
        assert child.wait(60) == 0
    finally:
        child.kill_session()
    assert (tmp_path / "log").read_text() == "up\nasked\ntook\n"


def test_without_that_it_would_have_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR2)"], check=False
    )
    assert done.returncode == -signal.SIGUSR2
