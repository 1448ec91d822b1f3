"""Tensor and sequence parallelism against one process, in fp32: a small stack that uses all of `TensorSplit`.

The tolerance is the layout promise: loss within 5e-6; every gradient within 1e-5 of the larger of its own largest
element and 1e-4 of the global norm over the square root of its size. Deviations are given in units of it.

Legend: B batch, S sequence, D model, F feed-forward, V vocabulary, G ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bessemer.comm import collectives as comm
from bessemer.models.split import TensorSplit
from bessemer.ops.deferred import put_off_weight_gradients
from bessemer.parallel.tensor import TensorParallel

BATCH, SEQ, WIDTH, HIDDEN, VOCABULARY = 2, 16, 24, 40, 93
ROWS = {"embed", "up", "up_bias", "inner", "head"}  # divided along dim 0; `COLUMNS` along dim 1
COLUMNS = {"down", "outer"}
FP32 = torch.float32
KINDS = {"all_reduce": "all_reduce", "gather": "all_gather_single", "scatter": "reduce_scatter_single"}


@dataclass(frozen=True)
class Case:
    divided: bool  # sequence parallelism
    chunks: int
    batch: int = BATCH
    how: str = "plain"  # or "recomputed" activations, or weight gradients "put off"
    dtype: torch.dtype = torch.float32


CASES = [
    Case(divided, **fields)
    for divided in (False, True)
    for fields in (
        {"chunks": 1, "batch": 1},
        {"chunks": 1},
        {"chunks": 4, "batch": 1},
        {"chunks": 4},
        {"chunks": 3},  # which divides no share
        {"chunks": 2, "how": "recomputed"},
        {"chunks": 2, "how": "put off"},
    )
]


def stack(case: Case, split: TensorSplit, p: dict[str, Tensor], data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, stream before the head)."""

    def feed_forward(x_BSD: Tensor) -> Tensor:
        up = split.columns(x_BSD, p["up"], p["up_bias"], case.dtype)
        return split.rows(F.gelu(up), p["down"], p["down_bias"], case.dtype)

    at_S = split.stream_part(torch.arange(SEQ), 0)
    x_BSD = split.embed(data["tokens"], p["embed"]) + F.embedding(at_S, p["positions"])
    normed_BSD = x_BSD * p["gain"]
    if case.how == "recomputed":
        x_BSD = x_BSD + checkpoint(feed_forward, normed_BSD, use_reentrant=False)
    else:
        x_BSD = x_BSD + feed_forward(normed_BSD)
    x_BSD = x_BSD + split.leave(torch.tanh(split.enter(x_BSD) @ p["inner"].t()) @ p["outer"].t())
    x_BSD = x_BSD + split.give_tokens(torch.tanh(split.take_tokens(x_BSD) @ p["tokenwise"]))
    return split.loss(x_BSD.to(case.dtype), p["head"], data["labels"], data["weights"]), x_BSD


def parameters() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(5)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "positions": (SEQ, WIDTH),
        "gain": (WIDTH,),
        "up": (HIDDEN, WIDTH),
        "up_bias": (HIDDEN,),
        "down": (WIDTH, HIDDEN),
        "down_bias": (WIDTH,),
        "inner": (HIDDEN, WIDTH),
        "outer": (WIDTH, HIDDEN),
        "tokenwise": (WIDTH, WIDTH),
        "head": (VOCABULARY, WIDTH),
    }
    return {name: torch.randn(shape, generator=made) * 0.3 for name, shape in shapes.items()}


def batch_of(size: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(size)
    shape = (size, SEQ)
    weights = torch.rand(shape, generator=made)
    labels = torch.randint(0, VOCABULARY, shape, generator=made)
    weights[:, ::5], labels[:, ::5] = 0, -100
    return {"tokens": torch.randint(0, VOCABULARY, shape, generator=made), "labels": labels, "weights": weights}


def part_of(name: str, whole: Tensor, rank: int, degree: int, fill: float) -> Tensor:
    """What a rank holds of a parameter; rows past the end of the vocabulary are `fill`."""
    if name in COLUMNS:
        return whole.chunk(degree, 1)[rank]
    if name not in ROWS:
        return whole
    rows = -(-len(whole) // degree)
    part = torch.full((rows, *whole.shape[1:]), fill)
    mine = whole[rank * rows : (rank + 1) * rows]
    part[: len(mine)] = mine
    return part


def split_of(case: Case, rank: int, world: int) -> TensorParallel:
    assert dist.group.WORLD is not None
    return TensorParallel(
        dist.group.WORLD, world, rank, sequence_parallel=case.divided, vocab_size=VOCABULARY, chunks=case.chunks
    )


def differentiate(case: Case, split: TensorSplit, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, stream); the gradients are those of the loss for a unit of weight."""
    data = batch_of(case.batch)
    for tensor in p.values():
        tensor.requires_grad_()
    with put_off_weight_gradients() if case.how == "put off" else contextlib.nullcontext() as queue:
        loss, stream_BSD = stack(case, split, p, data)
        loss = loss / data["weights"].sum()
        loss.backward()
    if queue is not None:
        assert p["up"].grad is None and p["down"].grad is None
        queue.take().run()
    return loss.detach(), stream_BSD.detach()


@functools.cache
def reference(batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, stream, gradients) of one process."""
    want = parameters()
    loss, stream_BSD = differentiate(Case(False, 1, batch, dtype=dtype), TensorSplit(), want)
    return loss, stream_BSD, gradients(want)


def gradients(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.grad for name, tensor in p.items() if tensor.grad is not None}


def deviations(case: Case, rank: int, world: int, log: Collectives | None = None) -> dict[str, float]:
    """Of the loss, the stream and every gradient, in units of the tolerance; and the loss itself, as `value`."""
    want_loss, want_stream, want = reference(case.batch, case.dtype)
    p = {n: part_of(n, t, rank, world, torch.nan).clone() for n, t in parameters().items()}
    split = split_of(case, rank, world)
    with contextlib.nullcontext() if log is None else log.watched():
        loss, stream = differentiate(case, split, p)
    found = {"loss": abs(float(loss - want_loss)) / 5e-6, "value": float(loss)}
    found["stream"] = float((stream - split.stream_part(want_stream)).abs().max() / (1e-5 * want_stream.abs().max()))
    norm = float(torch.stack([t.norm() for t in want.values()]).norm())
    partial = {"tokenwise"} | ({"positions", "gain", "down_bias"} if case.divided else set())
    got = gradients(p)
    assert got.keys() == want.keys()
    for name, whole in want.items():
        if name in partial:  # of this rank's tokens: the caller's to sum
            dist.all_reduce(got[name])
        limit = 1e-5 * max(float(whole.abs().max()), 1e-4 * norm / whole.numel() ** 0.5)
        found[name] = float((got[name] - part_of(name, whole, rank, world, 0.0)).abs().max()) / limit
    return found


class Tampered:
    """A collective whose result comes out wrong: only this rank's own, or at half its size."""

    def __init__(self, work: dist.Work | None, result: Tensor, wrong: Tensor | None) -> None:
        self.work, self.result, self.wrong = work, result, wrong

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.result.copy_(self.result / 2 if self.wrong is None else self.wrong)


@dataclass
class Collectives:
    """Counts the collectives inside a block, and can spoil the n-th: `drop` it or `halve` its result."""

    spoil: tuple[str, int] | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)  # kind, bytes
    events: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for kind, name in KINDS.items():
                patch.setattr(comm, name, self._instead(kind, getattr(comm, name)))
            yield

    def _instead(self, kind: str, real: Any) -> Any:
        def collective(into: Tensor, *given: Tensor, group: Any, async_op: bool) -> Any:
            spoilt = self.spoil is not None and self.spoil[1] == len(self.calls)
            larger = max([into, *given], key=lambda t: t.numel())
            self.calls.append((kind, larger.numel() * larger.element_size()))
            self.events.append(kind)
            wrong = None
            if spoilt and self.spoil is not None and self.spoil[0] == "drop":
                source = given[0] if given else into
                each = max(1, into.numel() // source.numel())
                begin = dist.get_rank() * into.numel() if source.numel() > into.numel() else 0
                wrong = source.flatten()[begin:][: into.numel()].repeat(each).view(into.shape)
            work = real(into, *given, group=group, async_op=async_op)
            return Tampered(work, into, wrong) if spoilt else Watched(work, self.events)

        return collective


@dataclass
class Watched:
    work: dist.Work
    events: list[str]

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def parity(rank: int, world: int) -> tuple[dict[Case, dict[str, float]], list[str]]:
    return {case: deviations(case, rank, world) for case in CASES}, refused(rank, world)


def spoilt(rank: int, world: int) -> list[tuple[Any, ...]]:
    """(case, how, which collective, its kind, the largest deviation) of every collective of a pass, spoilt."""
    found: list[tuple[Any, ...]] = []
    for case in (Case(False, 2), Case(True, 2)):
        plain = Collectives()
        deviations(case, rank, world, plain)
        for how, (index, (kind, _)) in itertools.product(("drop", "halve"), enumerate(plain.calls)):
            seen = deviations(case, rank, world, Collectives((how, index)))
            worst = max(math.inf if math.isnan(v) else v for n, v in seen.items() if n != "value")
            found.append((case, how, index, kind, worst))
    return found


def refused(rank: int, world: int) -> list[str]:
    """What a token and a label outside of the vocabulary raise; 93 to 95 are rows of padding with four ranks."""
    said, case = [], Case(True, 1)
    p = {n: part_of(n, t, rank, world, 0.0) for n, t in parameters().items()}
    for name, value in (("tokens", VOCABULARY), ("tokens", -1), ("labels", VOCABULARY), ("labels", -1)):
        data = batch_of(1)
        data[name][0, 1] = value
        try:
            stack(case, split_of(case, rank, world), p, data)
        except IndexError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process(world):
    ranks = run_ranks(world, parity)
    for case in CASES:
        for found, _ in ranks:
            worst = {n: v for n, v in found[case].items() if n != "value" and not v <= 1}
            assert not worst, (case, worst)
        assert len({found[case]["value"] for found, _ in ranks}) == 1, case
    outside = [f"label {v} outside of the vocabulary [0, {VOCABULARY})" for v in (VOCABULARY, -1)]
    assert all(said == ["index out of range in self"] * 2 + outside for _, said in ranks)


def bfloat16(rank: int, world: int) -> list[dict[str, float]]:
    return [deviations(Case(d, c, dtype=torch.bfloat16), rank, world) for d in (False, True) for c in (1, 2)]


def test_in_bfloat16_partial_results_are_summed_in_it():
    """Against one process in bfloat16: a rounding of each partial result, 2^-9, is 400 units."""
    for found in run_ranks(2, bfloat16):
        for units in found:
            assert 50 < max(v for n, v in units.items() if n != "value") < 1500, units


def test_every_collective_counts():
    """Whichever is dropped or comes out at half its size, some rank is far from the one process."""
    for entries in zip(*run_ranks(2, spoilt), strict=True):
        assert max(entry[-1] for entry in entries) > 50, entries


class Products(TorchDispatchMode):
    """Notes the products: `dW` where the result has the shape of a weight, else `product`."""

    def __init__(self, weights: tuple[torch.Size, ...], events: list[str]) -> None:
        super().__init__()
        self.weights, self.events = weights, events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "_linear_pointwise"):
            self.events.append("dW" if out.shape in self.weights else "product")
        return out


def totals(calls: list[tuple[str, int]]) -> dict[str, int]:
    return {kind: sum(size for k, size in calls if k == kind) for kind in sorted({k for k, _ in calls})}


def order_and_bytes(rank: int, world: int) -> dict[tuple[str, bool, int], tuple[Any, ...]]:
    """Of each part: events and bytes of the forward pass, then those of the backward pass."""
    found = {}
    data = batch_of(BATCH)
    whole_BSD, wide_BSF = torch.ones(BATCH, SEQ, WIDTH), torch.ones(BATCH, SEQ, HIDDEN)
    up, down = torch.ones(HIDDEN, WIDTH).requires_grad_(), torch.ones(WIDTH, HIDDEN).requires_grad_()
    table = torch.ones(-(-VOCABULARY // world), WIDTH).requires_grad_()
    for divided, chunks in ((False, 1), (False, 2), (True, 1), (True, 2)):
        split = split_of(Case(divided, chunks), rank, world)
        stream = split.stream_part(whole_BSD)
        parts: dict[str, tuple[Any, Tensor, tuple[Any, ...]]] = {
            "enter": (split.enter, stream, ()),
            "leave": (split.leave, whole_BSD, ()),
            "columns": (split.columns, stream, (up, None, FP32)),
            "rows": (split.rows, wide_BSF, (down, None, FP32)),
            "embed": (split.embed, data["tokens"], (table,)),
            "loss": (split.loss, stream, (table, data["labels"], data["weights"])),
            "take": (split.take_tokens, stream, ()),
            "give": (split.give_tokens, torch.ones(BATCH, SEQ // world, WIDTH), ()),
        }
        for name, (run, given, others) in parts.items():
            log = Collectives()
            with log.watched(), Products((up.shape, down.shape), log.events):
                y = run(given if name == "embed" else given.clone().requires_grad_(), *others)
                forward = log.events.copy(), totals(log.calls)
                log.events.clear()
                log.calls.clear()
                y.backward(torch.ones_like(y))
            found[name, divided, chunks] = (*forward, log.events, totals(log.calls))
    return found


def test_transfers_run_under_products_and_carry_what_they_should():
    world = 2
    for found in run_ranks(world, order_and_bytes):
        for (name, divided, chunks), (forward, forward_bytes, backward, backward_bytes) in found.items():
            assert (forward_bytes, backward_bytes) == closed_form(name, divided, world), (name, divided, chunks)
            if (name, divided, chunks) in ORDER:
                got = " ".join(forward), " ".join(backward)
                assert got == ORDER[name, divided, chunks], (name, divided, chunks)


ORDER = {
    ("columns", False, 1): ("product", "product all_reduce dW wait"),
    ("columns", False, 2): ("product", "product all_reduce product all_reduce dW wait wait"),
    ("columns", True, 1): ("gather wait product", "product scatter dW wait"),
    ("columns", True, 2): (
        "gather gather wait product wait product",
        "product scatter dW product scatter dW wait wait",
    ),
    ("rows", False, 1): ("product all_reduce wait", "product dW"),
    ("rows", False, 2): ("product all_reduce product all_reduce wait wait", "product dW product dW"),
    ("rows", True, 1): ("product scatter wait", "gather wait product dW"),
    ("rows", True, 2): (
        "product scatter product scatter wait wait",
        "gather gather wait product dW wait product dW",
    ),
}
"""Of a projection, forward and backward. In `columns`, `product` of the backward pass is the one for dx."""


def closed_form(name: str, divided: bool, world: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the larger side of the collectives, forward and backward, for any number of chunks."""
    stream = 4 * BATCH * SEQ * WIDTH
    statistics = 3 * 4 * BATCH * SEQ * world
    if name in ("take", "give") and divided:
        return {}, {}
    if divided:
        inwards, outwards = {"scatter": stream}, {"gather": stream}
        table = {
            "enter": (outwards, inwards),
            "leave": (inwards, outwards),
            "loss": ({"gather": stream + statistics}, inwards),
        }
    else:
        table = {
            "enter": ({}, {"all_reduce": stream}),
            "leave": ({"all_reduce": stream}, {}),
            "loss": ({"gather": statistics}, {"all_reduce": stream}),
            "take": ({}, {"gather": stream}),
            "give": ({"gather": stream}, {}),
        }
    return table[{"columns": "enter", "rows": "leave", "embed": "leave"}.get(name, name)]
