"""Validation: perplexity and bits per byte over the first sequences of the validation split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from bessemer.data import Batch as NumpyBatch
from bessemer.data import Dataset
from bessemer.parallel.data import drop_gathered
from bessemer.parallel.mesh import Mesh
from bessemer.train.step import Batch

__all__ = ["Evaluation", "evaluate", "to_tensors"]


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


def evaluate(module: nn.Module, dataset: Dataset, mesh: Mesh, *, sequences: int, micro_batch: int) -> Evaluation:
    """Loss of `module` over the first `sequences` samples (at most one epoch), shared out over all ranks.

    Every rank runs the same number of forward passes, since with sharded parameters they are collective: a rank
    without work repeats a sample with weight zero.
    """
    ids = list(range(min(sequences, dataset.num_samples)))
    batches = [ids[i : i + micro_batch] for i in range(0, len(ids), micro_batch)]
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    training = module.training
    module.eval()
    with torch.no_grad():
        for turn in range(0, len(batches), mesh.world_size):
            mine = turn + mesh.rank
            batch = to_tensors(dataset.batch(batches[min(mine, len(batches) - 1)]), mesh.device)
            loss_sum, weight_sum = module(**batch)
            if mine < len(batches):
                sums += torch.stack([loss_sum.double(), weight_sum.double()])
    module.train(training)
    drop_gathered(module)
    loss_sum, weight = mesh.sum_over_world(sums).tolist()
    loss = loss_sum / weight
    return Evaluation(loss, round(weight), len(ids), loss / math.log(2) / dataset.bytes_per_token)
