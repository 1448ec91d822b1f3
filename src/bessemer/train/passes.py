"""The forward and backward passes of a rank over the units of a step: straight, or through a pipeline.

Legend: B batch, S sequence, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.core.stages import stage_ranges
from bessemer.models.moe import expert_load
from bessemer.models.quantise import held_amax, key_draws, start_amax
from bessemer.models.watched import Watching, end_watch, start_watch
from bessemer.parallel.data import DataParallel
from bessemer.parallel.mesh import Mesh
from bessemer.parallel.pipeline import Pipeline
from bessemer.precision.watch import Table, Window
from bessemer.runtime.phases import Phases

if TYPE_CHECKING:
    from bessemer.train.dumps import Dumps

__all__ = ["Batch", "Contribution", "Passes"]

Batch = dict[str, Tensor]


@dataclass
class Contribution:
    """What a rank's units give to a step beside the gradients, which stay in `.grad`. It is summed over ranks, but for
    amax and some of the watch, of which the maximum counts."""

    loss_sum: Tensor | float = 0.0
    weight_sum: Tensor | float = 0.0
    expert_load: Tensor | None = None  # float64 [MoE layers, experts]: how often each was chosen
    amax: Tensor | None = None  # float32 [quantised tensors of the whole model, 3], of delayed scaling
    watch: Table | None = None  # of a sampled step, what quantising did; sums, and maxima
    batches: list[Batch] = field(default_factory=list)  # for naming the first bad tensor
    bad_units: tuple[int, ...] | None = None
    """Those of this rank whose gradients weren't finite, where `.grad` holds sums over groups; else None, and they are
    there to be looked at."""

    def add(self, loss_sum: Tensor, weight_sum: Tensor) -> None:
        """Take in one micro-batch; the sums are kept in float64 so that their order can't show in the loss."""
        self.loss_sum = self.loss_sum + loss_sum.detach().double()
        self.weight_sum = self.weight_sum + weight_sum.detach().double()

    def add_load(self, expert_load: Tensor | None) -> None:
        """Take in how often a micro-batch chose each expert, of some layers."""
        if expert_load is not None:
            load = expert_load.double()
            self.expert_load = load if self.expert_load is None else self.expert_load + load


class Passes:
    """Runs units of micro-batches through what this rank holds of the model."""

    def __init__(
        self,
        job: Job,
        spec: ModelSpec,
        mesh: Mesh,
        parallel: DataParallel,
        amax_names: tuple[str, ...] = (),
        watching: Watching | None = None,
    ) -> None:
        self.module: nn.Module = parallel.module
        self.mesh = mesh
        self.phases = Phases()
        self.amax_names, self.watching = amax_names, watching
        self.window = Window()
        """Open while a forward pass runs: then the watch counts inputs and weights."""
        self.running: tuple[int, Batch] | None = None
        """The latest micro-batch that a forward pass began with, and its place in its run."""
        self.dumps: Dumps | None = None
        """Where faults are kept for a replay, if they are."""
        self._step = 0
        self._job = job
        self._spec = spec
        self._parallel = parallel
        self._pipeline: Pipeline | None = None
        self.stage, self.num_stages = 0, 1
        """The pipeline stage of the latest forward pass, and how many there are."""
        if mesh.sizes["pp"] > 1:
            self._ranges = stage_ranges(spec, job.layout, job.data.seq_len)
            self.num_stages = len(self._ranges)
            self._pipeline = pipeline(job, mesh)
            self._pipeline.phases = self.phases

    @property
    def knows_loss(self) -> bool:
        """Whether this rank holds the end of the model."""
        return self._pipeline is None or self._spec.num_layers - 1 in self.module.layers

    @property
    def unit_micro_batches(self) -> int:
        """How many micro-batches this rank runs together."""
        return 1 if self._pipeline is None else self._job.micro_batches

    def run(self, batches: Iterator[Batch], count: int, step: int = 0) -> Contribution:
        """Forward and backward of the next `count` micro-batches, whole units, of step `step` (from 0); local gradients
        add up in `.grad`."""
        mine = Contribution()
        self._step = step
        if self.amax_names:
            start_amax(self.module)
        sampled = self.watching is not None and self.watching.samples(step)
        if sampled:
            start_watch(self.module, self.window)
        each = self.unit_micro_batches
        for first in range(0, count, each):
            with self.phases("data_s"):
                unit = [next(batches) for _ in range(each)]
            mine.batches += unit
            self._parallel.before_backward(last=first + each == count)
            if self._pipeline is None:
                self.phases.at(micro_batch=first)
                self._straight(mine, unit[0])
            else:
                _Unit(self, mine, unit, first + each == count).run(self._pipeline)
        if self.amax_names:
            mine.amax = held_amax(self.module, self.amax_names, self.mesh.device)
        if sampled:
            assert self.watching is not None
            mine.watch = end_watch(self.module, self.watching, self.mesh.device)
        return mine

    def _straight(self, mine: Contribution, batch: Batch) -> None:
        self.running = max(0, len(mine.batches) - 1), batch
        with self.phases("forward_s"), self.window:
            self.key_draws(batch)
            loss_sum, weight_sum = self.module(**batch)
            mine.add(loss_sum, weight_sum)
            mine.add_load(expert_load(self.module))
        with self.phases("backward_s"):
            loss_sum.backward()

    def again(self, unit: list[Batch]) -> None:
        """The forward and backward pass of a unit once more, for looking at it: nothing is summed over replicas. Every
        rank of the replica must call it."""
        self._parallel.before_backward(last=False)
        if self._pipeline is None:
            self._straight(Contribution(), unit[0])
        else:
            _Unit(self, Contribution(), unit, False).run(self._pipeline)

    def key_draws(self, batch: Batch) -> None:
        """What stochastic rounding draws in the passes of `batch` from now on."""
        key_draws(self.module, self._job.train.seed, self._step, batch["tokens_BS"])

    @torch.no_grad()
    def forward(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """(loss sum, weight sum) of one micro-batch without gradients; 0 on the ranks of a pipeline that don't hold
        its last stage. Every rank of the replica must call it."""
        if self._pipeline is None:
            return self.module(**batch)  # type: ignore[no-any-return]
        mine = Contribution()
        _Unit(self, mine, [batch], False).run(self._pipeline, forward_only=True)
        return mine.loss_sum, mine.weight_sum


def pipeline(job: Job, mesh: Mesh) -> Pipeline:
    """The executor of the job's schedule on this rank."""
    layout, group = job.layout, mesh.group("pipeline")
    assert group is not None
    return Pipeline(layout.schedule, layout.pp, mesh.at("pp"), layout.virtual_stages, group, mesh.device)


class _Unit:
    """The micro-batches of one unit on their way through the pipeline: what its executor runs."""

    def __init__(self, passes: Passes, mine: Contribution, batches: list[Batch], last: bool) -> None:
        self._passes, self._mine, self._batches, self._last = passes, mine, batches, last

    def run(self, executor: Pipeline, *, forward_only: bool = False) -> None:
        run = executor.forward_only if forward_only else executor.run
        run(self, len(self._batches), self._shape, torch.float32)

    def _shape(self, micro: int) -> tuple[int, ...]:
        """Of the stream between two stages."""
        module = self._passes.module
        batch, seq = self._batches[micro]["tokens_BS"].shape
        seq //= module.split.context.degree
        if module.split.tensor.sequence_parallel:
            seq //= module.split.tensor.degree
        return batch, seq, self._passes._spec.hidden_size

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        """The stream after `stage`, or the loss."""
        passes, layers = self._passes, self._passes._ranges[stage]
        passes.stage = stage
        passes.phases.at(stage=stage, micro_batch=micro)
        passes.running = max(0, len(self._mine.batches) - len(self._batches)) + micro, self._batches[micro]
        with passes.phases("forward_s"), passes.window:
            passes.key_draws(self._batches[micro])
            out, weight_sum = passes.module(**self._batches[micro], layers=layers, stream_BSD=x)
        self._mine.add_load(expert_load(passes.module, layers))
        if layers.stop == passes._spec.num_layers:
            self._mine.add(out, weight_sum)
        return out

    def on_stage_done(self, stage: int) -> None:
        """Gradients of a stage are complete: those that no other stage of this rank adds to can be reduced."""
        passes, layers = self._passes, self._passes._ranges[stage]
        if self._last:
            names = tuple(f"blocks.{layer}." for layer in layers)
            passes._parallel.done(p for n, p in passes.module.named_parameters() if n.startswith(names))
