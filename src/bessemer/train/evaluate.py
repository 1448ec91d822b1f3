"""Validation: perplexity and bits per byte over the first sequences of the validation split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from bessemer.data import Batch as NumpyBatch
from bessemer.data import Dataset
from bessemer.parallel.data import drop_gathered
from bessemer.parallel.mesh import Mesh
from bessemer.train.passes import Batch

__all__ = ["Evaluation", "WholeModel", "evaluate", "to_tensors"]


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per token that counts; `bits_per_byte` of the text behind the tokens."""

    loss: float
    tokens: int
    sequences: int
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def to_tensors(batch: NumpyBatch, device: torch.device) -> Batch:
    """A batch of the data room as tensors on `device`, under the names of the model's arguments."""
    fields = {
        "tokens_BS": batch.tokens_BS,
        "labels_BS": batch.labels_BS,
        "weights_BS": batch.weights_BS,
        "segments_BS": batch.segments_BS,
    }
    return {k: torch.from_numpy(v).to(device) for k, v in fields.items() if v is not None}


class Evaluated(Protocol):
    """What can be evaluated: `Passes` of a run, or a whole model."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def mesh(self) -> Mesh: ...

    def forward(self, batch: Batch) -> tuple[float | torch.Tensor, float | torch.Tensor]: ...


@dataclass(frozen=True)
class WholeModel:
    """A model that this process holds whole."""

    module: nn.Module
    mesh: Mesh

    @torch.no_grad()
    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.module(**batch)  # type: ignore[no-any-return]


def evaluate(passes: Evaluated, dataset: Dataset, *, sequences: int, micro_batch: int) -> Evaluation:
    """Loss over the first `sequences` samples (at most one epoch), shared out over the data-parallel ranks.

    Every rank runs the same number of forward passes, since they are collective: a rank without work repeats a
    sample whose sums nobody takes.
    """
    mesh, module = passes.mesh, passes.module
    ids = list(range(min(sequences, dataset.num_samples)))
    batches = [ids[i : i + micro_batch] for i in range(0, len(ids), micro_batch)]
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    training = module.training
    module.eval()
    at, ranks = mesh.at("replica") * mesh.sizes["shard"] + mesh.at("shard"), mesh.sizes["replica"] * mesh.sizes["shard"]
    for turn in range(0, len(batches), ranks):
        mine = turn + at
        batch = to_tensors(dataset.batch(batches[min(mine, len(batches) - 1)]), mesh.device)
        loss_sum, weight_sum = passes.forward(batch)
        if mine < len(batches) and mesh.counts_loss:
            sums += torch.tensor([float(loss_sum), float(weight_sum)], dtype=torch.float64, device=mesh.device)
    module.train(training)
    drop_gathered(module)
    loss_sum, weight = mesh.sum_over_world(sums).tolist()
    loss = loss_sum / weight
    return Evaluation(loss, round(weight), len(ids), loss / math.log(2) / dataset.bytes_per_token)
