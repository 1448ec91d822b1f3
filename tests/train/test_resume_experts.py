"""Checkpoints of models with experts: stacked tensors and selection biases come back under another sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.loops import small_job, train
from train.toy import MODELS

from bessemer.train.opened import open_trained


def job_in(folder: Path, family: str, **layout: object):
    model = MODELS[family] | {"vocab_size": 257}
    steps = {"steps": 6, "global_batch": 8, "eval_sequences": 4}
    return small_job(folder, model=model, train=steps, keep={"every": 3}, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_run_goes_on_under_another_sharding(tmp_path, family):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole = train(job_in(tmp_path / "one", family))[0]
    first = train(job_in(tmp_path / "two", family, dp=2, dp_shard="full"), stop_at=3)[0]
    assert first["ended"] == "stopped"
    rest = train(job_in(tmp_path / "two", family))[0]
    assert whole["ended"] == rest["ended"] == ""
    losses = [m["loss"] for m in whole["metrics"]]
    resumed = [m["loss"] for m in first["metrics"] + rest["metrics"]]
    assert len(losses) == len(resumed) == 6 and losses[-1] < losses[0]
    assert resumed == pytest.approx(losses, abs=5e-5)
    balance = [m["experts"] for m in rest["metrics"]]
    assert all(b["dropped"] == 0 and min(b["imbalance"]) >= 1 for b in balance)
    biases = {k: v for k, v in rest["state"].items() if "router.bias" in k[0]}
    assert len(biases) == (0 if family == "mixtral" else 2) and all(bool(b.any()) for b in biases.values())
    reopened = open_trained(tmp_path / "two" / "runs" / "small").module()
    saved = {k[0]: v for k, v in rest["state"].items() if not k[0].startswith("optim.")}
    from bessemer.models.canonical import state

    assert all(torch.equal(value, saved[name]) for name, value in state(reopened))
