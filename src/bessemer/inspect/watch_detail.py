"""What one rank left in its own files: the phases and operations that are open in its black box, the end of its log."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bessemer.core.errors import BessemerError
from bessemer.runtime.blackbox import read_blackbox

__all__ = ["box_words", "last_lines"]

LINES, LOG_BYTES = 20, 16384


def box_words(path: Path, now: float) -> dict[str, Any]:
    """`open`: the open phases, outermost first; `unfinished`: operations whose end nobody saw; each in words with the
    seconds up to `now` (unix seconds). Both empty where there is no black box."""
    try:
        box = read_blackbox(path)
    except BessemerError:
        return {"open": [], "unfinished": []}
    phases = [
        {"name": mark.phase, "step": mark.step, "for_s": _age(now, box.wall_s(mark.at_s))} for mark in box.open_phases()
    ]
    operations = [
        {
            "name": f"{o.operation} number {o.order} of {o.group.name!r}, {len(o.group.ranks)} ranks",
            "bytes": o.size_bytes,
            "for_s": _age(now, box.wall_s(o.enqueue_s)),
        }
        for o in box.unfinished()[-6:]
    ]
    return {"open": phases, "unfinished": operations}


def last_lines(path: Path) -> list[str]:
    """The last lines of a log, whatever its size; none where there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    return [line[:400] for line in (lines[1:] if size > LOG_BYTES else lines)[-LINES:]]


def _age(now: float, t: float) -> float | None:
    return None if math.isnan(t) else max(0.0, now - t)
