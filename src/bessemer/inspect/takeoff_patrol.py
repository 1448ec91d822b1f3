"""A patrol: the same check again and again over an idle cluster, with a history for each host.

A host is also compared with itself: with the median of its own good checks, so that one of two hosts, or a fleet that
ages together, is seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.core.units import format_rate
from bessemer.inspect.takeoff_history import History, own_rates, standing
from bessemer.inspect.takeoff_records import Fleet
from bessemer.inspect.takeoff_verdict import Finding, Verdict

__all__ = ["Rule", "out_of_service", "patrol_line", "slower_than_before"]

OWN_DROP = 0.10
"""Of the median of a host's own good checks: day and night alone change a room's throughput by 1 to 2 % (Llama 3, 2024,
section 3.3.4)."""
_LEAST_BEFORE, _MOST_BEFORE = 5, 50


@dataclass(frozen=True)
class Rule:
    """`bad` of the last 2 x `bad` results take a host out of service, `good` good ones in a row put it back."""

    bad: int = 2
    good: int = 3


def slower_than_before(fleet: Fleet, history: History) -> list[Finding]:
    """Hosts whose rates together are more than OWN_DROP below the median of their own last good checks (at least 5)."""
    found = []
    for host, rates in own_rates(fleet).items():
        before = [line.rates for line in history.lines(host) if not line.bad][-_MOST_BEFORE:]
        shares, words = [], []
        for name, rate in rates.items():
            own = [line[name] for line in before if name in line]
            if len(own) >= _LEAST_BEFORE:
                usual = statistics.median(own)
                shares.append(rate / usual)
                words.append(f"{name} {format_rate(rate, 'op')}, usually {format_rate(usual, 'op')}")
        if shares and statistics.geometric_mean(shares) < 1 - OWN_DROP:
            share = statistics.geometric_mean(shares)
            found.append(Finding(host, "history", True, f"at {share:.2f} of its own median ({'; '.join(words)})"))
    return found


def out_of_service(history: History, hosts: Sequence[str], rule: Rule) -> list[str]:
    """Those of `hosts` that are quarantined after their last check."""
    ends = {host: [line.result for line in history.lines(host)] for host in hosts}
    return [host for host in hosts if standing(ends[host], bad=rule.bad, good=rule.good) == "quarantined"]


def patrol_line(number: int, verdict: Verdict, out: Sequence[str]) -> str:
    """What a round of a patrol says."""
    now = [finding.host for finding in verdict.findings if finding.bad]
    words = ", ".join(dict.fromkeys(host or "the fleet" for host in now)) or "none"
    away = f"; out of service: {', '.join(out)}" if out else ""
    total = len(verdict.good) + len(verdict.bad)
    return f"round {number}: {len(verdict.good)} of {total} hosts good, bad now: {words}{away}"
