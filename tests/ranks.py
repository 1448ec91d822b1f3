"""Run a function on N ranks, quickly: ranks are forked from a process that has imported torch and nothing more.

    results = run_ranks(2, scenario, arg)        # scenario(rank, world_size, arg) in each rank, gloo initialised

The function and its arguments must be importable and picklable; a failing rank fails the call with its traceback.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "pytest",
    "torch._dynamo",  # torch loads these at the first optimizer or FSDP step: 1.5 s a rank
    "torch._inductor",
    "torch.onnx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing",
    "bessemer.train.assembly",
    "bessemer.core.hf_config",
]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0, until: int | None = None
) -> list[Any]:
    """The results of `function(rank, world_size, *args)` of every rank, in order of rank. `until`: of the first so many
    that end, and the others are killed: where one fails, those that wait for it in a sum never end by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pairs = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(target=_rank, args=(rank, world_size, store, pairs[rank][1], function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect([reader for reader, _ in pairs], timeout_s, until or world_size)
        finally:
            for process in processes:
                process.kill()
                process.join()


def die_with_the_tests() -> None:
    """Called first by a process of `_context`: the kernel kills it, stopped or not, when the tests' process has ended
    in any way. The fork server lives as long as one of its children has a copy of a pipe: so that is closed here."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    with suppress(OSError):
        os.close(server._forkserver_alive_fd)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, when the fork server ends
    if os.getppid() == 1:
        os._exit(1)  # it has ended already


def _collect(readers: list[Connection], timeout_s: float, count: int) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"ranks {sorted(set(range(len(readers))) - set(results))} gave no result in {timeout_s} s"
            )
        for reader in wait([r for i, r in enumerate(readers) if i not in results], timeout=left):
            ok, value = reader.recv()
            if not ok:
                raise AssertionError(value)
            results[readers.index(reader)] = value
    return [results[i] for i in sorted(results)]


def _rank(rank: int, world_size: int, store: str, writer: Connection, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    die_with_the_tests()
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        writer.send((True, function(rank, world_size, *args)))
    except BaseException:
        writer.send((False, f"rank {rank} of {world_size}:\n{traceback.format_exc()}"))
    signal.pause()  # the parent ends all ranks together: one that left early could break another's last exchange
