"""What earlier checks leave: checksums of answers by device and library, and a line a host and check, from which hosts
are taken out of service and put back. No torch.

    standing([False, True, True], bad=2, good=3)         # "quarantined"
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bessemer.core.errors import DataError
from bessemer.core.paths import user_path
from bessemer.inspect.takeoff_compare import majority
from bessemer.inspect.takeoff_records import Fleet
from bessemer.inspect.takeoff_verdict import Finding
from bessemer.keep.records import RecordWriter, read_records, write_atomically

__all__ = [
    "History",
    "HostLine",
    "checksums_after",
    "checksums_file",
    "host_lines",
    "own_rates",
    "read_checksums",
    "standing",
    "write_checksums",
]

Standing = Literal["in service", "quarantined"]
_MOST_CHECKSUMS = 512
"""The newest are kept: a device kind, library and thread count has one for each format."""


def standing(results: Iterable[bool | None], *, bad: int, good: int) -> Standing:
    """Of a host whose checks ended so, oldest first (True: bad; None: wrong answers, which no noise explains).

    In service it is quarantined when `bad` of its last 2 x `bad` results were bad, or at once for wrong answers. In
    quarantine it is released after `good` good results in a row, and what was before is then forgotten.
    """
    recent: list[bool] = []
    clean = 0
    out = False
    for result in results:
        is_bad = result is not False
        if out:
            clean = 0 if is_bad else clean + 1
            if clean >= good:
                out, recent = False, []
            continue
        recent = [*recent, is_bad][-2 * bad :]
        if result is None or sum(recent) >= bad:
            out, clean = True, 0
    return "quarantined" if out else "in service"


@dataclass(frozen=True)
class HostLine:
    """One host in one check. `rates`: operations/s of its slowest rank, by format. `wrong`: an answer was wrong."""

    t: float
    host: str
    bad: bool
    wrong: bool
    what: list[str]
    rates: dict[str, float]

    @property
    def result(self) -> bool | None:
        """As `standing` takes it."""
        return None if self.wrong else self.bad


def own_rates(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Host -> format -> operations/s of its slowest rank."""
    rates: dict[str, dict[str, float]] = {state.host: {} for state in fleet.hosts}
    for state in fleet.ranks:
        own = rates[fleet.host_of(state.rank)]
        for product in state.products:
            if product.rate:
                own[product.format] = min(product.rate, own.get(product.format, product.rate))
    return rates


def host_lines(fleet: Fleet, findings: Sequence[Finding], t: float) -> list[HostLine]:
    """A line for each host of a check. t: unix seconds."""
    lines = []
    for host, rates in own_rates(fleet).items():
        own = [finding for finding in findings if finding.host == host and finding.bad]
        wrong = any(finding.check == "answer" for finding in own)
        lines.append(HostLine(t, host, bool(own), wrong, [f"{f.check}: {f.what}" for f in own], rates))
    return lines


class History:
    """`FOLDER/HOST.jsonl`: a line a check, appended by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, lines: Sequence[HostLine]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for line in lines:
            with RecordWriter(self._file(line.host)) as writer:
                writer.write(vars(line))

    def lines(self, host: str) -> list[HostLine]:
        """Oldest first; DataError for a damaged line."""
        try:
            return [HostLine(**record) for record in read_records(self._file(host))]
        except TypeError as error:
            raise DataError(
                f"{self._file(host)} holds a line that is none of a take-off check: {error}",
                code="takeoff-history",
                fix="another --history folder, or move that file away",
            ) from error

    def hosts(self) -> list[str]:
        return sorted(file.stem.replace("%2F", "/") for file in self.folder.glob("*.jsonl"))

    def _file(self, host: str) -> Path:
        return self.folder / f"{host.replace('/', '%2F')}.jsonl"


def checksums_file(cache: str) -> Path:
    """Where the checksums of right answers are kept."""
    return user_path(cache) / "takeoff" / "checksums.json"


def read_checksums(file: Path) -> dict[str, str]:
    """Key -> checksum; empty where there is no file. DataError `takeoff-history` for one that can't be read."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {str(key): str(entry["checksum"]) for key, entry in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{file} can't be read: {error}", code="takeoff-history", fix=f"rm {file}; the next check writes it anew"
        ) from error


def checksums_after(fleet: Fleet, stored: Mapping[str, str]) -> dict[str, str]:
    """`stored` with the answers of this check that all ranks, or most of at least three, agree in. What was stored
    before stays: an answer that changed is a finding, and a person decides."""
    found: dict[str, dict[int, str]] = {}
    for state in fleet.ranks:
        for product in state.products:
            if product.checksum and not product.fault:
                found.setdefault(product.key, {})[state.rank] = product.checksum
    agreed = {key: majority(of_rank) for key, of_rank in found.items()}
    return {**{key: value for key, value in agreed.items() if value is not None}, **stored}


def write_checksums(file: Path, checksums: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Adds what is new, with the time and the hosts it is from."""
    old: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    new = {key: value for key, value in checksums.items() if key not in old}
    if not new:
        return
    entries = {key: {"checksum": value, "t": time.time(), "hosts": list(hosts)[:8]} for key, value in new.items()}
    kept = dict(list({**old, **entries}.items())[-_MOST_CHECKSUMS:])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(kept, indent=1))
