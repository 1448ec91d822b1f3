"""Replays of pipeline schedules: events (passes and transfers) a second of one core.

    python bench/plan_replay.py [--json]

"first" builds the schedule's lists and finds their order as well; a search keeps those and replays the shape again with
other times ("again"). CPU time, the best of several tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from table import Row, main

from bessemer.plan.replay import Replay, StageTimes, num_stages, replay
from bessemer.plan.walk import compiled

SHAPES = (
    ("1f1b", 16, 512, 1),
    ("1f1b", 16, 512, 4),
    ("zb-h2", 16, 256, 1),
    ("zb-v", 16, 256, 1),
    ("dualpipe", 16, 512, 1),
)


def rows() -> list[Row]:
    found = []
    for name, stages, micro, virtual in SHAPES:
        chunks = num_stages(name, stages, virtual) / stages
        times = StageTimes(forward_s=0.01 / chunks, input_s=0.01 / chunks, weight_s=0.01 / chunks, p2p_s=1e-4)

        def once(
            name: str = name, shape: tuple[int, int, int] = (stages, micro, virtual), t: StageTimes = times
        ) -> Replay:
            return replay(name, stages=shape[0], micro_batches=shape[1], virtual_stages=shape[2], times=t)

        label = f"{name} pp {stages} x {micro} micro-batches" + (f" x {virtual}" if virtual > 1 else "")
        events = once().num_events
        first, again = _best_s(once, fresh=True), _best_s(once, fresh=False)
        found.append(Row(f"replay {label}, first", events / first, "events/s", "higher", 100_000, f"{events:,} events"))
        found.append(Row(f"replay {label}, again", events / again, "events/s", "higher", 100_000))
    return found


def _best_s(once: Callable[[], Replay], *, fresh: bool) -> float:
    best = float("inf")
    for _ in range(3):
        if fresh:
            compiled.cache_clear()
        start = time.process_time()
        once()
        best = min(best, time.process_time() - start)
    return best


if __name__ == "__main__":
    main(rows)
