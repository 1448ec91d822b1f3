"""The verb `landing`."""

from __future__ import annotations

from pathlib import Path

from bessemer.inspect.landing import Landing, read_landing

__all__ = ["landing"]


def landing(run: str) -> Landing:
    """How a run ended and why: first fault, guilty rank, evidence, and what to do next.

    Reads only what the run left in its folder (events, metrics, logs, black boxes) and, for ranks of this host, the
    kernel's log. A run that hangs may be asked while it hangs.

    run: The run folder, runs/NAME.
    """
    return read_landing(Path(run))
