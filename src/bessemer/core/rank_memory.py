"""Bytes that a rank of Bessemer's own trainer holds, line by line: the closed form of what `bessemer train` does.

Everything is arithmetic, so that each quantity is a number, or an array with an entry for each of many layouts: `check`
asks for one rank of one job, the planner for thousands of layouts at once, and a dry run counts the real tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bessemer.core.held import Elements
from bessemer.core.model import ModelSpec

__all__ = [
    "MASTER_BYTES",
    "MOMENT_GROUP",
    "Copies",
    "Passing",
    "Sharing",
    "final_norm_elements",
    "held_bytes",
    "moment_bytes",
    "rotation_bytes",
    "scattered_bytes",
    "sharing_of",
    "state_lines",
    "vector_elements",
    "working_bytes",
]

MASTER_BYTES = 4
"""Master parameters and gradients are fp32 under every recipe; so is the residual stream, and optimizer state as far
as `precision.moments` leaves it."""
MOMENT_GROUP = 128
"""Elements that share a range where moments are FP8 (`precision/expanded.py`)."""
LOGIT_CHUNK_BYTES = 16 << 20
"""The loss holds logits of at most this size at a time (`ops.cross_entropy`)."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How ranks that see other tokens share out a rank's state. Flags are 0 or 1.

    dense, experts: ranks over which FSDP shards them; 1: none.  sharded_dense, sharded_experts: whether it does.
    summed_dense, summed_experts: whether unsharded gradients have a copy that is summed over ranks.
    whole: whether FSDP's gradients stay whole until the end of a step.  gathers_all: whether parameters are gathered
    for the whole step, otherwise block by block.  muon: whether the matrices of blocks have one moment instead of two.
    """

    dense: Any
    experts: Any
    sharded_dense: Any
    sharded_experts: Any
    summed_dense: Any
    summed_experts: Any
    whole: Any
    gathers_all: Any
    muon: Any = 0


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Ranks that hold the same. data: inside a copy of the model, of all but experts; experts: of experts; replicas:
    copies of the model. local_experts: whole experts of a rank (1 without any), of `width` each."""

    data: Any
    experts: Any
    replicas: Any
    local_experts: Any
    width: Any


def sharing_of(c: Copies, hidden: int, *, sharded: Any, full: Any, accumulates: Any, muon: Any = 0) -> Sharing:
    """As `parallel/data.py` shares out. sharded: whether `dp_shard` isn't "none"; full: whether it is "full";
    accumulates: whether whole gradients are summed over several backward passes before they are scattered.
    """
    dense = sharded * (c.data > 1)
    experts = dense * (c.experts > 1)
    # of an expert's elements two thirds have its width as rows, the way out the model's
    largest = 3 / (2 / _divided(c, c.width) + 1 / _divided(c, hidden))
    return Sharing(
        dense=1 + dense * (c.data - 1),
        experts=1 + experts * (largest - 1),
        sharded_dense=dense,
        sharded_experts=experts,
        summed_dense=(1 - dense) * (c.data * c.replicas > 1),
        # beside sharded weights, experts without copies inside the replica are left to the sum across replicas
        summed_experts=(1 - experts) * (c.experts * c.replicas > 1),
        whole=dense * accumulates,
        gathers_all=1 - full * 1,
        muon=muon,
    )


def moment_bytes(kind: str) -> float:
    """Of AdamW's two moments of an element of a matrix, by `precision.moments`. FP8 has a code an element and two
    bfloat16 numbers a group; what a group lacks at the end of a tensor isn't counted."""
    return {"fp32": 8.0, "bf16": 4.0, "fp8": 2 * (1 + 4 / MOMENT_GROUP)}[kind]


def final_norm_elements(spec: ModelSpec) -> int:
    """Of the norm after the last block."""
    return spec.hidden_size * (2 if spec.norm == "layernorm" else 1)


def vector_elements(rank: Elements, ends: Any, final_norm: Any) -> Any:
    """Of a rank's norms and biases. ends: elements outside of blocks, `final_norm` of them in a norm."""
    return rank.dense - rank.untrained - rank.matrices - ends + final_norm


def state_lines(
    rank: Elements, s: Sharing, *, ends: Any, blocks: Any, final_norm: Any, moments: str = "fp32"
) -> dict[str, Any]:
    """Bytes of weights, gradients, gradient_sum, optimizer and gathered.

    rank: all that it holds. Of what FSDP gathers block by block: `ends`, elements outside of blocks, which stay for a
    whole pass; `blocks`: `Elements` of the two largest blocks, the one at work and the next on its way. final_norm: how
    many of `ends` are in a norm. moments: `precision.moments`, which spares what has one dimension.
    """
    trained = rank.dense - rank.untrained
    local = trained / s.dense + rank.experts / s.experts
    one_moment = s.muon * (rank.matrices / s.dense + rank.experts / s.experts)
    whole = s.sharded_dense * trained + s.sharded_experts * rank.experts
    in_turn = s.sharded_dense * (ends + blocks.dense) + s.sharded_experts * blocks.experts
    everything = s.sharded_dense * rank.dense + s.sharded_experts * rank.experts
    gathered = s.gathers_all * everything + (1 - s.gathers_all) * in_turn
    elements = {
        "weights": local + rank.untrained / s.dense,
        "gradients": local + s.whole * whole,
        "gradient_sum": s.summed_dense * trained + s.summed_experts * rank.experts,
        "optimizer": 2 * local - one_moment,
        "gathered": gathered,
    }
    lines = {name: MASTER_BYTES * count for name, count in elements.items()}
    narrow = (trained - vector_elements(rank, ends, final_norm)) / s.dense + rank.experts / s.experts
    lines["optimizer"] = lines["optimizer"] - (moment_bytes("fp32") - moment_bytes(moments)) * narrow
    return lines


def scattered_bytes(block: Elements, s: Sharing) -> Any:
    """What FSDP needs for a moment where it scatters the gradients of `block` at once: them, and the copy it sends."""
    return (1 - s.whole) * 2 * MASTER_BYTES * (s.sharded_dense * block.dense + s.sharded_experts * block.experts)


def _divided(c: Copies, rows: Any) -> Any:
    """By what a rank's share of stacks of experts is smaller than all: stacks are cut evenly between experts, else
    between rows of each, else between experts as it comes out, of which the fullest rank counts."""
    even = 1 * ((c.local_experts % c.experts == 0) | (rows % c.experts == 0))
    return even * c.experts + (1 - even) * c.local_experts / -(-c.local_experts // c.experts)


@dataclass(frozen=True, kw_only=True)
class Passing:
    """What passes through a rank with one micro-batch. tokens: on its context rank; stream: by what the stream is
    smaller than these; wide: bytes of an element of the compute type; table: elements of the rank's share of the head;
    rotations: bytes a token of rotation tables, which a stage makes for itself where a rank holds parts of sequences.
    """

    tokens: Any
    stream: Any
    wide: Any
    hidden: int
    table: Any
    rotations: Any = 0


def held_bytes(p: Passing, layers: Any, *, ends: Any, predictions: int, prediction: Any) -> tuple[Any, Any]:
    """(bytes that a stage holds between forward and backward, those of them that its loss holds).

    layers: bytes a token of all its layers.  ends: 1 where the model ends on it.  predictions: modules of multi-token
    prediction; prediction: bytes a token of the block of one.
    The loss keeps its own gradients: of the hidden states, for all tokens, and of the head, in fp32.
    """
    stream = p.hidden / p.stream
    statistics = MASTER_BYTES / p.stream
    norm = MASTER_BYTES * stream + statistics
    loss = p.tokens * p.wide * p.hidden + MASTER_BYTES * p.table
    module = prediction + 2 * norm + 3 * p.wide * stream + statistics  # its norms, what it joins, and its block
    end = p.tokens * norm + loss + predictions * (p.tokens * module + loss)
    return p.tokens * (layers + p.rotations) + ends * end, ends * (1 + predictions) * loss


def rotation_bytes(spec: ModelSpec, cp: Any) -> Any:
    """Of cosines and sines, a token of a rank of context parallelism."""
    width = 0 if spec.positions != "rope" else spec.head_dim if spec.mla is None else spec.mla.qk_rope_head_dim
    return MASTER_BYTES * width * (cp > 1)


def working_bytes(p: Passing, *, matrix: Any, rows: Any, again: Any, ends: Any) -> Any:
    """The most that a pass needs for a moment, about: gradients of the widest weight (in the compute type, then in
    fp32) or of the results that experts give for `rows`, with those of the stream and what a layer makes again; or the
    loss's head in the compute type, and its logits. matrix: elements of the widest weight; again: bytes a token."""
    converted = p.wide * (MASTER_BYTES - p.wide) / 2  # nothing is converted where the compute type is fp32
    stream = p.tokens * (p.hidden * (MASTER_BYTES / p.stream + 2 * p.wide) + again)
    layer = stream + _larger(matrix * (MASTER_BYTES + converted), rows * p.hidden * (MASTER_BYTES + 2 * p.wide))
    return _larger(layer, ends * (2 * converted * p.table + 2 * LOGIT_CHUNK_BYTES))


def _larger(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2
