"""Pipeline parallelism: one executor for every schedule of `core.schedules` that keeps one copy of the weights.

Each rank runs its program (`program.py`): passes, and transfers that run under them. Messages carry no tags, since NCCL
ignores them: what a rank receives is told by the order alone, on gloo too. A stage handed over inside a rank (the turn
of a V) is no message.

Schedules that split the backward pass compute the gradients of inputs, and of everything but linear weights, in I;
those of linear weights in W (`ops.deferred`). Nothing is scaled here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bessemer.comm import collectives as comm
from bessemer.core import schedules
from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem
from bessemer.ops.deferred import WeightQueue, WeightWork, put_off_weight_gradients
from bessemer.parallel.program import Step, Transfer, forward_actions, rank_program, transfer_order
from bessemer.runtime.phases import Phases

__all__ = ["Pipeline", "Shape", "StageRunner"]

Shape = tuple[int, ...] | Callable[[int], tuple[int, ...]]
"""Of the stream between stages: the same for all micro-batches, or that of each."""


class StageRunner(Protocol):
    """What the pipeline asks of the model."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        """The stream after `stage` from the stream before it (None for the first stage), of the type and shape that
        `run` was told; of the last stage the scalar loss. While training, x is a leaf that requires gradients, and
        the result must depend on something that does."""
        ...

    def on_stage_done(self, stage: int) -> None:
        """All that this stage adds to gradients in this `run` is in `.grad`; other passes are still to come. Called on
        the stage's rank, in the order of the schedule, which is not that of other ranks."""
        ...


class Pipeline:
    """Runs micro-batches through the stages of this rank, one of the `pp` ranks of `group` (None for one rank).

    `phases` gets the seconds of backward passes ("backward_s") and of waiting for other ranks ("comm_s"); a caller
    may put its own there. ConfigError for a schedule with two copies of the weights.
    """

    def __init__(
        self,
        schedule: str,
        pp: int,
        rank: int,
        virtual_stages: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        kind = schedules.schedule(schedule)
        if kind.shape == "two-way":
            raise _two_copies(schedule)
        chunks = virtual_stages if kind.chunks is None else kind.chunks
        self.num_stages = pp * chunks
        self.stages = schedules.stages_of_rank(kind, pp, chunks, rank)
        self.phases = Phases()
        self.rank, self.group, self.device = rank, group, device
        self._kind, self._pp, self._virtual_stages = kind, pp, virtual_stages
        self._programs: dict[tuple[int, bool], list[Step]] = {}

    def is_last(self, stage: int) -> bool:
        """Whether `stage` ends in the loss."""
        return stage == self.num_stages - 1

    def run(self, runner: StageRunner, num_micro: int, shape: Shape, dtype: torch.dtype) -> None:
        """Forward and backward of micro-batches 0 .. num_micro - 1; gradients add up in `.grad`.

        Every rank of the group must call this with the same arguments. ConfigError where the schedule can't be built
        for so many micro-batches.
        """
        program = self._program(num_micro, training=True)
        with put_off_weight_gradients() if self._kind.split_backward else nullcontext() as queue:
            _Run(self, runner, shape, dtype, queue).follow(program)

    @torch.no_grad()
    def forward_only(self, runner: StageRunner, num_micro: int, shape: Shape, dtype: torch.dtype) -> None:
        """Forward of any number of micro-batches, each rank with the same stages as in `run`."""
        _Run(self, runner, shape, dtype, None).follow(self._program(num_micro, training=False))

    def _program(self, num_micro: int, *, training: bool) -> list[Step]:
        key = num_micro, training
        if key not in self._programs:
            build = schedules.schedule_actions if training else forward_actions
            ranks = build(self._kind.name, self._pp, num_micro, self._virtual_stages)
            self._programs[key] = rank_program(self.rank, ranks[self.rank], transfer_order(ranks))
        return self._programs[key]


class _Run:
    """One run of a program: what is on its way between passes."""

    def __init__(
        self, pipeline: Pipeline, runner: StageRunner, shape: Shape, dtype: torch.dtype, queue: WeightQueue | None
    ) -> None:
        self._pipeline, self._runner, self._queue = pipeline, runner, queue
        self._shape, self._dtype = shape, dtype
        # by (way, the stage that made it, micro-batch), until it is sent or a pass of this rank takes it
        self._streams: dict[tuple[str, int, int], Tensor] = {}
        self._works: dict[Transfer, tuple[dist.Work, Tensor]] = {}
        # by (stage, micro-batch), from forward to backward: the input, and where the graph starts
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = {}
        self._weights: dict[tuple[int, int], WeightWork] = {}

    def follow(self, program: list[Step]) -> None:
        phases, runner = self._pipeline.phases, self._runner
        for do, stage, micro, transfer in program:
            if transfer is not None:
                with phases("comm_s"):
                    self._transfer(do, transfer)
            elif do == "F":
                self._forward(stage, micro)
            elif do == "complete":
                runner.on_stage_done(stage)
            else:
                with phases("backward_s"):
                    if do == "W":
                        self._weights.pop((stage, micro)).run()
                    else:
                        self._backward(stage, micro)

    def _transfer(self, do: str, transfer: Transfer) -> None:
        group = self._pipeline.group
        if do == "send":
            stream = self._streams.pop(transfer[:3])
            work = comm.isend(stream, group=group, group_dst=transfer.target)
        elif do == "receive":
            shape = self._shape(transfer.micro) if callable(self._shape) else self._shape
            stream = torch.empty(shape, dtype=self._dtype, device=self._pipeline.device)
            work = comm.irecv(stream, group=group, group_src=transfer.source)
        else:
            work, stream = self._works.pop(transfer)
            work.wait()
            if do == "arrive":
                self._streams[transfer[:3]] = stream
            return
        assert work is not None  # this rank is in the group
        self._works[transfer] = work, stream

    def _forward(self, stage: int, micro: int) -> None:
        training = torch.is_grad_enabled()
        x = None if stage == 0 else self._streams.pop(("F", stage - 1, micro)).requires_grad_(training)
        out = self._runner.forward(stage, micro, x)
        last = self._pipeline.is_last(stage)
        if not last:
            self._streams["F", stage, micro] = out.detach().contiguous()
        if training:  # the edge, not the stream: that can go once it is sent
            self._graphs[stage, micro] = x, out if last else get_gradient_edge(out)

    def _backward(self, stage: int, micro: int) -> None:
        x, root = self._graphs.pop((stage, micro))
        last = self._pipeline.is_last(stage)
        torch.autograd.backward(root, None if last else self._streams.pop(("B", stage + 1, micro)))
        if x is not None:
            assert x.grad is not None, f"stage {stage} doesn't use its input"
            self._streams["B", stage, micro] = x.grad.contiguous()
        if self._queue is not None:
            self._weights[stage, micro] = self._queue.take()


def _two_copies(name: str) -> ConfigError:
    problem = Problem(
        code="not-runnable",
        where="layout.schedule",
        what=f'schedule = "{name}" can be planned but not trained',
        why="it keeps two copies of the weights, and the trainer one",
        fix='layout.schedule = "dualpipev"',
    )
    return ConfigError([problem])
