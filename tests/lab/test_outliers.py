"""The outlier study: what is made loud and kept so, how results read, and that it goes on where it was stopped."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from train.toy import run_steps, toy_job, toy_parts

from bessemer.core.errors import BessemerError, NonFinite, RequestError, Stopped
from bessemer.keep.records import read_records
from bessemer.lab import outliers_training
from bessemer.lab.outliers import ARMS, BASE, CHANNELS, PLAIN, SMOOTH, OutlierRun, difference_of, gather, study
from bessemer.lab.outliers_training import Amplified, train_all, train_one
from bessemer.lab.progress import Progress
from bessemer.models.decoder import Decoder
from bessemer.models.parts import FeedForward

A = 64.0


def hidden(feed: FeedForward, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ feed.gate_up.weight.t()).chunk(2, dim=-1)
    return F.silu(gate) * up


def test_two_channels_are_loud_and_one_of_them_at_every_token() -> None:
    parts = toy_parts(toy_job())
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))
    model = cast(Decoder, parts.module)
    feeds = [cast(FeedForward, block.mlp) for _, block in model.held_blocks()]
    before = [(f.gate_up.weight.detach().clone(), f.down.weight.detach().clone()) for f in feeds]
    Amplified(model, A)
    for feed, (gate_up, down) in zip(feeds, before, strict=True):
        h, width = hidden(feed, x), feed.down.weight.shape[1]
        g = x @ gate_up[0]
        want = A**2 * torch.stack([g.relu() ** 2, (-g).relu() ** 2], dim=1)
        assert float((h[:, :CHANNELS] - want).detach().abs().max()) < 0.5  # silu(z) z - relu(z)^2 nowhere exceeds 0.48
        assert float(h[:, CHANNELS:].detach().abs().median()) < 1e-3 * float(
            h[:, :CHANNELS].detach().amax(dim=1).median()
        )
        assert torch.equal(feed.gate_up.weight[2:width], gate_up[2:width])
        assert torch.equal(feed.gate_up.weight[width + 2 :], gate_up[width + 2 :])
        assert torch.equal(feed.down.weight[:, 2:], down[:, 2:])
        assert torch.allclose(feed.down.weight[:, :2] * A**2, down[:, :2])


def test_loud_channels_stay_while_all_others_learn() -> None:
    parts = toy_parts(toy_job(train={"weight_decay": 0.1, "clip": 1e-3}))
    loud = Amplified(cast(Decoder, parts.module), A)
    feeds = [cast(FeedForward, block.mlp) for _, block in cast(Decoder, parts.module).held_blocks()]
    before = [(f.gate_up.weight.detach().clone(), f.down.weight.detach().clone()) for f in feeds]
    norms = []
    for result in run_steps(parts, 0, 3):
        norms.append(result.grad_norm)
        loud.restore()
    assert max(norms) < 50, "the loud columns of down would have gradients A^2 times as large"
    for feed, (gate_up, down) in zip(feeds, before, strict=True):
        same_rows = (feed.gate_up.weight == gate_up).all(dim=1)
        width = down.shape[1]
        assert same_rows.nonzero().flatten().tolist() == [0, 1, width, width + 1]
        assert (feed.down.weight == down).all(dim=0).nonzero().flatten().tolist() == [0, 1]


def test_every_arm_gets_every_seed() -> None:
    runs = study(256.0, 20, 3)
    assert len(runs) == 12 and [r.arm for r in runs[:4]] == list(ARMS)
    for run in runs:
        assert (run.job.precision.recipe, run.job.precision.smooth) == ARMS[run.arm]
    assert len({str(r.key) for r in runs}) == 12
    assert study(128.0, 20, 3)[0].key != runs[0].key


@pytest.mark.parametrize(
    ("request_", "code"),
    [((0.5, 20, 3), "lab-amplification"), ((256.0, 19, 3), "lab-steps"), ((256.0, 20, 1), "lab-seeds")],
)
def test_studies_that_answer_nothing_are_refused(request_: tuple[float, int, int], code: str) -> None:
    with pytest.raises(RequestError) as error:
        study(*request_)
    assert error.value.code == code and error.value.fix.startswith("--")


def made_up(run: OutlierRun, tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Seeds 0.1 apart; the plain recipe worse by 0.2, delayed by 0.3, smooth by what is noise."""
    worse = {BASE: 0.0, PLAIN: 0.2, "fp8-delayed": 0.3, SMOOTH: 0.0}[run.arm]
    small = np.random.default_rng([run.job.train.seed, len(run.arm)]).normal() * 0.01
    losses = [3.0 + 0.1 * run.job.train.seed + worse + float(small)] * run.steps
    tell({"step": run.steps, "loss": losses[-1]})
    return {"losses": losses, "val_loss": losses[-1] + 0.5, "seconds": 2.0}


GEMM = {1.0: dict.fromkeys(("bf16", "tensor", "stale", "row", "block", "mx", "nvfp4", "smooth", "zeros",
                            "smooth-zeros"), 0.25)}  # fmt: skip


def test_findings_are_paired_by_seed() -> None:
    runs = study(256.0, 20, 4)
    found = gather(runs, [made_up(run, lambda _: None) for run in runs], GEMM)
    for key in ("val_loss", "train_loss"):
        assert found.comparisons[PLAIN][key].mean == pytest.approx(0.2, abs=0.02)
        assert found.mended[key].mean == pytest.approx(-0.2, abs=0.02) and found.mended[key].high < 0
    arms = found.as_json()["arms"]
    findings = {arm: arms[arm]["comparisons"]["val_loss"]["finding"] for arm in arms if arm != BASE}
    assert findings == {
        PLAIN: "measurably worse", "fp8-delayed": "measurably worse", SMOOTH: "no measurable difference"
    }  # fmt: skip
    text = str(found)
    assert text.count("measurably worse") == 4 and "25.0%" in text and "A = 256: 20 steps, 4 seeds" in text
    assert difference_of(found).startswith("<svg") and SMOOTH in difference_of(found)


def diverging(*arms: str) -> Callable[..., dict[str, Any]]:
    """As `made_up`, but the second seed of `arms` ends without a loss."""

    def train(run: OutlierRun, tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        if run.arm in arms and run.job.train.seed == 1:
            return {"losses": [3.0], "val_loss": None, "seconds": 0.1}
        return made_up(run, tell)

    return train


@pytest.mark.parametrize("arms", [(PLAIN,), ("fp8-delayed", PLAIN, SMOOTH)])
def test_an_arm_that_diverges_is_told_and_left_at_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arms: tuple[str, ...]
) -> None:
    runs, file = study(256.0, 20, 2), tmp_path / "runs.jsonl"
    monkeypatch.setattr(outliers_training, "train_one", diverging(*arms))
    said = io.StringIO()
    records = train_all(runs, file, Progress(runs, said))
    monkeypatch.setattr(outliers_training, "train_one", lambda *_: pytest.fail("a diverged run was trained again"))
    assert train_all(runs, file, Progress(runs, said)) == records
    assert said.getvalue().count("diverged") == 2 * len(arms)
    found = gather(runs, records, GEMM)
    assert found.diverged == dict.fromkeys(arms, (1,)) and found.mended == {}
    assert set(found.losses) == set(ARMS) - set(arms) == {BASE, *found.comparisons}
    written = found.as_json()["arms"]
    assert written[PLAIN] == {"losses": {}, "comparisons": {}, "diverged_seeds": [1]}
    assert written[BASE]["diverged_seeds"] == [] and set(written) == set(ARMS)
    assert str(found).count("diverged in 1 of 2 seeds") == 2 * len(arms)
    assert difference_of(found).startswith("<svg")


def test_a_study_without_its_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = study(256.0, 20, 2)
    monkeypatch.setattr(outliers_training, "train_one", diverging(BASE))
    for _ in range(2):
        with pytest.raises(BessemerError) as error:
            train_all(runs, tmp_path / "runs.jsonl", Progress(runs, io.StringIO()))
        assert error.value.code == "lab-reference-diverged"
    assert len(list(read_records(tmp_path / "runs.jsonl"))) == 5


def test_a_run_ends_where_it_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise NonFinite("the loss is nan")

    class Step:
        run = staticmethod(refused)

    class Parts:
        module, step = None, Step

    monkeypatch.setattr(outliers_training, "assemble", lambda *_: Parts)
    monkeypatch.setattr(outliers_training, "Amplified", lambda *_: None)
    record = train_one(study(256.0, 20, 2)[0], lambda _: None)
    assert record["val_loss"] is None and record["losses"] == []


def test_a_study_goes_on_behind_its_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, file, trained = study(256.0, 20, 2), tmp_path / "runs.jsonl", []

    def stopped_in_the_third(run: OutlierRun, tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        trained.append(run.title)
        if len(trained) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return made_up(run, tell)

    monkeypatch.setattr(outliers_training, "train_one", stopped_in_the_third)
    with pytest.raises(Stopped) as stop:
        train_all(runs, file, Progress(runs, io.StringIO()))
    assert "2 of 8 runs" in stop.value.message and len(list(read_records(file))) == 2
    trained.append("the third comes only once")
    said = io.StringIO()
    records = train_all(runs, file, Progress(runs, said))
    assert len(trained) == 4 + 6 and trained[4] == runs[2].title
    assert records == list(read_records(file)) and said.getvalue().count("is there already") == 2
    louder = study(512.0, 20, 2)
    assert len(train_all(louder, file, Progress(louder, io.StringIO()))) == 8 and len(trained) == 4 + 6 + 8


@pytest.mark.slow
@pytest.mark.timeout(900)  # 9 runs of 100 steps, some 7 CPU seconds each: shorter ones don't tell the arms apart
def test_plain_fp8_trains_measurably_worse_and_smooth_swiglu_mends_it() -> None:
    """As `bessemer lab outliers --seeds 3` without its fourth arm."""
    runs = [run for run in study(1024.0, 100, 3) if run.arm != "fp8-delayed"]
    found = gather(runs, [train_one(run, lambda _: None) for run in runs], GEMM)
    for key in ("val_loss", "train_loss"):
        plain, smooth, mended = (c[key] for c in (found.comparisons[PLAIN], found.comparisons[SMOOTH], found.mended))
        assert plain.low > 0, "the plain recipe is measurably worse than bf16"
        assert mended.high < 0, "Smooth-SwiGLU is measurably better than the plain recipe"
        assert abs(smooth.mean) < plain.mean / 3, "and near bf16"
