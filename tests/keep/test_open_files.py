"""Many connections under the soft limit of open files with which shells and services start a process."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fake_ranks import AGENT, job_in, script

from bessemer.core.job_file import dump_job
from bessemer.keep.links import SECRET, await_challenge, connect
from bessemer.keep.wire import Frames
from bessemer.runtime.host_state import raise_open_files

FEW, MANY = 64, 100
PATIENCE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)


def with_few_files(*words: str) -> list[str]:
    """A command that starts another one under a low soft limit."""
    return ["sh", "-c", f'ulimit -Sn {FEW}; exec "$@"', "sh", *words]


def test_a_process_takes_what_the_system_grants() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW * 8, before[1]))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_coordinator_serves_more_connections_than_its_soft_limit(folder: Path) -> None:
    (folder / "job.toml").write_text(dump_job(job_in(folder)))
    address = f"unix:{folder}/c"
    command = with_few_files(sys.executable, "-m", "bessemer.keep.coordinate", "--address", address,
                             "--job", str(folder / "job.toml"), "--log", str(folder / "log"))  # fmt: skip
    links: list[socket.socket] = []
    with subprocess.Popen(command, env={**os.environ, SECRET: "a secret of the tests"}) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(links) < MANY:
                with suppress(FileNotFoundError, ConnectionRefusedError):  # it is just starting
                    links.append(connect(address, PATIENCE_S))
                    assert await_challenge(links[-1], Frames())["kind"] == "challenge"
                assert time.monotonic() < deadline and process.poll() is None
        finally:
            process.kill()
            for link in links:
                link.close()


def test_what_an_agent_starts_has_the_files_that_it_has(tmp_path: Path) -> None:
    job = job_in(tmp_path, dp=1)
    (tmp_path / "job.toml").write_text(dump_job(job))
    body = "import resource, json; print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))\nmember.close()\n"
    words = with_few_files(sys.executable, "-c", AGENT, str(tmp_path / "job.toml"), script(body), "")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    soft, hard = json.loads((job.run.folder / "logs" / "rank-0.log").read_text())
    assert soft == hard > FEW
