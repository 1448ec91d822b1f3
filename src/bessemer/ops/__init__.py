"""Operators: each has a reference in plain torch and, where it pays, a CPU kernel; the registry picks."""

from bessemer.ops.activation import gelu, swiglu, swiglu_backward
from bessemer.ops.attention import Heads, attend, attend_masked, first_keys, split_heads
from bessemer.ops.attention_blocks import Block, attend_block, attend_block_backward, merge_blocks
from bessemer.ops.cross_entropy import cross_entropy_rows, linear_cross_entropy
from bessemer.ops.deferred import WeightQueue, WeightWork, put_off_weight_gradients
from bessemer.ops.grouped import grouped_linear
from bessemer.ops.linear import linear
from bessemer.ops.native import fallback_reason, why_absent
from bessemer.ops.norm import add_norm
from bessemer.ops.registry import paths, use

__all__ = [
    "Block",
    "Heads",
    "WeightQueue",
    "WeightWork",
    "add_norm",
    "attend",
    "attend_block",
    "attend_block_backward",
    "attend_masked",
    "cross_entropy_rows",
    "fallback_reason",
    "first_keys",
    "gelu",
    "grouped_linear",
    "linear",
    "linear_cross_entropy",
    "merge_blocks",
    "paths",
    "put_off_weight_gradients",
    "split_heads",
    "swiglu",
    "swiglu_backward",
    "use",
    "why_absent",
]
