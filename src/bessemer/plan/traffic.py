"""What a rank of Bessemer's own trainer exchanges in one step, in closed form: bytes by group of ranks and operation.

    traffic(spec, job)["tensor"]["all_reduce"]

Groups and operations are named, and bytes counted, as `bessemer.comm.collectives` counts them in a run: full buffers,
and of messages both what is sent and what is received. T tokens of a micro-batch on a context-parallel rank, D hidden
size, X experts, n ranks of the group, c bytes of the compute type; the stream, masters, gradients and their sums are
float32. All is of a micro-batch, and of a layer that has the part, unless it says "a step".

    tensor       Into a product of width w: nothing forward, a sum of T w c backward; with sequence parallelism (SP) a
                 gather of as much forward, a scatter backward.  Out of one: a sum of T D c forward, nothing backward;
                 SP: a scatter, a gather.
                 In go queries, keys and values (of latent attention the latents and the shared key), feed-forward
                 parts, and the head for each loss; out come attention and feed-forward parts, and the embedding as
                 float32.  Each loss gathers 12 T n, experts without SP T D c each way.
                 A step: gradients of what all ranks hold whole, each for its own tokens or heads (`heads`: those of
                 shared key/value heads).
    context      `exchanges.ContextExchange`.
    pipeline     4 T D (SP: / tp) to and from each stage before or behind one of the rank's that is on another rank.
                 `ends`, a step: the gradient of an embedding that both ends hold.
    experts      8 etp X of counts; etp rows of D c a choice of an own token, four times: dispatch, combine, backward.
                 With precision.dispatch = "fp8" two of these are rows of D + ceil(D / 128).
                 `sequence`: 4 X for each run of tokens that a balance loss averages over.
    data         A step: sums of gradients (`expert_data`: of experts; `replica`: between copies of the model).  With
                 FSDP gathers and scatters instead, see `_sharded`.
    sequence     Under a quantised recipe with a scale per tensor: 4 for each amax, of a projection's input, of the
                 logical tensors of its weight and of their gradients; with delayed scaling in the first step.
    block        A step: the squared norm.
    world        A step: loss, tokens, loads of the experts; seconds of the phases; 12 a logical tensor with a history.

Exact on every rank, but where ranks take uneven parts: of the rows that experts get, and of gradients of weights that
FSDP cuts unevenly, it is the mean, exact in the sum over ranks. What is made again in the backward pass, Muon's whole
matrices, and amaxes of pieces (tp_chunks), of channels (smooth, cp) and of experts that ranks share are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from bessemer.core.held import HeldLayers, layers_by_stage
from bessemer.core.job import Job
from bessemer.core.layout import Layout
from bessemer.core.model import ModelSpec
from bessemer.core.recipes import RECIPES
from bessemer.core.schedules import SCHEDULES, rank_of_stage
from bessemer.plan.exchanges import (
    ContextExchange,
    coded_row_bytes,
    key_value_width,
    packed_bytes,
    query_output_width,
    routed_bytes,
    stream_bytes,
)
from bessemer.plan.parameters import Parameter, rank_parameters

__all__ = ["traffic"]

WIDE = 4
"""Bytes of an element of the stream between blocks, of masters, gradients and sums of them."""
COUNT = 8
"""Bytes of a number of rows, or of a sum that decides something (int64, float64)."""
LOSS_NUMBERS = 3
"""What a rank tells the others of each token's logits."""

Entry = tuple[str, str, float]
"""Group, operation, bytes."""


def traffic(
    spec: ModelSpec, job: Job, rank: int = 0, step: int = 0, kept: Collection[tuple[int, str]] = ()
) -> dict[str, dict[str, float]]:
    """Bytes of step `step` (from 0) on rank `rank`; groups of one rank are absent.

    kept: (layer, name in its block) of the linear layers that a quantised recipe leaves as they are; which these are
    `bessemer.models.quantise.why_kept` says. With delayed scaling histories are taken to be known after the first step.
    ValueError for a job with exchanges that the formulas leave out.
    """
    left_out = _left_out(job, spec.moe is not None)
    if left_out:
        raise ValueError(f"there is no closed form of what {left_out} exchanges")
    at = _Rank(spec, job, rank, step, frozenset(kept))
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in (_tensor, _context, _pipeline, _experts, _gradients, _partial_gradients, _amaxes, _commit):
        for group, operation, size in part(at):
            if size and at.sizes[group] > 1:
                found[group][operation] += size
    return {group: dict(operations) for group, operations in found.items()}


def _left_out(job: Job, experts: bool) -> str:
    if job.train.recompute != "none":
        return f'train.recompute = "{job.train.recompute}"'
    if job.train.optimizer != "adamw":
        return f'train.optimizer = "{job.train.optimizer}"'
    layout, whole = job.layout, RECIPES[job.precision.recipe].keeps_codes
    if whole and layout.tp_chunks > 1:
        return f"a scale for each piece of layout.tp_chunks = {layout.tp_chunks}"
    if experts and (whole or job.precision.smooth) and layout.cp * layout.tp * layout.ep * layout.etp > 1:
        return "the agreement of ranks that share experts on scales"
    return "precision.smooth with cp" if job.precision.smooth and layout.cp > 1 else ""


@dataclass(frozen=True)
class _Rank:
    """A rank, and what passes through it."""

    spec: ModelSpec
    job: Job
    rank: int
    step: int
    kept: frozenset[tuple[int, str]] = frozenset()

    @property
    def place(self) -> tuple[int, int]:
        """On the pipeline and on the tensor axis."""
        layout = self.job.layout
        return self.rank // (self.job.shard * layout.cp * layout.tp) % layout.pp, self.rank % layout.tp

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks of each group, as `bessemer.parallel.mesh` makes them."""
        layout, spec, replicas = self.job.layout, self.spec, self.job.replicas
        stage = self.job.shard * layout.cp * layout.tp
        experts = layout.ep * layout.etp
        ends_apart = layout.pp > 1 and SCHEDULES[layout.schedule].shape == "loop"
        at_end = ends_apart and self.place[0] in (0, layout.pp - 1)
        return {
            "tensor": layout.tp,
            "heads": max(layout.tp // spec.num_kv_heads, 1) if spec.mla is None else 1,
            "context": layout.cp,
            "sequence": layout.cp * layout.tp,
            "pipeline": layout.pp,
            "ends": 2 if at_end and (spec.tied_embeddings or spec.mtp_layers > 0) else 1,
            "experts": experts,
            "data": self.job.shard * layout.cp,
            "expert_data": stage // experts,
            "replica": replicas,
            "block": stage * layout.pp,
            "world": layout.world_size,
        }

    @cached_property
    def stages(self) -> dict[int, range]:
        """The layers of each of the rank's pipeline stages."""
        return layers_by_stage(self.spec, self.job.layout, self.job.data.seq_len)[self.place[0]]

    @property
    def predictions(self) -> int:
        """Modules of multi-token prediction here."""
        ends = any(layers.stop == self.spec.num_layers for layers in self.stages.values())
        return self.spec.mtp_layers if ends else 0

    @cached_property
    def blocks(self) -> HeldLayers:
        """What a micro-batch passes here; the block of a prediction module is like the last layer's."""
        layers = [layer for own in self.stages.values() for layer in own]
        return HeldLayers.of(self.spec, [*layers, *[self.spec.num_layers - 1] * self.predictions])

    @cached_property
    def parameters(self) -> list[Parameter]:
        layers = [layer for own in self.stages.values() for layer in own]
        return rank_parameters(self.spec, self.job.layout, layers)

    @property
    def sharded(self) -> bool:
        """Whether FSDP divides the state."""
        return self.job.layout.dp_shard != "none" and self.sizes["data"] > 1

    @cached_property
    def num_micro(self) -> int:
        """Micro-batches of the step, whose units are dealt to replicas as `bessemer.data.cursor` says."""
        job, replicas = self.job, self.job.replicas
        each, extra = divmod(job.global_batch_at(self.step) // job.unit, replicas)
        replica = self.rank // self.sizes["block"]
        return (each + ((replica - self.step) % replicas < extra)) * job.micro_batches

    def quantised(self, p: Parameter) -> bool:
        """Whether the recipe quantises what reads this weight."""
        path = p.name.split(".")
        if path[0] not in ("blocks", "mtp") or len(p.shape) == 1 or "router" in path or "join" in path:
            return False
        layer = int(path[1]) + (self.spec.num_layers if path[0] == "mtp" else 0)
        local = ".".join(path[3 if path[0] == "mtp" else 2 : -1])
        return RECIPES[self.job.precision.recipe].quantised and (layer, local) not in self.kept

    def smooth(self, p: Parameter) -> bool:
        return self.job.precision.smooth and p.name.endswith(".down.weight")

    def agrees(self, p: Parameter) -> bool:
        """Whether ranks agree on scales of this weight's logical tensors: no history says them."""
        recipe = RECIPES[self.job.precision.recipe]
        remembered = recipe.name == "fp8-delayed" and self.step > 0 and not self.smooth(p)
        return self.quantised(p) and recipe.keeps_codes and not remembered

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a context-parallel rank."""
        return self.job.train.micro_batch * self.job.data.seq_len // self.job.layout.cp

    @property
    def element_bytes(self) -> int:
        """Of the compute type."""
        return 4 if RECIPES[self.job.precision.recipe].compute == "fp32" else 2


def _tensor(at: _Rank) -> Iterator[Entry]:
    """All that one micro-batch needs, times the micro-batches."""
    spec, blocks, T, ranks = at.spec, at.blocks, at.tokens, at.sizes["tensor"]
    hidden, moe, mla = spec.hidden_size, spec.moe, spec.mla
    losses = (1 + at.predictions) * blocks.ends
    attentions = blocks.dense + blocks.moe
    feed_forwards = blocks.dense + (blocks.moe if moe is not None and moe.shared_ffn_size else 0)
    attention = hidden
    if mla is not None:
        queries = hidden if mla.q_lora_rank is None else mla.q_lora_rank
        attention = queries + mla.kv_lora_rank + mla.qk_rope_head_dim
    into = stream_bytes(T, attentions * attention + (feed_forwards + losses) * hidden, at.element_bytes)
    out_of = stream_bytes(T, (attentions + feed_forwards) * hidden, at.element_bytes)
    out_of += stream_bytes(T, (blocks.begins + at.predictions) * hidden, WIDE)
    statistics = losses * stream_bytes(T, LOSS_NUMBERS * ranks, WIDE)
    gathered = statistics
    if at.job.layout.sequence_parallel:
        gathered += into + out_of
        yield "tensor", "reduce_scatter", at.num_micro * (into + out_of)
    else:
        gathered += 2 * blocks.moe * stream_bytes(T, hidden, at.element_bytes)
        yield "tensor", "all_reduce", at.num_micro * (into + out_of)
    yield "tensor", "all_gather", at.num_micro * gathered


def _context(at: _Rank) -> Iterator[Entry]:
    spec, layout, mla = at.spec, at.job.layout, at.spec.mla
    kv_heads = spec.num_kv_heads if mla is None else spec.num_heads
    value_dim = spec.head_dim if mla is None else mla.v_head_dim
    key_dim = max(spec.head_dim, value_dim)
    own_heads = max(kv_heads // layout.tp, 1)
    size = ContextExchange(
        ranks=layout.cp,
        query_output=at.tokens * query_output_width(spec.num_heads, key_dim, value_dim, layout.tp),
        key_value=at.tokens * key_value_width(kv_heads, key_dim, value_dim, layout.tp),
        element_bytes=at.element_bytes,
        gradient_bytes=WIDE,
        repeats=layout.cp // math.gcd(own_heads, layout.cp),
    )
    times = at.num_micro * (at.blocks.dense + at.blocks.moe)
    if layout.cp_kind == "ring":
        for operation in ("send", "recv"):
            yield "context", operation, times * (size.hops + size.hops_back)
    elif layout.cp_kind == "allgather":
        yield "context", "all_gather", times * 2 * size.gathered
        yield "context", "reduce_scatter", times * size.scattered
    else:
        yield "context", "all_to_all", times * 2 * size.swapped


def _pipeline(at: _Rank) -> Iterator[Entry]:
    """Each message forward is answered by one of the same size, so as much is sent as received."""
    layout, kind = at.job.layout, SCHEDULES[at.job.layout.schedule]
    if layout.pp == 1:
        return
    num_stages = layout.pp * len(at.stages)
    around = [other for stage in at.stages for other in (stage - 1, stage + 1) if 0 <= other < num_stages]
    elsewhere = sum(rank_of_stage(kind, layout.pp, stage, 0, at.num_micro) != at.place[0] for stage in around)
    message = stream_bytes(at.tokens, at.spec.hidden_size, WIDE, layout.tp if layout.sequence_parallel else 1)
    for operation in ("send", "recv"):
        yield "pipeline", operation, at.num_micro * elsewhere * message


def _experts(at: _Rank) -> Iterator[Entry]:
    moe, layout = at.spec.moe, at.job.layout
    if moe is None:
        return
    times = at.num_micro * at.blocks.moe
    tokens, copies = at.tokens // layout.tp, moe.top_k * layout.etp
    home = routed_bytes(tokens, copies, at.spec.hidden_size, at.element_bytes)
    coded = at.job.precision.dispatch == "fp8"
    out = routed_bytes(tokens, copies, coded_row_bytes(at.spec.hidden_size), 1) if coded else home
    yield "experts", "all_to_all", times * (COUNT * layout.etp * moe.num_experts + 2 * (out + home))
    if moe.aux_loss_coef:
        runs = at.job.train.micro_batch if moe.aux_loss_per_sequence else 1
        yield "sequence", "all_reduce", times * WIDE * runs * moe.num_experts


def _gradients(at: _Rank) -> Iterator[Entry]:
    """Sums of gradients over the ranks that see other tokens, inside a copy of the model and between copies."""
    for group, kinds in (("expert_data", ("expert",)), ("data", ("divided", "whole", "partial", "untrained"))):
        own = [p for p in at.parameters if p.kind in kinds]
        if at.sharded and at.sizes[group] > 1:
            yield from _sharded(at, own, group)
        else:
            size = WIDE * sum(p.elements for p in own if p.kind != "untrained")
            yield group, "all_reduce", size
            yield "replica", "all_reduce", size


def _sharded(at: _Rank, own: list[Parameter], group: str) -> Iterator[Entry]:
    """FSDP. Parameters are gathered once a step, or with "full" for each pass of what holds them: a block's for each
    micro-batch, forward and backward, those around the blocks (embedding, norm, head) for each stage of the rank too.
    Gradients are scattered once a step, but with "gradient" and "full" for each micro-batch; in a pipeline once."""
    job, ranks = at.job, at.sizes[group]
    staged, kind = job.layout.pp > 1, job.layout.dp_shard
    scatters = 1 if staged or kind == "optimizer" else at.num_micro
    for p in own:
        size = WIDE * _filled_up(p, ranks)
        inside = p.name.startswith(("blocks.", "mtp."))
        passes = 2 * at.num_micro * (1 if inside else len(at.stages)) if kind == "full" else 1
        yield group, "all_gather", passes * _gathered(at, p, ranks)
        if job.precision.gather == "fp8" and at.agrees(p) and not at.smooth(p):
            for sharing in (group,) if p.kind == "expert" else (group, "tensor"):
                yield sharing, "all_reduce", passes * WIDE * _logical_tensors(p)
        if p.kind != "untrained":
            yield group, "reduce_scatter", scatters * size
            yield "replica", "all_reduce", size / ranks


def _gathered(at: _Rank, p: Parameter, ranks: int) -> int:
    """Bytes of a parameter in one gather: see `bessemer.parallel.gathering`."""
    elements, gather = _filled_up(p, ranks), at.job.precision.gather
    if gather == "fp32":
        return WIDE * elements
    share = elements // ranks
    if len(p.shape) == 1 or p.name.startswith(("embed.", "pos_embed.")) or ".router." in p.name:
        share *= WIDE
    elif gather == "bf16" or not at.quantised(p) or at.smooth(p):
        share *= 2
    elif RECIPES[at.job.precision.recipe].scale_block:
        share = share // p.shape[-1] * coded_row_bytes(p.shape[-1], _wire_block(at.job))
    return ranks * int(packed_bytes(share))


def _wire_block(job: Job) -> int:
    block = RECIPES[job.precision.recipe].scale_block
    return block if block > 0 else 128


def _logical_tensors(p: Parameter) -> int:
    """That a weight packs; each expert of a stack is one."""
    if p.kind == "expert":
        return p.shape[0]
    return {"qkv": 3, "gate_up": 2}.get(p.name.split(".")[-2], 1)


def _filled_up(p: Parameter, ranks: int) -> int:
    """Elements of a parameter whose rows are filled up so that all ranks get as many. Stacks of experts that don't come
    out even are cut inside of the experts where that does."""
    if p.kind == "expert" and p.shape[0] % ranks and p.shape[1] % ranks == 0:
        return p.elements
    return -(-p.shape[0] // ranks) * ranks * p.row_elements


def _partial_gradients(at: _Rank) -> Iterator[Entry]:
    """Sums of gradients of what several ranks of a replica hold (`parallel/copies.py`)."""
    layout, sharing = at.job.layout, at.sizes["data"] if at.sharded else 1
    whole = ("whole", "partial") if layout.sequence_parallel else ("partial",)
    own = sum(p.elements for p in at.parameters if p.kind in whole)
    yield "tensor", "all_reduce", WIDE * own / sharing
    shared = sum(p.shared_rows * p.row_elements for p in at.parameters)
    yield "tensor" if at.sizes["heads"] == layout.tp else "heads", "all_reduce", WIDE * shared / sharing
    rows = math.ceil(at.spec.vocab_size / layout.tp)
    known = min(max(at.spec.vocab_size - at.place[1] * rows, 0), rows)
    yield "ends", "all_reduce", WIDE * known * at.spec.hidden_size / sharing


def _amaxes(at: _Rank) -> Iterator[Entry]:
    """Of a projection's input and weights in the forward pass, of its gradients in the backward pass."""
    for p in at.parameters:
        if at.agrees(p) and p.kind != "expert":
            yield "sequence", "all_reduce", at.num_micro * WIDE * (1 + 2 * _logical_tensors(p))


def _commit(at: _Rank) -> Iterator[Entry]:
    """The squared norm, and the largest of the replicas'; loss, weight, whether to stop and the experts' loads; seconds
    of five phases twice."""
    spec = at.spec
    moe_layers = HeldLayers.of(spec, [*range(spec.num_layers), *[spec.num_layers - 1] * spec.mtp_layers]).moe
    loads = moe_layers * (spec.moe.num_experts if spec.moe is not None else 0)
    yield "block", "all_reduce", COUNT
    yield "replica", "all_reduce", COUNT
    yield "world", "all_reduce", COUNT * (3 + loads) + 2 * 5 * COUNT
    if at.job.precision.recipe == "fp8-delayed":
        whole = rank_parameters(spec, Layout(), range(spec.num_layers))
        yield "world", "all_reduce", 3 * WIDE * sum(_logical_tensors(p) for p in whole if at.quantised(p))
