"""A problem: one thing that is wrong with a request, said so that the reader can mend it at once.

Each room offers its checks in its own `problems.py`; they import no torch and allocate nothing.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Problem", "divisors_near", "nearest", "one_of", "render"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong (`what`), in which dotted field (`where`), why it can't work, and what to type instead.

    `code` is stable: scripts match on it and `docs/errors.md` explains it.
    """

    code: str
    where: str
    what: str
    why: str
    fix: str


def render(problems: Sequence[Problem], source: str) -> str:
    """The printed form: a headline, then per problem its code and text, the reason and the fix."""
    count = len(problems)
    lines = [f"{count} problem{'s' if count != 1 else ''} in {source} (nothing was started)"]
    width = max((len(p.code) for p in problems), default=0) + 2
    pad = " " * (width + 2)
    for p in problems:
        lines.append(f"  {p.code:<{width}}[{p.where}] {p.what}")
        if p.why:
            lines.append(f"{pad}{p.why}")
        lines.append(f"{pad}-> {p.fix}")
    return "\n".join(lines)


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known words closest in spelling, best first; empty when nothing is close."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.55)


def divisors_near(number: int, limit: int | None = None, count: int = 6) -> list[int]:
    """The first divisors of `number` from 1 up (at most `limit`), for a fix that lists what would work."""
    candidates = range(1, min(number, limit or number) + 1)
    return list(itertools.islice((d for d in candidates if number % d == 0), count))


def one_of(field: str, values: Sequence[object]) -> str:
    """ "layout.tp = 1, 2 or 4": the fix that lists what would work."""
    words = [str(v) for v in values]
    return f"{field} = {' or '.join([', '.join(words[:-1]), words[-1]] if len(words) > 1 else words)}"
