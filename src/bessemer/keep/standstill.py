"""Who holds up the others where no step comes true any more: the groups that aren't as far as some other one.

A rank computes, sums with the ranks of its place in other groups, and votes; each waits for all members of the epoch.
In a newer epoch of the same step it begins again. A group is as far as that of its ranks which is least far.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bessemer.keep.reception import RankState
from bessemer.keep.starter import Group
from bessemer.keep.step_times import LEAST_HANG_S, StepTimes

__all__ = ["Standing", "behind", "least_far", "standings_of"]

LONG_WORK_S = 600.0
"""How long a rank may take for what takes as long as it takes, while others wait for it."""
_LONG_WORK = ("evaluating", "saving", "waiting for the last checkpoint", "donating", "landing", "profiling", "dumping")
_SUMMING, _VOTED = 1, 2
_FAR = {"summing": _SUMMING, "voted": _VOTED}
_PHASE = re.compile(r"(\w+) \(epoch (\d+)\)")


class Standing(NamedTuple):
    """How far a group is: the step as its ranks count it, the epoch in which it works at it (-1: in none yet), and what
    it does of it. why: what is said if it is given up; silent_s: how long ago it should have gone on."""

    group: int
    step: int
    epoch: int
    far: int
    why: str
    silent_s: float

    @property
    def at(self) -> tuple[int, int, int]:
        return self.step, self.epoch, self.far


def least_far(states: Sequence[RankState]) -> RankState:
    """The rank that holds up its group."""
    return min(states, key=_how_far)


def standings_of(groups: Iterable[Group], progress: StepTimes, now: float) -> list[Standing]:
    """Of those groups that are there. None before a standstill can be one, and none while one of them does what takes
    its time, which is noted in `progress`."""
    there = [group for group in groups if not group.lost]
    busy = any(state.phase in _LONG_WORK for group in there for state in group.states)
    if busy and now - progress.last < LONG_WORK_S:
        progress.worked = now
    since_s = progress.since_s(now)
    if since_s < LEAST_HANG_S:
        return []
    found = []
    for group in there:
        state = least_far(group.states)
        why = f"rank {state.rank} makes no progress in {state.phase}"
        found.append(Standing(group.name, *_how_far(state), why, since_s - progress.usual_s))
    return found


def behind(standings: Iterable[Standing]) -> list[Standing]:
    """Those for which others wait; none where all are equally far. Where some have a sum and several haven't, one of
    those hangs, and the others wait for what it should have passed on: none is named, since the sum fails in the end,
    and in the epoch that follows the one that hangs is alone behind."""
    known = list(standings)
    most = max((s.at for s in known), default=(0, 0, 0))
    found = [s for s in known if s.at < most]
    unclear = most[2] == _VOTED and len(found) > 1 and all(s.at == (*most[:2], _SUMMING) for s in found)
    return [] if unclear else found


def _how_far(state: RankState) -> tuple[int, int, int]:
    told = _PHASE.fullmatch(state.phase)
    if told is None:
        return state.step, -1, 0
    return state.step, int(told[2]), _FAR.get(told[1], 0)
