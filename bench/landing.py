"""Scripted crashes of real runs, and what `bessemer landing` says of each, held against the truth.

    python bench/landing.py [--json] [--quick] [--only NAME ...] [--keep FOLDER]

Each scenario of tests/inspect/crash_scenarios.py is a run of `bessemer train` with real ranks of a tiny model, of which
something fails in a known way. A report is right where it names the guilty rank and the class. The bars: right in 90 %
of them, and never sure (confidence of 0.5 or more) of a rank or class that isn't true. Half an hour on two cores;
--quick plays every sixth. Progress on standard error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from table import Row, show

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:] = [
    str(TESTS),
    str(TESTS / "inspect"),
    *(p for p in sys.path if p != str(HERE)),
]  # train.py hides tests/train

from crash_runs import Judgement, Scenario, crashed, judged, memory_groups  # noqa: E402
from crash_scenarios import SCENARIOS  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

QUICK = 6
BAR_PERCENT = 90.0


@dataclass(frozen=True)
class Played:
    """A scenario that was played; `failed` says why it could not be played as written, which is no verdict."""

    scenario: Scenario
    judgement: Judgement | None
    evidence: tuple[str, ...]
    seconds: float
    failed: str = ""

    @property
    def mark(self) -> str:
        if self.judgement is None:
            return "not played"
        if self.judgement.right:
            return "right"
        return "WRONG, AND SURE" if self.judgement.wrong_and_sure else "missed"


def possible(scenario: Scenario) -> bool:
    """Whether this machine and user can play it."""
    return {"": True, "root": os.geteuid() == 0, "cgroup": memory_groups()}[scenario.needs]


def play(scenario: Scenario, folder: Path) -> Played:
    """Run it in `folder`, and judge what landing says of it."""
    begin = time.monotonic()
    try:
        with crashed(folder, scenario) as (_, landing):
            found = judged(landing, scenario.truth)
            evidence = () if landing is None else (
                *landing.verdict.evidence, *(line for loss in landing.losses for line in loss.verdict.evidence)
            )  # fmt: skip
    except (AssertionError, OSError):
        return Played(scenario, None, (), time.monotonic() - begin, traceback.format_exc())
    return Played(scenario, found, evidence, time.monotonic() - begin)


def rows(played: Sequence[Played]) -> list[Row]:
    """The totals."""
    judgements = [p.judgement for p in played if p.judgement is not None]
    right = sum(j.right for j in judgements)
    sure = sum(j.wrong_and_sure for j in judgements)
    percent = 100 * right / max(1, len(judgements))
    note = f"{right} of {len(judgements)}; {len(played) - len(judgements)} could not be played"
    return [
        Row("right rank and class", percent, "%", "higher", BAR_PERCENT, note),
        Row("wrong, with a confidence of 0.5 or more", sure, "reports", "lower", 0),
        Row("a scenario takes", sum(p.seconds for p in played) / max(1, len(played)), "s", "lower", None, "mean"),
    ]


def show_corpus(played: Sequence[Played]) -> None:
    table = Table("scenario", "truth", "landing says", "confidence", "", "s", title="crashes", title_justify="left")
    for p in played:
        told, confidence = ("", "") if p.judgement is None else (p.judgement.told, f"{p.judgement.confidence:.2f}")
        table.add_row(p.scenario.name, str(p.scenario.truth), told, confidence, p.mark, f"{p.seconds:.0f}")
    Console(width=None if Console().is_terminal else 150).print(table)
    for p in played:
        if p.mark != "right":
            print(f"{p.scenario.name}: {p.mark}", *(f"  {line}" for line in (*p.evidence, p.failed) if line), sep="\n")


def chosen(only: Sequence[str], *, quick: bool) -> list[Scenario]:
    """The scenarios to play. SystemExit for a name that none has."""
    unknown = set(only) - {scenario.name for scenario in SCENARIOS}
    if unknown:
        raise SystemExit(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SCENARIOS)}")
    found = [s for s in SCENARIOS if possible(s) and (not only or s.name in only)]
    return found[::QUICK] if quick and not only else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of tables")
    parser.add_argument("--quick", action="store_true", help="every sixth scenario")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these scenarios alone")
    parser.add_argument("--keep", type=Path, help="leave the run folders in this folder")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # what was started is ended on the way out
    scenarios = chosen(given.only, quick=given.quick)
    played = []
    place = nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp")
    with place as base:
        for scenario in scenarios:
            folder = Path(base) / scenario.name
            folder.mkdir(parents=True)
            played.append(play(scenario, folder))
            print(f"  {scenario.name}: {played[-1].mark}", file=sys.stderr, flush=True)
    if not given.json:
        show_corpus(played)
    show(rows(played), json=given.json)


if __name__ == "__main__":
    main()
