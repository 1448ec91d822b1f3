"""The end of a run: which group evaluates and saves the last step, and when all may go.

The group that leads does so, and says that it has. The others wait, since each of them could do it in its place: a
state that nobody has saved is lost with the last one that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Conclusion"]


class Conclusion:
    """Begins once the last step is true. `block`: ranks of a group; `epoch`: in which it came true; `holders`: the
    groups that then held the state; `here`: those of them that are known to be there, by default all; told: the first
    knows that it leads. `not_before`, by the monotonic clock: until then others may still come."""

    def __init__(
        self, block: int, epoch: int, holders: Iterable[int], *, here: Iterable[int] | None = None, told: bool,
        not_before: float = 0.0,
    ) -> None:  # fmt: skip
        self.over = False
        self.epoch, self.holders = epoch, sorted(holders)
        self._block, self._not_before = block, not_before
        self._here = self.holders if here is None else sorted(here)
        self._leads = self._here[0] if told and self._here else None
        self._done: set[tuple[int, int]] = set()

    def came(self, group: int) -> None:
        """A rank of a group that has the last step, to a coordinator that took over."""
        self._here = sorted({*self._here, group})

    def done(self, group: int, place: int) -> None:
        """That rank has done all that its group had to do."""
        self._done.add((group, place))

    def gone(self, group: int) -> None:
        self._here = [name for name in self._here if name != group]

    def decide(self, now: float) -> list[tuple[list[int], dict[str, Any]]]:
        """Messages that follow, and the groups to which they go: conclude{} to one that leads from now on, over{} to
        all."""
        if self.over or not self._here or now < self._not_before:
            return []
        if any(sum(group == name for group, _ in self._done) >= self._block for name in self._here):
            self.over = True
            return [(list(self._here), {"kind": "over"})]
        if self._leads == self._here[0]:
            return []
        self._leads = self._here[0]
        return [([self._leads], {"kind": "conclude"})]
