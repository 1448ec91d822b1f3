"""Going on from copies in the memory of the hosts' vaults: all ranks from the same step, or none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bessemer.core.errors import CheckpointError
from bessemer.keep.memory_copies import MemoryCopies, fetch
from bessemer.keep.slices import Slice
from bessemer.parallel.mesh import Mesh
from bessemer.train.assembly import Assembly
from bessemer.train.state import filled_slices

__all__ = ["FromMemory", "agreed_step", "fetch_from_peers", "from_memory"]


@dataclass(frozen=True)
class FromMemory:
    """`step` is None where nothing could be used, which `why` explains. spoilt: something was filled in before it was
    found to be damaged, so that what the model began with is gone."""

    step: int | None
    why: str
    meta: dict[str, Any] = field(default_factory=dict)
    spoilt: bool = False


def from_memory(parts: Assembly, vault: Path, *, at_least: int) -> FromMemory:
    """Fill the state of `parts` from the newest step that all ranks find in memory, `at_least` or later. A step of
    which a rank finds damage is passed over by all. Without success the state is that of nothing: fill it from
    elsewhere, or start again where `spoilt`."""
    mesh = parts.mesh
    bound, refused = float("inf"), []
    try:
        copies = MemoryCopies(vault)
    except CheckpointError as error:  # the others must hear that this rank has none
        copies, refused = None, [error.message]
    with filled_slices(parts.module, parts.optimizer) as slices:
        steps = [] if copies is None else copies.steps(slices)
        while True:
            step = agreed_step([s for s in steps if at_least <= s < bound], mesh)
            if step is None:
                break
            problem, meta = _fill(copies, step, slices)
            bad = _ranks_with(problem, mesh)
            if not bad:
                why = f"copies in memory of step {step}, verified" + "".join(f"; {r}" for r in refused)
                return FromMemory(step, why, meta)
            refused.append(f"step {step} in memory refused by rank {', '.join(map(str, bad))}: {problem or 'damaged'}")
            bound = step
    spoilt = bound < float("inf")
    why = "; ".join(refused) or f"no step from {at_least} on is in the memory of all ranks"
    return FromMemory(None, why, spoilt=spoilt)


def fetch_from_peers(vault: Path) -> str:
    """Have this host's vault take what its peers hold and it doesn't; what was refused, to be said. Ranks of one host
    may all ask: the first one's is the work."""
    try:
        _, refused = fetch(vault)
    except CheckpointError as error:
        refused = [error.message]
    return "".join(f"; {why}" for why in refused)


def agreed_step(own: Sequence[int], mesh: Mesh) -> int | None:
    """The newest step that every rank has among its `own`."""

    def least(value: float) -> int:
        return -int(mesh.max_over_world(torch.tensor([-value], dtype=torch.float64, device=mesh.device)))

    bound = float("inf")
    while True:
        newest = max((s for s in own if s < bound), default=-1)
        proposed = least(newest)
        if proposed < 0:
            return None
        if least(float(proposed in own)):
            return proposed
        bound = proposed


def _fill(copies: MemoryCopies | None, step: int, slices: list[Slice]) -> tuple[str, dict[str, Any]]:
    """What was wrong, or empty; and the meta of the step."""
    assert copies is not None, "the step is one of its own"
    try:
        copies.read_into(step, slices, threads=torch.get_num_threads())
        return "", copies.meta(step)
    except CheckpointError as error:
        return error.message, {}


def _ranks_with(problem: str, mesh: Mesh) -> list[int]:
    apart = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
    apart[mesh.rank] = int(bool(problem))
    return [int(rank) for rank in mesh.sum_over_world(apart).nonzero().flatten()]
