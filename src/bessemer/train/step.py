"""One training step: units in, one contribution, one update.

    state' = f(state, contribution), at the commit only

A unit is a run of sample ids whose content doesn't depend on ranks or membership; units are dealt to replicas, and
inside a replica each shard rank takes its part of every unit. What a rank's units give to the step is its
contribution: gradients and sums. Gradients are scaled in exactly one place, `Step._commit`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from bessemer.core.job import Job
from bessemer.data.cursor import deal, units_of_step
from bessemer.parallel.data import DataParallel
from bessemer.parallel.mesh import Mesh
from bessemer.train.optim import Optimizer
from bessemer.train.schedule import lr_factor

__all__ = ["Contribution", "Step", "StepResult", "rank_micro_batches"]

Batch = dict[str, torch.Tensor]
PHASES = ("data_s", "forward_s", "backward_s", "comm_s", "optimizer_s", "other_s")


def rank_micro_batches(job: Job, step: int, replica: int, shard_index: int) -> list[list[int]]:
    """The sample ids of each micro-batch that the rank (replica, shard_index) runs in step `step`, in order."""
    units = units_of_step(job, step)
    part, micro = job.unit // job.shard, job.train.micro_batch
    batches = []
    for index in deal(step, len(units), job.replicas)[replica]:
        ids = list(units[index])[shard_index * part : (shard_index + 1) * part]
        batches += [ids[i : i + micro] for i in range(0, part, micro)]
    return batches


@dataclass
class Contribution:
    """What a rank's units give to a step beside the gradients, which stay in `.grad`. All of it is summed."""

    loss_sum: torch.Tensor | float = 0.0
    weight_sum: torch.Tensor | float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    batches: list[Batch] = field(default_factory=list)  # for naming the first bad tensor

    def add(self, loss_sum: torch.Tensor, weight_sum: torch.Tensor) -> None:
        """Take in one micro-batch; the sums are kept in float64 so that their order can't show in the loss."""
        self.loss_sum = self.loss_sum + loss_sum.detach().double()
        self.weight_sum = self.weight_sum + weight_sum.detach().double()


@dataclass(frozen=True)
class StepResult:
    """A committed step over all ranks. `step` counts committed steps, from 1; loss in nats per token."""

    step: int
    samples: tuple[int, int]
    loss: float
    weight: float
    grad_norm: float
    lr: float
    step_s: float
    phases: dict[str, float]  # mean over ranks
    longest_wait_s: float  # of any rank, for the others: what the latest rank cost
    stop: bool  # some rank was asked to stop


class Step:
    """Runs and commits the steps of a job on this rank.

    `on_bad` is called on every rank, before the update, when the loss or the gradient norm isn't finite; it has to
    raise. The arguments are the step (from 0) and this rank's own contribution.
    """

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        parallel: DataParallel,
        optimizer: Optimizer,
        on_bad: Callable[[int, Contribution], None],
    ) -> None:
        self.job = job
        self.mesh = mesh
        self.parallel = parallel
        self.optimizer = optimizer
        self._on_bad = on_bad

    def run(self, step: int, batches: Iterator[Batch], count: int, *, stop: bool = False) -> StepResult:
        """Run step `step` (from 0) over the next `count` micro-batches of `batches`, and commit it.

        Every rank must call this with its own share; `stop` asks all ranks to stop after this step.
        """
        start = time.perf_counter()
        mine = Contribution()
        for index in range(count):
            self._micro_batch(mine, batches, last=index == count - 1)
        mine.phases["comm_s"] += self.parallel.finish()
        return self._commit(step, mine, start, stop)

    def _micro_batch(self, mine: Contribution, batches: Iterator[Batch], *, last: bool) -> None:
        t0 = time.perf_counter()
        batch = next(batches)
        t1 = time.perf_counter()
        self.parallel.before_backward(last=last)
        loss_sum, weight_sum = self.parallel.module(**batch)
        mine.add(loss_sum, weight_sum)
        mine.batches.append(batch)
        t2 = time.perf_counter()
        loss_sum.backward()
        t3 = time.perf_counter()
        for phase, seconds in (("data_s", t1 - t0), ("forward_s", t2 - t1), ("backward_s", t3 - t2)):
            mine.phases[phase] += seconds

    def _commit(self, step: int, mine: Contribution, start: float, stop: bool) -> StepResult:
        t0 = time.perf_counter()
        sums = torch.tensor(
            [float(mine.loss_sum), float(mine.weight_sum), float(stop), *mine.phases.values()],
            dtype=torch.float64,
            device=self.mesh.device,
        )
        loss_sum, weight, stops, *phase_sums = self.mesh.sum_over_world(sums).tolist()
        t1 = time.perf_counter()
        gradients = self.optimizer.gradients()
        raw_norm = self._global_norm(gradients)
        if not (weight > 0 and math.isfinite(loss_sum) and math.isfinite(raw_norm)):
            self._on_bad(step, mine)
        norm = raw_norm / weight
        clip = self.job.train.clip
        shrink = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        torch._foreach_mul_(gradients, shrink / weight)  # the one place where gradients are scaled
        factor = lr_factor(self.job.train, step)
        self.optimizer.step(factor)
        t2 = time.perf_counter()
        longest_wait = torch.tensor([mine.phases["comm_s"] + t1 - t0], dtype=torch.float64, device=self.mesh.device)
        self.mesh.max_over_world(longest_wait)
        end = time.perf_counter()
        phases = {k: v / self.mesh.world_size for k, v in zip(PHASES, phase_sums, strict=True)}
        phases["comm_s"] += t1 - t0
        phases["optimizer_s"] = t2 - t1
        phases["other_s"] = max(0.0, end - start - sum(phases.values()))
        first = self.job.samples_before(step)
        return StepResult(
            step=step + 1,
            samples=(first, first + self.job.global_batch_at(step)),
            loss=loss_sum / weight,
            weight=weight,
            grad_norm=norm,
            lr=self.job.train.lr * factor,
            step_s=end - start,
            phases=phases,
            longest_wait_s=float(longest_wait),
            stop=stops > 0,
        )

    def _global_norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """The 2-norm over all parameters and shards: squares summed in float64, so no grouping shows."""
        if not gradients:
            return 0.0
        squares = torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
        if self.mesh.shard_group is not None:
            dist.all_reduce(squares, group=self.mesh.shard_group)
        return float(squares.sqrt())
