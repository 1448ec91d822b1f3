"""A model with its first weights.

Every logical tensor is drawn from its own generator, keyed by (seed, name): so the weights don't depend on how
parameters are packed, in which order they are made, or who holds which part.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from bessemer.core.model import ModelSpec
from bessemer.models.canonical import held, local
from bessemer.models.decoder import Decoder

__all__ = ["build", "initial", "initialise"]


def build(
    spec: ModelSpec, *, seed: int, device: torch.device | str = "cpu", compute_dtype: torch.dtype = torch.float32
) -> Decoder:
    """A whole `Decoder` with float32 parameters, initialised unless `device` is "meta"."""
    model = Decoder(spec, device=device)
    model.compute_dtype = compute_dtype
    if torch.device(device).type != "meta":
        initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """First values for what this rank holds of a model, whatever share that is; rows that only fill up become 0."""
    for parameter in model.parameters():
        local(parameter).zero_()
    made: dict[str, Tensor] = {}
    for block in held(model):
        name = block.piece.name
        if name not in made:  # the blocks of a tensor come one after another: only one is kept whole
            made = {name: initial(model.spec, name, block.piece.shape, seed)}
        block.tensor.copy_(made[name][block.within])


def initial(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The first value of the logical tensor `name`, float32 on the CPU.

    Norms 1, biases 0 (a router's selection bias too), matrices normal(0, init_std); the projections that write to the
    residual stream (attn.o, every down) are smaller by sqrt(2 layers), so that its variance doesn't grow with depth
    (GPT-2, Megatron-LM).
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = spec.init_std
    if name.endswith((".attn.o.weight", ".mlp.down.weight", ".experts.down.weight", ".shared.down.weight")):
        std /= math.sqrt(2 * spec.num_layers)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
