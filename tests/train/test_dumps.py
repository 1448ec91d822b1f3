"""A fault in a step leaves a dump, and its replay names operator, element and cause, and tells data from hardware."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from train.toy import run_steps, toy_job, toy_parts

from bessemer.comm import collectives as comm
from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.data.cursor import deal, units_of_step
from bessemer.inspect.replay import replay
from bessemer.runtime.dump_folder import dump_notes, read_record
from bessemer.runtime.first_bad import FirstBad
from bessemer.runtime.recorder import Recorder
from bessemer.train.assembly import Assembly
from bessemer.train.dumps import Dumps

pytestmark = pytest.mark.timeout(300)  # on a machine whose cores others use too


def dumping_parts(folder: Path, job: Job, rank: int = 0, told: list[Any] | None = None) -> Assembly:
    """The parts of a rank that keeps faults in `folder`/dumps."""
    recorder = Recorder(folder / "blackbox" / f"rank-{rank}", rank=rank, world=job.layout.world_size, job_hash=job.hash)
    if job.layout.world_size > 1:
        comm.record_to(recorder)
    parts = toy_parts(job, rank)
    parts.step.passes.phases.attach(recorder)

    def tell(event: str, **fields: Any) -> None:
        if told is not None:
            told.append((event, fields))

    parts.step.passes.dumps = Dumps(
        folder / "dumps", job, parts.mesh, number=rank, attempt="now", blackbox=recorder.path, tell=tell
    )
    parts.step.passes.dumps.units = deal(1, len(units_of_step(job, 1)), job.replicas)[parts.mesh.at("replica")]
    return parts


def step_of(parts: Assembly, step: int = 1) -> str:
    """Run a step that is to fail; what was raised."""
    with pytest.raises(NonFinite) as raised:
        list(run_steps(parts, step, step + 1))
    return raised.value.message


def test_a_weight_near_overflow_is_named_down_to_its_element(tmp_path: Path) -> None:
    told: list[Any] = []
    parts = dumping_parts(tmp_path, toy_job(), told=told)
    with torch.no_grad():
        parts.module.block(1).mlp.down.weight.fill_(1e-3)
        parts.module.block(1).mlp.down.weight[3, 5] = 3e38
        parts.module.block(1).mlp.gate_up.weight.mul_(1e3)
    message = step_of(parts, 0)
    assert re.search(r"made by \S*(mm|linear)\S* of blocks.1.mlp.down", message), message
    (note,) = dump_notes(tmp_path / "dumps")
    assert (note.kind, note.rank, note.step) == ("non-finite", 0, 1)
    assert told[0][0] == "dump" and told[0][1]["path"] == str(note.path)
    found = replay(note.path)
    assert found.element is not None and found.element.index[-1] == 3
    assert found.parameter == "blocks.1.mlp.down.weight[3, 5]"
    assert (found.verdict.kind, found.verdict.confidence) == ("code", 0.9), str(found)
    assert "blocks.1.mlp.down.weight[3, 5]" in str(found) and "samples: 0, 1 (unit 0)" in str(found)
    json.dumps(found.as_json(), allow_nan=False)


def test_a_gradient_that_goes_wrong_in_backward(tmp_path: Path) -> None:
    parts = dumping_parts(tmp_path, toy_job())
    parts.optimizer.params["blocks.0.attn.o.weight"].register_hook(lambda grad: grad * float("nan"))
    assert "made by aten.mul.Tensor of blocks.0.attn, backward" in step_of(parts)
    record = read_record(tmp_path / "dumps" / "dump-1")
    assert record["micro_batches"][0]["samples"] == [8, 9] and record["step"] == 2
    assert "gradient.blocks.0.attn.o.weight" in record["tensors"] and record["marks"]
    found = replay(tmp_path / "dumps" / "dump-1")
    assert (found.operator, found.module) == ("aten.mul.Tensor", "blocks.0.attn")
    assert found.verdict.kind == "data or code" and found.verdict.confidence == 0.9


def activation_of_rank_1(rank: int, world: int, folder: str, job: Job) -> str:
    parts = dumping_parts(Path(folder), job, rank)
    if rank == 1:
        parts.module.block(1).register_forward_hook(lambda module, args, output: output / (output * 0))
    return step_of(parts)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "dp_shard": "full"}, {"tp": 2}, {"pp": 2}])
def test_the_guilty_rank_alone_leaves_a_dump(tmp_path: Path, layout: dict[str, Any]) -> None:
    job = toy_job(layout=layout)
    messages = run_ranks(2, activation_of_rank_1, str(tmp_path), job, timeout_s=240)
    assert messages[0] == messages[1] and "made by aten.div.Tensor of blocks.1" in messages[0]
    (note,) = dump_notes(tmp_path / "dumps")
    assert (note.rank, note.operator) == (1, "aten.div.Tensor")
    record = read_record(note.path)
    assert record["collectives"] or layout == {"dp": 2}, "what was communicated last is in it"
    assert record["weights"] == (layout == {"dp": 2}), "only a rank with all weights can keep them"
    found = replay(note.path)
    assert found.cause is not None and found.cause.name == "other" and found.cause.value == 0.0
    assert found.verdict.kind == "data or code"


def gradient_of_rank_1(rank: int, world: int, folder: str, job: Job) -> tuple[str, int | None]:
    parts = dumping_parts(Path(folder), job, rank)
    if rank == 1:

        def spoil(module: Any, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: grad * float("nan"))

        parts.module.block(1).register_forward_hook(spoil)
    with pytest.raises(NonFinite) as raised:
        list(run_steps(parts, 1, 2))
    return raised.value.message, raised.value.rank


def test_of_sharded_gradients_too_the_rank_that_made_it_is_named(tmp_path: Path) -> None:
    job = toy_job(layout={"dp": 2, "dp_shard": "full"})
    for message, rank in run_ranks(2, gradient_of_rank_1, str(tmp_path), job, timeout_s=240):
        assert rank == 1 and re.search(r"the summed gradient of .* made by aten.mul.Tensor.*, backward", message), (
            message
        )
    (note,) = dump_notes(tmp_path / "dumps")
    assert (note.rank, note.operator) == (1, "aten.mul.Tensor")


class Sabotage:
    """A processor that gives wrong results for a while: the next `times` times that a product is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        whole = FirstBad._run

        def run(watch: FirstBad, func: Any, args: Any, kwargs: Any) -> Any:
            result = whole(watch, func, args, kwargs)
            if self.left and re.search("mm|linear", str(func)) and watch.place == "blocks.1.mlp.down":
                self.left -= 1
                result.view(-1)[7] = float("nan")
            return result

        monkeypatch.setattr(FirstBad, "_run", run)


def spoil_original(parts: Assembly, times: int) -> None:
    """The passes of the step itself give a bad value, for so many forward passes."""
    left = [times]

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            return output + torch.tensor(float("nan"))
        return output

    parts.module.block(1).register_forward_hook(hook)


def test_a_result_that_does_not_repeat_is_the_hardwares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dumping_parts(tmp_path, toy_job())
    spoil_original(parts, times=8)  # four micro-batches of the step, and as many of the first look at them
    Sabotage(monkeypatch, times=1)  # then the operator is seen to go wrong, and right when it is called again
    assert " of blocks.1.mlp.down" in step_of(parts)
    found = replay(tmp_path / "dumps" / "dump-1")
    assert found.element is not None and found.element.index[-1] == 7, "of the result as it was on the rank"
    assert [run.again for run in found.runs if run.what == "the operator, here"] == [False]
    assert found.record["operator"]["repeats"] is False
    verdict = found.verdict
    assert (verdict.kind, verdict.confidence) == ("hardware", 0.6), "the passes were bad again there, the operator not"


def test_a_step_that_does_not_repeat_at_all_is_the_hardwares(tmp_path: Path) -> None:
    parts = dumping_parts(tmp_path, toy_job())
    spoil_original(parts, times=1)
    message = step_of(parts)
    assert message.startswith("the gradient of") and "no pass gives a bad value when it is run again" in message
    found = replay(tmp_path / "dumps" / "dump-1")
    assert found.record["again"] == {"reference": False, "native": False}
    assert (found.verdict.kind, found.verdict.confidence) == ("hardware", 0.9), str(found)


def test_redacted_dumps_hold_no_token(tmp_path: Path) -> None:
    job = toy_job(inspect={"redact": True})
    parts = dumping_parts(tmp_path, job)
    parts.module.block(1).register_forward_hook(lambda module, args, output: output * float("inf"))
    step_of(parts)
    record = read_record(tmp_path / "dumps" / "dump-1")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "dumps" / "dump-1" / "tensors.safetensors")
    whole = [name for name, t in tensors.items() if not t.is_floating_point() and name != "random.cpu"]
    assert whole and all(not tensors[name].any() for name in whole)
    assert record["redacted"] and record["micro_batches"][0]["samples"] == [8, 9], "positions say where the data lies"


def test_an_exception_is_kept_with_its_stack_and_tensors(tmp_path: Path) -> None:
    parts = dumping_parts(tmp_path, toy_job())
    passes = parts.step.passes

    def raises(module: Any, args: Any) -> None:
        hidden = args[0] @ torch.ones(7, 3)  # of shapes that don't fit
        del hidden

    parts.module.block(1).mlp.register_forward_pre_hook(raises)
    with pytest.raises(RuntimeError) as raised:
        list(run_steps(parts, 1, 2))
    assert passes.dumps is not None
    passes.dumps.exception(passes, 1, raised.value)
    path = tmp_path / "dumps" / "dump-1"
    assert str(path) in raised.value.__notes__[0]
    record = read_record(path)
    assert record["kind"] == "exception" and record["module"] == "blocks.1" and "test_dumps.py" in record["stack"][0]
    assert record["micro_batches"][0]["samples"] == [8, 9]
    found = replay(path)
    assert found.verdict.kind == "unknown", "the hook was of that process"


def test_errors_of_peers_and_of_requests_leave_no_dump(tmp_path: Path) -> None:
    parts = dumping_parts(tmp_path, toy_job())
    passes = parts.step.passes
    assert passes.dumps is not None
    passes.dumps.exception(passes, 0, RuntimeError("[gloo] Connection closed by peer"))
    passes.dumps.exception(passes, 0, NonFinite("named already"))
    assert not (tmp_path / "dumps").exists()


def test_a_failed_kernel_links_cudas_core_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_COREDUMP_FILE", str(tmp_path / "core.%p.%t"))
    parts = dumping_parts(tmp_path, toy_job())
    passes = parts.step.passes
    assert passes.dumps is not None
    (tmp_path / f"core.{os.getpid()}.17").write_bytes(b"x" * 1234)
    passes.dumps.exception(passes, 0, RuntimeError("CUDA error: device-side assert triggered"))
    record = read_record(tmp_path / "dumps" / "dump-1")
    assert record["kind"] == "kernel" and record["core_file"]["bytes"] == 1234
    assert "1,234 bytes" in str(replay(tmp_path / "dumps" / "dump-1"))


def test_an_error_while_dumping_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    parts = dumping_parts(tmp_path, toy_job(), told=told)
    parts.module.block(1).register_forward_hook(lambda module, args, output: output * float("inf"))
    (tmp_path / "dumps").write_text("a file where the folder should be")
    assert "the output of blocks.1 is not finite" in step_of(parts)
    assert told[0][0] == "dump_failed" and "FileExistsError" in told[0][1]["why"]


def test_bytes_are_bounded_by_the_job(tmp_path: Path) -> None:
    parts = dumping_parts(tmp_path, toy_job(inspect={"dump_mb": 0.02}))
    parts.module.block(1).register_forward_hook(lambda module, args, output: output * float("inf"))
    step_of(parts)
    path = tmp_path / "dumps" / "dump-1"
    assert (path / "tensors.safetensors").stat().st_size < 20_000 + 4096
    record = read_record(path)
    assert not record["weights"] and record["operator"]["whole"], "the operator comes first"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_verb_replays_a_dump(tmp_path: Path) -> None:
    parts = dumping_parts(tmp_path, toy_job())
    parts.module.block(1).register_forward_hook(lambda module, args, output: output * float("inf"))
    step_of(parts)
    landing = [sys.executable, "-m", "bessemer.cli", "landing"]
    path = str(tmp_path / "dumps" / "dump-1")
    done = subprocess.run([*landing, "--replay", path, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["operator"] == "aten.mul.Tensor" and said["cause"]["name"] == "other"
    wrong = subprocess.run(landing, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--replay" in wrong.stderr
