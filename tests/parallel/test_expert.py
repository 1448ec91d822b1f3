"""Expert parallelism against one process, in fp32: outputs, inputs' gradients and every expert weight's gradient.

The bar is the layout promise: within 1e-5 of the larger of a tensor's own largest element and 1e-4 of the global norm
over the square root of its size. Mistakes put in on purpose show that the bar can be missed.

Legend: T tokens of a rank, R rows that its experts get, D model, X experts, L experts of a rank, W ranks of a width,
G ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parallel.expert_layer import CASES, D, Layer, X, chosen_of, inputs, noise
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bessemer.comm import collectives as comm
from bessemer.models.split import ExpertSplit
from bessemer.parallel import expert
from bessemer.parallel.expert import ExpertParallel

LAYOUTS = {2: ((2, 1), (1, 2)), 4: ((4, 1), (2, 2), (1, 4))}  # by ranks: (degree, width degree)
MUTATIONS = ("width sum", "order by expert", "way home of gradients", "gradient copies")

Found = dict[str, np.ndarray]


def run(layer: Layer, ranks: list[int], case: str, *, recompute: bool = False) -> Found:
    """Output and gradients of two passes through the layer, one behind the other."""
    x_TD, chosen_TK, slope_TD = inputs(ranks, case)
    y_TD = x_TD
    for _ in range(2):
        y_TD = checkpoint(layer, y_TD, chosen_TK, use_reentrant=False) if recompute else layer(y_TD, chosen_TK)
    (y_TD * slope_TD).sum().backward()
    found = {"out": y_TD.detach(), "dx": x_TD.grad}
    found |= {name: layer.get_parameter(f"experts.{name}.weight").grad for name in ("gate", "up", "down")}
    assert all(value is not None for value in found.values())
    layer.zero_grad()
    return {name: value.numpy() for name, value in found.items() if value is not None}


def _one_copy(rows: Tensor, sizes_G: list[int], width: int) -> Tensor:
    return torch.cat(torch.split(rows, sizes_G)[::width])


def _as_it_came(received_GL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows), torch.arange(rows)


def _stay(ctx: Any, grad_RD: Tensor) -> Any:
    return grad_RD.new_zeros(()), None, None, None


def _nothing_came(ctx: Any, _grad: Tensor) -> Any:
    return torch.zeros(sum(ctx.exchange.sent), D), None


def _to_one_rank(ctx: Any, grad_TD: Tensor) -> Any:
    (order_R,) = ctx.saved_tensors
    ctx.exchange.start_out(grad_TD)
    only = float(dist.get_rank() % ctx.exchange.width == 0)
    return ctx.exchange.finish_out().index_select(0, order_R) * only, None, None, None


@contextlib.contextmanager
def mutated(what: str) -> Iterator[None]:
    """Leave out one part of the work, as a mistake in the code would."""
    patch, parts = mock.patch.object, contextlib.ExitStack()
    with parts:
        if what == "width sum":
            parts.enter_context(patch(expert, "_sum_copies", _one_copy))
        elif what == "order by expert":
            parts.enter_context(patch(expert, "_order_by_expert", _as_it_came))
        elif what == "way home of gradients":
            parts.enter_context(patch(expert._Arrive, "backward", staticmethod(_stay)))
            parts.enter_context(patch(expert._Depart, "backward", staticmethod(_nothing_came)))
        elif what == "gradient copies":
            parts.enter_context(patch(expert._Combine, "backward", staticmethod(_to_one_rank)))
        yield


class Recorder:
    """Stands before `all_to_all_single`: when each exchange starts and is waited for, and the bytes it sends."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.sent_bytes: list[int] = []
        self._exchange = comm.all_to_all_single

    def __call__(self, into: Tensor, rows: Tensor, *sizes: Any, **options: Any) -> Any:
        self.sent_bytes.append(rows.nbytes)
        work = self._exchange(into, rows, *sizes, **options)
        if not options.get("async_op"):
            self.log.append("counts")
            return work
        self.log.append("start")
        assert work is not None
        return _Waiting(work, self.log)


class _Waiting:
    def __init__(self, work: dist.Work, log: list[str]) -> None:
        self.work, self.log = work, log

    def wait(self) -> None:
        self.log.append("wait")
        self.work.wait()


def split_of(rank: int, layout: tuple[int, int], *, coded: bool = False) -> ExpertParallel:
    degree, width = layout
    at = {"degree": degree, "rank": rank // width, "width_degree": width, "width_rank": rank % width}
    ranks = {"sequence_group": dist.group.WORLD, "token_ranks": degree * width}
    return ExpertParallel(dist.group.WORLD, **at, **ranks, coded=coded)


def events_of(layer: Layer, rank: int) -> dict[str, Any]:
    """The order of events in one pass, forward and backward, and what was sent."""
    x_TD, chosen_TK, _ = inputs([rank], "spread")
    recorder = Recorder(layer.log)
    with mock.patch.object(comm, "all_to_all_single", recorder):
        layer.log.clear()
        out = layer(x_TD, chosen_TK)
        forward = list(layer.log)
        layer.log.clear()
        out.sum().backward()
        backward = list(layer.log)
        layer.log.clear()
        checkpoint(layer, x_TD, chosen_TK, use_reentrant=False).sum().backward()
    layer.zero_grad()
    return {
        "forward": forward,
        "backward": backward,
        "recomputed": list(layer.log),
        "sent": recorder.sent_bytes[:5],
        "rows": chosen_TK.numel(),
    }


def exact(split: ExpertParallel, rank: int, dtype: torch.dtype) -> dict[str, bool]:
    """Whether rows there and back, through experts that multiply by a number, and their gradients are right bitwise."""
    _, chosen_TK, _ = inputs([rank], "spread")
    flat = chosen_TK.flatten().sort().values
    rows_TD = noise(len(flat), D, seed=rank).to(dtype).requires_grad_()
    sent = split.dispatch(rows_TD, torch.bincount(flat, minlength=X))
    rows, counts = sent.arrived()
    first = split.rank * (X // split.degree)
    expert_R = torch.arange(first, first + len(counts)).repeat_interleave(counts)
    factor_R1 = factors(dtype)[expert_R, split.width_rank].unsqueeze(1)
    out = split.combine(rows * factor_R1, sent)
    slope_TD = noise(len(flat), D, seed=rank + 50).to(dtype)
    out.backward(slope_TD)
    factor_WT1 = factors(dtype)[flat, : split.width_degree].t().unsqueeze(-1)
    assert rows_TD.grad is not None
    pairs = {"out": (out, rows_TD), "dx": (rows_TD.grad, slope_TD)}
    # the products in the type of the rows, as each rank of the width makes them, their sum in float32
    return {name: torch.equal(now, _in_turn(x * factor_WT1).to(dtype)) for name, (now, x) in pairs.items()}


def _in_turn(partial_WTD: Tensor) -> Tensor:
    total = partial_WTD[0].float()
    for partial in partial_WTD[1:]:
        total = total + partial.float()
    return total


def factors(dtype: torch.dtype) -> Tensor:
    return noise(X, 4, seed=7).to(dtype)


def without_gradients(layer: Layer, rank: int) -> dict[str, np.ndarray]:
    """The output without a graph, and the weights' gradients where the rows need none."""
    x_TD, chosen_TK, slope_TD = inputs([rank], "spread")
    with torch.no_grad():
        silent = layer(x_TD, chosen_TK)
    assert not silent.requires_grad
    (layer(x_TD.detach(), chosen_TK) * slope_TD).sum().backward()
    gradient = layer.experts.down.weight.grad
    layer.zero_grad()
    assert gradient is not None
    return {"out": silent.numpy(), "down": gradient.numpy()}


def scenario(rank: int, ranks: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Everything that is to be known about each layout of `ranks` ranks, in one start of them."""
    torch.manual_seed(rank)  # nothing may depend on the global generator
    results = {}
    for layout in LAYOUTS[ranks]:
        split = split_of(rank, layout)
        layer = Layer(split, [])
        found: dict[str, Any] = {case: run(layer, [rank], case) for case in CASES}
        found["recompute"] = {case: run(layer, [rank], case, recompute=True) for case in CASES}
        for mutation in MUTATIONS:
            with mutated(mutation):
                found[mutation] = run(layer, [rank], "spread")
        found["events"] = events_of(layer, rank)
        found["no gradients"] = without_gradients(layer, rank)
        found["exact"] = {str(dtype): exact(split, rank, dtype) for dtype in (torch.float32, torch.bfloat16)}
        counts = torch.tensor([rank, 1])
        found["counts"] = (split.sum_counts(counts).tolist(), counts.tolist())
        layer.load_weights(rank % layout[0], rank // layout[0])
        found["rank order"] = run(layer, [rank], "spread")
        results[layout] = found
    return results


@functools.cache
def results(layout: tuple[int, int]) -> list[dict[str, Any]]:
    """What each rank of the layout found."""
    return [found[layout] for found in on_ranks(layout[0] * layout[1])]


@functools.cache
def on_ranks(ranks: int) -> list[dict[tuple[int, int], dict[str, Any]]]:
    return run_ranks(ranks, scenario)


@functools.cache
def one_process(ranks: int, case: str) -> Found:
    return run(Layer(ExpertSplit(), []), list(range(ranks)), case)


def put_together(layout: tuple[int, int], parts: list[Found]) -> Found:
    """The tensors of all ranks as one process has them."""
    degree, width = layout
    whole: Found = {name: np.concatenate([part[name] for part in parts]) for name in ("out", "dx") if name in parts[0]}
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        if name not in parts[0]:
            continue
        rows = [[parts[e * width + w][name] for w in range(width)] for e in range(degree)]
        whole[name] = np.concatenate([np.concatenate(row, dim) for row in rows], 0)
    return whole


def deviation(layout: tuple[int, int], what: str, case: str) -> float:
    """The largest difference over the promise, 1.0 being exactly at it."""
    return excess(one_process(layout[0] * layout[1], case), put_together(layout, [p[what] for p in results(layout)]))


def excess(expected: Found, found: Found) -> float:
    norm = np.sqrt(sum(float((v.astype(np.float64) ** 2).sum()) for k, v in expected.items() if k != "out"))
    worst = 0.0
    for name, value in expected.items():
        assert found[name].shape == value.shape
        if value.any():
            floor = 1e-4 * norm / np.sqrt(value.size)
            worst = max(worst, float(np.abs(found[name] - value).max() / (1e-5 * max(np.abs(value).max(), floor))))
        else:
            assert not found[name].any(), name
    return worst


ALL_LAYOUTS = [layout for several in LAYOUTS.values() for layout in several]
EACH_LAYOUT = pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=str)


@EACH_LAYOUT
@pytest.mark.parametrize("case", CASES)
def test_any_division_of_the_experts_equals_one_process(layout: tuple[int, int], case: str) -> None:
    assert deviation(layout, case, case) <= 1


@pytest.mark.parametrize(
    ("mutation", "layouts"),
    [
        ("width sum", [(1, 2), (2, 2), (1, 4)]),
        ("gradient copies", [(1, 2), (2, 2), (1, 4)]),
        ("order by expert", ALL_LAYOUTS),
        ("way home of gradients", ALL_LAYOUTS),
        ("rank order", [(2, 2)]),
    ],
)
def test_a_missing_part_is_noticed(mutation: str, layouts: list[tuple[int, int]]) -> None:
    """The test above must be able to fail."""
    found = {layout: deviation(layout, mutation, "spread") for layout in layouts}
    assert min(found.values()) > 1e3, found


@EACH_LAYOUT
def test_a_recomputed_pass_gives_the_same_bits(layout: tuple[int, int]) -> None:
    for found in results(layout):
        for case in CASES:
            for name, value in found[case].items():
                assert np.array_equal(value, found["recompute"][case][name]), (case, name)


@EACH_LAYOUT
def test_a_shared_expert_runs_while_rows_and_gradients_travel(layout: tuple[int, int]) -> None:
    forward = ["counts", "start", "shared start", "shared end", "wait", "experts", "start", "wait"]
    backward = ["start", "wait", "experts backward", "start", "shared end backward", "shared start backward", "wait"]
    for found in results(layout):
        assert found["events"]["forward"] == forward
        assert found["events"]["backward"] == backward
        assert found["events"]["recomputed"] == forward + forward + backward


@EACH_LAYOUT
def test_bytes_sent(layout: tuple[int, int]) -> None:
    degree, width = layout
    rows_of = [found["events"]["rows"] for found in results(layout)]
    received = [0] * (degree * width)
    for rank in range(degree * width):
        for x in chosen_of("spread", rank).flatten().tolist():
            for share in range(width):
                received[x // (X // degree) * width + share] += 1
    for found, rows, came in zip(results(layout), rows_of, received, strict=True):
        row_bytes = D * 4
        out, home = width * rows * row_bytes, came * row_bytes
        assert found["events"]["sent"] == [8 * width * X, out, home, out, home]
    assert sum(received) == width * sum(rows_of)


@EACH_LAYOUT
def test_rows_and_sums_are_exact_in_either_type(layout: tuple[int, int]) -> None:
    for found in results(layout):
        assert all(all(parts.values()) for parts in found["exact"].values()), found["exact"]


@EACH_LAYOUT
def test_evaluation_and_rows_that_need_no_gradient(layout: tuple[int, int]) -> None:
    layer = Layer(ExpertSplit(), [])
    x_TD, chosen_TK, slope_TD = inputs(list(range(layout[0] * layout[1])), "spread")
    out = layer(x_TD.detach(), chosen_TK)
    (out * slope_TD).sum().backward()
    found = put_together(layout, [part["no gradients"] for part in results(layout)])
    gradient = layer.experts.down.weight.grad
    assert gradient is not None
    for name, value in (("out", out.detach()), ("down", gradient)):
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * float(value.abs().max()))


@EACH_LAYOUT
def test_counts_are_summed_on_a_copy(layout: tuple[int, int]) -> None:
    ranks = layout[0] * layout[1]
    for rank, found in enumerate(results(layout)):
        assert found["counts"] == ([sum(range(ranks)), ranks], [rank, 1])


def test_a_rank_alone_keeps_its_rows() -> None:
    at = {"degree": 1, "rank": 0, "width_degree": 1, "width_rank": 0}
    split = ExpertParallel(None, **at, sequence_group=None, token_ranks=1)
    rows_TD, counts_X = noise(4, D, seed=1), torch.tensor([1, 3])
    sent = split.dispatch(rows_TD, counts_X)
    assert sent.arrived() == (rows_TD, counts_X)
    assert split.combine(rows_TD, sent) is rows_TD
    assert split.sum_counts(counts_X) is counts_X
