"""When a pipeline rank of Bessemer's own trainer is full: micro-batches that wait in each of its stages.

`bessemer.plan.pipeline.in_flight` counts whole ranks, which is enough where stages are alike. Here each stage counts by
itself, and what waits for a split backward pass to make gradients of weights counts apart.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES, schedule_actions

__all__ = ["Moment", "moments_of"]

Moment = tuple[tuple[int, int], ...]
"""Of each stage of a rank, in order, the micro-batches that wait for their backward pass, and those whose weight
gradients are put off."""


def moments_of(schedule: str, sizes: tuple[int, int, int], rank: int) -> Sequence[Moment]:
    """The moments of a rank that can be its fullest. With gpipe all micro-batches wait, which is left to the caller."""
    pp, chunks, num_micro = sizes
    if pp == 1 or schedule == "gpipe":
        return [((1, 0),) * chunks]
    if schedule == "zb-h1" and num_micro >= pp:
        return [((pp - rank, rank),), ((pp - rank - 1, rank + 1),)]
    if schedule == "zb-h2" and num_micro >= 3 * pp:
        return [((n, 2 * pp - 1 - n),) for n in range(pp - 1 - rank, 2 * (pp - rank))]
    if SCHEDULES[schedule].split_backward:
        enough = min(num_micro, 2 * pp) if schedule.startswith("dual") else num_micro
        return _split_moments(schedule, pp, enough)[rank]
    if chunks == 1:
        return [((min(pp - rank, num_micro), 0),)]
    return [tuple((min(n, num_micro), 0) for n in counts) for counts in _interleaved(pp, chunks, num_micro, rank)]


@functools.lru_cache(maxsize=512)
def _split_moments(schedule: str, pp: int, num_micro: int) -> list[list[Moment]]:
    """By rank, from the schedule's own lists; all stages full where it can't be built from so few micro-batches."""
    chunks = SCHEDULES[schedule].chunks or 1
    try:
        ranks = schedule_actions(schedule, pp, num_micro)
    except ConfigError:
        return [[((num_micro, 0),) * chunks] for _ in range(pp)]
    found = []
    for actions in ranks:
        stages = sorted({a.stage for a in actions})
        now = {stage: [0, 0] for stage in stages}
        seen = set()
        for action in actions:
            counts = now[action.stage]
            counts[0] += {"F": 1, "I": -1}.get(action.kind, 0)
            counts[1] += {"I": 1, "W": -1}.get(action.kind, 0)
            seen.add(tuple((now[stage][0], now[stage][1]) for stage in stages))
        found.append(_largest(seen))
    return found


def _largest(moments: set[Moment]) -> list[Moment]:
    """Those that no other one exceeds everywhere."""
    found: list[Moment] = []
    for one in sorted(moments, key=lambda m: -sum(itertools.chain(*m))):
        flat = tuple(itertools.chain(*one))
        if not any(all(a >= b for a, b in zip(itertools.chain(*m), flat, strict=True)) for m in found):
            found.append(one)
    return found


def _interleaved(pp: int, chunks: int, num_micro: int, rank: int) -> list[tuple[int, ...]]:
    """After the warm-up of interleaved 1F1B a rank takes one forward and one backward in turn; both go through its
    chunks in rounds of pp micro-batches, backward from the last one on."""
    total, period = num_micro * chunks, pp * chunks
    ahead = min(2 * (pp - rank - 1) + (chunks - 1) * pp, total)
    counts, found = [0] * chunks, []
    for i in range(min(ahead + period, total)):
        counts[i % period // pp] += 1
        if i >= ahead:
            found.append(tuple(counts))
            counts[chunks - 1 - (i - ahead) % period // pp] -= 1
    return found or [tuple(counts)]
