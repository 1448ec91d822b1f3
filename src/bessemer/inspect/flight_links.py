"""How long transfers keep ranks waiting once the last one has come, from the black boxes of all ranks of a group.

A transfer begins when the last rank has handed it over. Its end is known where a host waited for it: so what is hidden
behind work isn't seen, and costs nothing either. A message is over when the receiver has it; the sender's host is rid
of it as soon as it lies in a buffer.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bessemer.inspect.flight_records import LinkSample
from bessemer.runtime.box_tail import TailOperation

__all__ = ["LinkMeter"]

OPEN = 20_000
"""Operations that still lack a rank's word; the oldest are forgotten."""

_Key = tuple[str, tuple[int, ...], str, int]


class LinkMeter:
    """Pairs what ranks tell of the same operation. Only groups that span hosts count: inside a host of CPUs the
    scheduler decides when a transfer ends."""

    def __init__(self) -> None:
        self._open: dict[_Key, dict[int, tuple[float, float, float]]] = {}
        self._spent_s: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)

    def take(self, rank: int, operation: TailOperation, ahead_s: float, hosts: dict[int, str]) -> None:
        """An operation as `rank` saw it; groups are of the numbers that `hosts` has, ahead_s that of its clock."""
        name, ranks = operation.group
        kind, key = operation.operation, tuple(sorted(ranks))
        if operation.peer >= 0:
            ends = (rank, operation.peer) if kind == "send" else (operation.peer, rank)
            kind, key = "send", ends
        if len({hosts.get(r, "") for r in key}) < 2:
            return
        told = self._open.setdefault((name, key, kind, operation.order), {})
        told[rank] = (operation.enqueue_s + ahead_s, operation.wait_s + ahead_s, operation.finish_s + ahead_s)
        if len(told) < len(key):
            if len(self._open) > OPEN:
                del self._open[next(iter(self._open))]
            return
        del self._open[name, key, kind, operation.order]
        come_t = max(come for come, _, _ in told.values())
        waiting = [told[key[1]]] if operation.peer >= 0 else list(told.values())
        begin_t = max(come_t, min(wait for _, wait, _ in waiting))
        over_t = min(over for _, _, over in waiting)  # who waited late saw the end late
        spent = self._spent_s[f"{name} {kind}"]
        spent[key] = spent.get(key, 0.0) + max(0.0, over_t - begin_t)

    def samples(self, step: int, t: float, steps: int, step_s: float = 0.0) -> list[LinkSample]:
        """What was spent since the last call, for each of the `steps` that ended since then, each in `step_s`."""
        found = []
        for kind, spent in self._spent_s.items():
            groups = tuple(sorted(spent))
            transfer_G = np.asarray([spent[group] / steps for group in groups])
            found.append(LinkSample(step, t, kind, groups, transfer_G, step_s))
            for group in groups:
                spent[group] = 0.0
        return found
