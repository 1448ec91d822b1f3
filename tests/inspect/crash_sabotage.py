"""What makes a rank of a real run fail, from outside: copied as `sitecustomize.py` to a folder on the run's PYTHONPATH.

CRASH, in the environment, is a plan as JSON:

    {"do": "segv", "at": "forward", "ranks": [1], "step": 12, "pace_s": 0.05, "marker": "/path", "once": false, ...}

do: the name of a signal, or of one of the functions in DEEDS below. at: a point of a step, or "start", as the rank's
process begins. step: from 0. ranks: by the numbers of the run; none: whichever comes there. once: only the first
process that comes there. Only processes that run, or fork, `bessemer.train.worker` change anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAN: dict[str, Any] = json.loads(os.environ.get("CRASH", "{}"))
AT = {"step": -1}
WORKER = "bessemer.train.worker"
HELD: list[Any] = []


def number() -> int:
    """Of this rank in the run; known only once it is forked."""
    return int(os.environ.get("BESSEMER_NUMBER") or os.environ.get("RANK") or -1)


def mine(step: int | None = None) -> bool:
    """Whether this rank is to fail in that step, by default the present one."""
    at = AT["step"] if step is None else step
    chosen = not PLAN["ranks"] or number() in PLAN["ranks"]
    return at == PLAN["step"] and chosen and not (PLAN.get("once") and os.path.exists(PLAN["marker"]))


def strike() -> None:
    with open(PLAN["marker"], "a") as marker:
        marker.write(f"{number()}\n")
    if PLAN["do"] in DEEDS:
        DEEDS[PLAN["do"]]()
    else:
        os.kill(os.getpid(), getattr(signal, PLAN["do"]))


# ---- what is done


def read_at_nothing() -> None:
    ctypes.string_at(0)


def fail() -> None:
    raise ValueError("a mistake in the code of this rank")


def load_slowly() -> None:
    time.sleep(3600)


def loop_without_end() -> None:
    while True:
        time.sleep(0.01)


def allocate_too_much() -> None:
    """More than this process may have by its limit of addresses."""
    import torch

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    HELD.append(torch.empty(1 << 28))


def fill_the_memory_group() -> None:
    """More than the memory cgroup allows, which this process enters: the kernel ends it."""
    Path(PLAN["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    while True:
        HELD.append(b"x" * (8 << 20))


def open_too_many() -> None:
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 16, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    while True:
        HELD.append(open(os.devnull))  # noqa: SIM115 (never closed: that is the fault)


def other_library() -> None:
    """Another version of a library comes first, which lacks what is imported from it."""
    folder = Path(PLAN["marker"]).parent / "other" / "safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text('__version__ = "0.0.1"\n')
    sys.path.insert(0, str(folder.parent))


DEEDS: dict[str, Callable[[], None]] = {
    "segv": read_at_nothing,
    "abort": os.abort,
    "raise": fail,
    "load-slowly": load_slowly,
    "loop": loop_without_end,
    "allocate": allocate_too_much,
    "out-of-memory": fill_the_memory_group,
    "files": open_too_many,
    "library": other_library,
    "nothing": lambda: None,
}


# ---- where it is done


def put(owner: Any, **others: Any) -> None:
    """In the place of what the module or class has."""
    for name, other in others.items():
        setattr(owner, name, other)


def at_steps() -> None:
    """Steps are counted here, and slowed down so that somebody outside can act between two."""
    from bessemer.train.loop import Loop

    whole = Loop._step

    def step(self: Any, at: int, batches: Any) -> Any:
        AT["step"] = at
        time.sleep(PLAN.get("pace_s", 0.0))
        if PLAN["at"] == "parameters" and mine():
            strike()
            first = next(iter(self.parts.optimizer.params.values()))
            first.data.view(-1)[0] += float(PLAN["add"])
        return whole(self, at, batches)

    put(Loop, _step=step)


def at_passes() -> None:
    from bessemer.train.passes import Passes

    whole = Passes._straight

    def straight(self: Any, contribution: Any, batch: Any) -> None:
        handles = []
        first = next(p for p in self.module.parameters() if p.requires_grad)
        if not mine(self._step):
            whole(self, contribution, batch)
            return
        if PLAN["at"] == "forward":
            strike()
        elif PLAN["at"] == "backward":
            handles.append(first.register_hook(lambda gradient: strike()))
        elif PLAN["at"] == "gradient" and not HELD:  # once: no pass shows it again
            HELD.append(True)
            strike()
            handles.append(first.register_hook(lambda gradient: gradient * float("nan")))
        elif PLAN["at"] == "activation" and not HELD:
            HELD.append(True)
            strike()
            self.module.block(1).register_forward_hook(lambda module, args, out: out / (out * 0))
        elif PLAN["at"] == "tokens":
            strike()
            batch = batch | {"tokens_BS": batch["tokens_BS"] + 1000}
        whole(self, contribution, batch)
        for handle in handles:
            handle.remove()

    put(Passes, _straight=straight)


def at_data() -> None:
    from bessemer.data.dataset import Dataset

    whole = Dataset.batch

    def batch(self: Any, ids: Any) -> Any:
        if PLAN["at"] == "data" and AT["step"] >= 0 and mine(min(AT["step"], PLAN["step"])):
            strike()
        return whole(self, ids)

    put(Dataset, batch=batch)


def at_sums() -> None:
    """Of one copy of the model, and across groups."""
    import torch
    import torch.distributed as dist

    from bessemer.comm import collectives
    from bessemer.parallel.across import Across

    all_reduce, reduce = collectives.all_reduce, Across.reduce

    def other(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        waits = not (named.get("async_op") or (len(args) > 2 and args[2]))
        if PLAN["at"] == "sum" and not waits and mine():
            all_reduce(x, *args, **named)
            strike()
        if PLAN["at"] in ("size", "operation", "skip") and waits and not HELD and mine():
            HELD.append(True)
            strike()
            if PLAN["at"] == "skip":
                return None
            if PLAN["at"] == "operation":
                return collectives.broadcast(x, 0)
            return all_reduce(x.repeat(2), *args, **named)
        return all_reduce(x, *args, **named)

    def across(self: Any, sums: Any, maxima: Any = ()) -> None:
        if PLAN["at"] == "sum" and mine():
            self._wait(self._ready.is_set)
            self._link.start(sums[0], dist.ReduceOp.SUM)
            strike()
        reduce(self, sums, maxima)

    put(collectives, all_reduce=other)
    put(Across, reduce=across)


def at_votes() -> None:
    from bessemer.keep.cohort import Cohort
    from bessemer.train import transfer
    from bessemer.train.kept import Buffers

    vote, outcome, digest, into = Cohort.vote, Cohort.await_outcome, Buffers.digest, transfer._into

    def voting(self: Any, epoch: int, step: int, told: str) -> None:
        vote(self, epoch, step, told)
        if PLAN["at"] == "voted" and mine(step):
            strike()

    def waiting(self: Any, epoch: int, step: int) -> bool:
        made = outcome(self, epoch, step)
        if PLAN["at"] == "committed" and made and mine(step):
            strike()
        return made

    def digested(self: Any) -> str:
        if PLAN["at"] == "digest" and mine():
            strike()
            self.gradients[3] ^= 1
        return digest(self)

    def taking(link: Any, view: memoryview) -> None:
        if PLAN["at"] == "joiner" and len(view) > 1000 and mine(PLAN["step"]):
            strike()
        into(link, view)

    put(Cohort, vote=voting, await_outcome=waiting)
    put(Buffers, digest=digested)
    put(transfer, _into=taking)


def at_saves() -> None:
    from bessemer.train.loop import Loop

    whole = Loop._save

    def save(self: Any, step: int) -> None:
        if PLAN["at"] == "save" and self.leads and mine(step):
            strike()
            next(iter(self.parts.optimizer.params.values())).data.view(-1)[0] = float("inf")
        whole(self, step)

    put(Loop, _save=save)


if PLAN and WORKER in sys.orig_argv:
    if PLAN["at"] == "start":
        if not PLAN["ranks"] or number() in PLAN["ranks"]:
            strike()
    else:
        try:
            for install in (at_steps, at_passes, at_data, at_sums, at_votes, at_saves):
                install()
        except BaseException:  # the interpreter would only print it, and run on without
            traceback.print_exc()
            os._exit(86)
