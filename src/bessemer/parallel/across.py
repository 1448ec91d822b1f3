"""Sums across the groups of an epoch: the one place where contributions of different copies of the model meet.

Each rank has a process group of its own epoch with the ranks at the same place of the other groups. What is known of
gloo (measured with torch 2.13) decides how it is used:
- `abort` does nothing, a stopped peer holds an operation for its whole timeout, and destroying a group joins its
  threads: so operations are polled, and a group that is given up goes to a graveyard with the buffers that it may still
  write to, until its operations have run into their timeout.
- making a group with a dead member blocks as long, and on a shared device it blocks the next one too: so each is made
  in a thread of its own, on a device of its own, and simply left there when a newer epoch has come.
- a rank that drops its group sets free the others that wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bessemer.core.errors import PeerLost

__all__ = ["Across", "GivenUp", "Link", "connect_gloo", "connect_nccl"]

_POLL_S = 0.0005
_LONGEST_POLL_S = 0.005


@dataclass(eq=False)
class _Buried:
    """A link and buffers to which `works` may still write."""

    held: list[object]
    works: list[Any]


_GRAVEYARD: list[_Buried] = []


def _sweep() -> None:
    """Let go of what no operation writes to any more: each ends with its timeout at the latest."""
    over = [buried for buried in _GRAVEYARD if all(work.is_completed() for work in buried.works)]
    _GRAVEYARD[:] = [buried for buried in _GRAVEYARD if buried not in over]
    if over:
        _end(over)


def _end(things: list[Any]) -> None:
    """Let go of them in a thread, since a group's end may block; nobody else may hold them any more."""
    threading.Thread(target=things.clear, name="bessemer-drop", daemon=True).start()


class GivenUp(Exception):
    """A newer epoch has come, or the sum failed: nothing of it may be used. `failed`: it did so by itself."""

    def __init__(self, why: str, *, failed: bool) -> None:
        super().__init__(why)
        self.failed = failed


class Link(Protocol):
    """A process group that one epoch uses. `start` begins an operation in place and returns what `done` asks."""

    def start(self, buffer: torch.Tensor, op: Any) -> Any: ...

    def done(self, work: Any) -> bool:
        """Whether it is over. PeerLost if it failed."""
        ...

    def drop(self, *, hangs: bool) -> None:
        """Give it up; never blocks. hangs: an operation is still under way, else it has failed, and others that wait
        for this rank are to be set free."""
        ...


class _Gloo:
    def __init__(self, group: Any) -> None:
        self._group = group

    def start(self, buffer: torch.Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._group.allreduce([buffer], options)

    def done(self, work: Any) -> bool:
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a sum across groups failed: {str(error).splitlines()[0]}", code="peer-lost") from error
        return True

    def drop(self, *, hangs: bool) -> None:
        if not hangs:  # else the graveyard has it. What is pending besides fails too, but may take its whole timeout
            groups, self._group = [self._group], None
            _end(groups)


def connect_gloo(store: Any, rank: int, size: int, timeout_s: float, address: str = "127.0.0.1") -> Link:
    """A gloo group on a device of its own, at an address or name of this host. Blocks until all have come, at most
    `timeout_s`."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return _Gloo(dist.ProcessGroupGloo(store, rank, size, options))


class _Nccl:
    """Written from torch's documentation; not run without a GPU. A communicator that is given up is aborted in a
    thread, since an abort can hang (NCCL 2.25.1, 2.28.3 to 2.28.8)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def start(self, buffer: torch.Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = True
        return self._group.allreduce([buffer], options)

    def done(self, work: Any) -> bool:
        if not work.is_completed():
            return False
        error = work.exception()
        if error is not None:
            raise PeerLost(f"a sum across groups failed: {error}", code="peer-lost")
        work.wait()  # orders the streams
        return True

    def drop(self, *, hangs: bool) -> None:
        del hangs  # either is ended by an abort
        group, self._group = self._group, None
        threading.Thread(target=group.abort, name="bessemer-abort", daemon=True).start()


def connect_nccl(store: Any, rank: int, size: int, timeout_s: float) -> Link:
    """A NCCL communicator of its own. Not run without a GPU."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return _Nccl(dist.ProcessGroupNCCL(store, rank, size, options))


class Across:
    """The sums of one epoch at one place. `connect` makes the link, in a thread; size 1 needs none.

    `given_up` is asked again and again while this rank waits: whether a newer epoch has come."""

    def __init__(self, connect: Callable[[], Link] | None, *, given_up: Callable[[], bool]) -> None:
        self._given_up = given_up
        self._link: Link | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._alone = connect is None
        _sweep()
        self.connect_s = 0.0
        """How long sums waited for the link to be made."""
        if connect is not None:
            threading.Thread(target=self._connect, args=(connect,), name="bessemer-epoch", daemon=True).start()

    def _connect(self, connect: Callable[[], Link]) -> None:
        try:
            self._link = connect()
        except BaseException as error:  # raised again in the waiting thread
            self._error = error
        self._ready.set()

    def reduce(self, sums: Sequence[torch.Tensor], maxima: Sequence[torch.Tensor] = ()) -> None:
        """Sum and maximum over all groups, in place. GivenUp if a newer epoch comes first, or a peer is lost: what the
        buffers hold then is of no account, and an operation that hangs may still write to them: don't use them again.
        """
        if self._alone:
            return
        begin = time.perf_counter()
        self._wait(self._ready.is_set)
        self.connect_s += time.perf_counter() - begin
        link = self._link
        if link is None:
            raise GivenUp(f"no link: {self._error}", failed=True)
        buried = _Buried([link, sums, maxima], [])
        _GRAVEYARD.append(buried)
        for op, buffers in ((dist.ReduceOp.SUM, sums), (dist.ReduceOp.MAX, maxima)):
            buried.works += [link.start(buffer, op) for buffer in buffers if buffer.numel()]
        for work in buried.works:
            self._wait_for(link, work)
        _GRAVEYARD.remove(buried)

    def _wait_for(self, link: Link, work: Any) -> None:
        try:
            self._wait(lambda: link.done(work))
        except PeerLost as error:
            self.drop(hangs=False)
            raise GivenUp(str(error), failed=True) from error

    def _wait(self, over: Callable[[], bool]) -> None:
        pause = _POLL_S
        while not over():
            if self._given_up():
                self.drop(hangs=True)
                raise GivenUp("a newer epoch has come", failed=False)
            time.sleep(pause)
            pause = min(_LONGEST_POLL_S, 1.2 * pause)

    def drop(self, *, hangs: bool = False) -> None:
        """Let go of the epoch's link."""
        if self._link is not None:
            self._link.drop(hangs=hangs)
            self._link = None
