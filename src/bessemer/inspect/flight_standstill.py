"""What is known of ranks of this host that stand still: black boxes, the state of their processes, Python stacks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bessemer.runtime.blackbox import Blackbox, Group, Operation

__all__ = ["ACROSS", "STACK_SIGNAL", "across_groups", "is_stopped", "log_of", "python_stack"]

STACK_SIGNAL = signal.SIGUSR1
"""A rank answers it with the Python stacks of its threads, in its log (`keep.member`)."""
ACROSS = "replica"
"""The name under which the sum across groups that may be lost is told: what it is called in other runs."""
_POLL_S = 0.02
_STACK_LINES = 12


def is_stopped(pid: int) -> bool:
    """Whether a process is in state T (stopped, or held by a debugger)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def across_groups(boxes: Iterable[Blackbox], block: int, active: Sequence[int]) -> list[Blackbox]:
    """Boxes of a run whose groups of `block` ranks may be lost, as those of one run.

    A rank's groups are told by the places in its own group: they become the numbers by which the run knows ranks. The
    sum across groups isn't recorded as an operation, but its phase is: who is in it waits for the same place of all
    `active` groups, in the order of steps.
    """
    found = []
    for box in boxes:
        own = box.rank // block
        if own not in active:
            continue
        groups = {
            number: replace(group, ranks=tuple(own * block + r for r in group.ranks))
            for number, group in box.groups.items()
        }
        operations = [_renumbered(o, groups, own * block) for o in box.operations]
        place = box.rank - own * block
        across = Group(-1, ACROSS, tuple(name * block + place for name in active), "gloo", True)
        phases = box.open_phases()
        step = next((mark.step for mark in reversed(box.marks) if mark.step is not None), None)
        if step is not None:
            last = max((o.number for o in operations), default=0)
            operations.append(_sum(last + 1, across, step - 1, 0.0, 0.0))
            if [mark.phase for mark in phases] == ["comm_s"] and not box.unfinished():
                operations.append(_sum(last + 2, across, step, phases[0].at_s, None))
        found.append(replace(box, groups=groups, operations=tuple(operations)))
    return found


def _renumbered(operation: Operation, groups: dict[int, Group], first: int) -> Operation:
    peer = None if operation.peer is None else first + operation.peer
    return replace(operation, group=groups.get(operation.group.number, operation.group), peer=peer)


def _sum(number: int, group: Group, order: int, at_s: float, finish_s: float | None) -> Operation:
    return Operation(number, group, "all_reduce", order, "float32", 4, 0, 0, None, at_s, at_s, finish_s)


def log_of(pid: int) -> Path | None:
    """Where a process writes its errors, if that is a file: a rank's log, or that of another launcher."""
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{pid}/fd/2").readlink()
        return path if path.is_file() else None
    return None


def python_stack(pid: int, log: Path, *, within_s: float = 0.5) -> list[str]:
    """Ask a rank for its Python stacks; the innermost lines of its main thread, as its log has them.

    Empty where the process doesn't answer the signal or has ended. It goes on undisturbed.
    """
    if not _catches(pid, STACK_SIGNAL) or is_stopped(pid):
        return []
    start = log.stat().st_size
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return []
    deadline, text = time.monotonic() + within_s, ""
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before = len(text)
        with log.open("rb") as file:  # it may be large
            file.seek(start)
            text = file.read().decode(errors="replace")
        if text and len(text) == before:
            break
    return _main_thread(text)


def _main_thread(text: str) -> list[str]:
    """Its frames, innermost first. The dump lists it last, or as the current thread."""
    stacks = text.split("most recent call first):\n")[1:]
    current = [s for head, s in zip(text.split("most recent call first):\n"), stacks, strict=False) if "Current" in
               head.rpartition("\n")[2]]  # fmt: skip
    chosen = current[0] if current else (stacks[-1] if stacks else "")
    frames = [line.strip() for line in chosen.splitlines() if line.startswith("  File ")]
    return frames[:_STACK_LINES]


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
