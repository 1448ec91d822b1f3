"""The verb `eval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bessemer.api._extras import need

__all__ = ["EvalResult", "eval"]


@dataclass(frozen=True)
class EvalResult:
    """Loss in nats per token, and what it means: perplexity, bits per byte, and the unigram entropy beside it."""

    run: str
    step: int
    loss: float
    perplexity: float
    bits_per_byte: float
    unigram_entropy: float
    sequences: int
    tokens: int

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __str__(self) -> str:
        return (
            f"{self.run} at step {self.step}: validation loss {self.loss:.4f} nats per token\n"
            f"  over {self.tokens:,} tokens of {self.sequences:,} sequences\n"
            f"  perplexity {self.perplexity:.2f}, {self.bits_per_byte:.3f} bits per byte;"
            f" token frequencies alone would give {self.unigram_entropy:.4f} nats"
        )


def eval(run: str, *, sequences: int = 0) -> EvalResult:
    """Perplexity and bits per byte of a trained model on its validation split.

    run: A run folder (its newest checkpoint that verifies) or a checkpoint folder.
    sequences: How many validation sequences to read; 0 reads the whole split.
    """
    need("eval", "train")
    import torch

    from bessemer.data import open_dataset, prepare
    from bessemer.parallel.mesh import Mesh
    from bessemer.train.evaluate import WholeModel, evaluate
    from bessemer.train.opened import open_trained

    trained = open_trained(run)
    prepare(trained.job)
    dataset = open_dataset(trained.job, "val")
    found = evaluate(
        WholeModel(trained.module(), Mesh.alone(torch.device("cpu"))),
        dataset,
        sequences=sequences or dataset.num_samples,
        micro_batch=trained.job.train.micro_batch,
    )
    return EvalResult(
        run=run,
        step=trained.step,
        loss=found.loss,
        perplexity=found.perplexity,
        bits_per_byte=found.bits_per_byte,
        unigram_entropy=dataset.unigram_entropy(),
        sequences=found.sequences,
        tokens=found.tokens,
    )
