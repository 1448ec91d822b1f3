"""One trace of a run from what all its ranks left: black boxes and profiled steps, on one clock, for Perfetto.

    merged = merge_traces(run_folder, Path("run.json"))

The form is Chrome's trace events: a process for each rank; in it a thread for the phases of each lane, one or more for
the operations (which overlap), and those of torch's profiler. Phases and operations are complete events ("X").

Clocks: ranks of one host share a monotonic clock. Hosts are laid beside each other by the wall clock that each rank
noted beside its own once a step; where that lets a rank see an operation end before another has come to it, which can't
be, the host is moved by the least that mends it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bessemer.core.errors import RequestError
from bessemer.core.units import counted
from bessemer.runtime.blackbox import Blackbox, Operation, read_blackboxes

__all__ = ["Clocks", "MergedTrace", "merge_traces"]

Events = list[dict[str, Any]]
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""No rank knows one of these to be over before every rank has come to it."""
OPERATIONS_TID, PROFILER_TID = 100, 1000


@dataclass(frozen=True)
class Clocks:
    """Of each host: how far its wall clock was ahead of its monotonic one, and by how much it was moved, in seconds.
    The clock of all is the monotonic one of the first host, whose small numbers keep nanoseconds apart."""

    ahead_s: dict[str, float]
    moved_s: dict[str, float]

    @property
    def origin_s(self) -> float:
        """Zero of the clock of all, in unix seconds."""
        return next(iter(self.ahead_s.values()))

    def common_s(self, host: str, at_s: float) -> float:
        """A time of the monotonic clock of a host, on the clock of all."""
        return at_s + (self.ahead_s[host] - self.origin_s) + self.moved_s[host]


@dataclass
class MergedTrace:
    """What went into the file `path`. profiles: steps that torch's profiler recorded; left_out: why some could not be
    laid beside the rest."""

    path: str
    ranks: list[int]
    events: int
    profiles: list[str]
    clocks: Clocks
    left_out: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The form of `bessemer landing RUN --trace FILE --json`."""
        return {
            "path": self.path,
            "ranks": self.ranks,
            "events": self.events,
            "profiles": self.profiles,
            "moved_s": self.clocks.moved_s,
            "left_out": self.left_out,
        }

    def __str__(self) -> str:
        moved = {host: s for host, s in self.clocks.moved_s.items() if s}
        lines = [
            f"{self.path}: {counted(self.events, 'event')} of {counted(len(self.ranks), 'rank')} on "
            f"{counted(len(self.clocks.ahead_s), 'host')}, {counted(len(self.profiles), 'profiled step')} among them",
            *(
                f"  {host} moved by {1e3 * s:+.3f} ms: its wall clock let an effect precede its cause"
                for host, s in moved.items()
            ),
            *(f"  left out: {why}" for why in self.left_out),
            "  -> open it at ui.perfetto.dev, or in chrome://tracing",
        ]
        return "\n".join(lines)


def merge_traces(folder: Path, out: Path) -> MergedTrace:
    """Write the trace of the run in `folder` to `out`.

    RequestError `no-trace` where no rank left a black box, `trace-unwritable` where `out` can't be written.
    """
    boxes = read_blackboxes(folder / "blackbox") if (folder / "blackbox").is_dir() else []
    if not boxes:
        raise RequestError(
            f"{folder} has no black boxes, so that there is nothing to lay on one clock",
            code="no-trace",
            fix="the path of a run folder, runs/NAME, whose ranks have started",
        )
    clocks = _clocks(boxes)
    events = [event for box in boxes for event in (*_names(box), *_phases(box, clocks), *_operations(box, clocks))]
    profiles, left_out = [], []
    for path in sorted((folder / "traces").glob("step-*-rank-*.json.gz")):
        try:
            events += _profile(path, {box.rank: box for box in boxes}, clocks)
            profiles.append(path.name)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            left_out.append(f"{path.name}: {type(error).__name__}: {error}")
    base_us = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            begin_us = event["ts"] - base_us
            event["ts"] = round(begin_us, 3)
            if "dur" in event:  # ends are rounded like begins, so that what lay inside stays inside
                event["dur"] = round(round(begin_us + event["dur"], 3) - event["ts"], 3)
    events.sort(key=lambda e: (e.get("ts", -1.0), -e.get("dur", 0.0)))
    other = {"run": str(folder), "base_unix_s": clocks.origin_s + base_us / 1e6, "moved_s": clocks.moved_s}
    _write(out, {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events})
    return MergedTrace(str(out), [box.rank for box in boxes], len(events), profiles, clocks, left_out)


def _write(out: Path, trace: dict[str, Any]) -> None:
    aside = out.with_name(f".{out.name}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"), allow_nan=False)
        aside.replace(out)
    except OSError as error:
        raise RequestError(
            f"can't write {out}: {error.strerror}", code="trace-unwritable", fix="name a file in a folder of yours"
        ) from error
    finally:
        aside.unlink(missing_ok=True)


def _clocks(boxes: Sequence[Blackbox]) -> Clocks:
    by_host: dict[str, list[float]] = defaultdict(list)
    for box in boxes:
        by_host[box.host].append(box.ahead_s)
    ahead = {host: median(found) for host, found in by_host.items()}
    return Clocks(ahead, _moved(boxes, Clocks(ahead, dict.fromkeys(ahead, 0.0))))


def _moved(boxes: Sequence[Blackbox], clocks: Clocks) -> dict[str, float]:
    """By how much each host is moved against the first: as little as lets no operation end before all have come to it.
    In the middle where that can't be (a clock that was set during the run)."""
    reference = boxes[0].host
    met: dict[tuple[object, ...], list[tuple[str, float, float]]] = defaultdict(list)
    for box in boxes:
        for o in box.operations:
            if o.operation in TOGETHER and o.group.blocks and o.finish_s is not None:
                came, over = clocks.common_s(box.host, o.enqueue_s), clocks.common_s(box.host, o.finish_s)
                met[o.group.name, o.group.ranks, o.order].append((box.host, came, over))
    moved = {}
    for host in clocks.ahead_s:
        low, high = float("-inf"), float("inf")
        for ranks in met.values():
            own = [r for r in ranks if r[0] == host]
            others = [r for r in ranks if r[0] == reference]
            if host != reference and own and others:
                low = max(low, max(came for _, came, _ in others) - min(over for _, _, over in own))
                high = min(high, min(over for _, _, over in others) - max(came for _, came, _ in own))
        moved[host] = (low + high) / 2 if low > high else min(max(0.0, low), high)
    return moved


def _names(box: Blackbox) -> Iterator[dict[str, Any]]:
    """Of the process and its threads."""
    names = {"process_name": {"name": f"rank {box.rank} ({box.host})"}, "process_sort_index": {"sort_index": box.rank}}
    for name, args in names.items():
        yield {"ph": "M", "name": name, "pid": box.rank, "tid": 0, "args": args}
    for tid, lane in enumerate(_lanes(box), 1):
        yield {"ph": "M", "name": "thread_name", "pid": box.rank, "tid": tid, "args": {"name": f"phases: {lane}"}}


def _lanes(box: Blackbox) -> list[str]:
    return sorted({mark.lane for mark in box.marks})


def _phases(box: Blackbox, clocks: Clocks) -> Iterator[dict[str, Any]]:
    """Those whose begin is still there; one that hadn't ended lasts until the rank's last mark."""
    last_s = max((mark.at_s for mark in box.marks), default=0.0)
    for tid, lane in enumerate(_lanes(box), 1):
        stack: list[Any] = []
        for mark in (m for m in box.marks if m.lane == lane):
            del stack[mark.depth - (1 if mark.begins else 0) :]  # what lost its end
            if mark.begins:
                stack += [None] * (mark.depth - 1 - len(stack)) + [mark]
            elif len(stack) == mark.depth:
                begun = stack.pop()
                if begun is not None and begun.phase == mark.phase:
                    yield _phase(box, clocks, begun, tid, mark.at_s, {})
        for begun in stack:
            if begun is not None:
                yield _phase(box, clocks, begun, tid, last_s, {"unfinished": True})


def _phase(box: Blackbox, clocks: Clocks, mark: Any, tid: int, end_s: float, more: dict[str, Any]) -> dict[str, Any]:
    args = {n: v for n in ("step", "micro_batch", "stage", "layer") if (v := getattr(mark, n)) is not None} | more
    return _complete(box, clocks, mark.phase, "phase", tid, (mark.at_s, end_s), args)


def _operations(box: Blackbox, clocks: Clocks) -> Iterator[dict[str, Any]]:
    """Each on the first thread that is free; one whose end nobody saw lasts until the last sign of the rank."""
    times = [t for o in box.operations for t in (o.enqueue_s, o.wait_s, o.finish_s) if t is not None]
    last_s, free_at = max(times, default=0.0), []  # type: float, list[float]
    for o in sorted(box.operations, key=lambda o: o.enqueue_s):
        end_s = last_s if o.finish_s is None else o.finish_s
        row = next((i for i, t in enumerate(free_at) if t <= o.enqueue_s), len(free_at))
        if row == len(free_at):
            free_at.append(0.0)
            name = f"operations {row + 1}" if row else "operations"
            args = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": box.rank, "tid": OPERATIONS_TID + row, "args": args}
        free_at[row] = end_s
        name = f"{o.operation} {o.group.name}"
        yield _complete(box, clocks, name, "operation", OPERATIONS_TID + row, (o.enqueue_s, end_s), _told(o))


def _told(o: Operation) -> dict[str, Any]:
    told: dict[str, Any] = {"order": o.order, "bytes": o.size_bytes, "dtype": o.dtype, "ranks": len(o.group.ranks)}
    if o.peer is not None:
        told["peer"] = o.peer
    if o.wait_s is not None and o.finish_s is not None:
        told["waited_ms"] = round(1e3 * (o.finish_s - o.wait_s), 3)
    return told | ({"unfinished": True} if o.finish_s is None else {})


def _complete(
    box: Blackbox, clocks: Clocks, name: str, kind: str, tid: int, span: tuple[float, float], args: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    begin_us = 1e6 * clocks.common_s(box.host, span[0])
    dur = max(0.0, 1e6 * (span[1] - span[0]))
    return {
        "ph": "X", "name": name, "cat": kind, "pid": box.rank, "tid": tid, "ts": begin_us, "dur": dur, "args": args,
    }  # fmt: skip


def _profile(path: Path, boxes: dict[int, Blackbox], clocks: Clocks) -> Events:
    """What torch's profiler recorded of a step, as threads of the rank."""
    with gzip.open(path) as file:
        trace = json.load(file)
    anchor = trace["bessemer"]
    rank, host = int(anchor["rank"]), boxes[int(anchor["rank"])].host
    begin_us = next(e["ts"] for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"] == anchor["name"])
    shift_us = 1e6 * clocks.common_s(host, anchor["clock_s"]) - begin_us
    tids: dict[tuple[Any, Any], int] = {}
    events: Events = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "M" and event.get("name") not in ("thread_name", "thread_sort_index"):
            continue
        tid = tids.setdefault((event.get("pid"), event.get("tid")), PROFILER_TID + len(tids))
        moved = {**event, "pid": rank, "tid": tid}
        if "id" in event:  # of flows: each trace counts from 1
            moved["id"] = f"{path.name}:{event['id']}"
        if event.get("ph") == "M":
            moved.pop("ts", None)
        else:
            moved["ts"] = event["ts"] + shift_us
        events.append(moved)
    named = {e["tid"] for e in events if e["ph"] == "M"}
    for (_, thread), tid in tids.items():
        if tid not in named:  # those that the profiler makes up for itself
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": str(thread)}})
    return events
