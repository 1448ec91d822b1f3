"""The landing report: how a run ended, from what it left behind. First fault, guilty rank, evidence, what to do.

    landing = read_landing(run_folder)
    landing.verdict.rank, landing.verdict.kind, landing.verdict.confidence

Ranks that only lost a peer are victims and never guilty while another explanation is there. Where two explanations
compete the confidence is below 0.5; where nothing explains the end the class is "unknown". docs/landing.md has the
rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bessemer.inspect.landing_losses import Loss, losses
from bessemer.inspect.landing_remains import KernelLine, Remains, read_remains
from bessemer.inspect.landing_traces import Cluster, clusters
from bessemer.inspect.landing_verdict import NO_FAULT, Verdict, judge
from bessemer.runtime.dump_folder import DumpNote, dump_notes

__all__ = ["Landing", "landing_of", "read_landing"]


@dataclass(frozen=True)
class Landing:
    """verdict: of the last attempt. losses: of ranks that the run outlived, oldest first. clusters: ranks of the last
    attempt whose logs end with the same error and stack. dumps: what its faults left for a replay, oldest first."""

    run: str
    verdict: Verdict
    losses: list[Loss] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dumps: list[DumpNote] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The form of `bessemer landing RUN --json`."""
        return {
            "verdict": self.verdict.as_json(),
            "run": self.run,
            "victims": list(self.verdict.victims),
            "losses": [loss.as_json() for loss in self.losses],
            "clusters": [
                {"ranks": list(c.ranks), "error": c.trace.kind, "evidence": c.trace.evidence} for c in self.clusters
            ],
            "notes": self.notes,
            "dumps": [
                {"path": str(d.path), "rank": d.rank, "step": d.step, "kind": d.kind, "operator": d.operator}
                for d in self.dumps
            ],
        }

    def __rich__(self) -> Any:
        from bessemer.inspect.landing_table import landing_table

        return landing_table(self)


def read_landing(
    folder: Path, *, now: float | None = None, kernel: Sequence[KernelLine] | None = None, running: bool | None = None
) -> Landing:
    """The landing report of a run folder. now (unix seconds), kernel and running default to what this host says.

    RequestError `no-run` where the folder holds nothing of a run.
    """
    return landing_of(read_remains(folder, now=now, kernel=kernel, running=running))


def landing_of(remains: Remains) -> Landing:
    """The report on remains that were read before."""
    last = remains.tries[-1]
    verdict = judge(remains, last)
    if remains.notes:
        verdict = replace(
            verdict, confidence=min(verdict.confidence, 0.4), evidence=(*verdict.evidence, *remains.notes)
        )
    traces = {
        int(log.removeprefix("rank-")): trace
        for log in remains.traces
        if log.startswith("rank-") and (trace := remains.trace(log, last)) is not None
    }
    dumps = [note for note in dump_notes(remains.folder / "dumps") if remains.may_be_of(note.t, last)]
    verdict = _with_dumps(verdict, dumps)
    return Landing(str(remains.folder), verdict, losses(remains), clusters(traces), remains.notes, dumps)


def _with_dumps(verdict: Verdict, dumps: Sequence[DumpNote]) -> Verdict:
    """The verdict with the dump of the guilty rank, else the first one, as evidence and as what to do."""
    of_rank = [note for note in dumps if note.rank == verdict.rank]
    if not dumps or verdict.kind == NO_FAULT or (verdict.rank is not None and not of_rank):
        return verdict
    note = (of_rank or dumps)[0]
    made = f" in {note.operator}" if note.operator else ""
    line = f"dumps/{note.path.name}: {note.kind}{made}, rank {note.rank}, step {note.step}"
    following = f"{verdict.next}; `bessemer landing --replay {note.path}` runs it again"
    return replace(verdict, evidence=(*verdict.evidence, line), next=following)
