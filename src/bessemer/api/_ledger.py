"""The verb `ledger`."""

from __future__ import annotations

from pathlib import Path

from bessemer.inspect.ledger import Ledger, read_ledger

__all__ = ["ledger"]


def ledger(run: str, *, reference: str | None = None) -> Ledger:
    """Factory yield of a run and its five factors, with what each cost and whether it was measured.

    Reads only the records of the run folder, so it may be asked while the run goes on.

    run: The run folder, runs/NAME.
    reference: The run folder of a one-node run with the same work a device, against which a run on several nodes is
        held. Without it cluster efficiency is modelled.
    """
    return read_ledger(Path(run), Path(reference) if reference is not None else None)
