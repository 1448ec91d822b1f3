"""Black boxes in the form of torch's flight recorder, for torch's own tool.

    export_flight_record(read_blackboxes(run / "blackbox"), folder)
    $ torchfrtrace folder            # "Not all ranks joining collective, sequence number: 5 ... missing ranks: {1}"

The form is 2.10, that of torch 2.13. Its tool reads nothing but pickles, so the few opcodes that plain data needs are
written here; nothing in this package reads any. A message is told as an operation of a group of its own, the two
ranks in one direction ("pipeline 0>1"), since the tool takes a message in a larger group for a collective that the
others missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.runtime import ring
from bessemer.runtime.blackbox import Blackbox, Operation

__all__ = ["export_flight_record"]

VERSION = "2.10"
NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
BACKENDS = ("gloo", "nccl", "mccl", "xccl", "hccl", "rccl")
"""Those that the tool accepts; what runs over another is told as gloo's or NCCL's."""


@dataclass(frozen=True)
class _Told:
    """An operation of a rank as the tool is told of it: group and order are the same on every rank."""

    box: Blackbox
    operation: Operation
    group: str
    ranks: tuple[int, ...]  # ascending

    @property
    def key(self) -> tuple[str, int]:
        return self.group, self.operation.order

    @property
    def over(self) -> bool:
        return self.operation.group.blocks and self.operation.finish_s is not None

    @property
    def enqueue_wall_s(self) -> float:
        return self.box.wall_s(self.operation.enqueue_s)


def export_flight_record(boxes: Sequence[Blackbox], folder: Path) -> list[Path]:
    """Write `folder`/rank_R for each black box; returns the paths. The tool wants nothing else in the folder.

    Operations that some other rank's ring may no longer hold are left out, so that they don't look missing there. One
    that this rank's host hasn't waited for counts as over if a peer saw its end; where waiting doesn't block the
    host, none counts as over.
    """
    told = [_told_by(box) for box in boxes]
    first = _first_orders(boxes, [each for of_rank in told for each in of_rank])
    over = {each.key for of_rank in told for each in of_rank if each.over}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for box, of_rank in zip(boxes, told, strict=True):
        kept = [each for each in of_rank if each.operation.order >= first[each.group]]
        dump = {
            "version": VERSION,
            "comm_lib_version": "",
            "nccl_comm_state": {},
            "pg_config": {e.group: {"name": e.group, "desc": "undefined", "ranks": str(list(e.ranks))} for e in kept},
            "pg_status": {},
            "entries": [_entry(each, index, each.key in over) for index, each in enumerate(kept)],
        }
        path = folder / f"rank_{box.rank}"
        path.write_bytes(b"\x80\x02" + _pickled(dump) + b".")
        paths.append(path)
    return paths


def _told_by(box: Blackbox) -> list[_Told]:
    """All that a rank tells. Of a group that was made anew, whose order starts again, only the newest."""
    told = [_told(box, operation) for operation in box.operations if operation.group.ranks]
    newest: dict[str, int] = {}
    for each in told:
        newest[each.group] = max(newest.get(each.group, 0), each.operation.group.number)
    return [each for each in told if each.operation.group.number == newest[each.group]]


def _told(box: Blackbox, operation: Operation) -> _Told:
    group = operation.group
    if operation.peer is None:
        ranks = tuple(sorted(group.ranks))
        runs = (f"{a}-{a + step * (n - 1)}" + f"/{step}" * (step > 1) for a, step, n in ring.ranges(ranks))
        return _Told(box, operation, f"{group.name} {','.join(runs)}", ranks)
    source, target = _ends(box, operation)
    return _Told(box, operation, f"{group.name} {source}>{target}", tuple(sorted((source, target))))


def _ends(box: Blackbox, operation: Operation) -> tuple[int, int]:
    """Global ranks (source, target) of a message."""
    assert operation.peer is not None
    return (box.rank, operation.peer) if operation.operation == "send" else (operation.peer, box.rank)


def _first_orders(boxes: Sequence[Blackbox], told: list[_Told]) -> dict[str, int]:
    """Of each group the first operation that no rank's ring can have lost."""
    groups: dict[str, list[_Told]] = defaultdict(list)
    for each in told:
        groups[each.group].append(each)
    by_rank = {box.rank: box for box in boxes}
    first = {}
    for group, members in groups.items():
        oldest: dict[int, int] = {}
        for each in members:
            oldest[each.box.rank] = min(each.operation.order, oldest.get(each.box.rank, each.operation.order))
        first[group] = max(oldest.values())
        for rank in set(members[0].ranks) - set(oldest):
            if rank in by_rank:
                since_s = _complete_since_s(by_rank[rank])
                lost = [each.operation.order for each in members if each.enqueue_wall_s < since_s]
                first[group] = max(first[group], 1 + max(lost, default=0))
    return first


def _complete_since_s(box: Blackbox) -> float:
    """The wall-clock time from which a ring holds everything."""
    if not box.operations or box.operations[0].number == 1:
        return 0.0
    return box.wall_s(box.operations[0].enqueue_s)


def _entry(each: _Told, index: int, over_somewhere: bool) -> dict[str, Any]:
    box, operation = each.box, each.operation
    over = each.over or (over_somewhere and operation.wait_s is None)
    return {
        "record_id": index,
        "pg_id": 0,
        "process_group": (each.group, "undefined"),
        "collective_seq_id": operation.order,
        "p2p_seq_id": operation.order,
        "op_id": operation.number,
        "profiling_name": _profiling_name(each),
        "time_created_ns": _ns(box, operation.enqueue_s),
        "input_sizes": [[operation.taken]],
        "input_dtypes": [operation.dtype],
        "output_sizes": [[operation.given]],
        "output_dtypes": [operation.dtype],
        "state": "completed" if over else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": _ns(box, operation.finish_s) if each.over else None,
        "retired": over,
        "timeout_ms": 0,
        "is_p2p": operation.peer is not None,
        "frames": _frames(box, operation),
    }


def _profiling_name(each: _Told) -> str:
    operation, group = each.operation, each.operation.group
    fallback = "gloo" if group.blocks else "nccl"
    name = NAMES.get(operation.operation, operation.operation)
    if operation.peer is not None:
        source, target = (each.ranks.index(rank) for rank in _ends(each.box, operation))
        name += f" {source}->{target}" if operation.operation == "send" else f" {target}<-{source}"
    return f"{group.backend if group.backend in BACKENDS else fallback}:{name}"


def _frames(box: Blackbox, operation: Operation) -> list[dict[str, str]]:
    """Where in the step it was: the tool prints it as "NAME at FILENAME:LINE" in place of a stack."""
    mark = box.during(operation)
    if mark is None:
        return []
    places = {"step": mark.step, "micro-batch": mark.micro_batch, "stage": mark.stage, "layer": mark.layer}
    text = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    phase = mark.phase if mark.begins else mark.enclosing or "between phases"
    return [{"name": phase, "filename": text or "no step", "line": f"operation {operation.number}"}]


def _ns(box: Blackbox, at_s: float | None) -> int | None:
    return None if at_s is None else round(box.wall_s(at_s) * 1e9)


def _pickled(value: Any) -> bytes:
    """`value`, of plain data, as pickle opcodes (protocol 2)."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"I%d\n" % value
    if isinstance(value, str):
        text = value.encode()
        return b"X" + len(text).to_bytes(4, "little") + text
    if isinstance(value, dict):
        return b"}(" + b"".join(_pickled(x) for pair in value.items() for x in pair) + b"u"
    inside = b"".join(_pickled(x) for x in value)
    return b"(" + inside + b"t" if isinstance(value, tuple) else b"](" + inside + b"e"
