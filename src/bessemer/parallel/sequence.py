"""What the ranks that share the sequences of a micro-batch agree on: context and tensor parallel ranks together."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from bessemer.comm import collectives as comm
from bessemer.models.split import SequenceSplit

__all__ = ["SequenceRanks"]


class SequenceRanks(SequenceSplit):
    """`group` holds the `degree` ranks, of which this one is number `rank`."""

    def __init__(self, group: dist.ProcessGroup, degree: int, rank: int) -> None:
        self.degree, self.rank, self._group = degree, rank, group

    def largest(self, values: Tensor) -> Tensor:
        """One all-reduce, on a copy."""
        agreed = values.detach().clone()
        comm.all_reduce(agreed, group=self._group, op=dist.ReduceOp.MAX)
        return agreed
