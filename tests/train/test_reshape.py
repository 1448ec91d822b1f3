"""Any checkpoint under any layout: a run that changes its layout at every checkpoint against one that never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.parity import whole
from ranks import run_ranks
from train.loops import small_job, train
from train.toy import DEEPSEEK, MIXTRAL, MODEL

from bessemer.core.job import Job
from bessemer.data import open_dataset
from bessemer.train.restore import restore
from bessemer.train.state import state_slices

SP = {"sequence_parallel": True}
CHAINS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "dense": (
        MODEL | {"num_hidden_layers": 4},
        [
            {},
            {"tp": 2},
            {"tp": 4, **SP},
            {"dp": 2, "dp_shard": "full", "tp": 2},
            {"pp": 2},
            {"pp": 2, "schedule": "zb-v", "cp": 2},
            {"cp": 4, "cp_kind": "allgather"},
            {"pp": 4},
            {"dp": 2, "dp_shard": "optimizer", "pp": 2, "tp": 2, **SP},
            {},
        ],
    ),
    "mixtral": (
        MIXTRAL,
        [
            {},
            {"dp": 4, "ep": 4},
            {"tp": 2, "ep": 2},
            {"dp": 2, "dp_shard": "full", "etp": 2},
            {"dp": 2, "dp_shard": "full", "tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 2, **SP},
            {},
        ],
    ),
    "deepseek_v3": (
        DEEPSEEK,
        [{}, {"dp": 2, "ep": 2}, {"pp": 2, "tp": 2}, {"dp": 4, "dp_shard": "gradient", "ep": 2}, {"cp": 2}],
    ),
}
"""Family -> the layouts that a run goes through; each goes on from the checkpoint of the one before."""
STEPS = 2
"""of each layout"""


def restored_state(rank: int, world: int, job: Job) -> list[tuple[str, Any, Any, np.ndarray]]:
    """What a rank holds right after it was restored, before any step."""
    from train.toy import toy_parts

    parts = toy_parts(job, rank)
    restore(parts, job.run.folder, open_dataset(job, "train").fingerprint)
    slices = state_slices(parts.module, parts.optimizer)
    return [(s.name, s.global_shape, s.global_offset, s.tensor.clone().numpy()) for s in slices]


@pytest.mark.slow
@pytest.mark.parametrize("family", CHAINS)
def test_a_run_that_keeps_changing_its_layout_equals_one_that_does_not(tmp_path: Path, family: str) -> None:
    """Every restored tensor, optimizer included, is bitwise what was saved; samples are the same and losses within the
    layout promise."""
    model, layouts = CHAINS[family]
    total = STEPS * len(layouts)
    sections: dict[str, Any] = {
        "model": model | {"vocab_size": 257},
        "train": {"steps": total, "global_batch": 8, "micro_batch": 2, "seed": 17, "lr": 1e-3},
        "keep": {"every": 0},
    }
    (tmp_path / "straight").mkdir()
    (tmp_path / "moved").mkdir()
    straight = {m["step"]: m for m in train(small_job(tmp_path / "straight", **sections))[0]["metrics"]}
    saved: dict[str, np.ndarray] = {}
    for turn, layout in enumerate(layouts):
        job = small_job(tmp_path / "moved", **sections, layout=layout)
        if saved:
            found = whole(run_ranks(job.layout.world_size, restored_state, job))
            assert found.keys() == saved.keys()
            for name, tensor in found.items():
                assert np.array_equal(tensor, saved[name]), f"{name} changed between {layouts[turn - 1]} and {layout}"
        results = train(job, stop_at=STEPS * (turn + 1))
        assert results[0]["ended"] == ("" if turn == len(layouts) - 1 else "stopped"), results[0]["ended"]
        for metric in results[0]["metrics"]:
            expected = straight[metric["step"]]
            assert metric["samples"] == expected["samples"]
            assert metric["loss"] == pytest.approx(expected["loss"], abs=5e-6), (layout, metric["step"])
        saved = whole([[_plain(key, tensor) for key, tensor in r["state"].items()] for r in results])


def _plain(key: tuple[str, Any, Any], tensor: Any) -> tuple[str, Any, Any, np.ndarray]:
    name, shape, offset = key
    return name, shape, offset, tensor.numpy()
