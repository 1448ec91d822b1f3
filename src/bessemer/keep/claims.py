"""Which of two coordinators that don't hear each other goes on: the run folder, which all hosts see, decides.

A coordinator that goes on without some of an epoch's groups first puts a claim to that epoch into the folder, which
only one can do. After a partition the side with most of the groups is the first to try, since the other one waits; but
where the others are dead, the smaller side goes on all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Claim", "Claims"]


@dataclass(frozen=True)
class Claim:
    """`term`: of the coordinator that goes on; `lost`: the groups without which it does."""

    term: int
    lost: tuple[int, ...]


class Claims:
    """Of one attempt of a run, whose `token` tells them from those of an earlier one."""

    def __init__(self, run: Path, token: str) -> None:
        self._folder, self._token = run / "claims", token
        self._last = 0  # claims to epochs up to this one are ours

    def clear(self) -> None:
        """Those of earlier attempts."""
        for old in self._folder.glob("*"):
            with contextlib.suppress(OSError):
                old.unlink()

    def take(self, epoch: int, term: int, lost: Sequence[int], *, since: int | None = None) -> Claim | None:
        """Claim that epoch, and before it those since the last that was claimed (or since `since`), of which the other
        side may have heard last. None: they are ours; else the claim that another coordinator has to one of them.
        Raises OSError where the folder can't be written."""
        for number in range(since if since is not None else self._last + 1, epoch + 1):
            found = self._take(number, Claim(term, tuple(lost) if number == epoch else ()))
            if found.term != term:
                return found
        self._last = max(self._last, epoch)
        return None

    def _take(self, epoch: int, claim: Claim) -> Claim:
        """The claim that is there now."""
        self._folder.mkdir(exist_ok=True)
        target = self._folder / f"{self._token}-{epoch}.json"
        aside = self._folder / f"{self._token}-{epoch}.{claim.term}~"
        with aside.open("w") as file:
            json.dump({"term": claim.term, "lost": claim.lost}, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, target)  # fails if it is there, on a network's file system too
        except FileExistsError:
            found = json.loads(target.read_text())
            return Claim(int(found["term"]), tuple(found["lost"]))
        finally:
            aside.unlink(missing_ok=True)
        return claim
