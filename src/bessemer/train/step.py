"""One training step: units in, one contribution, one update.

    state' = f(state, contribution), at the commit only

A unit is a run of sample ids whose content doesn't depend on ranks or membership; units are dealt to replicas, and
inside a replica each shard rank takes its part of every unit. What a rank's units give to the step is its
contribution: gradients and sums. Gradients are scaled in exactly one place, `Step.commit`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.data.cursor import deal, units_of_step
from bessemer.models.canonical import local
from bessemer.models.moe import moe_layers
from bessemer.models.quantise import advance_amax
from bessemer.models.watched import Fall, Watching, fall_back
from bessemer.parallel.copies import squared_norm, sum_partial_gradients
from bessemer.parallel.data import DataParallel
from bessemer.parallel.mesh import Mesh
from bessemer.precision.watch import Figures, Table
from bessemer.train.balance import imbalance, move_selection_biases
from bessemer.train.optim import Optimizer
from bessemer.train.passes import Batch, Contribution, Passes
from bessemer.train.schedule import lr_factor

__all__ = ["Experts", "Sample", "Step", "StepResult", "rank_micro_batches"]

PHASES = ("data_s", "forward_s", "backward_s", "comm_s", "optimizer_s")


def rank_micro_batches(job: Job, step: int, replica: int, shard_index: int) -> list[list[int]]:
    """The sample ids of each micro-batch that the ranks at (replica, shard_index) run in step `step`, in order."""
    units = deal(step, len(units_of_step(job, step)), job.replicas)[replica]
    return [ids for unit in units for ids in unit_micro_batches(job, step, unit, shard_index)]


def unit_micro_batches(job: Job, step: int, unit: int, shard_index: int) -> list[list[int]]:
    """The sample ids of each micro-batch of a unit of step `step` that the ranks at shard_index run, in order."""
    part, micro = job.unit // job.shard, job.train.micro_batch
    ids = list(units_of_step(job, step)[unit])[shard_index * part : (shard_index + 1) * part]
    return [ids[i : i + micro] for i in range(0, part, micro)]


@dataclass(frozen=True)
class Experts:
    """What the routers of a step did, over all ranks."""

    imbalance: list[float]  # of each MoE layer the largest load of an expert over the mean one
    dropped: int  # choices that reached no expert: the tokens' choices less those that were counted


@dataclass(frozen=True)
class Sample:
    """What the watch saw in a step, over all ranks, and the projections that go on without quantising for it."""

    figures: Figures
    falls: tuple[Fall, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """A committed step over all ranks. `step` counts committed steps, from 1; loss in nats per token."""

    step: int
    samples: tuple[int, int]
    tokens: int  # of the whole batch, counted or not
    loss: float
    weight: float
    grad_norm: float
    lr: float
    step_s: float
    phases: dict[str, float]  # mean over ranks
    longest_wait_s: float  # of any rank, for the others: what the latest rank cost
    stop: bool  # some rank was asked to stop
    experts: Experts | None = None
    sample: Sample | None = None


class Step:
    """Runs and commits the steps of a job on this rank.

    `on_bad` is called on every rank, before the update, when the loss or the gradient norm isn't finite; it has to
    raise. The arguments are the step (from 0) and this rank's own contribution. `amax_names`: the tensors whose scales
    follow a history; `watching`: what is watched, if anything.
    """

    def __init__(
        self,
        job: Job,
        spec: ModelSpec,
        mesh: Mesh,
        parallel: DataParallel,
        optimizer: Optimizer,
        *,
        on_bad: Callable[[Passes, int, Contribution], None],
        amax_names: tuple[str, ...] = (),
        watching: Watching | None = None,
    ) -> None:
        self.job = job
        self.mesh = mesh
        self.parallel = parallel
        self.optimizer = optimizer
        self.passes = Passes(job, spec, mesh, parallel, amax_names, watching)
        self._spec = spec
        self._on_bad = on_bad

    def run(self, step: int, batches: Iterator[Batch], count: int, *, stop: bool = False) -> StepResult:
        """Run step `step` (from 0) over the next `count` micro-batches of `batches`, and commit it.

        Every rank must call this with its own share; `stop` asks all ranks to stop after this step.
        """
        start = time.perf_counter()
        self.passes.phases.at(step=step + 1)
        mine = self.passes.run(batches, count, step)
        with self.passes.phases("comm_s"):
            self.parallel.finish()
        return self.commit(step, mine, start, stop)

    def _sums(self, mine: Contribution, stop: bool) -> tuple[float, float, bool, torch.Tensor | None]:
        """Over all ranks: loss, weight, whether anybody asks to stop, and how often each expert was chosen. The amaxes
        of `mine`, and what it watched, become those of all ranks."""
        own = [float(mine.loss_sum), float(mine.weight_sum)]
        if not self.mesh.counts_loss:
            own = [0.0 if math.isfinite(own[0]) else own[0], 0.0]  # a gradient that is bad here alone is told by NaN
        sums = torch.tensor([*own, float(stop)], dtype=torch.float64, device=self.mesh.device)
        layers, moe = len(moe_layers(self._spec)), self._spec.moe
        load: torch.Tensor | None = None
        if moe is not None and layers:
            load = sums.new_zeros(layers, moe.num_experts) if mine.expert_load is None else mine.expert_load
            sums = torch.cat((sums, load.flatten()))
        sums = self.mesh.sum_over_world(sums)
        if mine.amax is not None:
            self.mesh.max_over_world(mine.amax)
        if mine.watch is not None:
            mine.watch.put_summed(self.mesh.sum_over_world(mine.watch.summed()))
            mine.watch.put_largest(self.mesh.max_over_world(mine.watch.largest()))
        loss_sum, weight, stops = sums[:3].tolist()
        return loss_sum, weight, stops > 0, None if load is None else sums[3:].view_as(load)

    def commit(self, step: int, mine: Contribution, start: float, stop: bool) -> StepResult:
        """Make step `step` (from 0) true with the gradients in `.grad` and the sums in `mine`, of this rank's part;
        they become those of all ranks of the mesh here."""
        module, phases_of = self.parallel.module, self.passes.phases
        with phases_of("comm_s"):
            loss_sum, weight, stop, load = self._sums(mine, stop)
            gradients = self.optimizer.gradients()
            sum_partial_gradients(module, gradients, self.mesh)
        with phases_of("optimizer_s"):
            raw_norm = float(squared_norm(module, gradients, self.mesh).sqrt())
            if not (weight > 0 and math.isfinite(loss_sum) and math.isfinite(raw_norm)):
                self._on_bad(self.passes, step, mine)
            norm = raw_norm / weight
            clip = self.job.train.clip
            shrink = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            scaled = [local(g) for g in gradients.values()]
            torch._foreach_mul_(scaled, shrink / weight)  # the one place where gradients are scaled
            factor = lr_factor(self.job.train, step)
            self.optimizer.step(factor)
            if load is not None:
                move_selection_biases(module, load)
            if mine.amax is not None:
                advance_amax(module, self.passes.amax_names, mine.amax)
            sample = None if mine.watch is None else self._sample(step, mine.watch)
        phases, longest_wait_s = self._phases_of_all()
        step_s = time.perf_counter() - start
        phases["other_s"] = max(0.0, step_s - sum(phases.values()))
        first = self.job.samples_before(step)
        return StepResult(
            step=step + 1,
            samples=(first, first + self.job.global_batch_at(step)),
            tokens=self.job.global_batch_at(step) * self.job.data.seq_len,
            loss=loss_sum / weight,
            weight=weight,
            grad_norm=norm,
            lr=self.job.train.lr * factor,
            step_s=step_s,
            phases=phases,
            longest_wait_s=longest_wait_s,
            stop=stop,
            experts=None if load is None else self._experts(step, load),
            sample=sample,
        )

    def _experts(self, step: int, load: torch.Tensor) -> Experts:
        tokens = self.job.global_batch_at(step) * self.job.data.seq_len
        assert self._spec.moe is not None
        chosen = tokens * self._spec.moe.top_k * len(load)
        return Experts(imbalance(load), chosen - round(float(load.sum())))

    def _sample(self, step: int, table: Table) -> Sample:
        """Of step `step` (from 0). All ranks have the same table, and so come to the same decisions."""
        watching, figures = self.passes.watching, table.figures()
        assert watching is not None
        if not watching.fall_back:
            return Sample(figures)
        return Sample(figures, fall_back(self.parallel.module, watching, table, figures, step + 1))

    def _phases_of_all(self) -> tuple[dict[str, float], float]:
        """(seconds of each phase, mean over ranks; the longest that any rank waited for others)."""
        taken = self.passes.phases.take()
        own = [taken.get(name, 0.0) for name in PHASES]
        seconds = torch.tensor([own, own], dtype=torch.float64, device=self.mesh.device)
        self.mesh.sum_over_world(seconds[0])
        self.mesh.max_over_world(seconds[1])
        mean = {k: float(v) / self.mesh.world_size for k, v in zip(PHASES, seconds[0], strict=True)}
        return mean, float(seconds[1][PHASES.index("comm_s")])
