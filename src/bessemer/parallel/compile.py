"""torch.compile, block by block. One graph serves all layers of a kind; what lies between blocks, the hooks of FSDP2
and of gradient buckets and the transfers of a pipeline, runs as it does without.

    compile_blocks(module, job)       # before `shard`; `train.compile` names the backend, "none" leaves all as it is

A block is one graph. It falls into the graphs of its parts where a piece of it has to stay outside:

* experts and their router, since how many rows an expert gets is known at run time only, and is read on the host where
  they are divided among ranks;
* attention under context parallelism, since a graph would lose the marks and counts of its exchanges.

Where no graph holds, `parallel.problems` refuses the job before it starts. A graph that would break, or be made
again without end, raises: nothing runs uncompiled behind the user's back.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bessemer.core.job import Job
from bessemer.models.decoder import Block, Decoder
from bessemer.models.moe import MixtureOfExperts

__all__ = ["compile_blocks"]

MAX_GRAPHS = 32
"""Of one piece of code. A training run has one for each kind of layer, with and without gradients, with and without
starts of documents, and one more where the size of a batch changes for the first time."""


def compile_blocks(module: Decoder, job: Job) -> None:
    """Compile the blocks of `module` in place, names unchanged. Each graph is made at its first call."""
    backend = job.train.compile
    if backend == "none":
        return
    for _, block in module.held_blocks():
        for part in _graphs(block):
            part.compile(backend=backend, fullgraph=True, recompile_limit=MAX_GRAPHS)


def _graphs(block: Block) -> Iterator[nn.Module]:
    """The modules of a block that become one graph each."""
    experts = block.mlp if isinstance(block.mlp, MixtureOfExperts) else None
    exchanges = block.compute.split.context.degree > 1
    if experts is None and not exchanges:
        yield block
        return
    yield from (block.attn_norm, block.mlp_norm)
    if not exchanges:
        yield block.attn
    if experts is None:
        yield block.mlp
    elif experts.shared is not None:
        yield experts.shared
