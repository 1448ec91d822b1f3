"""Subscriptions hear of phases, collectives and launches; without one nothing is made."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from bessemer.comm import collectives as comm
from bessemer.runtime import tracing
from bessemer.runtime.blackbox import read_blackbox
from bessemer.runtime.kernels import native_kernel
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
from bessemer.runtime.tracing import Activity, Recording, launches, subscribe

pytestmark = pytest.mark.timeout(300)  # on a machine whose cores others use too


def test_phases_are_told_with_their_place(tmp_path: Path) -> None:
    heard: list[tuple[str, str, int]] = []
    phases = Phases()
    phases.attach(Recorder(tmp_path / "rank-0", rank=0, world=1, job_hash="x"))
    phases.at(step=7, micro_batch=2)
    with subscribe(lambda point, a: heard.append((point, a.name, a.step)), ("phase",)), phases("backward_s"):
        with phases("comm_s"):
            pass
        with phases("comm_s"):
            pass
    with phases("forward_s"):
        pass
    inner = [("begin", "comm_s", 7), ("end", "comm_s", 7)]
    assert heard == [("begin", "backward_s", 7), *inner, *inner, ("end", "backward_s", 7)]
    assert not phases.told


def test_a_phase_that_was_open_before_is_not_told() -> None:
    heard: list[str] = []
    phases = Phases()
    with phases("step_s"):
        subscription = subscribe(lambda point, a: heard.append(f"{point} {a.name}"), ("phase",))
        with phases("forward_s"):
            pass
    subscription.close()
    assert heard == ["begin forward_s", "end forward_s"]


def test_buffers_are_handed_over_when_full_and_at_the_end() -> None:
    handed: list[list[Activity]] = []
    phases = Phases()
    with Recording(handed.append, ("phase",), capacity=3):
        for _ in range(7):
            with phases("forward_s"):
                pass
    assert [len(buffer) for buffer in handed] == [3, 3, 1]
    assert all(a.end_s >= a.begin_s for buffer in handed for a in buffer)
    assert len({id(buffer) for buffer in handed}) == 3, "a buffer that was handed over is the receiver's"


def test_a_callback_that_raises_is_not_called_again_and_harms_nobody() -> None:
    heard: list[str] = []

    def raises(point: str, activity: Activity) -> None:
        raise KeyError("a bug of the subscriber")

    phases = Phases()
    with subscribe(raises) as broken, subscribe(lambda point, a: heard.append(point), ("phase",)), phases("forward_s"):
        pass
    assert isinstance(broken.error, KeyError)
    assert heard[0] == "begin" and not (tracing.PHASES or tracing.COLLECTIVES or tracing.LAUNCHES)


def test_domains_are_checked() -> None:
    with pytest.raises(ValueError, match="kernels"):
        subscribe(print, ("kernels",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none was named"):
        subscribe(print, ())


def test_launches_are_those_of_torch_and_of_native_kernels() -> None:
    names: list[str] = []
    x = torch.ones(3, requires_grad=True)
    with Recording(lambda buffer: names.extend(a.name for a in buffer), ("launch",)), launches():
        (x * 2).sum().backward()
        with native_kernel("attend", torch.float32, lambda: 1.0):
            pass
    assert names[0] == "aten.mul.Tensor" and "aten.sum.default" in names and names[-1] == "attend"
    names.clear()
    with launches():
        _ = x * 2
    assert not names


def told_of(rank: int, world: int, folder: str) -> list[Any]:
    heard: list[Any] = []
    recorder = Recorder(Path(folder) / f"rank-{rank}", rank=rank, world=world, job_hash="x")
    comm.record_to(recorder)
    x = torch.ones(8)
    comm.all_reduce(x)
    with subscribe(lambda point, a: heard.append((point, a.name, a.detail["bytes"])), ("collective",)):
        comm.all_reduce(x)
        work = comm.all_reduce(x, async_op=True)
        assert work is not None
        heard.append("between")
        work.wait()
    comm.all_reduce(x)
    orders = [operation.order for operation in read_blackbox(recorder.path).operations]
    comm.record_to(None)
    with subscribe(lambda point, a: heard.append(point), ("collective",)):
        comm.all_reduce(x)  # told of without a black box too
    return [heard, orders]


def test_collectives_are_told_and_still_recorded(tmp_path: Path) -> None:
    for heard, orders in run_ranks(2, told_of, str(tmp_path), timeout_s=240):
        begin, end = ("begin", "all_reduce", 32), ("end", "all_reduce", 32)
        assert heard == [begin, end, begin, "between", end, "begin", "end"]
        assert orders == [1, 2, 3, 4], "the black box numbers them as if nobody had listened"


def test_threads_share_a_recording() -> None:
    handed: list[list[Activity]] = []

    def work() -> None:
        phases = Phases()
        for _ in range(500):
            with phases("forward_s"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    with Recording(handed.append, ("phase",), capacity=64):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(map(len, handed)) == 2000
