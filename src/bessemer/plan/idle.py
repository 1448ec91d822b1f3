"""Where the time of each pipeline rank goes in a replayed step, and why it waits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from bessemer.plan.replay import by_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.replay import Replay

__all__ = ["CAUSES", "RankTimes", "rank_times"]

CAUSES = ("warm_up", "neighbour", "transfer", "drain", "imbalance")
"""Why a rank does nothing: see `RankTimes`."""


@dataclass(frozen=True)
class RankTimes:
    """Seconds [ranks] of a step by what each rank does in them; they add up to the step on every rank.

    forward, backward: passes (B, I, W); sending: standing still while a message leaves (blocking transfers only);
    dp, optimizer: exposed exchange and update.
    Idle: warm_up before its first pass; neighbour: between passes, because the pass that it needs isn't done;
    transfer: of that, as long as the message itself takes; drain: after its last pass and exchange, until all ranks are
    ready; imbalance: however the schedule, a rank idles as long as it has less to do than the busiest one. That much is
    taken from the other four, in the order neighbour, drain, warm-up, transfer. What is left of idling is the same on
    every rank: the schedule's bubble.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    sending: NDArray[np.float64]
    dp: NDArray[np.float64]
    optimizer: NDArray[np.float64]
    warm_up: NDArray[np.float64]
    neighbour: NDArray[np.float64]
    transfer: NDArray[np.float64]
    drain: NDArray[np.float64]
    imbalance: NDArray[np.float64]

    @property
    def total(self) -> NDArray[np.float64]:
        return np.asarray(np.sum(list(asdict(self).values()), axis=0), float)

    @property
    def bubble_s(self) -> float:
        """Seconds that the schedule itself costs on every rank: warm-up, waits, transfers and drain."""
        return float((self.warm_up + self.neighbour + self.transfer + self.drain).mean())

    def as_json(self) -> dict[str, list[float]]:
        """Lists by cause, an entry a rank."""
        return {name: values.tolist() for name, values in asdict(self).items()}


def rank_times(step: Replay) -> RankTimes:
    """The step's time on each rank by what it was spent on."""
    length, ranks = step.end_s - step.start_s, step.ranks
    forward = by_rank(step.rank, np.where(step.kind == 0, length, 0.0), ranks)
    sending = by_rank(step.rank, step.sending_s, ranks)
    warm_up, gap, moving = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    taken_s = np.zeros(len(step) + 1)  # by the message of each pass; the last stands for awaiting nothing
    taken_s[step.transfers.item] = step.transfers.end_s - step.transfers.start_s
    for rank, items in enumerate(step.items_of_rank):
        free = np.append(0.0, (step.end_s + step.sending_s)[items[:-1]])
        waited = np.maximum(step.start_s[items] - free, 0.0)
        under_way = np.minimum(waited, taken_s[step.awaits[items]])
        warm_up[rank] = waited[0]
        gap[rank], moving[rank] = (waited - under_way)[1:].sum(), under_way[1:].sum()
    ready = step.free_s + step.dp_s
    drain = ready.max() - ready + step.optimizer_s.max() - step.optimizer_s
    load = step.busy_s + sending + step.dp_s + step.optimizer_s
    lack = load.max() - load
    idle = {"neighbour": gap, "drain": drain, "warm_up": warm_up, "transfer": moving}
    rest = lack.copy()
    for cause, seconds in idle.items():
        taken = np.minimum(seconds, rest)
        idle[cause], rest = seconds - taken, rest - taken
    return RankTimes(
        forward=forward,
        backward=step.busy_s - forward,
        sending=sending,
        dp=step.dp_s,
        optimizer=step.optimizer_s,
        imbalance=lack - rest,
        **idle,
    )
