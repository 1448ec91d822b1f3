"""The pipeline executor against one process, in fp32, for every schedule; what it holds, and when.

The tolerance is the layout promise: loss within 5e-6; every gradient within 1e-5 of the larger of its own largest
element and 1e-4 of the global norm over the square root of its size.
"""

from __future__ import annotations

import datetime
import functools
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES, schedule_actions
from bessemer.ops.deferred import WeightWork, putting_off
from bessemer.parallel.pipeline import Pipeline, _Run

BATCH, SEQ, WIDTH, VOCABULARY = 2, 6, 16, 24
SEED = 11
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    schedule: str
    pp: int
    num_micro: int
    virtual: int = 1
    evaluate: int = 0  # micro-batches of an evaluation before the step, the last of them shorter
    strided: bool = False  # two pipelines, on the even and on the odd ranks

    @property
    def num_stages(self) -> int:
        return self.pp * (SCHEDULES[self.schedule].chunks or self.virtual)


CASES = [
    *(Case("gpipe", pp, m) for pp in (2, 4) for m in (1, 3, pp + 2)),
    *(Case("1f1b", pp, m, evaluate=3) for pp in (2, 4) for m in (1, 3, pp + 2)),
    *(Case("1f1b", pp, m, 2, evaluate=1) for pp in (2, 4) for m in (pp, 2 * pp)),
    *(Case(s, pp, m, evaluate=m) for s in ("zb-h1", "zb-h2", "zb-v") for pp in (2, 4) for m in (1, 3, pp + 3)),
    *(Case("dualpipev", pp, m, evaluate=3) for pp in (2, 4) for m in (2 * pp, 2 * pp + 1)),
    Case("1f1b", 2, 5, strided=True),
    Case("zb-v", 2, 5, strided=True),
]


class Stage(nn.Module):
    """A norm, linear layers with and without bias, experts; an embedding before the first, the loss after the last."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(SEED + index)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=draw) * WIDTH**-0.5)

        self.embed = made(VOCABULARY, WIDTH) if index == 0 else None
        self.norm, self.up, self.bias = made(WIDTH), made(2 * WIDTH, WIDTH), made(2 * WIDTH)
        self.experts, self.down = made(2, 2 * WIDTH, 2 * WIDTH), made(WIDTH, 2 * WIDTH)
        self.head = made(VOCABULARY, WIDTH) if index == num_stages - 1 else None

    def forward(
        self, tokens_BS: Tensor, x_BSD: Tensor | None, watch: list[weakref.ref[torch.UntypedStorage]]
    ) -> Tensor:
        if x_BSD is None:
            x_BSD = F.embedding(tokens_BS, self.embed)
        normed = ops.add_norm(x_BSD, None, 1 + self.norm, None, 1e-5, "rmsnorm", torch.float32)[1]
        hidden_TF = ops.linear(normed, self.up, self.bias, torch.float32).sin().flatten(0, 1)
        rows = hidden_TF.shape[0]
        hidden_TF = ops.grouped_linear(hidden_TF, self.experts, torch.tensor([rows // 3, rows - rows // 3]))
        hidden_TF = hidden_TF.cos()
        watch.append(weakref.ref(hidden_TF.untyped_storage()))  # `linear` keeps it for the gradient of its weight
        out_BSD = x_BSD + ops.linear(hidden_TF, self.down, None, torch.float32).view_as(x_BSD)
        if self.head is None:
            return out_BSD
        ones = torch.ones(tokens_BS.numel())
        return ops.linear_cross_entropy(out_BSD.flatten(0, 1), self.head, tokens_BS.flatten().flip(0), ones)


class Runner:
    """Stages of a rank, and notes of what the pipeline did with them."""

    def __init__(self, num_stages: int, stages: tuple[int, ...], short: int | None = None) -> None:
        self.stages = nn.ModuleDict({str(s): Stage(s, num_stages) for s in stages})
        self.short = short  # the micro-batch of one sequence
        self.losses: dict[int, float] = {}
        self.done: list[int] = []
        self.at_done: dict[str, np.ndarray] = {}
        self.held: list[int] = []
        self._watch: list[weakref.ref[torch.UntypedStorage]] = []

    def tokens(self, micro: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 + micro)
        return torch.randint(VOCABULARY, (1 if micro == self.short else BATCH, SEQ), generator=draw)

    def shape(self, micro: int) -> tuple[int, ...]:
        return (*self.tokens(micro).shape, WIDTH)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        assert (x is None) == (stage == 0)
        assert x is None or (x.is_leaf and x.requires_grad == torch.is_grad_enabled())
        out: Tensor = self.stages[str(stage)](self.tokens(micro), x, self._watch)
        if out.dim() == 0:
            self.losses[micro] = float(out.detach())
        self.held.append(self.alive())
        return out

    def on_stage_done(self, stage: int) -> None:
        self.done.append(stage)
        self.at_done |= {n: g for n, g in self.grads().items() if n.startswith(f"{stage}.")}

    def alive(self) -> int:
        return sum(ref() is not None for ref in self._watch)

    def grads(self) -> dict[str, np.ndarray]:
        found = {n: p.grad for n, p in self.stages.named_parameters() if p.grad is not None}
        return {n: g.clone().numpy() for n, g in found.items()}


def work(rank: int, world: int, cases: list[Case], sabotage: str = "") -> list[dict[str, Any]]:
    """What each case did on this rank."""
    _sabotage(sabotage)
    halves = [dist.new_group([first, first + 2]) for first in (0, 1)] if world == 4 else []
    return [_one(case, rank, dist.group.WORLD if not case.strided else halves[rank % 2]) for case in cases]


def _one(case: Case, rank: int, group: Any) -> dict[str, Any]:
    place = rank // 2 if case.strided else rank
    pipeline = Pipeline(case.schedule, case.pp, place, case.virtual, group, CPU)
    found: dict[str, Any] = {}
    if case.evaluate:
        runner = Runner(case.num_stages, pipeline.stages, short=case.evaluate - 1)
        pipeline.forward_only(runner, case.evaluate, runner.shape, torch.float32)
        assert not runner.grads() and not runner.done
        assert runner.alive() == 0
        found["evaluated"] = runner.losses
    runner = Runner(case.num_stages, pipeline.stages)
    pipeline.run(runner, case.num_micro, (BATCH, SEQ, WIDTH), torch.float32)
    found |= {"losses": runner.losses, "grads": runner.grads(), "done": runner.done, "at_done": runner.at_done}
    found |= {"held": runner.held, "left": runner.alive()}
    found["seconds"] = pipeline.phases.take()
    return found


def _sabotage(what: str) -> None:
    """Leave something out or do it twice, as a mistake in the code would."""
    transfer, run = _Run._transfer, WeightWork.run
    if what == "a gradient is not sent":

        def empty(self: _Run, do: str, moved: Any) -> None:
            if do == "send" and moved.way == "B" and moved.micro == 1:
                self._streams[moved[:3]].zero_()
            transfer(self, do, moved)

        _Run._transfer = empty  # type: ignore[method-assign]
    elif what == "weights twice":

        def twice(self: WeightWork) -> None:
            items = list(self._items)
            run(self)
            run(WeightWork(items))

        WeightWork.run = twice  # type: ignore[method-assign]
    elif what == "weights never":
        WeightWork.run = lambda self: None  # type: ignore[method-assign]


@functools.cache
def one_process(num_stages: int, num_micro: int, short: int | None = None) -> tuple[dict[int, float], dict[str, Any]]:
    runner = Runner(num_stages, tuple(range(num_stages)), short)
    for micro in range(num_micro):
        x = None
        for stage in range(num_stages):
            x = runner.stages[str(stage)](runner.tokens(micro), x, [])
        x.backward()
        runner.losses[micro] = float(x.detach())
    return runner.losses, runner.grads()


@functools.cache
def results(world: int) -> dict[Case, list[dict[str, Any]]]:
    cases = [c for c in CASES if (4 if c.strided else c.pp) == world]
    ranks = run_ranks(world, work, cases)
    return {case: [found[i] for found in ranks] for i, case in enumerate(cases)}


def of_case(case: Case) -> list[dict[str, Any]]:
    """What the ranks of one pipeline found; two pipelines must find the same."""
    ranks = results(4 if case.strided else case.pp)[case]
    if case.strided:
        assert all(np.array_equal(ranks[0]["grads"][n], g) for n, g in ranks[1]["grads"].items())
        return ranks[::2]
    return ranks


def excess(case: Case, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """The largest deviations from one process in multiples of what the layout promise allows."""
    losses, expected = one_process(case.num_stages, case.num_micro)
    found = {n: g for r in ranks for n, g in r["grads"].items()}
    assert found.keys() == expected.keys()
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    tokens = BATCH * SEQ
    (mine,) = [r["losses"] for r in ranks if r["losses"]]
    assert mine.keys() == losses.keys()
    return {
        "loss": max(abs(mine[m] - losses[m]) / tokens for m in losses) / 5e-6,
        "gradient": max(
            np.abs(found[n] - g).max() / (1e-5 * max(np.abs(g).max(), 1e-4 * norm / np.sqrt(g.size)))
            for n, g in expected.items()
        ),
    }


ids = functools.partial(pytest.mark.parametrize, "case", ids=lambda c: "-".join(str(v) for v in vars(c).values()))


@ids(CASES)
def test_any_schedule_equals_one_process(case: Case) -> None:
    found = excess(case, of_case(case))
    assert found["loss"] <= 1, found
    assert found["gradient"] <= 1, found


@ids([c for c in CASES if c.evaluate])
def test_evaluation_gives_the_losses_of_one_process(case: Case) -> None:
    (found,) = [r["evaluated"] for r in of_case(case) if r["evaluated"]]
    expected, _ = one_process(case.num_stages, case.evaluate, case.evaluate - 1)
    assert found == pytest.approx(expected, abs=5e-6 * SEQ)


@ids(CASES)
def test_a_rank_holds_what_its_schedule_says(case: Case) -> None:
    """Operands of the weights' gradients live from F to B or W, no longer."""
    lists = schedule_actions(case.schedule, case.pp, case.num_micro, case.virtual)
    for found, actions in zip(of_case(case), lists, strict=True):
        held, expected = 0, []
        for action in actions:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            if action.kind == "F":
                expected.append(held)
        assert found["held"] == expected
        assert found["left"] == 0


@ids(CASES)
def test_each_stage_is_reported_when_its_gradients_are_complete(case: Case) -> None:
    lists = schedule_actions(case.schedule, case.pp, case.num_micro, case.virtual)
    for found, actions in zip(of_case(case), lists, strict=True):
        last = {a.stage: i for i, a in enumerate(actions) if a.kind in ("B", "I", "W")}
        assert found["done"] == sorted(last, key=lambda stage: last[stage])
        assert found["at_done"].keys() == found["grads"].keys()
        assert all(np.array_equal(found["at_done"][n], g) for n, g in found["grads"].items())
        assert set(found["seconds"]) == {"backward_s", "comm_s"}


@pytest.mark.parametrize("sabotage", ["a gradient is not sent", "weights twice", "weights never"])
def test_a_mistake_is_noticed(sabotage: str) -> None:
    case = Case("zb-v", 2, 5)
    ranks = [found[0] for found in run_ranks(2, work, [case], sabotage)]
    try:
        found = excess(case, ranks)
    except AssertionError:
        assert sabotage == "weights never"  # some parameters have no gradient at all
        return
    assert found["gradient"] > 100, found


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "dualpipe"])
def test_one_rank_needs_no_group(name: str) -> None:
    case = Case(name, 1, 3)
    found = _one(case, 0, None)
    assert excess(case, [found])["gradient"] <= 1


def test_two_copies_of_the_weights_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Pipeline("dualpipe", 4, 0, 1, None, CPU)
    assert error.value.problems[0].code == "not-runnable"


class Failing(Runner):
    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        if stage == 1 and micro == 1:
            raise ZeroDivisionError(f"micro-batch {micro}")
        return super().forward(stage, micro, x)


def fail(rank: int, world: int) -> tuple[str, float, bool]:
    """(the error of this rank, seconds until it came, whether gradients are still put off)."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    pipeline = Pipeline("zb-h1", world, rank, 1, group, CPU)
    start = time.monotonic()
    try:
        pipeline.run(Failing(world, pipeline.stages), 4, (BATCH, SEQ, WIDTH), torch.float32)
    except (ZeroDivisionError, RuntimeError) as error:
        return type(error).__name__, time.monotonic() - start, putting_off()
    return "none", 0.0, False


def test_an_error_ends_its_rank_at_once_and_others_with_the_groups_timeout() -> None:
    other, own = run_ranks(2, fail)
    assert own[0] == "ZeroDivisionError" and own[1] < 1
    assert other[0] != "none" and 0.9 <= other[1] < 10
    assert not own[2] and not other[2]
