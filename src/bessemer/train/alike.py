"""Whether the copies of the model still hold the same parameters: a hash of each, compared every `inspect.hash_every`
steps. A bit that flips in a copy's memory changes neither its loss nor its gradients much, and nothing else shows it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.comm import collectives as comm
from bessemer.models.canonical import local
from bessemer.parallel.mesh import Mesh

__all__ = ["hashes_of_copies", "parameters_hash"]

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


def hashes_of_copies(params: Iterable[Tensor], mesh: Mesh) -> tuple[list[int], list[int]] | None:
    """(ranks, their hashes) of all that hold what this rank holds, in the order of copies. None where it is alone.

    All ranks must call it: eight bytes of each are gathered.
    """
    group = mesh.group("replica")
    if group is None:
        return None
    own = parameters_hash(params)
    signed = own - 2**64 if own >= 2**63 else own
    mine = torch.tensor([signed], dtype=torch.int64, device=mesh.device)
    gathered = mine.new_empty(mesh.size("replica"))
    comm.all_gather_single(gathered, mine, group)
    return dist.get_process_group_ranks(group), [each % 2**64 for each in gathered.tolist()]
