"""The form of a black box file: how each part of it lies in the memory that a rank and its readers share.

    head        64 bytes: magic, sizes, CRC
    table       lines of text, only ever appended: "CRC JSON"; the first says whose file it is, the others give the
                numbers in the records their names
    marks       a ring of records of 64 bytes: phases that begin and end, clock pairs
    operations  a ring of records of 128 bytes: what was handed to the communication library, and how it ended

Record n of a ring lies at slot n modulo the number of slots and carries n and a CRC32 of its fields. What a killed
process left half written, or what is being overwritten while it is read, fails one of the two and counts as torn.
The end of an operation, written later beside it, is sealed by n alone.
All times are seconds as float64; those of records are of the rank's monotonic clock.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "BEGIN",
    "CLOCK",
    "END",
    "ENDING",
    "FINISH_AT",
    "HEAD",
    "HEAD_BYTES",
    "MAGIC",
    "MARK",
    "MARK_BYTES",
    "NONE",
    "OPERATION",
    "OPERATIONS",
    "OPERATION_BYTES",
    "PAIR",
    "SEALED_MARK",
    "SEALED_OPERATION",
    "WAIT_AT",
    "line",
    "lines",
    "ranges",
    "unfold",
]

MAGIC = b"BESSBOX1"
HEAD = struct.Struct("<8sIIII")  # magic, bytes of the table, slots for marks, slots for operations, CRC of these
HEAD_BYTES = 64

MARK = struct.Struct("<QdiHBHihhHB")
"""number, at_s, step, phase, kind, lane, micro-batch, stage, layer, enclosing phase, depth."""
PAIR = struct.Struct("<QdiHBHdHB")
"""The same for kind CLOCK, with the wall clock in place of micro-batch, stage and layer."""
SEALED_MARK = struct.Struct(f"<{MARK.size}sI")
MARK_BYTES = 64
BEGIN, END, CLOCK = 1, 2, 3
NONE = -1
"""A step, micro-batch, stage, layer or peer that isn't known; a phase that isn't is 0xFFFF."""

OPERATION = struct.Struct("<QdqqqiHBHB")
"""number, enqueue_s, place in the order of its group, elements taken and given, peer, group, operation, element type,
1 if the host waits from the start."""
SEALED_OPERATION = struct.Struct(f"<{OPERATION.size}sI")
ENDING = struct.Struct("<dQ")
"""A time, then the operation's number: stored in this order, so that the number seals the time. One for the start of
the host's waiting, one for the end."""
WAIT_AT, FINISH_AT = 64, 80
OPERATION_BYTES = 128

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")
"""What an operation's number in a record means. The numbers of phases, lanes, groups and element types are told by
the table."""


def line(entry: dict[str, Any]) -> bytes:
    """A line of the table."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def lines(table: bytes) -> Iterator[dict[str, Any]]:
    """The whole lines of a table; a torn one ends it."""
    for raw in table.split(b"\n"):
        try:
            if int(raw[:8], 16) != zlib.crc32(raw[9:]):
                return
            yield json.loads(raw[9:])
        except ValueError:
            return


def ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as runs [first, step, count]: a group of ten thousand is a few bytes."""
    found: list[list[int]] = []
    for rank in ranks:
        if found:
            first, step, count = found[-1]
            if count == 1:
                found[-1] = [first, rank - first, 2]
                continue
            if rank == first + step * count:
                found[-1][2] += 1
                continue
        found.append([rank, 1, 1])
    return found


def unfold(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks of `ranges`."""
    return tuple(rank for first, step, count in runs for rank in range(first, first + step * count, step))
