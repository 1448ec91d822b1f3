"""The ledger: factory yield and its five factors, from the records of a run.

    yield = generality x effective compute x node efficiency x cluster efficiency x stability
          = useful model FLOPs / (wall-clock time x declared peak of all devices)

Each factor is the ratio of two neighbours in the chain of `inspect.chain`, so the product telescopes whatever was
measured. `docs/ledger.md` states the rules and what each factor can't see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.inspect.chain import Chain, Link, build_chain, weakest
from bessemer.inspect.interruptions import charged
from bessemer.inspect.run_records import RunRecords, read_run
from bessemer.inspect.wall_time import WallTime

__all__ = ["FACTORS", "Factor", "Ledger", "ledger_of", "read_ledger"]

FACTORS = ("generality", "effective_compute", "node_efficiency", "cluster_efficiency", "stability")


@dataclass(frozen=True)
class Factor:
    """A factor, or why there is none.

    value: None where it can't be computed; `reason` then says why, else how it came about. kind: measured, published
    or modelled, the weakest of what went into it; None too where the value is so by definition. lost_s: seconds of the
    wall-clock time that it cost.
    """

    value: float | None
    kind: str | None
    reason: str = ""
    lost_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The ledger of a run. `total` is the yield; `wall` splits what stability lost by cause."""

    run: str
    factors: dict[str, Factor]
    total: Factor
    wall: WallTime
    steps: int
    tokens: int
    useful_flops: float | None
    peak_flops_per_s: float | None  # of all devices at the job's precision; its mean over the wall-clock time
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The form of `bessemer ledger RUN --json`."""
        every = {**self.factors, "yield": self.total}
        return {
            **{name: factor.value for name, factor in every.items()},
            "kinds": {name: factor.kind for name, factor in every.items()},
            "reasons": {name: factor.reason for name, factor in every.items() if factor.reason},
            "lost_s": {name: factor.lost_s for name, factor in self.factors.items()},
            "stability_lost_s": self.wall.lost_s,
            "run": self.run,
            "steps": self.steps,
            "tokens": self.tokens,
            "wall_s": self.wall.wall_s,
            "committed_s": self.wall.committed_s,
            "useful_flops": self.useful_flops,
            "peak_flops_per_s": self.peak_flops_per_s,
            "notes": self.notes,
        }

    def __rich__(self) -> Any:
        from bessemer.inspect.ledger_table import ledger_table

        return ledger_table(self)


def read_ledger(folder: Path, reference: Path | None = None) -> Ledger:
    """The ledger of a run folder. `reference`: a one-node run with the same work for each device.

    RequestError where a folder is no run folder, or where the reference did other work; DataError for damage.
    """
    return ledger_of(read_run(folder), read_run(reference) if reference is not None else None)


def ledger_of(run: RunRecords, reference: RunRecords | None = None) -> Ledger:
    """The ledger of records that were read before."""
    run = charged(run)
    chain = build_chain(run, None if reference is None else charged(reference))
    factors = {
        "generality": _ratio(chain, chain.useful, chain.paths),
        "effective_compute": _ratio(chain, chain.paths, chain.kernels),
        "node_efficiency": _ratio(chain, chain.kernels, chain.one_node),
        "cluster_efficiency": _ratio(chain, chain.one_node, chain.steps),
        "stability": _ratio(chain, chain.steps, chain.wall),
    }
    cluster = factors["cluster_efficiency"]
    if chain.single_node and cluster.value is not None:
        factors["cluster_efficiency"] = replace(cluster, kind=None, reason="1 by definition: the run is on one node")
    total = _ratio(chain, chain.useful, chain.wall)
    return Ledger(
        run=str(run.folder),
        factors=factors,
        total=total,
        wall=chain.split,
        steps=len(run.steps),
        tokens=sum(s.samples for s in run.steps) * run.job.data.seq_len,
        useful_flops=chain.useful_flops,
        peak_flops_per_s=chain.mean_weight if chain.peak_known else None,
        notes=[*chain.notes, *_oddities(factors)],
    )


def _ratio(chain: Chain, part: Link, whole: Link) -> Factor:
    """`part` over `whole`, with the seconds between them."""
    for link in (part, whole):
        if link.amount is None:
            return Factor(None, None, link.reason)
    assert part.amount is not None and whole.amount is not None
    if whole.amount == 0:
        return Factor(None, None, "no step has been committed")
    lost_s = (whole.amount - part.amount) / chain.mean_weight
    reason = "; ".join(dict.fromkeys(r for r in (part.reason, whole.reason) if r))
    return Factor(part.amount / whole.amount, weakest(part.kind, whole.kind), reason, lost_s)


def _oddities(factors: dict[str, Factor]) -> list[str]:
    """Values that can't be: what they say about the measurement."""
    found = []
    for name, likely in (
        ("effective_compute", "the peak was probably measured while the machine was busy: "
         "`python -m bessemer.runtime.peaks` measures it again, for later runs; "
         "or attention skipped much of what F counts"),
        ("node_efficiency", "the sampled steps were slower in their kernels than the others"),
        ("cluster_efficiency", "the reference run was slower than this one"),
    ):  # fmt: skip
        value = factors[name].value
        if value is not None and value > 1.02:
            found.append(f"{name} = {value:.3f} is above 1: {likely}")
    return found
