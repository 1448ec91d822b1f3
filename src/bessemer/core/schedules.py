"""Pipeline schedules by name; `layout.RUNNABLE` says which of them the trainer runs, the planner models all."""

from __future__ import annotations

__all__ = ["SCHEDULES"]

SCHEDULES: dict[str, str] = {
    "1f1b": "one forward, one backward, flushed at the step (Narayanan et al. 2021, arXiv 2104.04473)",
    "gpipe": "all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)",
    "zb-h1": "backward split into input and weight parts that fill the bubble (Qi et al. 2023, arXiv 2401.10241)",
    "zbv": "two virtual stages a rank in a V, with split backward (Qi et al. 2024, arXiv 2405.15362)",
    "dualpipe": "two directions at once, a forward overlapping a backward (DeepSeek-V3, arXiv 2412.19437)",
    "dualpipev": "the V-shaped half of dualpipe, without its second copy of the parameters",
}
"""Name -> what it does and where it was published. `virtual_stages` > 1 interleaves 1f1b."""
