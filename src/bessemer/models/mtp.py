"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 section 2.2): module k predicts the token k + 1 ahead.

    h_k = norm(block(join(norm(embedding of the token k ahead), norm(h_{k-1}))))

h_0 is the model's last hidden state, after its final norm. Embedding and head are the model's own. The order inside
`join` (embedding first) is that of the published weights.

Legend: B batch, S sequence, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bessemer.core.model import ModelSpec
from bessemer.models.parts import Compute, Norm, Projection, Visible

__all__ = ["Prediction", "ahead"]


class Prediction(nn.Module):
    """One module; `block` is a decoder block like the model's last one."""

    def __init__(self, spec: ModelSpec, block: nn.Module, compute: Compute, device: Any) -> None:
        super().__init__()
        self.embed_norm = Norm(spec.hidden_size, spec, compute, device)
        self.hidden_norm = Norm(spec.hidden_size, spec, compute, device)
        self.join = Projection(2 * spec.hidden_size, spec.hidden_size, False, compute, device)
        self.block = block
        self.norm = Norm(spec.hidden_size, spec, compute, device)

    def forward(self, hidden_BSD: Tensor, embedded_BSD: Tensor, visible: Visible) -> Tensor:
        """The next hidden state [B, S, D], for the head and for the next module."""
        both = torch.cat((self.embed_norm(embedded_BSD)[1], self.hidden_norm(hidden_BSD)[1]), -1)
        return self.norm(self.block(self.join(both).float(), visible))[1]


def ahead(values_BS: Tensor, count: int) -> Tensor:
    """values[b, i + count] at [b, i]; zeros where the sequence has ended."""
    return torch.cat((values_BS[:, count:], torch.zeros_like(values_BS[:, :count])), 1)
