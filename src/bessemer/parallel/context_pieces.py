"""Where the pieces of a sequence are: the zig-zag layout of context parallelism, and how keys and values are packed.

Legend: B batch, H heads, K key/value heads, S tokens of a rank, P tokens of a piece (S / 2), N whole sequence (2 n P
for n ranks), L the beginning of one, E head dim, Z elements of the keys and values of one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Packed", "Ranks", "cut", "in_order", "join", "spread"]


@dataclass(frozen=True)
class Ranks:
    """The ranks that share every sequence: `degree` of them in `group`, of which this one is number `rank`."""

    group: dist.ProcessGroup
    degree: int
    rank: int

    def pieces(self, rank: int | None = None) -> tuple[int, int]:
        """The two pieces that a rank (this one) holds of 2 x degree: an early one and its mirror image."""
        rank = self.rank if rank is None else rank
        return rank, 2 * self.degree - 1 - rank


def cut(x_BHSE: Tensor) -> Tensor:
    """[2, B, H, P, E], contiguous: the two pieces of a rank's tokens."""
    return x_BHSE.reshape(*x_BHSE.shape[:2], 2, -1, x_BHSE.shape[3]).movedim(2, 0).contiguous()


def join(x_2BHPE: Tensor) -> Tensor:
    """The way back of `cut`."""
    return x_2BHPE.movedim(0, 2).flatten(2, 3)


def _natural(count: int) -> list[int]:
    """Where each piece of a sequence, from the first to the last, stands in a list of all ranks' pieces by rank."""
    return [2 * piece if 2 * piece < count else 2 * (count - 1 - piece) + 1 for piece in range(count)]


def in_order(pieces: Sequence[Tensor]) -> Tensor:
    """The whole sequence [B, H, N, E] from the pieces [B, H, P, E] of rank 0, rank 1, ..."""
    return torch.cat([pieces[at] for at in _natural(len(pieces))], 2)


def spread(x_BHLE: Tensor, pieces: Sequence[Tensor]) -> None:
    """The way back of `in_order`: copies a sequence, or as much of it as there is from its beginning, into pieces."""
    length = pieces[0].shape[2]
    for piece, at in enumerate(_natural(len(pieces))[: x_BHLE.shape[2] // length]):
        pieces[at].copy_(x_BHLE[:, :, piece * length : (piece + 1) * length])


@dataclass(frozen=True)
class Packed:
    """The form in which keys and values travel: of each piece one row of Z elements, its keys, then its values."""

    keys: torch.Size  # of a piece: [B, K, P, E]
    values: torch.Size

    @classmethod
    def of(cls, k_BKSE: Tensor, v_BKSE: Tensor) -> Packed:
        """The form of a rank's keys and values of two pieces."""
        sizes = [torch.Size((*t.shape[:2], t.shape[2] // 2, t.shape[3])) for t in (k_BKSE, v_BKSE)]
        return cls(*sizes)

    def pack(self, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """[2, Z], contiguous."""
        return torch.cat([cut(t).flatten(1) for t in (k_BKSE, v_BKSE)], 1)

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [pieces, Z] the keys [pieces, B, K, P, E] and values, each piece of them contiguous."""
        width = self.keys.numel()
        return rows[:, :width].view(-1, *self.keys), rows[:, width:].view(-1, *self.values)

    def unpack(self, rows_2Z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The way back of `pack`, in another type."""
        k, v = (join(t).to(dtype) for t in self.views(rows_2Z))
        return k, v
