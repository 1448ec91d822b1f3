"""The errors in a log: Python's tracebacks, the stacks that a fatal signal prints, and the words of the allocator,
gloo and NCCL where there is no stack. Ranks whose stacks are the same are one cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bessemer.keep.member import sounds_like_a_lost_peer

__all__ = ["Cluster", "Trace", "clusters", "last_trace"]

TAIL_BYTES = 1 << 20
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+),? in (.+)$')
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_FATAL = re.compile(r"^Fatal Python error: (.*)$")
_WORDS = re.compile(
    r"DefaultCPUAllocator|CUDA out of memory|terminate called after throwing|uncorrectable ECC|CUDA error"
    r"|No space left on device|undefined symbol|version `GLIBC"
)
_GIVEN_UP = re.compile(r"watchdog caught collective operation timeout|heartbeat monitor timed out", re.IGNORECASE)
_SERVICE_GONE = re.compile(
    r"no vault answers at|the agent of this host is gone|the coordinator is gone|no coordinator at "
)
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


@dataclass(frozen=True)
class Trace:
    """An error in a log. kind: its class ("ValueError"; "fatal" for a signal's stack, "words" for a line alone).
    frames: (file, line, function), innermost last. number: of the line that says the error, from 1."""

    log: str
    number: int
    kind: str
    message: str
    frames: tuple[tuple[str, int, str], ...]

    @property
    def victim(self) -> bool:
        """Whether it is what others' ends look like from here."""
        gone = _GIVEN_UP.search(self.message) or _SERVICE_GONE.search(self.message)
        lost = sounds_like_a_lost_peer(self.message) or gone is not None
        return self.kind.rpartition(".")[2] == "PeerLost" or lost

    @property
    def signature(self) -> tuple[str, ...]:
        """Equal on ranks that failed in the same way: numbers in the text may differ."""
        frames = tuple(f"{Path(file).name}:{line}" for file, line, _ in self.frames[-3:])
        return (self.kind, re.sub(r"\d+", "#", self.message), *frames)

    @property
    def evidence(self) -> list[str]:
        said = self.message if self.kind in ("fatal", "words") else f"{self.kind}: {self.message}".rstrip(": ")
        stack = " <- ".join(f"{Path(file).name}:{line} {name}" for file, line, name in reversed(self.frames[-3:]))
        return [f"{self.log}:{self.number}: {said}", *([f"{self.log}: stack, innermost first: {stack}"] * bool(stack))]


@dataclass(frozen=True)
class Cluster:
    """Ranks with the same stack and error."""

    ranks: tuple[int, ...]
    trace: Trace


def clusters(traces: Mapping[int, Trace]) -> list[Cluster]:
    """The largest first."""
    by_signature: dict[tuple[str, ...], list[int]] = {}
    for rank, trace in sorted(traces.items()):
        by_signature.setdefault(trace.signature, []).append(rank)
    found = [Cluster(tuple(ranks), traces[ranks[0]]) for ranks in by_signature.values()]
    return sorted(found, key=lambda c: (-len(c.ranks), c.ranks))


def last_trace(path: Path, name: str) -> Trace | None:
    """The last error in a log, None if it has none. One that was raised because of another, and only tells that a
    peer is gone, gives way to that other one."""
    lines, first = _tail(path)
    found: list[tuple[Trace, bool]] = []
    chained = False
    index = 0
    while index < len(lines):
        line = lines[index]
        trace: Trace | None = None
        if line.startswith("Traceback (most recent call last)"):
            trace, index = _traceback(lines, index, name, first)
        elif (fatal := _FATAL.match(line)) is not None:
            trace, index = _fatal(lines, index, name, first, fatal.group(1))
        elif _WORDS.search(line) or (sounds_like_a_lost_peer(line) and line[:1] != " "):
            trace = Trace(name, first + index, "words", line.strip(), ())
        if trace is not None:
            found.append((trace, chained))
            chained = False
        elif line.startswith(_CHAINED):
            chained = True
        index += 1
    return _told(found)


def _told(found: list[tuple[Trace, bool]]) -> Trace | None:
    """The last with a stack, else the last of all; back along its chain while it only tells of a lost peer."""
    stacks = [at for at, (trace, _) in enumerate(found) if trace.frames]
    if not found:
        return None
    at = stacks[-1] if stacks else len(found) - 1
    while found[at][0].victim and found[at][1] and at > 0:
        at -= 1
    return found[at][0]


def _tail(path: Path) -> tuple[list[str], int]:
    """(the last lines without torch's prefix, the number of the first of them)."""
    skipped = 0
    with path.open("rb") as file:
        left = max(0, path.stat().st_size - TAIL_BYTES)
        while left > 0:
            part = file.read(min(left, 1 << 20))
            if not part:
                break
            skipped += part.count(b"\n")
            left -= len(part)
        text = file.read().decode(errors="replace")
    return [_PREFIX.sub("", line) for line in text.splitlines()], skipped + 1


def _traceback(lines: list[str], at: int, name: str, first: int) -> tuple[Trace | None, int]:
    """(the trace, index of the last line of it)."""
    frames: list[tuple[str, int, str]] = []
    for index in range(at + 1, len(lines)):
        line = lines[index]
        if (frame := _FRAME.match(line)) is not None:
            frames.append((frame.group(1), int(frame.group(2)), frame.group(3)))
        elif line and not line[0].isspace():
            error = _ERROR.match(line)
            kind, message = (error.group(1), error.group(2) or "") if error is not None else ("words", line)
            last = index
            while last + 1 < len(lines) and lines[last + 1].startswith("  "):  # the rest of a message, not of a stack
                last += 1
            more = [text.strip() for text in lines[index + 1 : last + 1]]
            return Trace(name, first + index, kind, " | ".join([message, *more]), tuple(frames)), last
    return None, len(lines)


def _fatal(lines: list[str], at: int, name: str, first: int, what: str) -> tuple[Trace, int]:
    """Of what faulthandler prints, the stack of the thread that was running."""
    frames: list[tuple[str, int, str]] = []
    index = at + 1
    current = False
    while index < len(lines):
        line = lines[index]
        if line.startswith(("Current thread", "Thread ", "Stack")):
            if frames:
                break
            current = line.startswith("Current thread")
        elif (frame := _FRAME.match(line)) is not None:
            if current:
                frames.append((frame.group(1), int(frame.group(2)), frame.group(3)))
        elif frames:
            break
        index += 1
    return Trace(name, first + at, "fatal", what, tuple(reversed(frames))), index - 1
