"""torch's communication, marked in the black box and counted. The rest of Bessemer communicates through these.

    name_group(mesh.group("tensor"), "tensor")
    record_to(recorder)                          # without one, operations are only counted
    all_reduce(x, group=group)                   # arguments and results are torch.distributed's
    collected()["tensor", "all_reduce"]          # Traffic(calls=1, bytes=4096)

Bytes are what one rank's payload is to the planner (`plan.collectives`): the full buffer, which is what an all-gather
ends with, what a reduce-scatter, an all-reduce or a broadcast starts with, what one rank sends in all in an all-to-all
(its own part included), and a message as it is.

An asynchronous operation is marked as over when its `wait` returns, not before. On gloo that is when it is over. NCCL
makes the device's stream wait and lets the host go on, so that there "finish" says when the host went on, and the time
between waiting and finish is the host's alone; the black box names such groups (`Group.blocks`). An operation that
raises stays unfinished in the black box.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.runtime.recorder import Channel, Recorder
from bessemer.runtime.ring import NONE, OPERATIONS
from bessemer.runtime.tracing import COLLECTIVES, Activity, tell_begin, tell_end

__all__ = [
    "MarkedWork",
    "Traffic",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "collected",
    "irecv",
    "isend",
    "name_group",
    "record_to",
    "reduce_scatter_single",
    "reset_collected",
]

BLOCKING = ("gloo", "mpi")
"""Backends on which a host that has waited knows the operation to be over."""
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND, RECV = range(len(OPERATIONS))
SUM = dist.ReduceOp.SUM


@dataclass
class Traffic:
    """How much of an operation this rank took part in over the groups of one name."""

    calls: int = 0
    bytes: int = 0


class _Group:
    """What is kept of a process group. torch's object has no room for it, and must not be kept alive by it."""

    __slots__ = ("alive", "backend", "channel", "names", "ranks", "traffic")

    def __init__(self, group: dist.ProcessGroup) -> None:
        key = id(group)
        self.alive = weakref.ref(group, lambda _: _groups.pop(key, None))
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.backend = str(dist.get_backend(group))
        self.names: list[str] = []
        self.traffic: list[Traffic] = []
        self.channel: Channel | None = None

    def open(self) -> None:
        """Count and record under the present names."""
        name = "+".join(self.names)
        self.traffic = [_traffic.setdefault((name, operation), Traffic()) for operation in OPERATIONS]
        self.channel = None
        if _recorder is not None:
            self.channel = _recorder.channel(name, self.ranks, self.backend, blocks=self.backend in BLOCKING)


class _Told:
    """An operation that somebody is told of, in the place of its channel: it passes on what that is to mark."""

    __slots__ = ("_activity", "_channel")

    def __init__(self, known: _Group, operation: int, size_bytes: int, peer: int) -> None:
        detail: dict[str, Any] = {"group": "+".join(known.names), "bytes": size_bytes, "ranks": len(known.ranks)}
        if peer != NONE:
            detail["peer"] = peer
        self._channel = known.channel
        self._activity = tell_begin(
            Activity("collective", OPERATIONS[operation], time.perf_counter(), detail=detail)
        )  # fmt: skip

    def enqueued(self, operation: int, dtype: int, taken: int, given: int, peer: int, waits: bool) -> int:
        channel = self._channel
        return 0 if channel is None else channel.enqueued(operation, dtype, taken, given, peer, waits)

    def waiting(self, number: int) -> None:
        if self._channel is not None:
            self._channel.waiting(number)

    def finished(self, number: int) -> None:
        if self._channel is not None:
            self._channel.finished(number)
        tell_end(self._activity, time.perf_counter())


_groups: dict[int, _Group] = {}
_traffic: dict[tuple[str, str], Traffic] = {}
_recorder: Recorder | None = None
_dtypes: dict[torch.dtype, tuple[int, int]] = {}  # (number in the black box, bytes)


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Give a group the name by which its operations are counted and recorded; call it before the first of them.

    One group of ranks may serve several purposes: with a second name it is called "first+second". A group without any
    goes by torch's own name for it.
    """
    known = _groups.setdefault(id(group), _Group(group))
    if name not in known.names:
        known.names.append(name)
        known.open()


def record_to(recorder: Recorder | None) -> None:
    """Mark operations in this black box from now on (None: in none). Every rank must do so at the same place in its
    order of operations, before the first where it can."""
    global _recorder
    _recorder = recorder
    _dtypes.clear()
    for known in list(_groups.values()):
        known.open()


def collected() -> dict[tuple[str, str], Traffic]:
    """(group, operation) -> what was counted since the last reset; operations as in `runtime.ring.OPERATIONS`."""
    return {key: Traffic(traffic.calls, traffic.bytes) for key, traffic in _traffic.items() if traffic.calls}


def reset_collected() -> None:
    """Count from zero."""
    for traffic in _traffic.values():
        traffic.calls = traffic.bytes = 0


class MarkedWork(dist.Work):
    """An operation under way, as torch's own; its end is marked when `wait` returns."""

    __slots__ = ("_channel", "_number", "_work")

    def __init__(self, work: dist.Work, channel: Channel | _Told, number: int) -> None:
        _init_work(self)
        self._work, self._channel, self._number = work, channel, number

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch does. True; raises if the operation failed."""
        self._channel.waiting(self._number)
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._channel.finished(self._number)
        return done


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._work, name)(*args)


for _name in ("is_completed", "is_success", "exception", "result", "get_future", "synchronize", "block_current_stream"):
    setattr(MarkedWork, _name, _passed_on(_name))
_init_work = dist.Work.__init__


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.all_reduce`: `tensor` of all ranks, reduced in place."""
    channel, number = _start(group, ALL_REDUCE, tensor, tensor, not async_op)
    return _end(dist.all_reduce(tensor, op, group, async_op), channel, number)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """`torch.distributed.all_gather_single` (once all_gather_into_tensor): inputs of all ranks into one output."""
    channel, number = _start(group, ALL_GATHER, input_tensor, output_tensor, not async_op)
    return _end(dist.all_gather_single(output_tensor, input_tensor, group, async_op), channel, number)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.reduce_scatter_single` (once reduce_scatter_tensor): this rank's part of the reduced input."""
    channel, number = _start(group, REDUCE_SCATTER, input, output, not async_op)
    return _end(dist.reduce_scatter_single(output, input, op, group, async_op), channel, number)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.all_to_all_single`: a part of the input to each rank, a part of the output from each."""
    channel, number = _start(group, ALL_TO_ALL, input, output, not async_op)
    work = dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    return _end(work, channel, number)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """`torch.distributed.broadcast`: one rank's `tensor` to all of them."""
    channel, number = _start(group, BROADCAST, tensor, tensor, not async_op)
    return _end(dist.broadcast(tensor, src, group, async_op, group_src), channel, number)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> dist.Work | None:
    """`torch.distributed.isend`."""
    channel, number = _start_message(group, SEND, tensor, dst, group_dst)
    return _end(dist.isend(tensor, dst, group, tag, group_dst), channel, number)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> dist.Work | None:
    """`torch.distributed.irecv`, from a rank that is named."""
    channel, number = _start_message(group, RECV, tensor, src, group_src)
    return _end(dist.irecv(tensor, src, group, tag, group_src), channel, number)


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """`torch.distributed.batch_isend_irecv`. The works are one for each message, or, on backends that join them, one
    for all."""
    started = [
        _start_message(p2p.group, SEND if p2p.op is dist.isend else RECV, p2p.tensor, p2p.peer, None)
        for p2p in p2p_op_list
    ]
    works = dist.batch_isend_irecv(p2p_op_list)
    if len(works) == len(started):
        pairs = zip(works, started, strict=True)
        return [work if channel is None else MarkedWork(work, channel, number) for work, (channel, number) in pairs]
    (joined,) = works
    for channel, number in started:
        if channel is not None:
            joined = MarkedWork(joined, channel, number)
    return [joined]


def _start(
    group: dist.ProcessGroup | None, operation: int, taken: Tensor, given: Tensor, waits: bool
) -> tuple[Channel | _Told | None, int]:
    """Count and mark a collective that is about to be handed over. (where its end is to be marked, its number)."""
    known = _groups.get(id(group)) or _known(group)
    dtype, item_bytes = _dtypes.get(given.dtype) or _numbered(given.dtype)
    num_taken = num_given = taken.numel()
    if given is not taken:
        num_given = given.numel()
    traffic = known.traffic[operation]
    traffic.calls += 1
    traffic.bytes += item_bytes * (num_given if operation == ALL_GATHER else num_taken)
    channel: Channel | _Told | None = known.channel
    if COLLECTIVES:
        channel = _Told(known, operation, item_bytes * max(num_taken, num_given), NONE)
    if channel is None:
        return None, 0
    return channel, channel.enqueued(operation, dtype, num_taken, num_given, NONE, waits)


def _start_message(
    group: dist.ProcessGroup | None, operation: int, tensor: Tensor, peer: int | None, group_peer: int | None
) -> tuple[Channel | _Told | None, int]:
    """The same for a message. ValueError where the other end isn't named."""
    known = _groups.get(id(group)) or _known(group)
    if group_peer is not None:
        peer = known.ranks[group_peer]
    if peer is None:
        raise ValueError("a message needs its other end: a rank of the group or a global one")
    dtype, item_bytes = _dtypes.get(tensor.dtype) or _numbered(tensor.dtype)
    numel = tensor.numel()
    traffic = known.traffic[operation]
    traffic.calls += 1
    traffic.bytes += item_bytes * numel
    channel: Channel | _Told | None = known.channel
    if COLLECTIVES:
        channel = _Told(known, operation, item_bytes * numel, peer)
    if channel is None:
        return None, 0
    return channel, channel.enqueued(operation, dtype, numel, numel, peer, False)


def _known(group: dist.ProcessGroup | None) -> _Group:
    """A group that may be the default one, or have no name yet."""
    if group is None:
        group = dist.group.WORLD
        assert group is not None  # torch's own functions need it too
    if id(group) not in _groups:
        name_group(group, "world" if group is dist.group.WORLD else group.group_name)
    return _groups[id(group)]


def _numbered(dtype: torch.dtype) -> tuple[int, int]:
    number = 0 if _recorder is None else _recorder.dtype(str(dtype).removeprefix("torch."), dtype.itemsize)
    _dtypes[dtype] = number, dtype.itemsize
    return _dtypes[dtype]


def _end(work: dist.Work | None, channel: Channel | _Told | None, number: int) -> dist.Work | None:
    """What the caller gets. Without a work the host has waited already."""
    if channel is None:
        return work
    if work is None:
        channel.finished(number)
        return None
    return MarkedWork(work, channel, number)
