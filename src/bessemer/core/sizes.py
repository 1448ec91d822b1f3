"""By what a rank's share of a block is smaller than the whole, and in how many bytes it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.core.layout import Layout
from bessemer.core.recipes import Recipe

__all__ = ["Sizes"]

_SCALE = 4
"""Bytes of a float32 scale; blocks of 32 and less have one in a byte."""


@dataclass(frozen=True)
class Sizes:
    """By what a rank's share is smaller than the whole, and how wide an element of the compute type is.

    sequence: ranks that share out the stream, tp under sequence parallelism.  rearranged: whether rows are put in
    another order before a product that leaves tensor parallelism; those of one sequence in one piece aren't.
    exchanged: whether tokens travel to their experts.  cp: ranks of context parallelism, of kind `cp_kind`.  coded:
    whether projections keep their inputs quantised, a byte an element (routers and small ones don't).
    narrow: the recipe under `precision.saved = "fp8"`; then SwiGLU keeps its input quantised, and projections keep
    theirs so where that is less than what would be kept anyway.
    """

    compute_bytes: int = 2
    tp: int = 1
    sequence: int = 1
    etp: int = 1
    rearranged: bool = False
    exchanged: bool = False
    cp: int = 1
    cp_kind: str = "ring"
    coded: bool = False
    narrow: Recipe | None = None

    @classmethod
    def of(
        cls,
        layout: Layout,
        compute_bytes: int,
        micro_batch: int = 2,
        *,
        coded: bool = False,
        narrow: Recipe | None = None,
    ) -> Sizes:
        divided = layout.sequence_parallel and layout.tp > 1
        return cls(
            compute_bytes,
            layout.tp,
            layout.tp if divided else 1,
            layout.etp,
            rearranged=divided and (micro_batch > 1 or layout.tp_chunks > 1),
            exchanged=layout.ep * layout.etp > 1,
            cp=layout.cp,
            cp_kind=layout.cp_kind,
            coded=coded,
            narrow=narrow,
        )

    @property
    def divided(self) -> bool:
        """Whether sequence parallelism shares out the stream."""
        return self.sequence > 1

    @property
    def codes(self) -> bool:
        """Whether `narrow` codes inputs that `coded` doesn't: in FP8, not in four bits."""
        return self.narrow is not None and self.narrow.gemm == "fp8" and not self.coded

    def code_bytes(self, width: float) -> float:
        """Of an input of `width` elements a token under `codes`, its scales included."""
        assert self.narrow is not None
        block = self.narrow.scale_block
        return width + (_SCALE if block < 0 else math.ceil(width / block) * (_SCALE if block > 32 else 1))
