"""Who exchanges with whom, so that every pair meets once: round-robin rounds (a 1-factorisation). No torch.

Hosts meet in rounds of their own, in which ranks with the same number on their host are partners (on one rail, where a
fabric has rails); then the ranks of each host meet among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["partners", "rounds", "sample"]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """n - 1 rounds of n/2 pairs (a < b), each pair once: the circle method, in which 0 stays and the others turn. An
    odd n takes n rounds, in each of which one has a rest."""
    if count < 2:
        return []
    places = list(range(count + count % 2))
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        found.append(sorted((min(pair), max(pair)) for pair in met if max(pair) < count))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def sample(total: int, most: int) -> list[int]:
    """At most `most` of the numbers below `total`, spread evenly."""
    if total <= most:
        return list(range(total))
    return [at * total // most for at in range(most)]


def partners(hosts: Sequence[Sequence[int]], most: int) -> tuple[list[dict[int, int]], tuple[int, int]]:
    """(for each round rank -> its partner, (rounds between hosts that are taken, of how many)).

    hosts: the ranks of each host in local order. Of the rounds between hosts at most `most` are taken.
    """
    across = rounds(len(hosts))
    chosen = sample(len(across), most)
    found: list[dict[int, int]] = []
    for at in chosen:
        pairs = [pair for a, b in across[at] for pair in zip(hosts[a], hosts[b], strict=False)]
        found.append(_both_ways(pairs))
    inside = [rounds(len(ranks)) for ranks in hosts]
    for at in range(max((len(own) for own in inside), default=0)):
        met = [(ranks[a], ranks[b]) for ranks, own in zip(hosts, inside, strict=True) if at < len(own)
               for a, b in own[at]]  # fmt: skip
        found.append(_both_ways(met))
    return found, (len(chosen), len(across))


def _both_ways(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    return {one: other for a, b in pairs for one, other in ((a, b), (b, a))}
