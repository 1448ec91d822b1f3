"""The verb `landing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from bessemer.api._extras import need
from bessemer.core.errors import RequestError
from bessemer.inspect.landing import read_landing
from bessemer.inspect.merged_trace import merge_traces

__all__ = ["Report", "landing"]


class Report(Protocol):
    """What was found: a `Landing`, a replay or a merged trace."""

    def as_json(self) -> dict[str, Any]: ...


def landing(run: str | None = None, *, replay: str | None = None, trace: str | None = None) -> Report:
    """How a run ended and why: first fault, guilty rank, evidence, and what to do next.

    Reads only what the run left in its folder (events, metrics, logs, black boxes) and, for ranks of this host, the
    kernel's log. A run that hangs may be asked while it hangs.

    run: The run folder, runs/NAME.
    replay: A dump of a fault, runs/NAME/dumps/dump-N: run its operator and its micro-batch again, in one process on the
        CPU, and say from which element the bad value came, and whether it was the data, the code or the machine.
    trace: Write the phases, operations and profiled steps of all ranks to this file instead, on one clock, as a trace
        that Perfetto and Chrome open.
    """
    if (run is None) == (replay is None) or (replay is not None and trace is not None):
        raise RequestError(
            "landing reads one run folder, or one dump",
            code="landing-what",
            fix="bessemer landing runs/NAME, or bessemer landing --replay runs/NAME/dumps/dump-1",
        )
    if replay is not None:
        need("landing", "train")
        from bessemer.inspect.replay import replay as run_again

        return run_again(Path(replay))
    assert run is not None
    return read_landing(Path(run)) if trace is None else merge_traces(Path(run), Path(trace))
