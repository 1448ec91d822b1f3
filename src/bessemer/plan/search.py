"""`search`: every layout of a request priced, in chunks of arrays, and ranked.

    found = search(Request(spec=..., machine=..., num_gpus=1024, global_batch=2048, seq_len=8192))
    found.best.row(0)

Nothing is sampled: each layout that no rule cuts gets a time and a memory, in closed form. Of those that fit the time
is kept in single precision (4 bytes a layout). The best of each pipeline schedule, a few hundred in all, are then
replayed event by event and ranked by that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES
from bessemer.plan.axes import Request, request_problems
from bessemer.plan.enumerate import CHUNK, Space, enumerate_layouts
from bessemer.plan.figures import Priced, joined, prices_of, runnable
from bessemer.plan.replayed import BUDGET, passes_of, with_replay

__all__ = ["KEPT", "Found", "search"]

KEPT = 80
"""Layouts of each schedule, and of those that train, that are kept: the fastest that fit in closed form."""
Progress = Callable[[int, int], None]
"""Called with (layouts priced, layouts in all)."""


@dataclass
class Found:
    """`best`: the fastest that fit, of every schedule, in order of their replayed times; `front`: those that no other
    beats in both time and memory, fastest first; `smallest`: the one that needs the least memory, whether it fits or
    not (None: nothing was priced); `trainable`: the fastest that fit and that the trainer runs. `alike`: layouts that
    fit and whose band of uncertainty reaches below the best one's upper end. `seconds`: wall-clock time."""

    request: Request
    searched: int
    pruned: int
    feasible: int
    alike: int
    seconds: float
    best: Priced
    front: Priced
    trainable: Priced
    smallest: Priced | None
    cut: dict[str, int] = field(default_factory=dict)


@dataclass
class _Top:
    """The `most` smallest entries seen, by time, then memory, then order."""

    most: int
    step: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    memory: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, step: NDArray[np.float64], memory: NDArray[np.float64], index: NDArray[np.int64]) -> None:
        if len(self.step) == self.most:  # nothing slower than the last can come in
            near = step <= self.step[-1]
            step, memory, index = step[near], memory[near], index[near]
        if len(step) > self.most:  # equal times at the edge must all compete
            near = step <= np.partition(step, self.most - 1)[self.most - 1]
            step, memory, index = step[near], memory[near], index[near]
        step, memory, index = (
            np.concatenate(pair) for pair in ((self.step, step), (self.memory, memory), (self.index, index))
        )
        order = np.lexsort((index, memory, step))[: self.most]
        self.step, self.memory, self.index = step[order], memory[order], index[order]


def search(request: Request, *, kept: int = KEPT, progress: Progress | None = None) -> Found:
    """Prices and ranks the whole space of `request`. ConfigError where the request itself can't be met by any layout;
    a space in which nothing fits is an answer (`feasible` 0, see `bessemer.plan.advice.impossible`)."""
    problems = request_problems(request)
    if problems:
        raise ConfigError(problems, "the request")
    start = time.perf_counter()
    space = enumerate_layouts(request)
    best, trainable = [_Top(kept) for _ in SCHEDULES], _Top(kept)
    times, sizes, places = [], [], []
    least: tuple[float, int] | None = None
    done = 0
    for layouts in space.chunks(CHUNK):
        priced = prices_of(request, layouts)
        index = np.arange(done, done + len(layouts))
        step, memory = priced.prices.step_s, priced.prices.memory_bytes
        assert np.isfinite(step).all() and np.isfinite(memory).all(), "each layout gets a time and a memory"
        smallest = int(memory.argmin())
        least = min(least or (np.inf, -1), (float(memory[smallest]), int(index[smallest])))
        fits = np.flatnonzero(priced.headroom_bytes >= 0)
        for schedule in np.unique(layouts.schedule[fits]):
            own = fits[layouts.schedule[fits] == schedule]
            best[schedule].add(step[own], memory[own], index[own])
        run = fits[runnable(layouts, request.machine)[fits]]
        trainable.add(step[run], memory[run], index[run])
        times.append(step[fits].astype(np.float32))
        front = _front(step[fits], memory[fits])
        sizes.append(memory[fits][front])
        places.append(fits[front] + done)
        done += len(layouts)
        if progress is not None:
            progress(done, space.size)
    places += [top.index for top in best]
    return _found(request, space, (best, trainable, least), times, _merged(space, request, places), start)


def _found(
    request: Request,
    space: Space,
    kept: tuple[list[_Top], _Top, tuple[float, int] | None],
    times: list[NDArray[np.float32]],
    front: Priced,
    start: float,
) -> Found:
    best, trainable, least = kept
    top = _ranked(prices_of(request, space.rows(np.sort(np.concatenate([t.index for t in best])))))
    limit = np.float32(top.prices.high_s[0]) if len(top) else np.float32(0)
    below = float(top.prices.low_s[0] / top.prices.step_s[0]) if len(top) else 1.0
    return Found(
        request=request,
        searched=space.size,
        pruned=space.raw - space.size,
        feasible=sum(map(len, times)),
        alike=sum(int((t * below <= limit).sum()) for t in times),
        seconds=time.perf_counter() - start,
        best=top,
        front=front,
        trainable=_ranked(prices_of(request, space.rows(np.sort(trainable.index)))),
        smallest=None if least is None else prices_of(request, space.rows(np.array([least[1]]))),
        cut=space.cut,
    )


def _ranked(priced: Priced) -> Priced:
    """Replayed and in order of time, then memory, then place in the space. Where the budget of passes is spent, the
    rest is left out: a rank is given to replayed times only."""
    order = np.lexsort((priced.prices.memory_bytes, priced.prices.step_s))
    spent = np.cumsum(passes_of(priced)[order])
    affordable = order[(spent <= BUDGET) | (np.arange(len(order)) == 0)]
    chosen = with_replay(prices_of(priced.request, priced.layouts.take(np.sort(affordable))))
    return chosen.take(np.lexsort((chosen.prices.memory_bytes, chosen.prices.step_s)))


def _front(step: NDArray[np.float64], memory: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the Pareto front, fastest first: each next one is slower and needs less memory."""
    order = np.lexsort((memory, step))
    lowest = np.minimum.accumulate(memory[order])
    new = np.ones(len(order), bool)
    new[1:] = lowest[1:] < lowest[:-1]
    return order[new]


def _merged(space: Space, request: Request, places: list[NDArray[np.int64]]) -> Priced:
    """The front of the chunks' fronts and of the best of each schedule, by replayed times."""
    index = np.unique(np.concatenate(places))
    priced = prices_of(request, space.rows(index))
    closed = _front(priced.prices.step_s, priced.prices.memory_bytes)
    ranked = _ranked(priced.take(np.setdiff1d(np.arange(len(index)), closed)))
    priced = joined(with_replay(priced.take(closed)), ranked)
    return priced.take(_front(priced.prices.step_s, priced.prices.memory_bytes))
