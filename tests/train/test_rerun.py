"""All copies run one unit now and then: a device that computes wrongly is named, and nothing else changes by it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train import loops
from train.faults import Fault
from train.fleet import Fleet
from train.loops import rank_main, small_job, train
from train.test_elastic import LAYOUTS, _digests, _job, _undisturbed
from train.toy import MIXTRAL, toy_job

from bessemer.core.job import Job
from bessemer.train.loop import Loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WRONG = 1
"""The rank whose gradients are a little off."""
SHAPES: dict[str, dict[str, Any]] = {
    "replicas": {"layout": {"dp": 3}},
    "zero-1": {"layout": {"dp": 4, "dp_shard": "optimizer"}, "keep": {"replicas": 2, "every": 4}},
    "zero-3": {"layout": {"dp": 4, "dp_shard": "full"}, "keep": {"replicas": 2, "every": 4}},
    "tp": {"layout": {"dp": 2, "tp": 2}},
    "pp": {"layout": {"dp": 2, "pp": 2}},
    "fp8": {"layout": {"dp": 2}, "precision": {"recipe": "fp8-delayed", "watch_every": 2}},
    "experts": {"model": MIXTRAL | {"vocab_size": 257}, "layout": {"dp": 2}},
}


def rerunning(folder: Path, shape: str, every: int) -> Job:
    fields = SHAPES[shape] | {"inspect": {"rerun_every": every}, "run": {"name": f"{shape}-{every}"}}
    return small_job(folder, **fields)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_run_again_leaves_no_trace(tmp_path: Path, shape: str) -> None:
    """The last state has the same bits, and so does every loss; nothing differs, nothing is told."""
    without, with_it = (train(rerunning(tmp_path, shape, every)) for every in (0, 2))
    for before, after in zip(without, with_it, strict=True):
        assert not before["ended"] and not after["ended"]
        assert [m["loss"] for m in before["metrics"]] == [m["loss"] for m in after["metrics"]]
        assert before["state"].keys() == after["state"].keys()
        for name, tensor in before["state"].items():
            assert torch.equal(tensor, after["state"][name]), name
        assert not [e for e in after["events"] if e["event"] in ("gradients", "parameters")]


def test_who_has_no_other_copy_compares_nothing() -> None:
    """A single copy, or a group that may be lost, which votes: neither reads its parameters for nothing."""

    class Alone(Loop):
        job = toy_job(inspect={"hash_every": 1, "rerun_every": 1})

        def __init__(self) -> None:
            self.parts: Any = SimpleNamespace(mesh=SimpleNamespace(group=lambda name: None))

        def _rerun(self, step: int) -> int | None:
            raise AssertionError("it was run")

    Alone()._compare_copies(1)
    Alone()._compare_work(1)


def a_wrong_device(rank: int, world: int, job: Job, socket: str, stop_at: int | None) -> dict[str, Any]:
    """As `loops.rank_main`; on one rank what an MLP gives is off by a thousandth."""
    from train import toy

    made = toy.toy_parts

    def parts_of(job: Job, rank: int = 0) -> Any:
        parts = made(job, rank)
        if rank == WRONG:
            parts.module.blocks["1"].mlp.register_forward_hook(lambda module, given, out: out * 1.001)
        return parts

    toy.toy_parts = parts_of
    return rank_main(rank, world, job, socket, stop_at)


@pytest.mark.parametrize(
    ("shape", "places", "odd"),
    [("replicas", [[0, 1, 2]], [WRONG]), ("zero-3", [[0, 2], [1, 3]], None)],
)
def test_a_device_that_computes_wrongly_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, places: list[list[int]], odd: list[int] | None
) -> None:
    """The sum and the parameters are the same everywhere: nothing else shows it. Of two copies, whose ranks sum inside
    each, it isn't known which is right."""
    monkeypatch.setattr(loops, "rank_main", a_wrong_device)
    job = rerunning(tmp_path, shape, 3)
    told = [e for end in train(job) for e in end["events"] if e["event"] in ("gradients", "parameters")]
    assert {e["event"] for e in told} == {"gradients"}
    for ranks in places:
        found = [e for e in told if e["ranks"] == ranks]
        assert [e["step"] for e in found] == [1, 4, 7, 10]
        for event in found:
            alone = [r for r, h in zip(ranks, event["hashes"], strict=True) if event["hashes"].count(h) == 1]
            assert alone == (odd or ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_group_that_computes_wrongly_is_put_out_before_its_work_counts(name: str) -> None:
    """Groups that may be lost vote on it: nothing of the wrong one from the compared step on is in any state."""
    job = _job(name)
    job = job.model_copy(update={"inspect": job.inspect.model_copy(update={"rerun_every": 2, "hash_every": 0})})
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path, Fleet(Path(path), job) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("wrong", 4, place=0) if group == 1 else None)
        ended = fleet.wait()
    for place in range(fleet.block):
        why = ended[1, 0, place]["ended"]
        assert why.startswith("fenced: its sum, its parameters or its rerun of step 5 differ"), why
    assert _digests(ended, groups=2) == _undisturbed(name, 10)
