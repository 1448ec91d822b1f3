"""Starting all ranks again in place after one has died: whether, how often, and from what.

Each restart changes something: the first goes on from copies in memory, the second from the newest checkpoint on disk,
each one after that from a checkpoint older by one. Once the run has come some steps further than it ever was, the count
begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.keep.reception import RankState

__all__ = ["PROGRESS_STEPS", "Ladder", "may_help"]

PROGRESS_STEPS = 10
"""So many steps beyond the furthest at an earlier failure are progress: the next failure is another one."""

_CONSEQUENCES = ("peer-lost", "stranded", "vault-lost", "memory-damaged")
"""What a rank reports of others' ends. Whatever else it reports would come again."""


def may_help(cause: RankState) -> bool:
    """Whether another start may end otherwise: the rank died, or reports what others' deaths did to it."""
    return cause.report is None or cause.report["code"] in _CONSEQUENCES


@dataclass
class Ladder:
    """`budget`: restarts in a row without progress. `first`: the failure that explains the end, where it comes to that:
    the one that began the row, or one that no other start would help."""

    budget: int
    taken: int = 0
    furthest: int = 0
    first: RankState | None = None

    def climb(self, cause: RankState, step: int, checkpoints: int) -> str | None:
        """From what to start again after `cause` at `step`, with so many checkpoints on disk: "memory", "disk", or
        "older:N" with N passed over; None: give up."""
        if self.first is None or step >= self.furthest + PROGRESS_STEPS:
            self.taken, self.first = 0, cause
        self.furthest = max(self.furthest, step)
        if not may_help(cause):
            self.first = cause
            return None
        if self.taken >= self.budget:
            return None
        rung = self.taken
        if rung >= 2 and rung - 1 >= checkpoints:
            return None  # there is no older one
        self.taken += 1
        return ("memory", "disk")[rung] if rung < 2 else f"older:{rung - 1}"
