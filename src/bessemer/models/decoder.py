"""The decoder: named blocks put together as a `ModelSpec` says.

Parameters are float32 masters; products run in `compute_dtype`, and norms, rotation, softmax, routers, the residual
stream and the loss in float32. Query, key and value share one packed parameter, as do gate and up; `canonical.py`
says which rows are which logical tensor.

Legend: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.model import ModelSpec
from bessemer.models.mla import LatentAttention
from bessemer.models.moe import MixtureOfExperts
from bessemer.models.mtp import Prediction, ahead
from bessemer.models.parts import Attention, Cache, Compute, FeedForward, Norm, Projection, Visible
from bessemer.models.rope import Rope
from bessemer.models.saving import Saving
from bessemer.models.split import Split

__all__ = ["Block", "Cache", "Decoder"]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each of the kind that layer `layer` of the spec has. The residual stream
    enters and leaves as one tensor, so that blocks can be sharded, recomputed or put on pipeline stages one by one."""

    def __init__(self, spec: ModelSpec, layer: int, compute: Compute, device: Any) -> None:
        super().__init__()
        self.layer, self.compute = layer, compute
        self.attn_norm = Norm(spec.hidden_size, spec, compute, device)
        self.attn = (Attention if spec.mla is None else LatentAttention)(spec, layer, compute, device)
        self.mlp_norm = Norm(spec.hidden_size, spec, compute, device)
        if spec.is_moe_layer(layer):
            self.mlp: nn.Module = MixtureOfExperts(spec, compute, device)
        else:
            self.mlp = FeedForward(spec, spec.ffn_size, compute, device)

    def forward(self, x_BSD: Tensor, visible: Visible) -> Tensor:
        with self.compute.saving.layer(self.layer):
            x_BSD, normed = self.attn_norm(x_BSD)
            x_BSD, normed = self.mlp_norm(x_BSD, self.attn(normed, visible))
            return x_BSD + self.mlp(normed, visible)


class Embedding(nn.Module):
    """A table [rows, D]."""

    def __init__(self, rows: int, size: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, device=device))


class Decoder(nn.Module):
    """A decoder-only language model, or what one process holds of it: its `layers` (all by default) with the parts
    that belong to the first and the last of them, and of each part the share that `split` leaves it. Parameters are
    left uninitialised (`models.build` fills them).

    The embedding belongs to the first layer, and to the last one too where the head is tied to it or multi-token
    prediction looks tokens up.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._compute = Compute(split=split or Split())
        self.split = self._compute.split
        self.layers = tuple(range(spec.num_layers)) if layers is None else layers
        last = spec.num_layers - 1
        rows = -(-spec.vocab_size // self.split.tensor.degree)
        learned = spec.positions == "learned"
        begins, ends = 0 in self.layers, last in self.layers
        embeds = begins or (ends and (spec.tied_embeddings or spec.mtp_layers > 0))
        self.embed = Embedding(rows, spec.hidden_size, device) if embeds else None
        self.pos_embed = Embedding(spec.max_positions, spec.hidden_size, device) if learned and begins else None
        self.blocks = nn.ModuleDict({str(i): Block(spec, i, self._compute, device) for i in self.layers})
        self.norm = Norm(spec.hidden_size, spec, self._compute, device) if ends else None
        self.head = None
        if ends and not spec.tied_embeddings:
            self.head = Projection(spec.hidden_size, rows, False, self._compute, device, part="columns")
        self.mtp = nn.ModuleList(
            Prediction(spec, Block(spec, last, self._compute, device), self._compute, device)
            for _ in range(spec.mtp_layers if ends else 0)
        )
        self._rope = None if learned else Rope(spec)

    def block(self, layer: int) -> Block:
        """The block of a layer that is held here; KeyError for another."""
        return cast(Block, self.blocks[str(layer)])

    def held_blocks(self) -> Iterator[tuple[int, Block]]:
        """(layer, block) of every block held here; those of multi-token prediction are numbered after the last."""
        yield from ((layer, self.block(layer)) for layer in self.layers)
        for step, module in enumerate(self.mtp):
            yield self.spec.num_layers + step, cast(Prediction, module).block  # type: ignore[misc]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the products: torch.float32 or torch.bfloat16. Parameters keep theirs."""
        return self._compute.dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"compute_dtype {dtype} is not torch.float32 or torch.bfloat16")
        self._compute.dtype = dtype

    @property
    def saving(self) -> Saving:
        """What the blocks keep for the backward pass."""
        return self._compute.saving

    @saving.setter
    def saving(self, saving: Saving) -> None:
        self._compute.saving = self.split.tensor.saving = saving

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        *,
        weights_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        layers: range | None = None,
        stream_BSD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight x cross-entropy in nats, sum of weights), float32 scalars over the tokens that count.

        labels_BS: int64, already shifted; -100, or weight 0, is not counted. segments_BS: documents of packed
        sequences; a token attends only to its own. A loss that asks for gradients can be differentiated once.

        With `layers` only these run, of which all must be held here: from `stream_BSD` (from the tokens where they
        begin with the first layer) to (stream, sum of weights), or to the loss where they end with the last.

        A rank of context parallelism gets whole sequences and returns the sums of its own tokens. What a mixture of
        experts and multi-token prediction add to the objective acts on the gradients alone: the value stays the
        cross-entropy of the next token, comparable between models.
        """
        layers = range(self.spec.num_layers) if layers is None else layers
        counted_BS = labels_BS != -100
        weights_BS = counted_BS.float() if weights_BS is None else torch.where(counted_BS, weights_BS.float(), 0.0)
        visible = self._visible(tokens_BS, segments_BS, None, weights_BS.sum(1))
        mine_BS = self.split.context.part(weights_BS)
        if stream_BSD is None:
            stream_BSD = self._embedded(tokens_BS, visible)
        for layer in layers:
            stream_BSD = self.blocks[str(layer)](stream_BSD, visible)
        if layers.stop < self.spec.num_layers:
            return stream_BSD, mine_BS.sum()
        assert self.norm is not None
        hidden_BSD = self.norm(stream_BSD)[1]
        loss = self._loss(hidden_BSD, labels_BS, weights_BS)
        if len(self.mtp) and torch.is_grad_enabled():
            extra = self._predictions(hidden_BSD, tokens_BS, labels_BS, weights_BS, segments_BS, visible)
            loss = loss + (extra - extra.detach())
        return loss, mine_BS.sum()

    def _loss(self, hidden_BSD: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        """labels and weights are those of whole sequences."""
        part = self.split.context.part
        return self.split.tensor.loss(hidden_BSD, self._head_weight, part(labels_BS), part(weights_BS))

    def _predictions(
        self,
        hidden_BSD: Tensor,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        segments_BS: Tensor | None,
        visible: Visible,
    ) -> Tensor:
        """The summed losses of the prediction modules, times their weight over their number. A prediction that
        would cross the end of its document or of the sequence doesn't count."""
        assert self.embed is not None
        total = hidden_BSD.new_zeros((), dtype=torch.float32)
        for step, module in enumerate(self.mtp, 1):
            mine_BS = self.split.context.part(ahead(tokens_BS, step))
            embedded = self.split.tensor.embed(mine_BS, self.embed.weight)
            hidden_BSD = module(hidden_BSD, embedded, visible)
            weights = ahead(weights_BS, step)
            if segments_BS is not None:
                weights = torch.where(ahead(segments_BS, step) == segments_BS, weights, 0.0)
            total = total + self._loss(hidden_BSD, ahead(labels_BS, step), weights)
        return total * (self.spec.mtp_loss_weight / len(self.mtp))

    def logits(self, tokens_BS: Tensor, *, segments_BS: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Next-token logits [B, S, V] in the compute type; with a cache, tokens_BS go on from what it holds."""
        visible = self._visible(tokens_BS, segments_BS, cache, None)
        stream_BSD = self._embedded(tokens_BS, visible)
        for block in self.blocks.values():
            stream_BSD = block(stream_BSD, visible)
        assert self.norm is not None
        return ops.linear(self.norm(stream_BSD)[1], self._head_weight, None, self.compute_dtype)

    @property
    def _head_weight(self) -> Tensor:
        owner = self.embed if self.head is None else self.head
        assert owner is not None
        return owner.weight

    def _embedded(self, tokens_BS: Tensor, visible: Visible) -> Tensor:
        """The stream before the first block."""
        assert self.embed is not None
        stream_BSD = self.split.tensor.embed(self.split.context.part(tokens_BS), self.embed.weight)
        if self.pos_embed is None:
            return stream_BSD
        if visible.cache is not None:
            return stream_BSD + F.embedding(visible.cache.positions, self.pos_embed.weight)
        at = self.split.context.positions(tokens_BS.shape[1], tokens_BS.device)
        return stream_BSD + F.embedding(self.split.tensor.stream_part(at, 0), self.pos_embed.weight)

    def _visible(
        self, tokens_BS: Tensor, segments_BS: Tensor | None, cache: Cache | None, weights_B: Tensor | None
    ) -> Visible:
        (batch, seq), device = tokens_BS.shape, tokens_BS.device
        length = seq if cache is None else cache.length
        if length > self.spec.max_positions and self.spec.positions == "learned":
            raise ValueError(f"{length} tokens in a sequence, but the model has {self.spec.max_positions} positions")
        positions = None if cache is None else cache.positions
        if cache is None and self.split.context.degree > 1:
            positions = self.split.context.positions(seq, device)
        rope = None if self._rope is None else self._rope.tables(length, device, positions)
        if cache is not None:
            return Visible({}, rope, cache)
        windows = {self.spec.window(i) for i in range(self.spec.num_layers)}
        starts = {w: ops.first_keys(segments_BS, batch, seq, w) for w in windows}
        return Visible({w: None if s is None else s.to(device) for w, s in starts.items()}, rope, None, weights_B)
