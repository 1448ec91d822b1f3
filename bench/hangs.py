"""Whether the watch of a run names the right rank where one is stopped, or alive and makes no progress, and how soon.

    python bench/hangs.py [--json] [--quick]

Two or three real processes train a tiny model (data, tensor or pipeline parallel) and write their black boxes; the
watch that `bessemer train` starts reads them. One rank, drawn at random, is sent SIGSTOP, or sleeps for ever when it
enters a phase that is drawn too. The first finding after it counts, and one before it is wrong. Most trials of the
second kind have a limit of max(2 s, 5 x p99 of a step) instead of the product's max(10 s, 5 x p99), so that they take
seconds; some have the product's. `--quick`: a tenth of the trials. Progress on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from _hang_ranks import ARMED, LAYOUTS, PHASES, STRUCK, context, job_of, rank, watch
from table import Row, show

from bessemer.core.job_file import dump_job
from bessemer.inspect.flight_watch import LEASE_S
from bessemer.keep.step_times import LEAST_HANG_S
from bessemer.keep.wire import Frames
from bessemer.runtime.blackbox import read_blackbox
from bessemer.runtime.box_tail import BoxTail

TRIALS, REAL_TRIALS, SHORT_S = 50, 3, 2.0
STEPS = 12
"""Which all ranks have taken before anything is done to one."""
SEEN_S = 1.5
"""Then the watch has taken them in."""
PATIENCE_S = 600.0


class Outcome(NamedTuple):
    """guilty, and what was named how many seconds after the fault (None: nobody), where `limit_s` are allowed."""

    guilty: int
    named: list[int] | None
    after_s: float
    limit_s: float
    about: str


def rows(scale: int) -> list[Row]:
    """The trials, fewer by that factor."""
    processes, draw = context(), random.Random(11)
    real = [_trial(processes, draw, draw.choice(PHASES), None) for _ in range(REAL_TRIALS)]
    stops, short = [], []
    for number in range(TRIALS // scale):
        stops.append(_trial(processes, draw, None, None))
        short.append(_trial(processes, draw, PHASES[number % len(PHASES)], SHORT_S))
    return [
        *_rows("stopped (SIGSTOP)", stops),
        *_rows(f"alive without progress, limit {SHORT_S:g} s", short, timed=False),
        *_rows("alive without progress, the product's limit", real),
    ]


def _rows(name: str, outcomes: list[Outcome], *, timed: bool = True) -> list[Row]:
    """timed: whether how soon it is named has a bar; the watch looks once a second, which is half of a short limit."""
    right = [outcome for outcome in outcomes if outcome.named == [outcome.guilty]]
    times_s = [outcome.after_s for outcome in right] or [float("nan")]
    bar_s = statistics.median(outcome.limit_s for outcome in outcomes) if timed else None
    within = sum(outcome.after_s <= outcome.limit_s for outcome in right)
    note = f"{min(times_s):.2f} to {max(times_s):.2f}" + (f"; {within} within their own bar" if timed else "")
    return [
        Row(f"{name}: the right rank is named", len(right), f"of {len(outcomes)}", "higher", bar=len(outcomes)),
        Row(f"{name}: until it is named, median", statistics.median(times_s), "s", "lower", bar=bar_s, note=note),
    ]


def _trial(processes: Any, draw: random.Random, phase: str | None, least_hang_s: float | None) -> Outcome:
    """One fault: phase None: SIGSTOP at any moment; else the rank hangs in that phase."""
    layout = draw.choice(LAYOUTS)
    world, delay_s = max(layout.values()), 0.3 * draw.random()
    guilty = draw.randrange(world)
    with tempfile.TemporaryDirectory() as folder, _agent(Path(folder)) as listener:
        _write_run(Path(folder), layout, world)
        started = [processes.Process(target=watch, args=(folder, least_hang_s), daemon=True)]
        for number in range(world):
            hangs_in = phase if number == guilty else None
            started.append(processes.Process(target=rank, args=(number, world, folder, hangs_in), daemon=True))
        try:
            for process in started:
                process.start()
            link, _ = listener.accept()
            with link:
                _until_trained(Path(folder), world, started)
                time.sleep(SEEN_S + delay_s)
                pid = started[1 + guilty].pid if phase is None else 0
                named, after_s, text = _struck(Path(folder), link, pid)
            limit_s = LEASE_S + 1.0 if pid else max(least_hang_s or LEAST_HANG_S, 5 * _p99_step_s(Path(folder)))
            about = f"{layout}, {'SIGSTOP' if pid else phase or 'between steps'}: {text}"
            outcome = Outcome(guilty, named, after_s, limit_s, about)
            print(outcome, file=sys.stderr, flush=True)
            return outcome
        finally:
            for process in started:
                process.kill()
                process.join()


def _struck(folder: Path, link: socket.socket, pid: int) -> tuple[list[int] | None, float, str]:
    """Do it, and wait for the first finding: whom it names, how long after the fault, its text. What was found before
    counts as wrong."""
    for early in _findings(link, time.monotonic()):
        return early["ranks"], float("nan"), f"before the fault: {early['text']}"
    since_s = time.monotonic()
    if pid:
        os.kill(pid, signal.SIGSTOP)
    else:
        (folder / ARMED).touch()
    for found in _findings(link, since_s + PATIENCE_S):
        named_s = time.monotonic()
        if not pid:
            since_s = json.loads((folder / STRUCK).read_text())
        return found["ranks"], named_s - since_s, found["text"]
    return None, float("nan"), "nothing"


def _p99_step_s(folder: Path) -> float:
    """Of the steps that are in the black box of the first rank."""
    marks = read_blackbox(folder / "blackbox" / "rank-0").marks
    begins = [mark.at_s for before, mark in pairwise(marks) if mark.step != before.step]
    lengths = sorted(end - begin for begin, end in pairwise(begins))
    return lengths[int(0.99 * (len(lengths) - 1))]


def _findings(link: socket.socket, until_s: float) -> Iterator[dict[str, Any]]:
    """What the watch tells of ranks that stand still."""
    frames = Frames()
    while True:
        link.settimeout(max(0.001, until_s - time.monotonic()))
        try:
            data = link.recv(1 << 16)
        except TimeoutError:
            return
        for record in frames.feed(data):
            if record["kind"] == "event" and record["fields"]["kind"] in ("stopped", "hang"):
                yield record["fields"]
        if not data:
            return


@contextmanager
def _agent(folder: Path) -> Iterator[socket.socket]:
    """Where the watch expects its agent."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        listener.bind(str(folder / "agent"))
        listener.listen(1)
        listener.settimeout(PATIENCE_S)
        yield listener


def _write_run(folder: Path, layout: dict[str, int], world: int) -> None:
    for name in ("logs", "blackbox"):
        (folder / name).mkdir()
    (folder / "job.toml").write_text(dump_job(job_of(layout)))
    start = {"t": time.time(), "event": "start", "world_size": world, "host": socket.gethostname()}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")


def _until_trained(folder: Path, world: int, processes: list[Any]) -> None:
    tails = [BoxTail(folder / "blackbox" / f"rank-{number}") for number in range(world)]
    newest = [0] * world
    deadline = time.monotonic() + PATIENCE_S
    while min(newest) < STEPS:
        for number, tail in enumerate(tails):
            tail.look()
            newest[number] = max([newest[number], *(mark.step for mark in tail.marks())])
        ended = [process.exitcode for process in processes if process.exitcode is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-800:] for path in (folder / "logs").iterdir())
            raise RuntimeError(f"ranks ended with {ended}, or take no steps: {newest}\n{logs}")
        time.sleep(0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    given = parser.parse_args()
    show(rows(10 if given.quick else 1), json=given.json)
