"""The decoder: named blocks put together as a `ModelSpec` says.

Parameters are float32 masters; products run in `compute_dtype`, and norms, rotation, softmax, routers, the residual
stream and the loss in float32. Query, key and value share one packed parameter, as do gate and up; `canonical.py`
says which rows are which logical tensor.

Legend: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from typing import Any

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

__all__ = ["Block", "Cache", "Decoder"]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each of the kind that layer `layer` of the spec has. The residual stream
    enters and leaves as one tensor, so that blocks can be sharded, recomputed or put on pipeline stages one by one."""

    def __init__(self, spec: ModelSpec, layer: int, compute: Compute, device: Any) -> None:
        super().__init__()
        self.attn_norm = Norm(spec.hidden_size, spec, compute, device)
        self.attn = (Attention if spec.mla is None else LatentAttention)(spec, layer, compute, device)
        self.mlp_norm = Norm(spec.hidden_size, spec, compute, device)
        if spec.is_moe_layer(layer):
            self.mlp: nn.Module = MixtureOfExperts(spec, compute, device)
        else:
            self.mlp = FeedForward(spec, spec.ffn_size, compute, device)

    def forward(self, x_BSD: Tensor, visible: Visible) -> Tensor:
        x_BSD, normed = self.attn_norm(x_BSD)
        x_BSD, normed = self.mlp_norm(x_BSD, self.attn(normed, visible))
        return x_BSD + self.mlp(normed, visible)


class Embedding(nn.Module):
    """A table [rows, D]."""

    def __init__(self, rows: int, size: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, device=device))


class Decoder(nn.Module):
    """A decoder-only language model; parameters are left uninitialised (`models.build` fills them)."""

    def __init__(self, spec: ModelSpec, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.spec = spec
        self._compute = Compute()
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, device)
        learned = spec.positions == "learned"
        self.pos_embed = Embedding(spec.max_positions, spec.hidden_size, device) if learned else None
        self.blocks = nn.ModuleList(Block(spec, i, self._compute, device) for i in range(spec.num_layers))
        self.norm = Norm(spec.hidden_size, spec, self._compute, device)
        self.head = None
        if not spec.tied_embeddings:
            self.head = Projection(spec.hidden_size, spec.vocab_size, False, self._compute, device)
        last = spec.num_layers - 1
        self.mtp = nn.ModuleList(
            Prediction(spec, Block(spec, last, self._compute, device), self._compute, device)
            for _ in range(spec.mtp_layers)
        )
        self._rope = None if learned else Rope(spec)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the products: torch.float32 or torch.bfloat16. Parameters keep theirs."""
        return self._compute.dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"compute_dtype {dtype} is not torch.float32 or torch.bfloat16")
        self._compute.dtype = dtype

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        *,
        weights_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight x cross-entropy in nats, sum of weights), float32 scalars over the tokens that count.

        labels_BS: int64, already shifted; -100, or weight 0, is not counted. segments_BS: documents of packed
        sequences; a token attends only to its own. A loss that asks for gradients can be differentiated once.

        What a mixture of experts and multi-token prediction add to the objective acts on the gradients alone: the
        value stays the cross-entropy of the next token, comparable between models.
        """
        counted_BS = labels_BS != -100
        weights_BS = counted_BS.float() if weights_BS is None else torch.where(counted_BS, weights_BS.float(), 0.0)
        visible = self._visible(tokens_BS, segments_BS, None, weights_BS.sum(1))
        hidden_BSD = self._hidden(tokens_BS, visible)
        loss = self._loss(hidden_BSD, labels_BS, weights_BS)
        if len(self.mtp) and torch.is_grad_enabled():
            extra = self._predictions(hidden_BSD, tokens_BS, labels_BS, weights_BS, segments_BS, visible)
            loss = loss + (extra - extra.detach())
        return loss, weights_BS.sum()

    def _loss(self, hidden_BSD: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        hidden_TD = hidden_BSD.flatten(0, 1)
        return ops.linear_cross_entropy(hidden_TD, self._head_weight, labels_BS.flatten(), weights_BS.flatten())

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
        total = hidden_BSD.new_zeros((), dtype=torch.float32)
        for step, module in enumerate(self.mtp, 1):
            embedded = F.embedding(ahead(tokens_BS, step), self.embed.weight)
            hidden_BSD = module(hidden_BSD, embedded, visible)
            weights = ahead(weights_BS, step)
            if segments_BS is not None:
                weights = torch.where(ahead(segments_BS, step) == segments_BS, weights, 0.0)
            total = total + self._loss(hidden_BSD, ahead(labels_BS, step), weights)
        return total * (self.spec.mtp_loss_weight / len(self.mtp))

    def logits(self, tokens_BS: Tensor, *, segments_BS: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Next-token logits [B, S, V] in the compute type; with a cache, tokens_BS go on from what it holds."""
        hidden_BSD = self._hidden(tokens_BS, self._visible(tokens_BS, segments_BS, cache, None))
        return ops.linear(hidden_BSD, self._head_weight, None, self.compute_dtype)

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def _hidden(self, tokens_BS: Tensor, visible: Visible) -> Tensor:
        """The last hidden state, after the final norm, in the compute type."""
        x_BSD = F.embedding(tokens_BS, self.embed.weight)
        if self.pos_embed is not None:
            at = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            x_BSD = x_BSD + F.embedding(at if visible.cache is None else visible.cache.positions, self.pos_embed.weight)
        for block in self.blocks:
            x_BSD = block(x_BSD, visible)
        return self.norm(x_BSD)[1]

    def _visible(
        self, tokens_BS: Tensor, segments_BS: Tensor | None, cache: Cache | None, weights_B: Tensor | None
    ) -> Visible:
        (batch, seq), device = tokens_BS.shape, tokens_BS.device
        length = seq if cache is None else cache.length
        if length > self.spec.max_positions and self.pos_embed is not None:
            raise ValueError(f"{length} tokens in a sequence, but the model has {self.spec.max_positions} positions")
        positions = None if cache is None else cache.positions
        rope = None if self._rope is None else self._rope.tables(length, device, positions)
        if cache is not None:
            return Visible({}, rope, cache)
        windows = {self.spec.window(i) for i in range(self.spec.num_layers)}
        starts = {w: ops.first_keys(segments_BS, batch, seq, w) for w in windows}
        return Visible({w: None if s is None else s.to(device) for w, s in starts.items()}, rope, None, weights_B)
