"""The rank's side of the agent: says how far it is, and hears when to stop. No torch is imported.

    member = Member.from_environment(job)
    member.phase(step, "forward"); member.metric({...}); member.event("save", step=50, stall_s=0.01)
    if member.stop_requested: ...          # finish the step, save, exit 3
    except Exception as error: raise SystemExit(member.failed(error))

Sending never waits: what the socket won't take now stays in memory and goes with the next record.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bessemer.core.errors import BessemerError, PeerLost, RequestError
from bessemer.keep.launch import Launch, find_launch
from bessemer.keep.wire import Frames, pack

if TYPE_CHECKING:
    from bessemer.core.job import Job

__all__ = ["Member", "sounds_like_a_lost_peer"]

CLOSE_S = 30.0
"""How long a rank waits at its end for the agent to take its last records."""
STDERR = 2

_PEER_WORDS = (  # gloo, TCPStore and NCCL
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket timeout",
    "remote process exited",
    "timed out waiting",
)


class Member:
    """This process as a member of its run. `agent`, `vault` and `run_folder` are None when it runs alone."""

    def __init__(self, launch: Launch, *, agent: Path | None = None, vault: Path | None = None) -> None:
        self.launch = launch
        self.rank, self.world_size = launch.rank, launch.world_size
        self.number = launch.rank
        """By which the agent knows this process; it differs from the rank where there are several groups."""
        self.local_rank, self.local_world_size = launch.local_rank, launch.local_world_size
        self.agent, self.vault = agent, vault
        self.run_folder: Path | None = None
        self.store: Path | None = None
        self._socket: socket.socket | None = None
        self._frames = Frames()
        self._out: deque[bytes] = deque()
        self._waiting_phase = b""
        self._at: tuple[int, str] = (0, "start")
        self._stop = False
        self._bye = False
        self._guard = threading.RLock()  # records may come from a checkpoint thread too
        self.services: subprocess.Popen[bytes] | None = None  # of this host, in the rank that started them
        self._signal = ""
        self.leave_wishes: queue.SimpleQueue[str] | None = None
        """Where groups may leave a run: the names of signals that reached this process, each a wish of its group to
        leave. Elsewhere None: a signal is a wish to stop the run."""
        self._welcome: dict[str, Any] | None = None

    @classmethod
    def from_environment(cls, job: Job | None = None) -> Member:
        """The member that the environment describes, connected; signal handlers for SIGTERM and SIGINT installed.

        Under our agent nothing else is needed. Under torchrun, Slurm, MPI or any launcher that sets RANK and
        WORLD_SIZE, `job` is needed: local rank 0 starts the host's services (records and vault) and the others wait
        for them. Raises RequestError when the launcher's variables don't suffice, RunFolderError when the folder is
        in use or another job's, and PeerLost when the services don't come up.
        """
        launch = find_launch()
        if launch is None:
            raise RequestError(
                "this process was not started by a launcher: RANK and WORLD_SIZE are not set",
                code="no-launch",
                fix="bessemer train JOB starts the ranks itself; or use torchrun, srun or mpirun",
            )
        if "BESSEMER_AGENT" in os.environ:
            member = cls(
                launch, agent=Path(os.environ["BESSEMER_AGENT"]), vault=_path_of(os.environ.get("BESSEMER_VAULT"))
            )
            member.run_folder = _path_of(os.environ.get("BESSEMER_RUN"))
            member.store = _path_of(os.environ.get("BESSEMER_STORE"))
            member.number = int(os.environ.get("BESSEMER_NUMBER", member.rank))
            if "BESSEMER_GROUP" in os.environ:
                member.leave_wishes = queue.SimpleQueue()  # whose put is safe in a signal handler
            member.connect()
        else:
            from bessemer.keep.join import join_host

            if job is None:
                raise RequestError(
                    f"started by {launch.launcher} without our agent, so the job is needed",
                    code="no-job",
                    fix="bessemer train JOB under the launcher, not the worker alone",
                )
            member = join_host(cls, launch, job)
        return member

    @classmethod
    def alone(cls) -> Member:
        """A single rank with nobody to tell: for tests and for use as a library. Records go nowhere."""
        return cls(Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1))

    # ---- what the rank says

    def metric(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; a time stamp `t` is added when absent. Never dropped."""
        self._send({"kind": "metric", "record": {**record, "t": record.get("t", time.time())}})

    def event(self, name: str, /, **fields: Any) -> None:
        """One line of events.jsonl. Never dropped."""
        self._send({"kind": "event", "event": name, "fields": {"t": time.time(), **fields}})

    def phase(self, step: int, name: str) -> None:
        """Where the rank is, for the agent's message if it dies. While it can't be sent, the next one replaces it."""
        if self._socket is None or (step, name) == self._at:
            return
        self._at = (step, name)
        frame = pack({"kind": "phase", "step": step, "name": name})
        with self._guard:
            self._waiting_phase = frame
            self._flush(lost_is_error=False)

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Around what takes as long as it takes while others wait: the phase is `name`, then again what it was."""
        step, before = self._at
        self.phase(step, name)
        try:
            yield
        finally:
            self.phase(step, before)

    def failed(self, error: BaseException) -> int:
        """Reports why this rank ends, prints the traceback (into the rank's log) and returns the exit code.

        A `Stopped` or SystemExit is no failure: nothing is reported for it.
        """
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            code = error.exit_code if isinstance(error, BessemerError) else 1
        if code in (0, 3):
            self.close(code)
            return code
        if isinstance(error, BessemerError) and error.rank is not None:
            error.rank += self.number - self.rank  # where it was raised, ranks count from 0 in each group
        with contextlib.suppress(OSError):  # a log on a full disk must not keep the report from the agent
            traceback.print_exception(error)
            sys.stderr.flush()
        try:
            self._send({"kind": "failed", **describe(error, self.number, self._at[0]), "exit_code": code})
            self.close(code)
        except PeerLost:
            print("the agent is gone too, so this was reported to nobody", file=sys.stderr)
        return code

    # ---- what the rank hears

    @property
    def stop_requested(self) -> bool:
        """Whether to finish the step, save and exit 3. Ranks must agree on it before they act: reduce it over all.

        A signal that reached this rank itself is told to the agent, so that the others hear of it too.
        """
        if not self._stop and self._socket is not None:
            with self._guard:
                self._receive()
        stop = self._stop  # a signal that comes after this line is for the next question, so that it is told then
        if self._signal:
            name, self._signal = self._signal, ""
            self._send({"kind": "stopping", "signal": name})
        return stop

    def request_stop(self) -> None:
        self._stop = True

    def folder_token(self) -> str:
        """The token of this attempt in the run folder, as this host sees it; empty when it sees none. When all ranks
        have the same after they met, their hosts share the folder."""
        try:
            return str(json.loads(((self.run_folder or Path()) / "run.json").read_text())["token"])
        except (FileNotFoundError, ValueError, KeyError):
            return ""

    # ---- the end

    def close(self, exit_code: int = 0, timeout_s: float = CLOSE_S) -> None:
        """Sends what is left, and returns when the agent has written it. In the rank that started the host's services
        it also waits for them to end, so that a launcher which clears up after its ranks doesn't kill a last save."""
        if self._socket is None:
            return
        deadline = time.monotonic() + timeout_s
        with self._guard:
            self._waiting_phase = b""  # nobody needs to know any more where this rank is
            self._out.append(pack({"kind": "bye", "exit_code": exit_code}))
            self._flush(lost_is_error=True)
            while not self._bye:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._wait(left_s):
                    raise PeerLost(
                        f"the agent did not take this rank's last records within {timeout_s:g} s",
                        code="agent-silent",
                        rank=self.rank,
                    )
                self._flush(lost_is_error=True)
                self._receive()
            self._socket.close()
            self._socket = None
        if self.services is not None and exit_code != 2:  # after a wrong request there is nothing to save
            self.services.wait()

    # ---- inside

    def connect(self) -> None:
        """Connects to the agent's socket and introduces itself. Raises PeerLost when nobody listens there.

        From here on SIGTERM and SIGINT are a wish to stop, or to leave; the agent sends none before it has heard the
        hello.
        """
        self._install_handlers()
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(str(self.agent))
        except OSError as error:
            link.close()
            raise PeerLost(
                f"nobody listens at {self.agent} ({error.strerror}): the agent is gone",
                code="agent-lost",
                rank=self.rank,
            ) from error
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        link.setblocking(False)
        self._socket = link
        self._send({"kind": "hello", "rank": self.number, "local_rank": self.local_rank, "pid": os.getpid()})

    def await_welcome(self, timeout_s: float) -> None:
        """Waits until the host's services are up: run folder locked, vault started. Raises what went wrong there."""
        deadline = time.monotonic() + timeout_s
        while self._welcome is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerLost(
                    f"the services of this host were not ready within {timeout_s:.0f} s",
                    code="services-lost",
                    rank=self.rank,
                )
            self._wait(left_s)
            self._receive()
        self.vault = _path_of(self._welcome.get("vault"))

    def _send(self, record: Mapping[str, Any]) -> None:
        if self._socket is None:
            return
        frame = pack(record)
        with self._guard:
            self._out.append(frame)
            self._flush(lost_is_error=True)

    def _flush(self, *, lost_is_error: bool) -> None:
        """Sends as much as the socket takes: records in order, then the latest phase mark."""
        link = self._socket
        if link is None:
            return
        try:
            while self._out or self._waiting_phase:
                frame = self._out[0] if self._out else self._waiting_phase
                sent = link.send(frame)
                if sent < len(frame):  # the rest must go first, before any other frame
                    if self._out:
                        self._out[0] = frame[sent:]
                    else:
                        self._out.append(frame[sent:])
                        self._waiting_phase = b""
                elif self._out:
                    self._out.popleft()
                else:
                    self._waiting_phase = b""
        except BlockingIOError:
            return
        except OSError as error:
            if lost_is_error:
                raise PeerLost(
                    f"the agent of this host is gone ({error.strerror})", code="agent-lost", rank=self.rank
                ) from error

    def _receive(self) -> None:
        link = self._socket
        if link is None:
            return
        try:
            data = link.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"the agent of this host is gone ({error.strerror})", code="agent-lost") from error
        if not data:
            raise PeerLost("the agent of this host is gone", code="agent-lost", rank=self.rank)
        for record in self._frames.feed(data):
            kind = record.get("kind")
            if kind == "stop":
                self._stop = True
            elif kind == "bye":
                self._bye = True
            elif kind == "welcome":
                self._welcome = record
            elif kind == "refused":
                fix, code = record.get("fix", ""), record.get("code", "bad-launch")
                raise RequestError(record["message"], code=code, fix=fix, rank=record.get("rank", self.rank))

    def _wait(self, timeout_s: float) -> bool:
        assert self._socket is not None
        poller = select.poll()  # not select(), which can't watch descriptors above 1023
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        return bool(poller.poll(timeout_s * 1000))

    def _install_handlers(self) -> None:
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.leave_wishes is not None:
                self.leave_wishes.put(signal.Signals(number).name)
                return
            if not self._stop:
                self._signal = signal.Signals(number).name
            self._stop = True

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, on_signal)
        faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)  # where it hangs, into the rank's log


def describe(error: BaseException, rank: int, step: int) -> dict[str, Any]:
    """An exception as the agent prints it: code, message, fix, rank and step."""
    if isinstance(error, BessemerError):
        return {
            "code": error.code,
            "message": error.message,
            "fix": error.fix,
            "rank": rank if error.rank is None else error.rank,
            "step": step if error.step is None else error.step,
        }
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    lost = isinstance(error, RuntimeError | OSError) and sounds_like_a_lost_peer(str(error))
    return {"code": "peer-lost" if lost else "crash", "message": message, "fix": "", "rank": rank, "step": step}


def sounds_like_a_lost_peer(text: str) -> bool:
    """Whether an error's text is what torch says when another rank is gone: a consequence, not the cause."""
    return any(words in text.lower() for words in _PEER_WORDS)


def _path_of(text: str | None) -> Path | None:
    return Path(text) if text else None
