"""Bytes of what ranks exchange inside a step, each formula once: the planner prices these sizes (`layer`, `step`), and
`traffic` adds up those of Bessemer's own trainer.

Engines differ in types and in how often they send: that is in the arguments. Everything is arithmetic, so that each
quantity is a number or an array with an entry a layout. Sizes are the full buffers of `bessemer.plan.collectives`.
Tokens are those of a micro-batch on a context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "ContextExchange",
    "coded_row_bytes",
    "key_value_width",
    "packed_bytes",
    "query_output_width",
    "routed_bytes",
    "stream_bytes",
]

PART_BYTES = 16
"""What FSDP's gather carries of a parameter, where it packs them, begins at multiples of this."""


def stream_bytes(tokens: Any, width: Any, element_bytes: Any, share: Any = 1) -> Any:
    """Activations `width` wide: what tensor parallelism gathers in front of a product, and what it sums or scatters
    behind one; between pipeline stages each tensor-parallel rank sends one of `share` parts."""
    return tokens * width * element_bytes / share


def key_value_width(kv_heads: Any, key_dim: Any, value_dim: Any, tp: Any) -> Any:
    """Elements a token of the keys and values of a tensor-parallel rank; a rank has one head at least."""
    return kv_heads * (key_dim + value_dim) / np.minimum(tp, kv_heads)


def query_output_width(heads: Any, key_dim: Any, value_dim: Any, tp: Any) -> Any:
    """Elements a token of the queries and of the results of attention of a tensor-parallel rank."""
    return heads * (key_dim + value_dim) / tp


@dataclass(frozen=True, kw_only=True)
class ContextExchange:
    """What one of `ranks` exchanges of a layer's attention, a pass.

    query_output, key_value: its own elements of queries and results, of keys and values. gradient_bytes: of an element
    of a gradient of these that is being summed. repeats: how often Ulysses has each key/value head, so that every rank
    gets whole ones.
    """

    ranks: Any
    query_output: Any
    key_value: Any
    element_bytes: Any
    gradient_bytes: Any
    repeats: Any = 1

    @property
    def gathered(self) -> Any:
        """Keys and values of all ranks, once forward and once backward."""
        return self.key_value * self.element_bytes * self.ranks

    @property
    def scattered(self) -> Any:
        """Their gradients."""
        return self.key_value * self.gradient_bytes * self.ranks

    @property
    def swapped(self) -> Any:
        """Tokens for heads and back, each way."""
        return (self.query_output + self.repeats * self.key_value) * self.element_bytes

    @property
    def hops(self) -> Any:
        """What a ring sends forward: keys and values move ranks - 1 times."""
        return (self.ranks - 1) * self.key_value * self.element_bytes

    @property
    def hops_back(self) -> Any:
        """The same again, and gradients that make one hop more, which brings them home."""
        return self.hops + self.scattered


def routed_bytes(tokens: Any, copies: Any, hidden: Any, element_bytes: Any) -> Any:
    """Tokens on their way to experts, or their results on the way home: `copies` rows of each are sent."""
    return tokens * copies * hidden * element_bytes


def coded_row_bytes(width: Any, block: Any = 128) -> Any:
    """Of a row in FP8: a code for each element, a scale of a byte for each `block` of them."""
    return width - (-width // block)


def packed_bytes(size: Any) -> Any:
    """What a rank's share of a parameter of `size` bytes takes in a gather that packs parameters of several types."""
    return -(-size // PART_BYTES) * PART_BYTES
