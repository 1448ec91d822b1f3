"""Groups of a run as a coordinator sees them, what their ranks report, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["Group", "Message", "Report", "outvoted"]


@dataclass
class Group:
    """What is known of a group. `here`: the places whose ranks have come; `synced`: those that have caught up."""

    name: int
    incarnation: int
    step: int | None  # at which its state stands as it came; None: it has none
    here: set[int] = field(default_factory=set)
    state: Literal["forming", "spare", "joining", "active"] = "forming"
    synced: set[int] = field(default_factory=set)
    leaving: bool = False


@dataclass(frozen=True)
class Report:
    """What a rank tells a coordinator that takes over. share: its units of the step after `step`, if it had any."""

    group: int
    incarnation: int
    place: int
    state: Literal["forming", "spare", "joining", "active"]
    epoch: int
    step: int
    share: tuple[int, ...] = ()


class Message(NamedTuple):
    """One record for the ranks at these places of these groups. Ten thousand groups are told of a commit by one."""

    groups: Sequence[int]
    places: Sequence[int]
    record: dict[str, Any]


def outvoted(votes_by_place: Sequence[Mapping[int, str]], members: Sequence[int]) -> list[int] | None:
    """Groups whose vote is another digest than that of most members at the same place; None where no strict majority
    agrees. Votes of others than members count nothing."""
    wrong: set[int] = set()
    for votes in votes_by_place:
        if len(set(votes.values())) == 1:
            continue
        digests = {name: votes[name] for name in members}
        kinds = set(digests.values())
        if len(kinds) == 1:
            continue
        best = max(kinds, key=list(digests.values()).count)
        if 2 * list(digests.values()).count(best) <= len(digests):
            return None
        wrong |= {name for name, digest in digests.items() if digest != best}
    return sorted(wrong)
