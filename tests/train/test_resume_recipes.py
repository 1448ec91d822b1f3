"""Two steps, a checkpoint and two more equal four steps, bit for bit, under each quantised recipe with all it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel.precision_parity import job_of
from torch import Tensor
from train.toy import run_steps, toy_parts

from bessemer.core.job import Job
from bessemer.core.recipes import RECIPES
from bessemer.keep.checkpoint import write_checkpoint
from bessemer.models.watched import held_troubles, refresh_fallen
from bessemer.train.assembly import Assembly
from bessemer.train.restore import checkpoint_meta, restore
from bessemer.train.state import FALL_BACK_PREFIX, owned_slices, state_slices

CASES = [
    *((recipe, family, True) for recipe in RECIPES if RECIPES[recipe].quantised for family in ("llama", "mixtral")),
    ("nvfp4", "llama", False),
    ("nvfp4", "mixtral", False),
]


def job_in(folder: Path, recipe: str, family: str, *, stochastic: bool) -> Job:
    switches = {
        "smooth": True, "saved": "fp8", "moments": "fp8", "watch_every": 1, "fall_back": True, "stochastic": stochastic,
    }  # fmt: skip
    job = job_of(recipe, family, precision=switches)
    return job.model_copy(update={"run": job.run.model_copy(update={"name": "run", "dir": str(folder)})})


def let_one_fall(parts: Assembly, step: int) -> str:
    """As if a layer had been in trouble in the last samples, so that the rest of the run depends on it; its state."""
    name, trouble = next(held_troubles(parts.module))
    trouble[1] = step
    refresh_fallen(parts.module)
    return FALL_BACK_PREFIX + name


def state(parts: Assembly) -> dict[tuple[str, tuple[int, ...]], Tensor]:
    return {(s.name, tuple(s.global_offset)): s.tensor.clone() for s in state_slices(parts.module, parts.optimizer)}


@pytest.mark.parametrize(("recipe", "family", "stochastic"), CASES)
def test_a_resumed_run_is_the_same_bits(tmp_path: Path, recipe: str, family: str, stochastic: bool) -> None:
    job = job_in(tmp_path, recipe, family, stochastic=stochastic)
    straight = toy_parts(job)
    list(run_steps(straight, 0, 2))
    fallen = let_one_fall(straight, 2)
    slices = owned_slices(straight.module, straight.optimizer, straight.mesh)
    write_checkpoint(job.run.folder / "checkpoints", 2, slices, checkpoint_meta(job, 2, "data"))
    resumed = toy_parts(job)
    assert restore(resumed, job.run.folder, "data").step == 2
    losses = [[r.loss for r in run_steps(parts, 2, 4)] for parts in (straight, resumed)]
    assert losses[0] == losses[1]
    wanted, found = state(straight), state(resumed)
    assert wanted.keys() == found.keys()
    assert [float(tensor[1]) for (name, _), tensor in found.items() if name == fallen] == [2]
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])] == []
