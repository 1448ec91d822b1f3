"""The rank's side: sending never waits, what it hears, and how it says why it fails. And which launcher started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bessemer.core.errors import PeerLost, RequestError, Stopped
from bessemer.keep.launch import Launch, find_launch
from bessemer.keep.member import Member, describe, sounds_like_a_lost_peer
from bessemer.keep.wire import MAX_FRAME_BYTES, Frames, WireError, listen, pack, private_dir

HERE = Launch(launcher="none", rank=1, world_size=2, local_rank=1, local_world_size=2)


class FakeAgent:
    """Accepts one rank and reads only when told to."""

    def __init__(self, path: Path) -> None:
        self.server = listen(path)
        self.server.setblocking(True)
        self.server.settimeout(10)
        self.frames = Frames()
        self.records: list[dict[str, Any]] = []

    def accept(self) -> None:
        self.link, _ = self.server.accept()
        self.link.settimeout(10)

    def read_until(self, kind: str) -> list[dict[str, Any]]:
        while not any(r["kind"] == kind for r in self.records):
            self.records += self.frames.feed(self.link.recv(1 << 16))
        return self.records

    def answer_bye(self) -> None:
        self.read_until("bye")
        self.link.sendall(pack({"kind": "bye"}))


@contextmanager
def connected(path: Path) -> Iterator[tuple[Member, FakeAgent]]:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    agent = FakeAgent(path)
    member = Member(HERE, agent=path)
    member.connect()
    agent.accept()
    try:
        yield member, agent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        agent.link.close()
        agent.server.close()
        if member._socket is not None:
            member._socket.close()


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Path]:
    """A path for a socket, short enough wherever pytest puts its files."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="m") as folder:
        yield Path(folder) / "a"


def test_records_arrive_as_they_were_sent(short: Path) -> None:
    with connected(short) as (member, agent):
        member.metric({"step": 1, "t": 2.0})
        member.event("machine", kind="measured", event="odd", t=3.0)  # a field may have any name
        member.phase(2, "forward")
        thread = threading.Thread(target=agent.answer_bye)
        thread.start()
        member.close()
        thread.join()
        kinds = [r["kind"] for r in agent.records]
        assert kinds == ["hello", "metric", "event", "phase", "bye"]
        assert agent.records[1]["record"] == {"step": 1, "t": 2.0}
        assert agent.records[2]["fields"] == {"kind": "measured", "event": "odd", "t": 3.0}


def test_a_silent_agent_never_makes_the_rank_wait_and_no_record_is_lost(short: Path) -> None:
    with connected(short) as (member, agent):
        big = "x" * 5000
        longest_s = 0.0
        for step in range(1, 1001):  # 5 MB, more than any socket buffer
            start = time.perf_counter()
            member.phase(step, "forward")
            member.metric({"step": step, "filler": big})
            longest_s = max(longest_s, time.perf_counter() - start)
        assert longest_s < 1.0
        assert member._out, "the socket took everything, so nothing was tested"
        thread = threading.Thread(target=agent.answer_bye)
        thread.start()
        member.close()
        thread.join()
        assert [r["record"]["step"] for r in agent.records if r["kind"] == "metric"] == list(range(1, 1001))
        phases = [r["step"] for r in agent.records if r["kind"] == "phase"]
        assert phases == sorted(phases)
        assert len(phases) < 1000  # those that were overtaken are not sent


def test_a_mark_that_repeats_is_not_sent(short: Path) -> None:
    with connected(short) as (member, agent):
        for _ in range(3):
            member.phase(1, "forward")
        member.event("end")
        assert [r["kind"] for r in agent.read_until("event")] == ["hello", "phase", "event"]


def test_what_is_done_aside_is_a_phase_of_its_own(tmp_path: Path) -> None:
    with connected(tmp_path / "agent") as (member, agent):
        for name in ("training", "dumping"):
            member.phase(7, "training")
            member.event(name)
            agent.read_until("event")
            with pytest.raises(ValueError, match="by design"), member.aside(name):
                member.event("inside")
                raise ValueError("by design")
        member.event("last")
        while agent.records[-1].get("event") != "last":
            agent.records += agent.frames.feed(agent.link.recv(1 << 16))
        assert [(r["step"], r["name"]) for r in agent.records if r["kind"] == "phase"] == [
            (7, "training"), (7, "dumping"), (7, "training"),
        ]  # fmt: skip


def test_the_agent_s_word_stops_the_rank(short: Path) -> None:
    with connected(short) as (member, agent):
        assert not member.stop_requested
        agent.link.sendall(pack({"kind": "stop"}))
        assert member.stop_requested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_rank_and_is_told_once(short: Path, number: signal.Signals) -> None:
    with connected(short) as (member, agent):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert member.stop_requested
        assert member.stop_requested
        member.event("end")
        assert [r.get("signal") for r in agent.read_until("event") if r["kind"] == "stopping"] == [number.name]


def test_a_signal_in_the_midst_of_the_question_is_not_forgotten(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(short) as (member, agent):
        receive = member._receive

        def interrupted() -> None:
            receive()
            os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(member, "_receive", interrupted)
        assert member.stop_requested
        member.event("end")
        assert [r["signal"] for r in agent.read_until("event") if r["kind"] == "stopping"] == ["SIGTERM"]


def test_an_agent_that_died_is_an_error_of_records_but_not_of_marks(short: Path) -> None:
    with connected(short) as (member, agent):
        agent.link.close()
        member.phase(1, "forward")
        with pytest.raises(PeerLost, match="agent of this host is gone"):
            member.metric({"step": 1})


def test_an_agent_that_is_not_there_is_an_error(short: Path) -> None:
    with pytest.raises(PeerLost, match="nobody listens at"):
        Member(HERE, agent=short).connect()


def test_closing_gives_up_on_a_silent_agent(short: Path) -> None:
    with connected(short) as (member, _), pytest.raises(PeerLost, match="did not take this rank's last records"):
        member.close(timeout_s=0.1)


def test_a_failure_is_reported_with_its_exit_code(short: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with connected(short) as (member, agent):
        thread = threading.Thread(target=agent.answer_bye)
        thread.start()
        member.phase(4, "backward")
        assert member.failed(RequestError("no such thing", code="nope", fix="ask for another")) == 2
        thread.join()
        (report,) = [r for r in agent.records if r["kind"] == "failed"]
        expected = {"code": "nope", "message": "no such thing", "fix": "ask for another", "rank": 1, "step": 4}
        assert report == {"kind": "failed", "exit_code": 2, **expected}
        assert "RequestError: no such thing" in capfd.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(Stopped("enough"), 3), (SystemExit(0), 0), (SystemExit(3), 3)])
def test_a_stop_is_no_failure(short: Path, error: BaseException, code: int) -> None:
    with connected(short) as (member, agent):
        thread = threading.Thread(target=agent.answer_bye)
        thread.start()
        assert member.failed(error) == code
        thread.join()
        assert [r["kind"] for r in agent.records] == ["hello", "bye"]
        assert agent.records[-1]["exit_code"] == code


def test_errors_of_torch_about_a_lost_peer_are_told_from_others() -> None:
    lost = RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9327")
    assert describe(lost, 0, 3)["code"] == "peer-lost"
    assert describe(RuntimeError("shape mismatch"), 0, 3)["code"] == "crash"
    assert describe(ValueError("connection closed by peer"), 0, 3)["code"] == "crash"
    assert sounds_like_a_lost_peer("Read timeout: Connection reset by peer")


def test_alone_there_is_nobody_to_tell() -> None:
    member = Member.alone()
    member.metric({"step": 1})
    member.event("x")
    member.phase(1, "y")
    assert not member.stop_requested
    member.close()


def test_no_torch_is_imported() -> None:
    code = "import sys, bessemer.keep.agent, bessemer.keep.host; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- the wire


def test_frames_survive_any_cut() -> None:
    records = [{"n": n, "text": "ä" * n} for n in range(20)]
    stream = b"".join(map(pack, records))
    for size in (1, 3, 7, 1000):
        frames, seen = Frames(), []
        for at in range(0, len(stream), size):
            seen += frames.feed(stream[at : at + size])
        assert seen == records


@pytest.mark.parametrize("stream", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{", b"\0\0\0\1\xff"])
def test_what_is_no_record_is_refused(stream: bytes) -> None:
    with pytest.raises(WireError):
        Frames().feed(stream)


def test_a_record_that_is_too_long_is_refused_where_it_is_made() -> None:
    with pytest.raises(WireError, match="above the limit"):
        pack({"x": "y" * MAX_FRAME_BYTES})


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    assert private_dir(tmp_path / "mine") == private_dir(tmp_path / "mine")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(WireError, match="only you can enter"):
        private_dir(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(WireError, match="only you can enter"):
        private_dir(tmp_path / "link")


# ---- launchers


def place(env: dict[str, str]) -> tuple[str, int, int, int, int] | None:
    found = find_launch(env)
    return (
        None
        if found is None
        else (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size)
    )


def test_each_launcher_s_variables() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    assert place(torchrun) == ("torchrun", 5, 8, 1, 4)
    assert place({"RANK": "1", "WORLD_SIZE": "2"}) == ("env", 1, 2, 0, 1)  # a process a pod
    slurm = {"SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert place({**slurm, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}) == (
        "slurm",
        6,
        7,
        0,
        1,
    )
    assert place({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}) == ("slurm", 1, 2, 1, 2)
    numbers = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    ompi = {f"OMPI_COMM_WORLD_{name}": number for name, number in numbers.items()}
    assert place(ompi) == ("mpi", 3, 4, 1, 2)
    pmi = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert place(pmi) == ("mpi", 3, 4, 1, 2)
    assert place({"HOME": "/"}) is None


def test_a_batch_script_is_no_task() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
    assert place(batch) is None
    assert place({**batch, "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "16"}) is not None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "set a rank, but not WORLD_SIZE"),
        ({"RANK": "two", "WORLD_SIZE": "3"}, "RANK = 'two' is not a whole number"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "rank 3 of 3"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local rank 2 of 2"),
    ],
)
def test_half_a_launch_is_an_error(env: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        find_launch(env)


def test_started_by_hand_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RequestError, match="not started by a launcher"):
        Member.from_environment()


def test_a_port_in_use_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.keep.join import rendezvous

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(name, value)
        member = Member(Launch(launcher="env", rank=0, world_size=2, local_rank=0, local_world_size=2))
        with pytest.raises(RequestError, match=f"port {port} of this host is in use") as caught:
            rendezvous(member)
        assert caught.value.code == "port-in-use"


def test_a_socket_that_can_be_seen_can_be_connected_to() -> None:
    """Between `bind` and `listen` a socket has a name and refuses: who waited for the name was refused now and then."""
    for _ in range(100):
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            path, come = Path(folder) / "s", []  # type: Path, list[bool]

            def connect_at_once(path: Path = path, come: list[bool] = come) -> None:
                deadline = time.monotonic() + 60
                while not path.exists() and time.monotonic() < deadline:
                    pass
                with socket.socket(socket.AF_UNIX) as link:
                    link.connect(str(path))
                    come.append(True)

            other = threading.Thread(target=connect_at_once)
            other.start()
            with listen(path):
                other.join(60)
                assert come
                with pytest.raises(FileExistsError):
                    listen(path)
                assert [found.name for found in Path(folder).iterdir()] == ["s"]
