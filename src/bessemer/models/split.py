"""What of a model this process holds, and how the parts of other processes take part.

Models hold no process groups. They call these four objects wherever a value crosses from one rank's share of the
work to all of it; the classes here are those of one process, to which the whole model belongs, and do nothing. The
axes of `bessemer.parallel` (a file each) derive from them.

The *stream* is the residual stream as a rank holds it: [B, S, D] of the rank's own tokens. Context parallelism gives
each rank its tokens of every sequence; sequence parallelism divides those once more among the tensor-parallel ranks.

Legend: B batch, S sequence (of this rank), D model, T tokens (B x S), H query heads, K key/value heads, E head dim,
X experts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer import ops
from bessemer.models.saving import Saving
from bessemer.ops.linear import How

__all__ = ["ContextSplit", "ExpertSplit", "Sent", "SequenceSplit", "Split", "TensorSplit"]


class TensorSplit:
    """Tensor parallelism: the columns and rows of weights, heads and vocabulary divided among `degree` ranks."""

    degree: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    chunks: int = 1
    """Pieces of a sequence that a projection is cut into."""
    saving: Saving = Saving()
    """What is kept of tensors that are only gathered or rearranged for a product: the part "gather"."""

    def enter(self, x_BSD: Tensor) -> Tensor:
        """From the stream to a value that every rank needs whole, for work on its own heads or columns.

        Gradients of the ranks' shares of the work are summed on the way back.
        """
        return x_BSD

    def leave(self, x_BSD: Tensor) -> Tensor:
        """The sum of the ranks' partial results, back in the stream."""
        return x_BSD

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        """`enter`, then the product with this rank's columns of outputs (weight [out / degree, in])."""
        return ops.linear(x, weight, bias, how)

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        """The product with this rank's share of the inputs (weight [out, in / degree]), then `leave`; the bias, which
        every rank holds whole, is added once."""
        return ops.linear(x, weight, bias, how)

    def embed(self, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of the embedding, of which this rank holds an equal share (filled up to it), in the stream."""
        return F.embedding(tokens_BS, weight_VD)

    def loss(self, hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        """The weighted cross-entropy of a head of which this rank holds a share of the rows, float32 scalar: the same
        on all ranks. hidden_BSD is in the stream; labels and weights are those of all tokens of the context rank."""
        return ops.linear_cross_entropy(hidden_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), weights_BS.flatten())

    def stream_part(self, values: Tensor, dim: int = 1) -> Tensor:
        """Of values of the rank's whole sequence along `dim`, those of the tokens in the stream. Not differentiated."""
        return values

    def take_tokens(self, x_BSD: Tensor) -> Tensor:
        """From the stream to tokens that no other rank holds: [B, S, D] -> [B, S / degree, D] where they all hold the
        same, the same tensor where sequence parallelism has divided them already."""
        return x_BSD

    def give_tokens(self, x_BSD: Tensor) -> Tensor:
        """The way back of `take_tokens`."""
        return x_BSD


class ContextSplit:
    """Context parallelism: the tokens of every sequence divided among `degree` ranks."""

    degree: int = 1
    rank: int = 0

    def positions(self, seq: int, device: torch.device) -> Tensor:
        """Where this rank's tokens stand in a sequence of `seq`: int64 [S], ascending within each piece."""
        return torch.arange(seq, device=device)

    def part(self, values_BS: Tensor) -> Tensor:
        """This rank's tokens of whole sequences [B, seq, ...] -> [B, S, ...]. Not differentiated."""
        return values_BS

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts: Tensor | None) -> Tensor:
        """Causal attention of this rank's queries to the keys and values of all ranks -> [B, S, H, E].

        starts: the first key that each query of the *whole* sequence sees, int32 [B, seq] (`ops.first_keys`).
        """
        return ops.attend(q_BHSE, k_BKSE, v_BKSE, starts)

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over these ranks. Not differentiated; every one of them calls it alike."""
        return values


class SequenceSplit:
    """The ranks that share the sequences of a micro-batch, and with them each tensor of its products: those of context
    and tensor parallelism together."""

    degree: int = 1
    rank: int = 0

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over these ranks. Not differentiated; every one of them calls it alike."""
        return values


class Sent(Protocol):
    """Tokens on their way to their experts."""

    def arrived(self) -> tuple[Tensor, Tensor]:
        """(rows sorted by expert, how many of them each expert that this rank holds got: int64 [X of this rank])."""
        ...


@dataclass(frozen=True)
class _Kept:
    """Tokens whose experts all live here."""

    rows: Tensor  # [T, D]
    counts: Tensor  # int64 [X]

    def arrived(self) -> tuple[Tensor, Tensor]:
        return self.rows, self.counts


class ExpertSplit:
    """Expert parallelism: whole experts divided among `degree` ranks (ep), the width of each among `width_degree`
    (etp). `token_ranks` ranks hold the tokens of one sequence (context and tensor parallel ranks)."""

    degree: int = 1
    rank: int = 0
    width_degree: int = 1
    width_rank: int = 0
    token_ranks: int = 1

    def dispatch(self, rows_TD: Tensor, counts_X: Tensor) -> Sent:
        """Starts sending rows, sorted by expert (`counts_X` of each of all X), to the ranks of their experts."""
        return _Kept(rows_TD, counts_X)

    def combine(self, out_TD: Tensor, sent: Sent) -> Tensor:
        """Results of `sent.arrived()`'s rows, back on the rank and in the order that `dispatch` got them in."""
        del sent
        return out_TD

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Summed over the `token_ranks` ranks of a sequence. Not differentiated."""
        return counts

    @property
    def shares(self) -> bool:
        """Whether other ranks hold parts of the tensors of this rank's experts: of their weights, or of the rows that
        they get of the same sequences."""
        return False

    def largest(self, values: Tensor, *, divided: bool = False) -> Tensor:
        """The elementwise maximum over those ranks of values [X of this rank, ...]; `divided`: the last dim is this
        rank's share of the width. Not differentiated; all ranks of the sequence and of the experts call it alike."""
        del divided
        return values


@dataclass(frozen=True)
class Split:
    """All together; a model gets one when it is built."""

    tensor: TensorSplit = field(default_factory=TensorSplit)
    context: ContextSplit = field(default_factory=ContextSplit)
    experts: ExpertSplit = field(default_factory=ExpertSplit)
    sequence: SequenceSplit = field(default_factory=SequenceSplit)
