"""The loop of a rank: steps, checkpoints, evaluations and records, until the job is done or somebody asks to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from bessemer.core.errors import Stopped
from bessemer.core.job import Job
from bessemer.data import Dataset, Reader
from bessemer.data.cursor import deal, units_of_step
from bessemer.keep.slices import Slice
from bessemer.models.watched import fallen
from bessemer.precision.watch import EXPONENTS
from bessemer.runtime.kernels import KernelSample
from bessemer.runtime.step_profiler import StepProfiler
from bessemer.runtime.tracing import launches
from bessemer.train.alike import gradients_hash, hashes_of_copies, parameters_hash, unit_due
from bessemer.train.assembly import Assembly
from bessemer.train.diagnosis import refuse_non_finite_state
from bessemer.train.evaluate import Evaluation, evaluate, to_tensors
from bessemer.train.restore import Origin, checkpoint_meta, restore
from bessemer.train.state import owned_slices
from bessemer.train.step import Batch, StepResult, rank_micro_batches, unit_micro_batches

__all__ = ["Loop", "Reporter", "Saver"]

KERNEL_SAMPLES_EVERY = 100
"""Steps between two samples of kernel time; the first is the third step, when nothing is cold any more."""


class Reporter(Protocol):
    """Where records go: the agent's member in a run, a list in a test."""

    @property
    def stop_requested(self) -> bool: ...

    def metric(self, record: dict[str, Any]) -> None: ...

    def event(self, name: str, /, **fields: Any) -> None: ...

    def phase(self, step: int, name: str) -> None: ...


class Saver(Protocol):
    """The vault's client: `save` and `hold` return the seconds that they kept the caller; failures of the background
    write are raised by `poll` and `wait`."""

    def reserve(self, slices: list[Slice], meta: dict[str, Any]) -> None: ...

    def save(self, step: int, slices: list[Slice], meta: dict[str, Any]) -> float: ...

    def hold(self, step: int, slices: list[Slice], meta: dict[str, Any]) -> float: ...

    def poll(self) -> list[dict[str, Any]]: ...

    def wait(self) -> list[dict[str, Any]]: ...


@dataclass
class Loop:
    """Everything a rank needs to run its job; `run` returns when the last step is committed and durable."""

    parts: Assembly
    train_data: Dataset
    val_data: Dataset | None
    reporter: Reporter
    saver: Saver
    run_folder: Path
    origin: Origin = field(default=Origin(), kw_only=True)
    profiler: StepProfiler | None = field(default=None, kw_only=True)

    @property
    def job(self) -> Job:
        return self.parts.job

    def run(self) -> None:
        """Go on from the newest state to the job's last step. Raises `Stopped` after a requested stop was saved."""
        step, saved = self._start()
        steps = self.job.train.steps
        batches = self._batches(step)
        stopped = False
        try:
            while step < steps and not stopped:
                result = self._step(step, batches)
                step, stopped = result.step, result.stop
                self._compare_copies(step)
                evaluation = self._evaluate_if_due(step)
                self._record(result, evaluation)
                self._warn_of_falls(result)
                if step == steps or stopped or (self.job.keep.every and step % self.job.keep.every == 0):
                    self._save(step)
                    saved = step
                elif self.job.keep.memory_every and step % self.job.keep.memory_every == 0:
                    self._hold(step)
                self._note_saved(self.saver.poll())
        finally:
            batches.close()
        if saved != step:
            self._save(step)
        self.reporter.phase(step, "waiting for the last checkpoint")
        self._note_saved(self.saver.wait())
        if stopped and step < steps:
            self._event("stopped", step=step)
            raise Stopped(f"stopped on request after step {step} of {steps}; it is saved", step=step)
        self._event("finished", step=step)

    def _start(self) -> tuple[int, int]:
        """(the step that the state stands at, the newest that is saved in the run's own folder or -1)."""
        restored = restore(self.parts, self.run_folder, self.train_data.fingerprint, self.origin)
        self._event("loaded", **restored.told())
        self._tell_watch()
        own = restored.path is not None and self.run_folder in Path(restored.path).parents
        self.saver.reserve(self._owned(), self._meta(restored.step))
        return restored.step, restored.step if own else -1  # one that was named lies in another run's folder

    @property
    def leads(self) -> bool:
        """Whether this rank's copy of the model speaks for the run: evaluates, saves, and tells of it."""
        return True

    @property
    def part_of_step(self) -> float:
        """How many times the work of this copy of the model the latest step was."""
        return 1.0

    def _batches(self, first_step: int) -> Iterator[Batch]:
        """This rank's micro-batches from `first_step` on, read ahead in threads."""
        mesh = self.parts.mesh
        wanted = (
            ids
            for step in range(first_step, self.job.train.steps)
            for ids in rank_micro_batches(self.job, step, mesh.at("replica"), mesh.at("shard"))
        )
        with Reader(self.train_data, wanted, self.job.data.workers) as reader:
            for batch in reader:
                yield to_tensors(batch, mesh.device)

    def _step(self, step: int, batches: Iterator[Batch]) -> StepResult:
        self.reporter.phase(step + 1, "training")
        profiled = nullcontext() if self.profiler is None else self.profiler.step(step + 1)
        try:
            with launches(), profiled:
                self._compare_work(step)
                if not _counts_kernels(step):
                    return self._run_step(step, batches)
                with KernelSample(self.parts.mesh.device) as sample:
                    result = self._run_step(step, batches)
            self._record_kernels(sample, result)
        except Exception as error:
            passes = self.parts.step.passes
            if passes.dumps is not None:
                passes.dumps.exception(passes, step, error)
            raise
        return result

    def _runs(self, units: list[int]) -> None:
        """Tell where a dump would find the samples of this rank's micro-batches."""
        dumps = self.parts.step.passes.dumps
        if dumps is not None:
            dumps.units = units

    def _run_step(self, step: int, batches: Iterator[Batch]) -> StepResult:
        mesh = self.parts.mesh
        self._runs(deal(step, len(units_of_step(self.job, step)), self.job.replicas)[mesh.at("replica")])
        count = len(rank_micro_batches(self.job, step, mesh.at("replica"), mesh.at("shard")))
        return self.parts.step.run(step, batches, count, stop=self.reporter.stop_requested)

    def _record_kernels(self, sample: KernelSample, result: StepResult) -> None:
        """One event with the FLOPs of all ranks by path, and the mean seconds in kernels of a rank."""
        mesh = self.parts.mesh
        paths = ("bf16", "fp16", "fp32", "fp64")
        own = [float(sample.flops.get(p, 0)) for p in paths] + [sample.kernel_s]
        sums = mesh.sum_over_world(torch.tensor(own, dtype=torch.float64, device=mesh.device)).tolist()
        flops = {p: f * self.part_of_step for p, f in zip(paths, sums[:-1], strict=True) if f}
        self._event("kernels", step=result.step, flops=flops, kernel_s=sums[-1] / mesh.world_size, step_s=result.step_s)

    def _compare_copies(self, step: int) -> None:
        """Every so often: whether all copies hold the same parameters. Told only where they don't."""
        every = self.job.inspect.hash_every
        if not every or step % every or self.parts.mesh.group("replica") is None:
            return
        with self.parts.step.passes.phases("compare_s"):
            own = parameters_hash(self.parts.optimizer.params.values())
            self._compare("parameters", step, own)

    def _compare_work(self, step: int) -> None:
        """Every so often: whether all copies get the same from one unit. Told only where they don't."""
        own = None if self.parts.mesh.group("replica") is None else self._rerun(step)
        if own is not None:
            with self.parts.step.passes.phases("compare_s"):
                self._compare("gradients", step + 1, own)

    def _compare(self, what: str, step: int, own: int) -> None:
        found = hashes_of_copies(own, self.parts.mesh)
        if found is not None and len(set(found[1])) > 1 and self.parts.mesh.at("replica") == 0:
            ranks, hashes = found
            self.reporter.event(what, step=step, ranks=ranks, hashes=[f"{each:016x}" for each in hashes])

    def _rerun(self, step: int) -> int | None:
        """A hash of what the unit gives that all copies run before their own work in step `step` (from 0); None where
        none is due, and in a step whose kernels are counted."""
        unit, mesh = unit_due(self.job, step), self.parts.mesh
        if unit is None or _counts_kernels(step):
            return None
        self._runs([unit])
        ids = unit_micro_batches(self.job, step, unit, mesh.at("shard"))
        with Reader(self.train_data, ids, self.job.data.workers) as reader:
            return gradients_hash(self.parts, [to_tensors(batch, mesh.device) for batch in reader], step)

    def _evaluate_if_due(self, step: int) -> Evaluation | None:
        every, last = self.job.train.eval_every, step == self.job.train.steps
        if self.val_data is None or not self.leads or not (last or (every and step % every == 0)):
            return None
        self.reporter.phase(step, "evaluating")
        start = time.perf_counter()
        passes, train = self.parts.step.passes, self.job.train
        with passes.phases("evaluate_s"):
            found = evaluate(passes, self.val_data, sequences=train.eval_sequences, micro_batch=train.micro_batch)
        self._event(
            "eval",
            step=step,
            loss=found.loss,
            perplexity=found.perplexity,
            bits_per_byte=found.bits_per_byte,
            tokens=found.tokens,
            seconds=time.perf_counter() - start,
        )
        return found

    def _record(self, result: StepResult, evaluation: Evaluation | None) -> None:
        if self.parts.mesh.rank != 0:
            return
        record: dict[str, Any] = {
            "step": result.step,
            "samples": list(result.samples),
            "loss": result.loss,
            "weight": result.weight,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "step_s": result.step_s,
            "tokens_per_s": result.tokens / result.step_s,
            "phases": result.phases,
            "longest_wait_s": result.longest_wait_s,
            "t": time.time(),
        }
        if result.experts is not None:
            record["experts"] = {"imbalance": result.experts.imbalance, "dropped": result.experts.dropped}
        if result.sample is not None:
            record["precision"] = result.sample.figures.as_json()
        if evaluation is not None:
            record |= {
                "val_loss": evaluation.loss,
                "val_bits_per_byte": evaluation.bits_per_byte,
                "perplexity": evaluation.perplexity,
            }
        self.reporter.metric(record)

    def _tell_watch(self) -> None:
        """What the samples in the records are of, and what goes on without quantising since an earlier one."""
        watching, mesh = self.parts.step.passes.watching, self.parts.mesh
        if watching is None:
            return
        since: dict[str, int] = {}
        if watching.fall_back:
            steps = mesh.max_over_world(fallen(self.parts.module, watching, mesh.device)).tolist()
            since = {name: int(step) for name, step in zip(watching.names, steps, strict=True) if step}
        self._event(
            "watch",
            every=watching.every,
            names=watching.names,
            groups=[len(group) for group in watching.groups],
            exponents=[EXPONENTS.start, EXPONENTS.stop],
            fallen=since,
        )
        if since:
            first = ", ".join(list(since)[:4]) + (" ..." if len(since) > 4 else "")
            what = f"{len(since)} of {len(watching.names)} tensors go on without quantising: {first}"
            self._event("warning", message=what, fallen=since)

    def _warn_of_falls(self, result: StepResult) -> None:
        for fall in result.sample.falls if result.sample is not None else ():
            runs = str(self.parts.module.compute_dtype).removeprefix("torch.")
            message = f"from step {result.step + 1} on {' and '.join(fall.names)} run in {runs}: {fall.why}"
            self._event("warning", message=message, step=result.step, fall_back=fall.names, why=fall.why)

    def _save(self, step: int) -> None:
        if not self.leads:
            return
        self.reporter.phase(step, "saving")
        with self.parts.step.passes.phases("checkpoint_s"):
            owned = self._owned()
            refuse_non_finite_state(self.parts.mesh, owned, step)
            stall_s = self.saver.save(step, owned, self._meta(step))
        self._event("save", step=step, stall_s=stall_s)

    def _hold(self, step: int) -> None:
        """A copy in memory: of each, only the seconds are noted, with those of checkpoints."""
        if not self.leads:
            return
        self.reporter.phase(step, "saving")  # the first copy waits for its memory
        with self.parts.step.passes.phases("checkpoint_s"):
            self.saver.hold(step, self._owned(), self._meta(step))

    def _owned(self) -> list[Slice]:
        return owned_slices(self.parts.module, self.parts.optimizer, self.parts.mesh)

    def _meta(self, step: int) -> dict[str, Any]:
        return checkpoint_meta(self.job, step, self.train_data.fingerprint)

    def _note_saved(self, finished: list[dict[str, Any]]) -> None:
        for notice in finished:
            self._event("saved", **{k: notice[k] for k in ("step", "path", "seconds", "bytes")})
            for step in notice["deleted"]:
                self._event("deleted", step=step)

    def _event(self, name: str, **fields: Any) -> None:
        if self.parts.mesh.rank == 0 and self.leads:
            self.reporter.event(name, **fields)


def _counts_kernels(step: int) -> bool:
    return step % KERNEL_SAMPLES_EVERY == 2
