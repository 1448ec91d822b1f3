"""Faults that a rank of a fleet does to itself, at a named point of a step."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at a point of step `step` (from 0): the signal is sent to itself.

    forward, backward, reduce, voted, receipt (of the commit, before it is read), committed (after it); epoch: while the
    link of epoch number `step` is made; donor, joiner: in the midst of a transfer. reset: there the donor's connection
    breaks off, once, and everybody lives. Without a signal, flip: a bit of the sum is wrong; nan: so is a gradient;
    wrong: from that step on attention is a little off; slow: every step takes half a second longer; clock: the wall
    clock jumps by `number` seconds. `place`: of the rank in its group."""

    point: str
    step: int
    number: int = signal.SIGKILL
    place: int = 0


def slow_down(loop: Any, pause_s: float) -> None:
    run = loop.parts.step.passes.run

    def slow(batches: Any, count: int, step: int = 0) -> Any:
        time.sleep(pause_s if count else 0)
        return run(batches, count, step)

    loop.parts.step.passes.run = slow


def _break_transfer(point: str, strike: Any) -> None:
    """Strike with a part of the state on its way, as who gives or takes it."""
    from bessemer.train import transfer

    into, connect, broken = transfer._into, transfer.connect, []  # type: Any, Any, list[bool]

    def taking(link: Any, view: memoryview) -> None:
        if len(view) > 1000:
            strike()
        into(link, view)

    class Giving(socket.socket):
        def sendall(self, data: Any, flags: int = 0) -> None:
            if len(data) > 1000 and point == "reset" and not broken:
                broken.append(True)
                super().sendall(data[: len(data) // 2], flags)
                self.shutdown(socket.SHUT_RDWR)
            super().sendall(data, flags)
            if len(data) > 1000 and point == "donor":
                strike()

    def given(address: str, timeout_s: float) -> socket.socket:
        link = connect(address, timeout_s)
        made = Giving(link.family, link.type, fileno=link.detach())
        made.settimeout(timeout_s)
        return made

    if point in ("donor", "reset"):
        transfer.connect = given
    else:
        transfer._into = taking


def _jump(loop: Any, fault: Fault) -> None:
    """From the fault's step on, whoever asks this process for the time of day hears another one."""
    real, run, ahead = time.time, loop.parts.step.passes.run, {"s": 0.0}
    time.time = lambda: real() + ahead["s"]

    def running(batches: Any, count: int, step: int = 0) -> Any:
        ahead["s"] = float(fault.number) if step >= fault.step else 0.0
        return run(batches, count, step)

    loop.parts.step.passes.run = running


def inject(fault: Fault, loop: Any) -> None:
    """Make the loop send itself the fault's signal at its point."""
    from bessemer.train import elastic

    def strike() -> None:
        os.kill(os.getpid(), fault.number)

    passes, cohort = loop.parts.step.passes, loop.cohort
    at = {"step": -1}
    if fault.point == "slow":
        slow_down(loop, 0.5)
        return
    if fault.point == "flip":
        digest = elastic.Buffers.digest

        def flipped(self: Any) -> str:
            if at["step"] == fault.step:
                self.gradients[3] ^= 1
            return digest(self)

        elastic.Buffers.digest = flipped
    run, vote, outcome = passes.run, cohort.vote, cohort.await_outcome

    def running(batches: Any, count: int, step: int = 0) -> Any:
        at["step"] = step
        if fault.point == "forward" and step == fault.step and count:
            strike()
        return run(batches, count, step)

    passes.run = running
    first = next(p for p in loop.parts.module.parameters() if p.requires_grad)
    if fault.point == "backward":
        first.register_hook(lambda g: strike() if at["step"] == fault.step else None)
    if fault.point == "nan":
        first.register_hook(lambda g: g * float("nan") if at["step"] == fault.step else None)
    if fault.point == "wrong":
        attention = next(m for n, m in loop.parts.module.named_modules() if n.endswith(".attn"))
        attention.register_forward_hook(lambda m, given, out: out * 1.01 if at["step"] >= fault.step else out)
    if fault.point == "clock":
        _jump(loop, fault)
    if fault.point == "receipt":
        take = cohort._take

        def taking_in(record: Any) -> None:
            if record["kind"] == "commit" and record["step"] == fault.step + 1:
                strike()
            take(record)

        cohort._take = taking_in
    if fault.point == "voted":
        cohort.vote = lambda epoch, step, d: (vote(epoch, step, d), strike() if step == fault.step else None)
    if fault.point == "committed":

        def told(epoch: int, step: int) -> bool:
            made = outcome(epoch, step)
            if made and step == fault.step:
                strike()
            return made

        cohort.await_outcome = told
    if fault.point == "reduce":
        reduce = elastic.Across.reduce

        def summing(self: Any, sums: Any, maxima: Any = ()) -> None:
            if at["step"] == fault.step:
                self._wait(self._ready.is_set)
                self._link.start(sums[0], dist.ReduceOp.SUM)
                strike()
            reduce(self, sums, maxima)

        elastic.Across.reduce = summing
    if fault.point == "saving":
        save = loop.saver.save
        loop.saver.save = lambda step, *rest: strike() if step == fault.step else save(step, *rest)
    if fault.point in ("donor", "joiner", "reset"):
        _break_transfer(fault.point, strike)
