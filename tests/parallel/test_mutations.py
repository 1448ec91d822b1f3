"""Parity must be able to fail: with any one reduction left out, or wrongly scaled, some bar breaks by far."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.parity import Disagreement, Sabotage, breaks, deviations, job_of

from bessemer.comm import collectives as comm
from bessemer.core.job import Job
from bessemer.parallel import context_ring
from bessemer.parallel import copies as parallel_copies
from bessemer.parallel import data as parallel_data
from bessemer.parallel import expert as parallel_expert
from bessemer.parallel.mesh import Mesh
from bessemer.train import step as train_step
from bessemer.train.passes import _Unit

SP = {"sequence_parallel": True}


def no_replica_sum() -> None:
    parallel_data.ReplicaSum.start = lambda self, buffer: None  # type: ignore[method-assign]


def no_weight_sum() -> None:
    Mesh.sum_over_world = lambda self, values: values  # type: ignore[method-assign]


def shard_mean() -> None:
    parallel_data.FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def one_partial_sum() -> None:
    def across(self: parallel_data.Sharded, index: int, scattered: torch.Tensor) -> None:
        if self._last:
            self._sum.start(scattered)

    parallel_data.Sharded._across_replicas = across  # type: ignore[method-assign]


def no_sum_inside() -> None:
    whole = parallel_data.Replicated.__init__

    def alone(self: parallel_data.Replicated, params: object, group: object, *rest: object, **named: object) -> None:
        whole(self, params, None, *rest, **named)  # type: ignore[arg-type]

    parallel_data.Replicated.__init__ = alone  # type: ignore[method-assign]


def _without(name: str) -> None:
    """A mesh whose group of that name is forgotten while partial gradients are summed."""
    whole = parallel_copies.sum_partial_gradients

    class Blind:
        def __init__(self, mesh: Mesh) -> None:
            self._mesh = mesh
            self.sizes = mesh.sizes
            self.heads = None if name == "heads" else mesh.heads
            self.ends = None if name == "ends" else mesh.ends

        def group(self, asked: str) -> dist.ProcessGroup | None:
            return None if asked == name else self._mesh.group(asked)

    train_step.sum_partial_gradients = lambda module, gradients, mesh: whole(module, gradients, Blind(mesh))  # type: ignore[arg-type,assignment]


def _no_tensor_sum() -> None:
    _without("tensor")


def _no_heads_sum() -> None:
    _without("heads")


def _no_ends_sum() -> None:
    _without("ends")


def partial_sums_twice() -> None:
    once = parallel_copies._sum_over

    def twice(blocks: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        once(blocks, group)
        once(blocks, group)

    parallel_copies._sum_over = twice


def copies_counted_each() -> None:
    parallel_copies.Copies.in_replica = 1  # type: ignore[method-assign,assignment]


def no_counts_sum() -> None:
    parallel_expert.ExpertParallel.sum_counts = lambda self, counts: counts  # type: ignore[method-assign]


def every_rank_speaks() -> None:
    Mesh.counts_loss = True  # type: ignore[method-assign,assignment]


def stages_done_too_early() -> None:
    """The reduction of a stage starts before its gradients are complete."""
    forward = _Unit.forward

    def eager(self: _Unit, stage: int, micro: int, x: torch.Tensor | None) -> torch.Tensor:
        out = forward(self, stage, micro, x)
        if micro == len(self._batches) - 1:
            self.on_stage_done(stage)
        return out

    _Unit.forward = eager  # type: ignore[method-assign]


def dropped(module: str, operation: str) -> Sabotage:
    """That operation, wherever `module` of the parallel room calls it, leaves each rank with its own part alone."""
    return functools.partial(_drop, f"bessemer.parallel.{module}", operation)


class _Done(dist.Work):
    """Over already: gloo's own would copy its result once more at each wait."""

    def wait(self, *_: Any) -> bool:
        return True


def _drop(module: str, operation: str) -> None:
    whole = getattr(comm, operation)

    def alone(*given: Any, **named: Any) -> Any:
        out = given[0]
        # a copy: gloo scatters what it has summed in the input itself
        source = (given[1] if len(given) > 1 and isinstance(given[1], torch.Tensor) else out).clone()
        work = whole(*given, **named)
        if sys._getframe(1).f_globals["__name__"] != module or not out.is_floating_point():
            return work
        if work is not None:
            work.wait()
        group = named.get("group") or next(g for g in given if isinstance(g, dist.ProcessGroup))
        at, n = dist.get_group_rank(group, dist.get_rank()), dist.get_world_size(group)
        if operation == "all_reduce":
            out.copy_(source)
        elif operation == "reduce_scatter_single":
            out.copy_(source.chunk(n)[at])
        elif operation == "all_gather_single":
            own = out.chunk(n)[at].clone()
            out.zero_().chunk(n)[at].copy_(own)
        else:
            out.zero_()
        return None if work is None else _Done()

    setattr(comm, operation, alone)


def no_messages() -> None:
    """What neighbours in a ring receive is nothing."""
    arrived = context_ring._Hop.arrived
    context_ring._Hop.arrived = lambda self: arrived(self).zero_()  # type: ignore[method-assign]


def one_part_of_the_width() -> None:
    def first(rows: torch.Tensor, sizes: list[int], width: int) -> torch.Tensor:
        return torch.cat(torch.split(rows, sizes)[::width])

    parallel_expert._sum_copies = first


def whole_z_loss() -> None:
    init = parallel_expert.ExpertParallel.__init__

    def alone(self: parallel_expert.ExpertParallel, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.token_ranks = 1

    parallel_expert.ExpertParallel.__init__ = alone  # type: ignore[method-assign]


MUTATIONS: dict[str, tuple[Job, Sabotage]] = {
    "tp2: no sums": (job_of(tp=2), dropped("tensor", "all_reduce")),
    "tp2: a loss from a part of the vocabulary": (job_of(tp=2), dropped("tensor", "all_gather_single")),
    "tp2 sequence: no gathers": (job_of(tp=2, **SP), dropped("tensor", "all_gather_single")),
    "tp2 sequence: no scatters": (job_of(tp=2, **SP), dropped("tensor", "reduce_scatter_single")),
    "mixtral tp2: tokens not given back": (job_of("mixtral", tp=2), dropped("tensor", "all_gather_single")),
    "tp2 muon: matrices not put together": (job_of(tp=2, optimizer="muon"), dropped("copies", "all_gather_single")),
    "cp2 ring: nothing arrives": (job_of(cp=2), no_messages),
    "cp2 allgather: no keys of others": (job_of(cp=2, cp_kind="allgather"), dropped("context", "all_gather_single")),
    "cp2 allgather: no gradients of others": (
        job_of(cp=2, cp_kind="allgather"),
        dropped("context", "reduce_scatter_single"),
    ),
    "cp2 ulysses: heads not swapped": (job_of(cp=2, cp_kind="ulysses"), dropped("context", "all_to_all_single")),
    "ep2: no tokens": (job_of("mixtral", dp=2, ep=2), dropped("expert", "all_to_all_single")),
    "etp2: no tokens": (job_of("mixtral", dp=2, etp=2), dropped("expert", "all_to_all_single")),
    "etp2: one part of the width": (job_of("mixtral", dp=2, etp=2), one_part_of_the_width),
    "dp2 full: no scatters": (job_of(dp=2, dp_shard="full"), dropped("data", "reduce_scatter_single")),
    "mixtral dp2 full: no gathers": (
        job_of("mixtral", dp=2, dp_shard="full"),
        dropped("gathering", "all_gather_single"),
    ),
    "tp2: the norm of one rank": (job_of(tp=2), dropped("copies", "all_reduce")),
    "mixtral cp2: z-loss of a part counted whole": (job_of("mixtral", cp=2), whole_z_loss),
    "dp2: no sum over replicas": (job_of(dp=2), no_replica_sum),
    "dp2: no sum of weights": (job_of(dp=2), no_weight_sum),
    "dp2 full: mean instead of sum": (job_of(dp=2, dp_shard="full"), shard_mean),
    "dp2 full: no sum of weights": (job_of(dp=2, dp_shard="full"), no_weight_sum),
    "dp4: no sum over sharded replicas": (job_of(dp=4, dp_shard="optimizer", replicas=2), no_replica_sum),
    "dp4: only the last unit crosses replicas": (job_of(dp=4, dp_shard="full", replicas=2), one_partial_sum),
    "cp2: no sum over context ranks": (job_of(cp=2), no_sum_inside),
    "dp2 cp2: no sum over replicas": (job_of(dp=2, cp=2), no_replica_sum),
    "ep2: no sum over the ranks of other tokens": (job_of("mixtral", dp=2, ep=2), no_sum_inside),
    "tp2 sequence: no sum of norms' gradients": (job_of(tp=2, **SP), _no_tensor_sum),
    "tp2 sequence: that sum twice": (job_of(tp=2, **SP), partial_sums_twice),
    "qwen3 tp2: no sum of head norms' gradients": (job_of("qwen3", tp=2), _no_tensor_sum),
    "mixtral tp2: no sum of the router's gradient": (job_of("mixtral", tp=2), _no_tensor_sum),
    "tp4: no sum over ranks that share heads": (job_of(tp=4), _no_heads_sum),
    "tp2: copies counted each in the norm": (job_of(tp=2), copies_counted_each),
    "tp2: every rank counts its loss": (job_of(tp=2), every_rank_speaks),
    "pp2: no sum of the tied embedding": (job_of(pp=2), _no_ends_sum),
    "pp2: tied embedding counted twice in the norm": (job_of(pp=2), copies_counted_each),
    "dp2 pp2: stages reduced too early": (job_of(layers=4, dp=2, pp=2), stages_done_too_early),
    "mixtral cp2: balance from a part of the sequence": (job_of("mixtral", cp=2), no_counts_sum),
    "mixtral tp2: balance from a part of the sequence": (job_of("mixtral", tp=2), no_counts_sum),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_or_wrongly_scaled_reduction_is_noticed(name: str) -> None:
    breaks(*MUTATIONS[name])


def unsummed_load() -> None:
    whole_sum = Mesh.sum_over_world
    Mesh.sum_over_world = lambda self, values: (whole_sum(self, values[:3]), values)[1]  # type: ignore[method-assign]


@pytest.mark.parametrize("dp_shard", ["none", "gradient"])
def test_an_unsummed_load_moves_the_selection_biases_apart(dp_shard: str) -> None:
    try:
        found = deviations(job_of("deepseek_v3", dp=2, dp_shard=dp_shard), unsummed_load)
    except Disagreement as error:
        assert "copies differ in layers.1.mlp.router.bias" in str(error), error
        return
    assert found["parameters"] > 1e-3, found
