"""The printed table of a watched run: the worst tensors and what to do about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bessemer.lab.watch import ROLES, Watched
from bessemer.lab.watch_advice import Advice, words

__all__ = ["cells", "watch_text"]

_COLUMNS = ("tensor", "role", "amax", "rise", "spread", "clipped", "to 0", "error", "result", "advice")


def watch_text(watched: Watched, found: Sequence[Advice], shown: int) -> str:
    """`shown` of the most urgent tensors, how many ask for what, and what fell back."""
    steps = watched.steps
    head = (
        f"{watched.folder}: {watched.job.precision.recipe}, {len(watched.names)} tensors, {len(steps)} samples "
        f"from step {steps[0]} to {steps[-1]}"
    )
    rows = [[a.name, a.role, *cells(a), a.advice] for a in found[:shown]]
    parts = [head, _aligned([list(_COLUMNS), *rows], left=(0, 1, 9)), _counts(found)]
    fell = [f"fell back after step {step}: {name}" for name, (step, _) in watched.fallen.items()]
    return "\n\n".join([*parts, *(["\n".join(fell)] if fell else [])])


def cells(advice: Advice) -> list[str]:
    """The figures of a row: amax; rise above the past and spread as powers of two; shares and errors."""
    shown = [_number(advice.amax, ".2g"), _power(advice.burst), _power(advice.spread)]
    shown += [_number(share, ".2%") for share in (advice.saturated, advice.flushed)]
    return shown + [_number(error, ".4f") for error in (advice.error, advice.result)]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _power(value: float | None) -> str:
    return "" if value is None else f"2^{value:.1f}"


def _counts(found: Sequence[Advice]) -> str:
    """A line for each advice: how many tensors of each role."""
    counts = Counter((a.advice, a.role) for a in found)
    order = sorted({a.advice for a in found}, key=lambda word: -sum(counts[word, r] for r in ROLES))
    rows = [[word, *(str(counts[word, role]) for role in ROLES), words(word)] for word in order]
    return _aligned([["advice", *ROLES, "means"], *rows], left=(0, 4))


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
