"""Whether the copies of the model still hold the same, and make the same of it.

A bit that flips in a copy's memory changes neither its loss nor its gradients much: every `inspect.hash_every` steps a
hash of the parameters is compared. A device that computes wrongly spoils the sum of all, which the copies then have
alike: every `inspect.rerun_every` steps each runs the same unit, and a hash of what it gives is compared, which like
devices with deterministic kernels have to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.comm import collectives as comm
from bessemer.core.job import Job
from bessemer.data.cursor import units_of_step
from bessemer.models.canonical import local
from bessemer.parallel.mesh import Mesh
from bessemer.train.assembly import Assembly
from bessemer.train.passes import Batch

__all__ = ["gradients_hash", "hashes_of_copies", "parameters_hash", "unit_due"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits: what one tensor adds can't be made up for by another."""


def parameters_hash(params: Iterable[Tensor]) -> int:
    """64 bits of what this rank holds of the parameters, the same wherever the same bits are held. One read of them.

    Each tensor's bits are summed as whole numbers, so that one flipped bit always shows; what two changes of one tensor
    undo in the sum doesn't.
    """
    sums = [local(p).detach().contiguous().view(_WORDS[p.element_size()]).sum(dtype=torch.int64) for p in params]
    found = 0
    for each in torch.stack(sums).tolist() if sums else ():
        found = (found * _ODD + each) % 2**64
    return found


def unit_due(job: Job, step: int) -> int | None:
    """Which unit of step `step` (from 0) all copies run, before its own work, to compare what it gives; None: none."""
    every = job.inspect.rerun_every
    if not every or step % every:
        return None
    return step // every % len(units_of_step(job, step))


def gradients_hash(parts: Assembly, batches: list[Batch], step: int) -> int:
    """64 bits of what these micro-batches of one unit give at the present parameters: gradients as this rank holds
    them, summed inside its copy, and the loss. `.grad` is left empty. All ranks of the copy must call it."""
    passes, parallel = parts.step.passes, parts.parallel
    with passes.phases.as_one("compare_s"), parallel.apart():
        mine = passes.run(iter(batches), len(batches), step)
        parallel.finish()
        loss = torch.as_tensor(mine.loss_sum, dtype=torch.float64, device=parts.mesh.device)
        params = [p for p in parts.optimizer.params.values() if p.grad is not None]
        found = parameters_hash([*(p.grad for p in params if p.grad is not None), loss])
        parts.optimizer.clear()
    return found


def hashes_of_copies(own: int, mesh: Mesh) -> tuple[list[int], list[int]] | None:
    """(ranks, their hashes) of all that hold what this rank holds, in the order of copies. None where it is alone.

    own: this rank's. All ranks must call it: eight bytes of each are gathered.
    """
    group = mesh.group("replica")
    if group is None:
        return None
    signed = own - 2**64 if own >= 2**63 else own
    mine = torch.tensor([signed], dtype=torch.int64, device=mesh.device)
    gathered = mine.new_empty(mesh.size("replica"))
    comm.all_gather_single(gathered, mine, group)
    return dist.get_process_group_ranks(group), [each % 2**64 for each in gathered.tolist()]
