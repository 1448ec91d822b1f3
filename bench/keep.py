"""What a fault costs a run that goes on through it, what being ready for faults costs, and both beside restarting.

    python bench/keep.py [--json] [--quick] [--only PART ...]

Parts: `faults` (four members and spares under kill -9, SIGSTOP and a standstill), `restarts` (the same job where all
ranks start again, here and under torchrun), `overhead` (CPU time without faults beside plain data parallelism), `votes`
(the coordinator with up to 10,000 simulated members), and from the first two the effective time of large jobs, which is
modelled. Twelve minutes on two cores, three with --quick, which throws fewer faults. Progress on standard error.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import _keep_faults
import _keep_overhead
import _keep_restarts
import _keep_votes
from _keep_faults import Cost
from _keep_restarts import Restart
from _keep_runs import tell
from table import Row, show

from bessemer.plan.goodput import Mode, estimate
from bessemer.plan.goodput_inputs import ask

PARTS = ("faults", "restarts", "overhead", "votes")
FAULTS = {"kill": 20, "stop": 20, "hang": 2}
QUICK_FAULTS = {"kill": 3, "stop": 3, "hang": 1}
GPUS = (1024, 16384, 100_000)
SIZES = (100, 1000, 10_000)


def measure(folder: Path, parts: Sequence[str], *, quick: bool) -> list[Row]:
    """The rows of these parts, in order."""
    found: list[Row] = []
    costs: list[Cost] = []
    own: list[Restart] = []
    if "faults" in parts:
        _say("faults")
        costs = _keep_faults.measure(folder, QUICK_FAULTS if quick else FAULTS)
        found += _keep_faults.rows(costs)
    if "restarts" in parts:
        _say("restarts")
        own = _keep_restarts.ours(folder, 1 if quick else 5)
        theirs = _keep_restarts.torchrun(folder / "torchrun", 1 if quick else 3)
        found += _keep_restarts.rows(own, theirs)
    if "overhead" in parts:
        _say("overhead")
        found += _keep_overhead.rows(folder, 8 if quick else 30)
    if "votes" in parts:
        _say("votes")
        found += _keep_votes.rows(SIZES, 10 if quick else 20, connected=SIZES[:2] if quick else SIZES)
    if costs and own:
        found += goodput(costs, own)
    return found


def _say(part: str) -> None:
    tell(f"{time.strftime('%H:%M:%S')} {part}")


def goodput(costs: Sequence[Cost], own: Sequence[Restart]) -> list[Row]:
    """Effective time of large jobs, modelled by `bessemer plan goodput` from what was measured here.

    As here: a third of the failures each ends a process, stops one, and leaves one alive without progress; they are
    found as soon in either mode, and a spare counts, or all are back, as soon as with the small model here. As
    published: what the verb assumes unasked. Saves and steps are those of the verb in all cases."""
    kinds = {cost.kind for cost in costs}
    stall_s = sum(median(c.lost_s for c in costs if c.kind == kind) for kind in kinds) / len(kinds)
    join_s = median(c.join_s for c in costs if c.kind != "hang")
    stop_s = median(r.stop_s for r in own)
    listed = []
    for gpus in GPUS:
        found = [f"detection_s={max(stall_s, 0.0):.3f}"]
        zero = [*found, "stall_s=0", f"join_s={max(join_s, stall_s):.3f}"]
        ways: list[tuple[str, Mode, list[str], str]] = [
            ("zero interruption, as here", "zero", zero, f"stall {stall_s:.2f} s, {join_s:.1f} s until a spare counts"),
            ("restart from disk, as here", "disk", [*found, f"restart_disk_s={stop_s:.3f}"], f"restart {stop_s:.1f} s"),
            ("zero interruption, as published", "zero", [], "found and stalled as published for that size"),
            ("restart from disk, as published", "disk", [], "found and restarted as published for that size"),
        ]
        for name, mode, sets, of in ways:
            asked = ask(gpus, "llama-3", sets)
            percent = 100 * estimate(asked.inputs, mode).effective_time
            note = f"modelled, a failure every {asked.inputs.mttf_s / 3600:.2f} h (Llama 3); {of}"
            listed.append(Row(f"effective time of {gpus:,} devices, {name}", percent, "%", "higher", None, note))
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer faults and steps: three minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # what was started is ended on the way out
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        rows = measure(Path(folder), given.only, quick=given.quick)
    show(rows, json=given.json)


if __name__ == "__main__":
    main()
