"""Corpora -> tokens -> shards -> samples by id. Everything here runs without torch.

    prepared = prepare(job, progress)          # tokenises what the cache lacks
    train = open_dataset(job, "train")
    train.batch([0, 1, 2])                     # tokens, labels, weights, segments as numpy arrays

The names load on first use, so that `bessemer.data.problems` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.data.cursor import deal, units_of_step
    from bessemer.data.dataset import Batch, Dataset, open_dataset
    from bessemer.data.prepared import Prepared, prepare
    from bessemer.data.reader import Reader

__all__ = ["Batch", "Dataset", "Prepared", "Reader", "deal", "open_dataset", "prepare", "units_of_step"]

_HOMES = {
    "Batch": "dataset",
    "Dataset": "dataset",
    "Prepared": "prepared",
    "Reader": "reader",
    "deal": "cursor",
    "open_dataset": "dataset",
    "prepare": "prepared",
    "units_of_step": "cursor",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
