"""What every rank of a run does, from the black boxes that its ranks write, no mark read twice.

    boxes = Boxes(run / "blackbox")
    for box in boxes.read(): box.rank, box.step, box.seconds, box.doing

A step counts as whole when its optimizer has ended, or when marks of a later one begin; what a rank does between two
steps (an evaluation, a save) is added to the earlier one. Seconds are exclusive, as those of `runtime.phases`.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from pathlib import Path

from bessemer.runtime import ring
from bessemer.runtime.box_tail import BoxTail, TailMark

__all__ = ["COMPUTE", "PHASES", "Boxes", "RankBox"]

PHASES = ("forward", "backward", "waiting", "data", "rest")
"""Into what the phases of a box are gathered: waiting is `comm_s`; rest the optimizer, saves and evaluations."""
COMPUTE = (0, 1)
"""Of these, what a rank computes itself."""
HISTORY = 64
"""Steps that are kept of each rank."""
LOOK_AGAIN_S = 5.0
"""Between two looks for boxes that are new or were replaced."""
BEHIND_STEPS = 20
"""All ranks take a step together, so a box that is further behind and doesn't grow is nobody's any more."""
_PLACE = {"forward_s": 0, "backward_s": 1, "comm_s": 2, "data_s": 3}
_REST = len(PHASES) - 1
_BETWEEN = ("evaluate_s", "checkpoint_s", "compare_s", "profile_s", "dump_s")


class RankBox:
    """One black box, as steps.

    steps: (step, seconds by phase [P]) of the last whole steps; step 0 where the rank didn't say which. doing: the
    innermost phase that is open, "" between phases, since `since_t` (unix seconds; NaN where nothing was marked).
    """

    def __init__(self, path: Path, since_t: float = 0.0) -> None:
        """since_t: when the attempt of the run began, in unix seconds."""
        self.tail = BoxTail(path, since_t)
        self._clear()

    def _clear(self) -> None:
        self.steps: deque[tuple[int, list[float]]] = deque(maxlen=HISTORY)
        self.num_steps = 0  # that were whole since it was opened
        self.has_grown = False  # from one reading to the next
        self._open: list[str] = []
        self._at_s = math.nan  # of the last mark
        self._seconds: list[float] | None = None  # of the step that runs; None while it isn't known from its begin
        self._step = ring.NONE
        self._whole = True  # whether that step is kept already: the next phase begins another

    @property
    def rank(self) -> int:
        return int(self.tail.own["rank"])

    @property
    def host(self) -> str:
        return str(self.tail.own["host"])

    @property
    def doing(self) -> str:
        return self._open[-1] if self._open else ""

    @property
    def since_t(self) -> float:
        return self._at_s + self.tail.ahead_s

    def look(self) -> bool:
        """Whether there is a black box that wasn't there at the last look."""
        if not self.tail.look():
            return False
        self._clear()
        return True

    def read(self) -> None:
        """Takes in the marks that are new."""
        marks, known = self.tail.marks(), not math.isnan(self._at_s)
        self.has_grown = known and bool(marks)
        for mark in marks:
            self._take(mark)

    def is_stale(self, step: int) -> bool:
        """Whether it is of an earlier attempt of the run, or stands still while the run, by what its records say, has
        come to `step`."""
        behind = bool(self.steps) and 0 < self.steps[-1][0] < step - BEHIND_STEPS
        return self.tail.stale or (behind and not self.has_grown)

    def _take(self, mark: TailMark) -> None:
        if mark.gap:
            self._open = []
            self._seconds, self._whole = None, False
        if self._open and self._seconds is not None:
            self._seconds[_PLACE.get(self._open[-1], _REST)] += mark.at_s - self._at_s
        del self._open[mark.depth - 1 :]
        self._at_s = mark.at_s
        if mark.begins:
            self._begin(mark.phase, mark.step)
            self._open.append(mark.phase)
        elif mark.phase == "optimizer_s" and not self._whole:
            self._close()

    def _begin(self, name: str, step: int) -> None:
        """An outermost phase: of the next step, if the last one is whole or it says another step."""
        if self._open or name in _BETWEEN:
            return
        if self._whole or step != self._step:
            known = self._whole or self._seconds is not None
            if not self._whole:
                self._close()
            self._seconds, self._whole = ([0.0] * len(PHASES) if known else None), False
        self._step = step

    def _close(self) -> None:
        """Keeps the step's seconds; what comes until another step begins is still added to them."""
        if self._seconds is not None:
            self.steps.append((max(self._step, 0), self._seconds))
            self.num_steps += 1
        self._whole = True


class Boxes:
    """All black boxes of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generation = 0  # grows with each box that is new or was replaced
        self.step = 0
        """To which the run has come, as its records say."""
        self._since_t = 0.0
        self._boxes: dict[str, RankBox] = {}
        self._looked_s = -math.inf

    def begin(self, start_t: float) -> None:
        """The run's latest attempt began at `start_t` (unix seconds): boxes that were left before are stale."""
        if start_t != self._since_t:
            self._since_t, self._boxes, self._looked_s = start_t, {}, -math.inf
            self.generation += 1

    def read(self) -> list[RankBox]:
        """By rank, each read up to its newest mark."""
        if time.monotonic() - self._looked_s >= LOOK_AGAIN_S:
            self._look()
        found = [box for box in self._boxes.values() if box.tail.own]
        for box in found:
            box.read()
        return sorted(found, key=lambda box: box.rank)

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if re.fullmatch(r"rank-\d+", path.name):
                box = self._boxes.setdefault(path.name, RankBox(path, self._since_t))
                self.generation += box.look()
