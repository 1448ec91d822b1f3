"""What a rank leaves of a fault in its step: the failing operator with its inputs, and all that says where it was.

    dumps = Dumps(folder, job, mesh, ...);  passes.dumps = dumps
    dumps.units = [3, 4]                  # what this rank runs of the step, in order
    dumps.non_finite(passes, fault)       # from `diagnosis`
    dumps.exception(passes, error)        # from the loop

Nothing here raises: a full disk, or a device that gives nothing back, must not hide the fault itself. So the fault is
in the log before its dump is begun, which may never end where a disk hangs. Others wait for a rank that dumps: it does
so in the phase `dump_s`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from bessemer import __version__
from bessemer.core.errors import BessemerError
from bessemer.core.job import Job
from bessemer.data.cursor import units_of_step
from bessemer.keep.member import Member, sounds_like_a_lost_peer
from bessemer.models.quantise import histories
from bessemer.parallel.mesh import Mesh
from bessemer.runtime.blackbox import Mark, Operation, read_blackbox
from bessemer.runtime.dump import Bag, packed_call, without_texts, write_dump
from bessemer.runtime.dump_folder import core_file, publish
from bessemer.runtime.first_bad import Call
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
from bessemer.runtime.step_profiler import StepProfiler
from bessemer.train.passes import Batch, Passes

__all__ = ["Dumps", "Fault", "dumps_of", "profiler_of"]

LAST = 32
"""Marks and operations of the black box that go into a dump."""
INNERMOST = 3
"""Frames of an exception whose tensors are kept."""
_KERNEL = re.compile(r"CUDA error|device-side assert|illegal memory access|CUBLAS_STATUS|CUDNN_STATUS|MUSA error")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Fault:
    """A non-finite value of step `step` (from 0). call: what made it, if that was seen; batches: the micro-batches that
    may have shown it, by their place among this rank's; tensors: what was found bad, by name; again: whether the pass,
    run again at once, gave a bad value with each kind of operators."""

    step: int
    text: str
    call: Call | None
    batches: Mapping[int, Batch]
    tensors: dict[str, Tensor]
    again: dict[str, bool]


class Dumps:
    """Writes dumps into `folder`, the run's `dumps`. number: by which the run knows this rank; attempt: what tells
    this attempt of the run from others; blackbox: this rank's; tell: one event of the run; aside: a context for what a
    dump takes, by which others know why the rank is late."""

    def __init__(
        self, folder: Path, job: Job, mesh: Mesh, *, number: int, attempt: str, blackbox: Path,
        tell: Callable[..., None], aside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.folder, self.job, self.mesh = folder, job, mesh
        self.number, self.attempt, self.blackbox, self._tell, self._aside = number, attempt, blackbox, tell, aside
        self.units: list[int] = []
        """The units that this rank's micro-batches are cut from, in their order."""
        self._start_t = time.time()

    def non_finite(self, passes: Passes, fault: Fault) -> str:
        """Keep a non-finite value; the path of the dump, empty where none was written."""
        _print(f"step {fault.step + 1}: {fault.text}; its dump is written now")
        bag = self._bag()

        def record() -> dict[str, Any]:
            return {
                "kind": "non-finite",
                "what": fault.text,
                "operator": None if fault.call is None else packed_call(fault.call, bag),
                "module": "" if fault.call is None else fault.call.module,
                "stack": [] if fault.call is None else fault.call.stack,
                "again": fault.again,
                **self._micro_batches(passes, fault.step, fault.batches, bag, fault.tensors),
            }

        with self._aside(), passes.phases("dump_s"):
            return self._written(fault.step, record, bag)

    def exception(self, passes: Passes, step: int, error: Exception) -> None:
        """Keep an exception of step `step` (from 0). Those that report another rank's end, or were made for people
        (`BessemerError`), are none of this rank's operators."""
        if isinstance(error, BessemerError) or sounds_like_a_lost_peer(str(error)):
            return
        said = "".join(traceback.format_exception(error))
        _print(f"step {step + 1} failed; its dump is written now, and this comes again with its place:\n{said}")
        bag = self._bag()
        batches = dict([passes.running]) if passes.running is not None else {}

        def record() -> dict[str, Any]:
            frames = list(_frames(error.__traceback__))
            text = "".join(traceback.format_exception_only(error)).strip()
            inside = [(name, frame) for frame, name in zip(frames, _modules(passes.module, frames), strict=True)]
            found = _locals([frame for _, frame in inside[:INNERMOST]])
            module = next((name for name, _ in inside if name is not None), "")
            return {
                "kind": "kernel" if _is_kernel(error) else "exception",
                "what": without_texts(text) if self.job.inspect.redact else text,
                "operator": None,
                "module": module,
                "stack": [f"{Path(f.f_code.co_filename).name}:{f.f_lineno} {f.f_code.co_name}" for f in frames],
                "again": {},
                **self._micro_batches(passes, step, batches, bag, found),
            }

        with self._aside(), passes.phases("dump_s"):
            path = self._written(step, record, bag)
        if path:
            error.add_note(f"dump of this fault: {path}\n`bessemer landing --replay {path}` runs it again")

    def _bag(self) -> Bag:
        section = self.job.inspect
        return Bag(section.dump_mb * 1e6, redact=section.redact)

    def _written(self, step: int, record: Callable[[], dict[str, Any]], bag: Bag) -> str:
        try:
            whole = {**self._place(step), **record()}
            path = publish(self.folder, self.job.inspect.dumps, self.attempt, lambda to: write_dump(to, whole, bag))
            if path is None:
                self._say("dump_skipped", step, why=f"{self.folder} is full (inspect.dumps)")
                return ""
            self._say("dump", step, path=str(path), operator=(whole["operator"] or {}).get("name", ""))
        except Exception as error:
            self._say("dump_failed", step, why=f"{type(error).__name__}: {error}")
            return ""
        return str(path)

    def _say(self, event: str, step: int, **fields: Any) -> None:
        try:
            _print(f"{event}: " + ", ".join(f"{k} {v}" for k, v in fields.items()))
            self._tell(event, rank=self.number, step=step + 1, **fields)
        except Exception:  # the fault itself is about to be reported on the same ways, and says more
            return

    def _place(self, step: int) -> dict[str, Any]:
        """What every dump has: which run, rank and step, and what the black box and the device say."""
        job, mesh, host, pid = self.job, self.mesh, os.uname().nodename, os.getpid()
        return {
            "t": time.time(),
            "rank": self.number,
            "world": mesh.world_size,
            "host": host,
            "pid": pid,
            "device": str(mesh.device),
            "place": {axis: mesh.at(axis) for axis in mesh.sizes if axis in ("replica", "pp", "shard", "cp", "tp")},
            "step": step + 1,
            "attempt": self.attempt,
            "versions": {"bessemer": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "job_hash": job.hash,
            "job": job.model_dump(mode="json"),
            "redacted": job.inspect.redact,
            "core_file": core_file(os.environ.get("CUDA_COREDUMP_FILE", ""), pid=pid, host=host, since_t=self._start_t),
            **self._black_box(),
        }

    def _black_box(self) -> dict[str, Any]:
        try:
            box = read_blackbox(self.blackbox)
        except BessemerError as error:
            return {"marks": [], "collectives": [], "blackbox": error.message}
        return {
            "marks": [_mark(mark) for mark in box.marks[-LAST:]],
            "collectives": [_operation(operation) for operation in box.operations[-LAST:]],
        }

    def _micro_batches(
        self, passes: Passes, step: int, batches: Mapping[int, Batch], bag: Bag, tensors: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The data cursor, the micro-batches, the random states and, where this rank holds the whole model, its
        weights: in this order, as far as they fit."""
        for micro, batch in batches.items():
            for name, tensor in batch.items():
                bag.add(f"batch.{micro}.{name}", tensor)
        for name, tensor in tensors.items():
            bag.add(name, tensor)
        bag.add("random.cpu", torch.get_rng_state())
        if self.mesh.device.type != "cpu":
            bag.add("random.device", torch.get_device_module(self.mesh.device).get_rng_state())
        state = dict(_state(passes.module)) if batches and self._holds_all(passes.module) else {}
        size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
        whole = bool(state) and size <= bag.room
        if whole:
            for name, tensor in state.items():
                bag.add(name, tensor)
        job = self.job
        return {
            "samples_of_step": [job.samples_before(step), job.samples_before(step + 1) - 1],
            "micro_batches": [
                {"place": micro, **self._cursor(step, micro), "inputs": list(batch)} for micro, batch in batches.items()
            ],
            "weights": whole and bag.whole(list(state)),
        }

    def _holds_all(self, module: nn.Module) -> bool:
        sizes = self.mesh.sizes
        one = all(sizes[axis] == 1 for axis in ("pp", "shard", "cp", "tp"))
        return one and all(type(p) is nn.Parameter for p in module.parameters())

    def _cursor(self, step: int, micro: int) -> dict[str, Any]:
        """The unit and the samples of this rank's micro-batch `micro`; nothing where the units aren't known."""
        job = self.job
        place, inside = divmod(micro, job.micro_batches)
        if place >= len(self.units):
            return {}
        part, each = job.unit // job.shard, job.train.micro_batch
        first = self.mesh.at("shard") * part + inside * each
        samples = list(units_of_step(job, step)[self.units[place]])[first : first + each]
        return {"unit": self.units[place], "samples": samples}


def dumps_of(job: Job, mesh: Mesh, member: Member, recorder: Recorder) -> Dumps | None:
    """The dumps of a rank of a run, None where the job wants none."""
    if not job.inspect.dumps:
        return None
    assert member.run_folder is not None
    return Dumps(
        member.run_folder / "dumps", job, mesh, number=member.number, attempt=member.folder_token(),
        blackbox=recorder.path, tell=member.event, aside=lambda: member.aside("dumping"),
    )  # fmt: skip


def profiler_of(job: Job, mesh: Mesh, member: Member, phases: Phases) -> StepProfiler | None:
    """The profiler of a rank of a run, which marks what it takes in `phases`; None where the job never asks for a
    trace."""
    section = job.inspect
    if not section.trace_every and section.trace_on == "none":
        return None
    assert member.run_folder is not None
    folder = member.run_folder / "traces"

    @contextlib.contextmanager
    def aside() -> Iterator[None]:
        with member.aside("profiling"), phases("profile_s"):
            yield

    return StepProfiler(folder, rank=member.number, section=section, device=mesh.device, aside=aside)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk
        print(text, file=sys.stderr, flush=True)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and the histories of delayed scaling."""
    yield from ((f"weight.{n}", p.detach()) for n, p in module.named_parameters())
    yield from ((f"buffer.{n}", b) for n, b in module.named_buffers())
    yield from ((f"history.{n}", h) for n, h in histories(module))


def _frames(at: TracebackType | None) -> Iterator[FrameType]:
    """Of a traceback, innermost first, without torch's own."""
    frames: list[FrameType] = []
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    return (f for f in reversed(frames) if not f.f_code.co_filename.startswith(_TORCH))


def _modules(model: nn.Module, frames: list[FrameType]) -> Iterator[str | None]:
    """Of each frame, the part of the model whose method it runs."""
    names = {id(part): name for name, part in model.named_modules()}
    return (names.get(id(frame.f_locals.get("self"))) for frame in frames)


def _locals(frames: list[FrameType]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for depth, frame in enumerate(frames):
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
                found[f"local.{depth}.{frame.f_code.co_name}.{name}"] = value
    return found


def _is_kernel(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or _KERNEL.search(str(error)) is not None


def _mark(mark: Mark) -> dict[str, Any]:
    told = {"at_s": mark.at_s, "phase": mark.phase, "begins": mark.begins, "lane": mark.lane, "step": mark.step}
    return told | {n: v for n in ("micro_batch", "stage", "layer") if (v := getattr(mark, n)) is not None}


def _operation(operation: Operation) -> dict[str, Any]:
    names = ("operation", "order", "dtype", "size_bytes", "peer", "enqueue_s", "wait_s", "finish_s")
    return {"group": operation.group.name, **{name: getattr(operation, name) for name in names}}
