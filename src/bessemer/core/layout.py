"""`Layout`: how a job is spread over ranks. World size = dp x cp x tp x pp; experts live inside it.

`RUNNABLE` says which choices the trainer can run today; the planner models all of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bessemer.core.model import Frozen

__all__ = ["RUNNABLE", "Layout"]

RUNNABLE: dict[str, frozenset[object]] = {
    "dp_shard": frozenset({"none", "optimizer", "gradient", "full"}),
    "schedule": frozenset({"1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipev"}),
}
"""Per field the values that `train` runs; a field that is absent here is unrestricted."""

MAX_DEGREE = 1_000_000
"""Beyond any cluster: a larger number is a slip, and searching its divisors for a fix would take for ever."""


class Layout(Frozen):
    """Parallel degrees and the choices that go with them. All degrees are at least 1.

    dp_shard: what the data-parallel ranks share out: nothing (replicas), the optimizer state (ZeRO-1),
    gradients too (ZeRO-2), or parameters as well (ZeRO-3, FSDP).
    """

    dp: int = Field(default=1, ge=1, le=MAX_DEGREE)
    tp: int = Field(default=1, ge=1, le=MAX_DEGREE)
    pp: int = Field(default=1, ge=1, le=MAX_DEGREE)
    cp: int = Field(default=1, ge=1, le=MAX_DEGREE)
    ep: int = Field(default=1, ge=1, le=MAX_DEGREE)
    etp: int = Field(default=1, ge=1, le=MAX_DEGREE)
    dp_shard: Literal["none", "optimizer", "gradient", "full"] = "none"
    sequence_parallel: bool = False
    tp_chunks: int = Field(default=1, ge=1, le=MAX_DEGREE)  # of the sequence, to send one under another's product
    cp_kind: Literal["ring", "allgather", "ulysses"] = "ring"
    schedule: str = "1f1b"
    virtual_stages: int = Field(default=1, ge=1, le=MAX_DEGREE)
    # layers of each stage in order; empty: see `core.stages.stage_ranges`
    stage_layers: tuple[Annotated[int, Field(ge=1)], ...] = ()

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def expert_span(self) -> int:
        """Data-parallel ranks that together hold all experts, and so belong to one copy of the model: the smallest
        divisor of dp that makes room for ep x etp (all of dp where none does)."""
        ranks, needed = self.cp * self.tp, self.ep * self.etp
        if needed == 1:
            return 1
        return next((d for d in range(1, self.dp) if self.dp % d == 0 and d * ranks % needed == 0), self.dp)
