"""What kill -9 of a rank costs where all ranks start again: torchrun with a plain script, and this project's own
restart in place, which goes on from the newest save. The same model, four ranks, a save every 20 steps, killed 13
steps later.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from _keep_runs import MEMBERS, SAVE_EVERY, Run, job_of, tell
from table import Row

from bessemer.inspect.chaos_target import Standing
from bessemer.keep.records import read_records

AFTER_SAVE = 13
_LOOK_S = 0.02
_PATIENCE_S = 600.0
Steps = list[tuple[int, float]]


@dataclass(frozen=True)
class Restart:
    """Seconds from the last step before the kill until the first one after it, and until the steps that were lost are
    done again. usual_s: of a step."""

    stop_s: float
    regained_s: float
    steps_lost: int
    usual_s: float


def ours(folder: Path, times: int) -> list[Restart]:
    """keep.mode = "restart" with keep.restarts: the agent starts all ranks again."""
    job = job_of(folder, "restart", mode="restart", restarts=99)
    last = 0
    with Run(job) as run:
        for number in range(times):
            run.until_step((last // SAVE_EVERY + 1) * SAVE_EVERY + AFTER_SAVE)
            run.kill_worker()
            last = run.standing.step
            tell(f"restart in place {number + 1} of {times}: killed at step {last}")
            run.until(_went_back(last))
            run.until_step(last + 2)
    return _from_records(job.run.folder)


def _went_back(last: int) -> Callable[[Standing], bool]:
    """Whether the records end before `last`, where the run was killed."""
    return lambda standing: standing.step < last - 1


def _from_records(folder: Path) -> list[Restart]:
    commits = {int(r["step"]): float(r["t"]) for r in read_records(folder / "metrics.jsonl")}
    usual = _usual([t for _, t in sorted(commits.items())])
    found = []
    for event in read_records(folder / "events.jsonl"):
        if event["event"] == "cut":
            first, lost = int(event["step"]) + 1, int(event["steps"])
            stop_s = commits[first] - float(event["last_t"])
            found.append(Restart(stop_s, commits[first + lost - 1] - float(event["last_t"]), lost, usual))
    return found


def _usual(times: Sequence[float]) -> float:
    return median(end - begin for begin, end in pairwise(times))


def torchrun(folder: Path, times: int) -> list[Restart]:
    """torchrun --max-restarts with `_keep_ddp.py`."""
    folder.mkdir()
    script = Path(__file__).with_name("_keep_ddp.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={MEMBERS}"]
    command += ["--max-restarts=99", "--monitor-interval=0.1", str(script), str(folder)]
    chance, found = random.Random(3), []
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        for number in range(times):
            before = _steps(process, folder, partial(_after_save, 2 * SAVE_EVERY))
            os.kill(int((folder / f"pid-{chance.randrange(MEMBERS)}").read_text()), signal.SIGKILL)
            tell(f"torchrun {number + 1} of {times}: killed at step {before[-1][0]}")
            after = _steps(process, folder, partial(_regained, len(before)))
            found.append(_restart(after))
    finally:
        process.terminate()  # its workers end with it
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return found


def _after_save(at_least: int, steps: Steps) -> bool:
    """Whether the newest attempt is where the kill is due."""
    return bool(steps) and steps[-1][0] >= at_least and steps[-1][0] % SAVE_EVERY >= AFTER_SAVE and _calm(steps)


def _calm(steps: Steps) -> bool:
    """A save and more behind the latest restart."""
    return all(b[0] == a[0] + 1 for a, b in pairwise(steps[-SAVE_EVERY:]))


def _break(steps: Steps) -> int | None:
    """Where the newest attempt begins."""
    found = [i for i in range(1, len(steps)) if steps[i][0] <= steps[i - 1][0]]
    return found[-1] if found else None


def _regained(known: int, steps: Steps) -> bool:
    at = _break(steps)
    return at is not None and at >= known and steps[-1][0] > steps[at - 1][0] + 1


def _restart(steps: Steps) -> Restart:
    at = _break(steps)
    assert at is not None
    last, last_t = steps[at - 1]
    again_t = next(t for step, t in steps[at:] if step == last)
    usual = _usual([t for _, t in steps[max(0, at - 12) : at]])
    return Restart(steps[at][1] - last_t, again_t - last_t, last - steps[at][0] + 1, usual)


def _steps(process: subprocess.Popen[bytes], folder: Path, what: Callable[[Steps], bool]) -> Steps:
    """The steps done, once `what` holds of them."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        file = folder / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        steps = [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]
        if what(steps):
            return steps
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join((folder / "log").read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"torchrun ended, or hangs, at line {len(steps)} of its steps\n{tail}")
        time.sleep(_LOOK_S)


def rows(own: Sequence[Restart], theirs: Sequence[Restart]) -> list[Row]:
    """The stop, the steps lost, and the time until they are regained, of both; and whether torchft is here."""
    found = []
    for name, restarts in (("restart in place", own), ("torchrun", theirs)):
        usual = median(r.usual_s for r in restarts)
        note = f"median of {len(restarts)}, a step takes {usual:.3f} s"
        of = [("nobody trains for", [r.stop_s for r in restarts], "s"),
              ("steps lost", [float(r.steps_lost) for r in restarts], ""),
              ("until the lost steps are regained", [r.regained_s for r in restarts], "s")]  # fmt: skip
        found += [Row(f"{name}, kill -9: {what}", median(values), unit, "lower", None,
                      f"{note}; {min(values):.3g} to {max(values):.3g}") for what, values, unit in of]  # fmt: skip
    if find_spec("torchft") is None:
        tell("torchft is not installed: left out")
    return found
