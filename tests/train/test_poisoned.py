"""A state that isn't finite, or that most contradict, is never the one that a run is left with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from train import loops
from train.faults import Fault
from train.fleet import Fleet
from train.loops import Recorder, small_job
from train.test_elastic import NAMES, _digests, _job, _undisturbed

from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.data import open_dataset, prepare
from bessemer.keep.checkpoint import CheckpointFolder
from bessemer.keep.vault_client import VaultClient
from bessemer.models.canonical import local
from bessemer.train.loop import Loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)


def _saving(job: Job) -> Job:
    """After each step."""
    return job.model_copy(update={"keep": job.keep.model_copy(update={"every": 1})})


def _saves(ended: dict[tuple[int, int, int], dict[str, Any]], place: int) -> dict[int, set[str]]:
    """By step the digests of what any group has saved of it."""
    found: dict[int, set[str]] = {}
    for (_, _, at), end in ended.items():
        for step, made in end["saves"].items() if at == place else ():
            found.setdefault(int(step), set()).add(made)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_stops_all_before_the_update(folder: Path, name: str) -> None:
    """On one rank of one group: nothing of it is in any state, and nothing from after it is saved."""
    job = _saving(_job(name))
    with Fleet(folder, job) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("nan", 4, place=fleet.block - 1) if group == 1 else None)
        ended = fleet.wait()
    assert len(ended) == 3 * fleet.block
    for (_, _, place), end in ended.items():
        assert end["ended"].startswith("non-finite"), end["ended"]
        assert max(_saves(ended, place)) == 4, "the step before"
        assert end["digest"] == ended[0, 0, place]["digest"]
    assert fleet.membership.step == 5, "the step was summed and voted for, and then refused by all"


@pytest.mark.parametrize("name", NAMES)
def test_what_most_contradict_is_not_saved(folder: Path, name: str) -> None:
    """The group that leads has a wrong bit in its sum; it is fenced before it can save, and the next one saves."""
    job = _saving(_job(name))
    with Fleet(folder, job) as fleet:
        for group in range(3):
            fleet.start(group)
        right = fleet.wait()
    (folder / "again").mkdir()
    with Fleet(folder / "again", job) as fleet:
        for group in range(3):
            fleet.start(group, fault=Fault("flip", 4, place=fleet.block - 1) if group == 0 else None)
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 10)
    for place in range(fleet.block):
        assert _saves(ended, place) == _saves(right, place)
        assert set(ended[0, 0, place]["saves"]) == {"1", "2", "3", "4"}
        assert set(ended[1, 0, place]["saves"]) == {str(step) for step in range(5, 11)}


class Poisoned(Loop):
    """A parameter is damaged in the memory of rank 1 after step 4."""

    def _save(self, step: int) -> None:
        if step == 4 and self.parts.mesh.rank == 1:
            with torch.no_grad():
                local(self.parts.optimizer.params["blocks.1.mlp.down.weight"])[0, 0] = float("inf")
        super()._save(step)


def poisoned(rank: int, world: int, job: Job, socket: str) -> tuple[int | None, int | None, str]:
    from train.toy import toy_parts

    with VaultClient(socket, rank=rank, world_size=world) as saver:
        loop = Poisoned(toy_parts(job, rank), open_dataset(job, "train"), None, Recorder(), saver, job.run.folder)
        try:
            loop.run()
        except NonFinite as error:
            return error.rank, error.step, error.message
    return None, None, "it was saved"


@pytest.mark.parametrize("layout", [{"dp": 2, "dp_shard": "full"}, {"tp": 2}])
def test_a_state_that_is_not_finite_does_not_push_out_a_sound_one(tmp_path: Path, layout: dict[str, Any]) -> None:
    job = small_job(tmp_path, layout=layout, keep={"every": 2, "keep_last": 1}, data={"val_fraction": 0.0})
    prepare(job)
    with loops.vault(job.run.folder, "--keep-last", "1") as socket:
        for found in run_ranks(2, poisoned, job, str(socket)):
            assert found[:2] == (1, 4) and "layers.1.mlp.down.weight" in found[2], found
    kept = CheckpointFolder(job.run.folder / "checkpoints")
    assert kept.steps() == [2] and kept.newest_verified().checkpoint is not None
