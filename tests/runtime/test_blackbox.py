"""The black box: what is written is read, whatever ends the writer, and what is half written is left out."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bessemer.core.errors import BessemerError
from bessemer.runtime import ring
from bessemer.runtime.blackbox import Blackbox, read_blackbox, read_blackboxes
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder

ALL_REDUCE, SEND = ring.OPERATIONS.index("all_reduce"), ring.OPERATIONS.index("send")
HANGS = """
import sys
from pathlib import Path
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), rank=3, world=8, job_hash="abc")
channel, float32 = recorder.channel("tensor", [2, 3], "gloo", blocks=True), recorder.dtype("float32", 4)
phases = Phases()
phases.attach(recorder)
for step in range(3):
    phases.at(step=step)
    for micro_batch in range(2):
        phases.at(micro_batch=micro_batch)
        with phases("forward_s"):
            pass
        with phases("backward_s"), phases("comm_s"):
            number = channel.enqueued(0, float32, 1000, 1000, -1, True)
            if (step, micro_batch) == (2, 1):
                print("hangs", flush=True)
                sys.stdin.read()
            channel.finished(number)
"""
MARKS = """
import sys
from pathlib import Path
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), rank=0, world=1, job_hash="abc", num_marks=64)
channel, float32 = recorder.channel("tensor", [2, 3], "gloo", blocks=True), recorder.dtype("float32", 4)
phases = Phases()
phases.attach(recorder)
print("marks", flush=True)
while True:
    with phases("outer_s"), phases("inner_s"):
        channel.finished(channel.enqueued(0, float32, 1000, 1000, -1, True))
"""


def _killed(script: str, path: Path, after_s: float) -> Blackbox:
    """What a process that runs `script` leaves when it is killed so long after its first line of output."""
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(after_s)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    box = read_blackbox(path)
    assert box.pid == process.pid
    return box


def _recorder(tmp_path: Path, **kwargs: int) -> Recorder:
    return Recorder(tmp_path / "rank-0", rank=0, world=2, job_hash="abc", **kwargs)


def _attached(recorder: Recorder) -> Phases:
    phases = Phases()
    phases.attach(recorder)
    return phases


def test_a_killed_rank_tells_where_it_was(tmp_path: Path) -> None:
    box = _killed(HANGS, tmp_path / "rank-3", 0.0)
    assert (box.rank, box.world, box.job_hash, box.torn) == (3, 8, "abc", 0)
    outer, inner = box.open_phases()
    assert (outer.phase, outer.step, outer.micro_batch) == ("backward_s", 2, 1)
    assert (inner.phase, inner.enclosing, inner.depth) == ("comm_s", "backward_s", 2)
    assert outer.at_s < inner.at_s
    assert [o.order for o in box.operations] == [1, 2, 3, 4, 5, 6]
    (stuck,) = box.unfinished()
    assert (stuck.operation, stuck.order, stuck.size_bytes, stuck.dtype) == ("all_reduce", 6, 4000, "float32")
    assert (stuck.group.name, stuck.group.ranks) == ("tensor", (2, 3))
    assert stuck.wait_s == stuck.enqueue_s > inner.at_s
    assert box.during(stuck) == inner


@pytest.mark.parametrize("trial", range(4))
def test_a_rank_killed_amid_marks_leaves_at_most_one_torn_record(tmp_path: Path, trial: int) -> None:
    box = _killed(MARKS, tmp_path / "rank-0", 0.02 + 0.03 * random.Random(trial).random())
    assert box.torn <= 1
    numbers = [mark.number for mark in box.marks]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # in order, none missing
    assert len(numbers) >= 63 and numbers[0] > 1
    assert [p.phase for p in box.open_phases()] in ([], ["outer_s"], ["outer_s", "inner_s"])
    assert len(box.unfinished()) <= 1


def test_a_box_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    with subprocess.Popen([sys.executable, "-c", MARKS, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(20):
            box = read_blackbox(path)
            assert {mark.phase for mark in box.marks} <= {"outer_s", "inner_s"}
            assert all(o.finish_s is None or o.finish_s >= o.enqueue_s for o in box.operations)
        process.kill()


def test_marks_carry_their_places(tmp_path: Path) -> None:
    phases = _attached(_recorder(tmp_path))
    phases.at(step=7, micro_batch=2, stage=1)
    with phases("forward_s"):
        phases.at(layer=5)
        with phases("comm_s"):
            pass
    phases.at(step=8)
    with phases("data_s"):
        pass
    marks = read_blackbox(tmp_path / "rank-0").marks
    assert [(m.phase, m.begins, m.depth) for m in marks] == [
        ("forward_s", True, 1), ("comm_s", True, 2), ("comm_s", False, 2), ("forward_s", False, 1),
        ("data_s", True, 1), ("data_s", False, 1),
    ]  # fmt: skip
    assert [(m.step, m.micro_batch, m.stage, m.layer) for m in marks[:2]] == [(7, 2, 1, None), (7, 2, 1, 5)]
    assert (marks[4].step, marks[4].micro_batch, marks[4].stage, marks[4].layer) == (8, None, None, None)
    assert sorted(m.at_s for m in marks) == [m.at_s for m in marks]


def test_an_error_ends_its_phases(tmp_path: Path) -> None:
    phases = _attached(_recorder(tmp_path))
    with pytest.raises(ValueError, match="bad"), phases("forward_s"), phases("comm_s"):
        raise ValueError("bad")
    assert read_blackbox(tmp_path / "rank-0").open_phases() == []


def test_phases_from_before_attaching_are_known_and_an_open_one_is_refused(tmp_path: Path) -> None:
    phases, recorder = Phases(), _recorder(tmp_path)
    with phases("forward_s"), pytest.raises(RuntimeError, match="forward_s"):
        phases.attach(recorder)
    phases.attach(recorder)
    with phases("forward_s"):
        assert [p.phase for p in read_blackbox(tmp_path / "rank-0").open_phases()] == ["forward_s"]
    assert phases.take().keys() == {"forward_s"}


def test_an_open_phase_whose_begin_was_overwritten_keeps_its_name(tmp_path: Path) -> None:
    phases = _attached(_recorder(tmp_path, num_marks=8))
    with phases("evaluate_s"):
        for _ in range(20):
            with phases("forward_s"):
                pass
        box = read_blackbox(tmp_path / "rank-0")
        with phases("comm_s"):
            inner = read_blackbox(tmp_path / "rank-0").open_phases()
    assert len(box.marks) == 8 and box.torn == 0
    (outer,) = box.open_phases()
    assert outer.phase == "evaluate_s" and math.isnan(outer.at_s)
    assert [p.phase for p in inner] == ["evaluate_s", "comm_s"]


def test_operations_tell_waiting_from_finished(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    channel, half = recorder.channel("pipeline", [0, 4], "nccl", blocks=False), recorder.dtype("bfloat16", 2)
    numbers = [channel.enqueued(SEND, half, 10, 10, 4, False) for _ in range(3)]
    numbers.append(channel.enqueued(ring.OPERATIONS.index("all_gather"), half, 10, 20, -1, False))
    channel.waiting(numbers[0])
    channel.finished(numbers[0])
    channel.waiting(numbers[1])
    box = read_blackbox(tmp_path / "rank-0")
    first, second, third, gather = box.operations
    assert first.finish_s is not None and first.wait_s is not None and first.enqueue_s <= first.wait_s <= first.finish_s
    assert second.wait_s is not None and second.finish_s is None
    assert third.wait_s is None and third.finish_s is None
    assert box.unfinished() == [second, third, gather]
    assert [(o.order, o.peer, o.size_bytes) for o in box.operations] == [
        (1, 4, 20),
        (2, 4, 20),
        (3, 4, 20),
        (1, None, 40),
    ]
    assert (first.group.backend, first.group.blocks) == ("nccl", False)


def test_a_late_end_leaves_the_operation_that_took_its_slot_alone(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, num_operations=4)
    channel, float32 = recorder.channel("data", [0, 1], "gloo", blocks=True), recorder.dtype("float32", 4)
    numbers = [channel.enqueued(ALL_REDUCE, float32, 1, 1, -1, False) for _ in range(5)]
    channel.finished(numbers[4])
    channel.finished(numbers[0])  # its slot is the fifth's by now
    box = read_blackbox(tmp_path / "rank-0")
    assert [(o.order, o.finish_s is None) for o in box.operations] == [(2, True), (3, True), (4, True), (5, False)]


def _mark_at(index: int) -> int:
    """Where in the file mark 1 + index lies."""
    return ring.HEAD_BYTES + (64 << 10) + (1 + index) * ring.MARK_BYTES


@pytest.mark.parametrize("at", [0, 8, 16, 20, 35, 38])
def test_a_changed_byte_tears_a_record_and_no_other(tmp_path: Path, at: int) -> None:
    phases = _attached(_recorder(tmp_path))
    for _ in range(3):
        with phases("forward_s"):
            pass
    path = tmp_path / "rank-0"
    content = bytearray(path.read_bytes())
    content[_mark_at(2) + at] ^= 1
    path.write_bytes(content)
    box = read_blackbox(path)
    assert box.torn == 1
    assert [m.number for m in box.marks] == [1, 2, 4, 5, 6]


def test_every_half_written_record_is_torn(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, num_marks=4)
    phases, path = _attached(recorder), tmp_path / "rank-0"
    for _ in range(2):
        with phases("forward_s"):
            pass
    before = path.read_bytes()
    phases.at(step=9)  # number 5, in the slot of number 1
    after = path.read_bytes()
    size = ring.SEALED_MARK.size
    for written in range(size):
        if before[_mark_at(0) : _mark_at(0) + written] == after[_mark_at(0) : _mark_at(0) + written]:
            continue
        if before[_mark_at(0) + written : _mark_at(0) + size] == after[_mark_at(0) + written : _mark_at(0) + size]:
            continue
        path.write_bytes(after[: _mark_at(0) + written] + before[_mark_at(0) + written :])
        box = read_blackbox(path)
        assert (box.torn, [m.number for m in box.marks]) == (1, [2, 3, 4]), written


def test_a_file_cut_off_anywhere_gives_what_it_holds(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    phases = _attached(recorder)
    channel, float32 = recorder.channel("data", [0, 1], "gloo", blocks=True), recorder.dtype("float32", 4)
    with phases("forward_s"):
        channel.finished(channel.enqueued(ALL_REDUCE, float32, 1, 1, -1, True))
    content, path = (tmp_path / "rank-0").read_bytes(), tmp_path / "cut"
    operation_at = ring.HEAD_BYTES + (64 << 10) + 4096 * ring.MARK_BYTES + ring.OPERATION_BYTES
    for length in (_mark_at(0), _mark_at(0) + 20, _mark_at(1), operation_at + 30, operation_at + 70, operation_at + 90):
        path.write_bytes(content[:length])
        box = read_blackbox(path)
        assert len(box.marks) == (length >= _mark_at(1)) + (length > _mark_at(2))
        assert [o.finish_s is None for o in box.operations] == ([True] if length >= operation_at + 70 else [])


def test_a_torn_table_keeps_the_names_before_it(tmp_path: Path) -> None:
    phases = _attached(_recorder(tmp_path))
    with phases("forward_s"), phases("comm_s"):
        pass
    path = tmp_path / "rank-0"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"comm_s", b"comm_x"))
    assert {m.phase for m in read_blackbox(path).marks} == {"forward_s", "unlisted"}


@pytest.mark.parametrize("content", [b"", b"BESSBOX1", b"\0" * 4096, b"x" * 100_000])
def test_other_files_are_refused_and_left_out_of_a_folder(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank-1"
    path.write_bytes(content)
    with pytest.raises(BessemerError) as raised:
        read_blackbox(path)
    assert raised.value.code == "blackbox-unreadable"
    _recorder(tmp_path)
    assert [box.rank for box in read_blackboxes(tmp_path)] == [0]
    with pytest.raises(BessemerError, match="rank-2"):
        read_blackbox(tmp_path / "rank-2")


def test_the_box_of_an_earlier_process_is_kept(tmp_path: Path) -> None:
    with _attached(_recorder(tmp_path))("forward_s"):
        _recorder(tmp_path)
    assert [m.phase for m in read_blackbox(tmp_path / "rank-0.previous").marks] == ["forward_s", "forward_s"]
    assert read_blackbox(tmp_path / "rank-0").marks == ()
    assert len(read_blackboxes(tmp_path)) == 1


def test_threads_write_without_losing_a_record(tmp_path: Path) -> None:
    recorder, switch_s = _recorder(tmp_path), sys.getswitchinterval()
    channel, float32 = recorder.channel("data", [0, 1], "gloo", blocks=True), recorder.dtype("float32", 4)

    def work(name: str) -> None:
        phases = Phases()
        phases.attach(recorder, lane=name)
        for _ in range(100):
            with phases(f"{name}_s"):
                channel.finished(channel.enqueued(ALL_REDUCE, float32, 1, 1, 7, True))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_s)
    box = read_blackbox(tmp_path / "rank-0")
    assert box.torn == 0
    assert [m.number for m in box.marks] == list(range(1, 801))
    for lane in ("t0", "t1", "t2", "t3"):
        marks = [m for m in box.marks if m.lane == lane]
        assert [m.begins for m in marks] == [True, False] * 100 and {m.phase for m in marks} == {f"{lane}_s"}
        assert box.open_phases(lane) == []
    assert len(box.operations) == 400 and box.unfinished() == []


def test_ranks_are_laid_beside_each_other_by_the_wall_clock(tmp_path: Path) -> None:
    phases = _attached(_recorder(tmp_path))
    before_s = time.time()
    with phases("forward_s"):
        box = read_blackbox(tmp_path / "rank-0")
    assert before_s - 1e-3 <= box.wall_s(box.marks[0].at_s) <= time.time() + 1e-3
    phases.at(step=1)
    assert read_blackbox(tmp_path / "rank-0").ahead_s == pytest.approx(time.time() - time.perf_counter(), abs=0.1)


def test_a_full_table_stops_nothing(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    float32 = recorder.dtype("float32", 4)
    for i in range(1500):  # as many groups as a job that is regrouped all the time
        channel = recorder.channel(f"replica {i}", range(0, 4096, 8), "gloo", blocks=True)
    with _attached(recorder)("late_s"):
        channel.enqueued(ALL_REDUCE, recorder.dtype("float64", 8), 1, 1, -1, True)
        channel.enqueued(ALL_REDUCE, float32, 1, 1, -1, True)
    box = read_blackbox(tmp_path / "rank-0")
    assert box.groups[0].ranks == tuple(range(0, 4096, 8)) and box.torn == 0
    assert [m.phase for m in box.marks] == ["unlisted"] * 2
    assert [(o.group.name, o.dtype) for o in box.operations] == [("unlisted", "unlisted"), ("unlisted", "float32")]


@pytest.mark.parametrize("ranks", [[5], [0, 1, 2, 3], [0, 8, 16], [3, 7], [0, 1, 4, 5], [9, 1, 4], list(range(10_240))])
def test_ranks_are_kept_as_runs(ranks: list[int]) -> None:
    runs = ring.ranges(ranks)
    assert list(ring.unfold(runs)) == ranks
    assert len(runs) <= 2


def test_a_mark_in_the_black_box_costs_less_than_two_microseconds(tmp_path: Path) -> None:
    phases = _attached(_recorder(tmp_path))
    best = float("inf")
    for _ in range(20):  # the fastest of many: other work on the machine only slows
        start = time.thread_time()
        for _ in range(500):
            with phases("forward_s"):
                pass
        best = min(best, (time.thread_time() - start) / 1000)
    assert best < 2e-6, f"{best * 1e6:.2f} us a mark"
