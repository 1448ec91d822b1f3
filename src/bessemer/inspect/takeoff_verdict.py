"""The verdict of a take-off check: which hosts are good, and which of them a job gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EXIT_BAD", "Finding", "Verdict", "verdict_of"]

EXIT_BAD = 4
"""The exit code where a host is bad: another than that of a failure (1), a wrong request (2) and a stop (3)."""


@dataclass(frozen=True)
class Finding:
    """What speaks against `host` ("": against the fleet as a whole). `bad`: it must not start; else a doubt."""

    host: str
    check: str
    bad: bool
    what: str

    def as_json(self) -> dict[str, Any]:
        return {"host": self.host, "check": self.check, "severity": "bad" if self.bad else "doubt", "what": self.what}


@dataclass(frozen=True)
class Verdict:
    """`good` and `bad`: all hosts, in order. `chosen`: those that the job gets, one a place; `replaced`: bad host of
    such a place -> the spare that took it; `missing`: places for which no good host is left."""

    good: tuple[str, ...]
    bad: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    chosen: tuple[str, ...] = ()
    replaced: dict[str, str] = field(default_factory=dict)
    missing: int = 0

    @property
    def ok(self) -> bool:
        """Nothing is bad. Also false where only the fleet as a whole is."""
        return not any(finding.bad for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "good": list(self.good),
            "bad": list(self.bad),
            "chosen": list(self.chosen),
            "replaced": self.replaced,
            "missing": self.missing,
            "findings": [finding.as_json() for finding in self.findings],
        }


def verdict_of(
    hosts: Sequence[str], findings: Sequence[Finding], places: int | None = None, out: Sequence[str] = ()
) -> Verdict:
    """places: how many hosts the job needs; the others are spares. None: all. out: hosts that are out of service for
    what they did before (quarantine)."""
    guilty = {finding.host for finding in findings if finding.bad} | set(out)
    good = [host for host in hosts if host not in guilty]
    wanted = list(hosts[: len(hosts) if places is None else places])
    spares = [host for host in good if host not in wanted]
    if places is None:
        return Verdict(tuple(good), tuple(h for h in hosts if h in guilty), tuple(findings), tuple(good))
    replaced: dict[str, str] = {}
    chosen = []
    for host in wanted:
        if host in guilty and spares:
            replaced[host] = spares.pop(0)
        if host not in guilty or host in replaced:
            chosen.append(replaced.get(host, host))
    bad = tuple(host for host in hosts if host in guilty)
    return Verdict(tuple(good), bad, tuple(findings), tuple(chosen), replaced, places - len(chosen))
