"""Marked communication: torch's results, the planner's bytes, and what the black box says of it, on real ranks."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flight_tool import said_by_torch
from ranks import run_ranks

from bessemer.comm import collectives as comm
from bessemer.runtime.blackbox import read_blackbox
from bessemer.runtime.flight_record import export_flight_record
from bessemer.runtime.recorder import Recorder


def _recorder(folder: str, rank: int, world: int) -> Recorder:
    return Recorder(Path(folder) / f"rank-{rank}", rank=rank, world=world, job_hash="abc")


def _named_group(world: int, name: str = "tensor") -> dist.ProcessGroup:
    group = dist.new_group(list(range(world)))
    comm.name_group(group, name)
    return group


def _operations(rank: int, world: int, group: dist.ProcessGroup, async_op: bool) -> list[torch.Tensor]:
    """The results of every collective; in the order in which the tests look for them."""
    other: dict[str, Any] = {"group": group, "async_op": async_op}
    mine = torch.arange(4.0) + 10 * rank
    reduced, greatest, sent = mine.clone(), mine.clone(), mine.clone()
    gathered, part, swapped = torch.zeros(4 * world), torch.zeros(4), torch.zeros(3 if rank == 0 else 5)
    to, come = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    works = [
        comm.all_reduce(reduced, **other),
        comm.all_reduce(greatest, dist.ReduceOp.MAX, **other),
        comm.all_gather_single(gathered, mine, **other),
        comm.reduce_scatter_single(part, torch.arange(8.0) * (rank + 1), **other),
        comm.all_to_all_single(swapped, mine, come, to, **other),
        comm.broadcast(sent, group_src=1, **other),
    ]
    for work in works:
        assert (work is None) == (not async_op)
        if work is not None:
            assert isinstance(work, dist.Work)
            work.wait()
    if works[0] is not None:  # the rest of a work is torch's own
        assert works[0].is_completed() and works[0].get_future().done()
    return [reduced, greatest, gathered, part, swapped, sent]


def _collectives(rank: int, world: int, folder: str, async_op: bool, recorded: bool) -> list[torch.Tensor]:
    if recorded:
        comm.record_to(_recorder(folder, rank, world))
    results = _operations(rank, world, _named_group(world), async_op)
    counted = {key: (traffic.calls, traffic.bytes) for key, traffic in comm.collected().items()}
    assert counted == {
        ("tensor", "all_reduce"): (2, 2 * 16),
        ("tensor", "all_gather"): (1, 16 * world),
        ("tensor", "reduce_scatter"): (1, 32),
        ("tensor", "all_to_all"): (1, 16),
        ("tensor", "broadcast"): (1, 16),
    }
    comm.reset_collected()
    assert comm.collected() == {}
    return results


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_collectives_give_what_torch_gives(tmp_path: Path, async_op: bool, recorded: bool) -> None:
    results = run_ranks(2, _collectives, str(tmp_path), async_op, recorded)
    for rank, (reduced, greatest, gathered, part, swapped, sent) in enumerate(results):
        assert reduced.tolist() == [10, 12, 14, 16]
        assert greatest.tolist() == sent.tolist() == [10, 11, 12, 13]
        assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
        assert part.tolist() == [12 * rank + 3 * i for i in range(4)]
        assert swapped.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 3, 12, 13])
    if not recorded:
        assert not list(tmp_path.iterdir())
        return
    for rank in (0, 1):
        box = read_blackbox(tmp_path / f"rank-{rank}")
        told = [(o.operation, o.order, o.taken, o.given, o.size_bytes) for o in box.operations]
        assert told == [
            ("all_reduce", 1, 4, 4, 16),
            ("all_reduce", 2, 4, 4, 16),
            ("all_gather", 3, 4, 8, 32),
            ("reduce_scatter", 4, 8, 4, 32),
            ("all_to_all", 5, 4, 3 if rank == 0 else 5, 16),
            ("broadcast", 6, 4, 4, 16),
        ]
        assert {(o.group.name, o.group.ranks, o.group.backend, o.group.blocks) for o in box.operations} == {
            ("tensor", (0, 1), "gloo", True)
        }
        for o in box.operations:
            assert o.dtype == "float32" and o.wait_s is not None and o.finish_s is not None
            assert o.enqueue_s <= o.wait_s < o.finish_s
            assert (o.wait_s > o.enqueue_s) == async_op


def _messages(rank: int, world: int, folder: str) -> list[list[float]]:
    recorder = _recorder(folder, rank, world)
    comm.record_to(recorder)
    group, other = _named_group(world, "pipeline"), 1 - rank
    there, back = torch.full((3,), float(rank)), torch.zeros(3, dtype=torch.float64)
    if rank == 0:
        works = [comm.isend(there, group=group, group_dst=other), comm.irecv(back, 1, group)]
    else:
        works = [comm.irecv(there, 0, group), comm.isend(back + 7, other, group)]
    assert len(read_blackbox(recorder.path).unfinished()) == 2
    for work in works:
        assert work is not None
        work.wait()
    assert not read_blackbox(recorder.path).unfinished()
    came = [there.tolist(), back.tolist()]
    ops = [
        dist.P2POp(dist.isend, torch.ones(2), group=group, group_peer=other),
        dist.P2POp(dist.irecv, torch.ones(2), other, group),
    ]
    works = comm.batch_isend_irecv(ops)
    assert len(works) == 2
    for work in works:
        work.wait()
    counted = {key: (traffic.calls, traffic.bytes) for key, traffic in comm.collected().items()}
    sent, received = (12, 24) if rank == 0 else (24, 12)
    assert counted == {("pipeline", "send"): (2, sent + 8), ("pipeline", "recv"): (2, received + 8)}
    with pytest.raises(ValueError, match="other end"):
        comm.irecv(torch.ones(2), group=group)
    return came


def test_messages_are_counted_by_direction_and_told_with_their_other_end(tmp_path: Path) -> None:
    assert run_ranks(2, _messages, str(tmp_path)) == [[[0.0] * 3, [7.0] * 3], [[0.0] * 3, [0.0] * 3]]
    for rank, first in ((0, "send"), (1, "recv")):
        box = read_blackbox(tmp_path / f"rank-{rank}")
        assert {o.peer for o in box.operations} == {1 - rank}
        assert [o.order for o in box.operations] == [1, 1, 2, 2]
        assert box.operations[0].operation == first
        assert not box.unfinished()


def _hangs(rank: int, world: int, folder: str) -> str:
    """Rank 1 doesn't enter the fifth all-reduce."""
    comm.record_to(_recorder(folder, rank, world))
    group, x = _named_group(world), torch.ones(8)
    for _ in range(4):
        comm.all_reduce(x, group=group)
    if rank == 1:
        return ""
    work = comm.all_reduce(x, group=group, async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError) as raised:
        work.wait(timedelta(seconds=0.3))
    return str(raised.value)


def test_torchs_tool_names_the_rank_that_did_not_enter(tmp_path: Path) -> None:
    assert "timed out" in run_ranks(2, _hangs, str(tmp_path / "blackbox"))[0]
    boxes = [read_blackbox(tmp_path / "blackbox" / f"rank-{rank}") for rank in (0, 1)]
    (stuck,) = boxes[0].unfinished()
    assert (stuck.order, stuck.operation) == (5, "all_reduce") and stuck.wait_s is not None
    assert not boxes[1].unfinished()
    export_flight_record(boxes, tmp_path / "dumps")
    said = said_by_torch(tmp_path / "dumps")
    assert "Not all ranks joining collective, sequence number: 5\n" in said
    assert "group info: tensor 0-1\ncollective: gloo:all_reduce\nmissing ranks: {1}\n" in said
    assert said.count("sequence number") == 1


def _names(rank: int, world: int, folder: str) -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    first, second, unnamed = (dist.new_group([0, 1]) for _ in range(3))
    comm.name_group(first, "tensor")
    comm.name_group(second, "tensor")
    comm.name_group(second, "sequence")
    comm.name_group(second, "tensor")
    for group in (first, second, unnamed, None):
        comm.all_reduce(x, group=group)
    names = [name for name, _ in comm.collected()]
    assert names == ["tensor", "tensor+sequence", unnamed.group_name, "world"]
    comm.record_to(_recorder(folder, rank, world))
    comm.name_group(first, "replica")
    for group in (first, None):
        comm.all_reduce(x, group=group)
    comm.record_to(None)
    comm.all_reduce(x, group=first)
    assert comm.collected()["tensor+replica", "all_reduce"] == comm.Traffic(2, 8)

    known = len(comm._groups)
    dist.destroy_process_group(first)
    del first, group
    gc.collect()
    assert len(comm._groups) == known - 1  # it keeps no group alive, so a number can't pass to another


def test_groups_go_by_their_names(tmp_path: Path) -> None:
    run_ranks(2, _names, str(tmp_path))
    told = [(o.group.name, o.order, o.dtype, o.size_bytes) for o in read_blackbox(tmp_path / "rank-1").operations]
    assert told == [("tensor+replica", 1, "bfloat16", 4), ("world", 1, "bfloat16", 4)]


def _joined(rank: int, world: int, folder: str) -> None:
    """NCCL gives one work for a whole batch."""
    recorder = _recorder(folder, rank, world)
    comm.record_to(recorder)
    group = _named_group(world, "context")
    ops = [
        dist.P2POp(dist.isend, torch.ones(2), 1 - rank, group),
        dist.P2POp(dist.irecv, torch.ones(2), 1 - rank, group),
    ]
    torchs, works = dist.batch_isend_irecv, []

    def joins(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        works.extend(torchs(p2p_op_list))
        return works[:1]

    comm.dist.batch_isend_irecv = joins
    (work,) = comm.batch_isend_irecv(ops)
    assert len(read_blackbox(recorder.path).unfinished()) == 2
    work.wait()
    works[1].wait()
    assert [o.finish_s is None for o in read_blackbox(recorder.path).operations] == [False, False]


def test_a_batch_with_one_work_is_marked_whole(tmp_path: Path) -> None:
    run_ranks(2, _joined, str(tmp_path))
