"""Learning-rate schedules: pure functions of (job, step), so that a resumed run can't drift from a straight one."""

from __future__ import annotations

import math

from bessemer.core.job import TrainSection

__all__ = ["lr_factor"]

WSD_DECAY = 0.2
"""Share of the run that wsd decays over when `decay_fraction` isn't given (Hägele et al. 2024 find 10-20 % enough)."""


def lr_factor(train: TrainSection, step: int) -> float:
    """The factor on `lr` for step `step` (from 0): linear warm-up, then the schedule down to `min_lr_ratio`.

    The warm-up's first step already moves: factor 1/`warmup`. The last step reaches `min_lr_ratio` exactly.
    cosine: half a cosine wave; linear: a line; wsd: constant, then a line over the last `decay_fraction`.
    """
    warmup = train.warmup
    if step < warmup:
        return (step + 1) / warmup
    if train.lr_schedule == "constant":
        return 1.0
    first, last = warmup, train.steps - 1
    if train.lr_schedule == "wsd":
        decay_steps = max(1, round(train.steps * (train.decay_fraction or WSD_DECAY)))
        first = max(first, last - decay_steps)
    if step <= first or last <= first:
        return 1.0
    done = min(1.0, (step - first) / (last - first))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if train.lr_schedule == "cosine" else 1 - done
    return train.min_lr_ratio + (1 - train.min_lr_ratio) * shape
