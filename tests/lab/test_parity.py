"""The comparison of recipes with a trainer that only writes records, and once with real runs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from bessemer import api
from bessemer.cli import main
from bessemer.core.errors import BessemerError, ConfigError, RequestError, RunFolderError, Stopped
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.core.problem import Problem
from bessemer.core.problems import problems
from bessemer.keep.records import RecordWriter
from bessemer.lab.parity import DIVERGED, analyse, curves
from bessemer.lab.parity_driver import train_all
from bessemer.lab.parity_jobs import LabRun, check_folders, lab_jobs, recipe_names, tail_mean
from bessemer.lab.parity_page import parity_plots, report_html, write_report
from bessemer.lab.plots import standalone
from bessemer.lab.progress import Progress
from bessemer.lab.statistics import WITHIN, WORSE

STEPS = 40
NAMES = ["bf16", "fp8-current", "mxfp8"]


def a_job(**sections: dict[str, Any]) -> Job:
    return Job.model_validate({"train": {"steps": STEPS, "seed": 5}} | sections)


def check(job: Job) -> list[Problem]:
    return problems(job, None, None)


def loss_of(run: LabRun, step: int) -> float:
    """Falls from 5 to 2; seeds lie 0.1 apart, mxfp8 is worse by 0.3, and what remains is small."""
    small = np.random.default_rng([run.seed, len(run.recipe)]).normal() * 0.01
    return 2 + 3 * (1 - step / run.steps) + 0.1 * (run.seed - 6) + 0.3 * (run.recipe == "mxfp8") + float(small)


class Writer:
    """A trainer that goes on behind the records of a run folder; `stop_in` names the run that it stops in half-way,
    with `failure` as the code of its last event, and `diverge_in` those that are no number half-way."""

    def __init__(self, stop_in: str = "", code: int = 0, failure: str = "", diverge_in: tuple[str, ...] = ()) -> None:
        self.stop_in, self.code, self.failure, self.diverge_in = stop_in, code, failure, diverge_in
        self.trained: list[tuple[str, int]] = []

    def __call__(self, run: LabRun, job_file: Path, tell: Callable[[dict[str, Any] | None], None]) -> int:
        assert job_file.read_text() == dump_job(run.job)
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "job.toml").write_text(dump_job(run.job))
        done = len(run.records())
        self.trained.append((run.job.run.name, done))
        diverges = run.job.run.name in self.diverge_in
        last = STEPS // 2 if diverges or run.job.run.name == self.stop_in else STEPS
        tell(None)
        with RecordWriter(run.folder / "events.jsonl") as events:
            events.write({"event": "start"})
        with RecordWriter(run.folder / "metrics.jsonl") as metrics:
            for step in range(done + 1, last + 1):
                record = {"step": step, "loss": loss_of(run, step), "step_s": 0.5}
                metrics.write(record | ({"val_loss": loss_of(run, step) + 0.1} if step == STEPS else {}))
                tell(record)
        with RecordWriter(run.folder / "events.jsonl") as events:
            if diverges or last < STEPS:
                code = "non-finite" if diverges else self.failure
                events.write({"event": "failed", "code": code} if code else {"event": "stopped"})
                return 1 if diverges else self.code
            events.write({"event": "finished", "step": STEPS})
        return 0


def series(folder: Path, names: list[str] = NAMES, seeds: int = 3, job: Job | None = None) -> list[LabRun]:
    return lab_jobs(job or a_job(), names, seeds, folder, check)


def trained(runs: list[LabRun], folder: Path, writer: Writer | None = None) -> str:
    """Train all; what was said."""
    said = io.StringIO()
    train_all(runs, folder / "jobs", Progress(runs, said), writer or Writer())
    return said.getvalue()


def test_names_may_be_short_and_the_reference_comes_first() -> None:
    assert recipe_names("current, mxfp8,delayed") == ["bf16", "fp8-current", "mxfp8", "fp8-delayed"]
    assert recipe_names("fp8-row,bf16,block128") == ["bf16", "fp8-row", "fp8-block128"]
    for wrong in ("current,fp8-current", "bf16", "", ","):
        with pytest.raises(RequestError) as error:
            recipe_names(wrong)
        assert error.value.code == "lab-recipes"
    with pytest.raises(ConfigError) as unknown:
        recipe_names("bf16,mxfp9")
    assert unknown.value.problems[0].code == "recipe-unknown" and "mxfp8" in unknown.value.problems[0].fix


def test_every_recipe_gets_every_seed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = series(tmp_path)
    assert [(r.recipe, r.seed) for r in runs] == [(name, seed) for seed in (5, 6, 7) for name in NAMES]
    assert len({r.folder for r in runs}) == 9 and runs[4].folder == tmp_path / "fp8-current-seed-6"
    for run in runs:
        same = run.job.model_copy(update={k: getattr(a_job(), k) for k in ("run", "keep")})
        assert same == a_job(precision={"recipe": run.recipe}, train={"steps": STEPS, "seed": run.seed})


def test_a_setting_that_one_recipe_reads_is_dropped_for_the_others(tmp_path: Path) -> None:
    job = a_job(precision={"history": 32, "stochastic": True})
    runs = series(tmp_path, ["bf16", "fp8-delayed", "fp8-current"], job=job)
    got = {r.recipe: (r.job.precision.history, r.job.precision.stochastic, set(r.dropped)) for r in runs}
    assert got == {
        "bf16": (None, False, {"precision.history", "precision.stochastic"}),
        "fp8-delayed": (32, True, set()),
        "fp8-current": (None, True, {"precision.history"}),
    }
    assert all(check(run.job) == [] for run in runs)


def test_a_setting_that_no_recipe_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        series(tmp_path, job=a_job(precision={"history": 32}))
    assert [(p.code, p.where) for p in error.value.problems] == [("ignored-setting", "precision.history")]


def test_what_is_wrong_with_any_job_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        series(tmp_path, ["bf16", "fp16"])
    assert [p.code for p in error.value.problems] == ["not-runnable"]


@pytest.mark.parametrize(
    ("seeds", "job", "code"), [(1, a_job(), "lab-seeds"), (3, a_job(run={"resume": "never"}), "lab-resume")]
)
def test_requests_that_compare_nothing_are_refused(tmp_path: Path, seeds: int, job: Job, code: str) -> None:
    with pytest.raises(RequestError) as error:
        series(tmp_path, seeds=seeds, job=job)
    assert error.value.code == code and not list(tmp_path.iterdir())


def test_a_finished_run_is_used_again_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    runs, first = series(tmp_path), Writer(stop_in="fp8-current-seed-5", code=Stopped.exit_code)
    with pytest.raises(Stopped):
        trained(runs, tmp_path, first)
    assert first.trained == [("bf16-seed-5", 0), ("fp8-current-seed-5", 0)]
    second = Writer()
    said = trained(series(tmp_path), tmp_path, second)
    assert second.trained[0] == ("fp8-current-seed-5", STEPS // 2) and len(second.trained) == 8
    assert "run 1/9  bf16 seed 5  is there already" in said
    third = Writer()
    trained(series(tmp_path), tmp_path, third)
    assert third.trained == []


def test_a_run_that_fails_ends_the_series_and_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(BessemerError) as error:
        trained(series(tmp_path), tmp_path, Writer(stop_in="mxfp8-seed-5", code=1, failure="crash"))
    assert error.value.code == "lab-run-failed" and error.value.exit_code == 1
    assert str(tmp_path / "jobs" / "mxfp8-seed-5.toml") in error.value.fix


def test_a_run_that_diverges_is_left_at_that_and_the_others_go_on(tmp_path: Path) -> None:
    gone = ("mxfp8-seed-5", "mxfp8-seed-7")
    first = Writer(diverge_in=gone)
    said = trained(series(tmp_path), tmp_path, first)
    assert len(first.trained) == 9 and said.count("diverged") == 2 and "run 3/9  mxfp8 seed 5  diverged" in said
    second, runs = Writer(), series(tmp_path)
    said = trained(runs, tmp_path, second)
    assert second.trained == [] and said.count("diverged") == 2 and said.count("is there already") == 7
    found, lines = analyse("job", {}, runs)
    assert found.verdict("mxfp8") == DIVERGED and found.verdict("fp8-current") == WITHIN
    assert "mxfp8" not in found.losses and "mxfp8" not in found.comparisons and "mxfp8" not in lines.losses
    written = found.as_json()["recipes"]
    assert list(written) == NAMES and written["fp8-current"]["diverged_seeds"] == []
    assert written["mxfp8"] == {"losses": {}, "step_s": None, "dropped_settings": [], "diverged_seeds": [5, 7],
                                "verdict": "diverged", "comparisons": {}}  # fmt: skip
    assert found.text().count("diverged in 2 of 3 seeds") == 2
    page = report_html(found, lines)
    assert page.count("diverged in 2 of 3 seeds") == 2 and "3 recipes x 3 seeds" in page


def test_a_page_can_be_made_where_every_recipe_diverged(tmp_path: Path) -> None:
    runs = series(tmp_path, ["bf16", "mxfp8"], seeds=2)
    trained(runs, tmp_path, Writer(diverge_in=("mxfp8-seed-5", "mxfp8-seed-6")))
    found, lines = analyse("job", {}, runs)
    assert found.noise("val_loss") == pytest.approx(0.0707, abs=0.02)  # of two values 0.1 apart
    write_report(found, lines, tmp_path)
    assert "diverged in 2 of 2 seeds" in (tmp_path / "report.html").read_text()
    for svg in parity_plots(found, lines).values():
        ElementTree.fromstring(standalone(svg))


def test_nothing_is_compared_with_a_reference_that_diverged(tmp_path: Path) -> None:
    first = Writer(diverge_in=("bf16-seed-6",))
    for writer, count in ((first, 4), (Writer(), 0)):
        with pytest.raises(BessemerError) as error:
            trained(series(tmp_path), tmp_path, writer)
        assert error.value.code == "lab-reference-diverged" and "bf16 seed 6" in error.value.message
        assert len(writer.trained) == count


@pytest.mark.parametrize(
    ("events", "diverged"),
    [([], False), ([{"event": "failed", "code": "crash"}], False), ([{"event": "failed", "code": "non-finite"}], True),
     ([{"event": "failed", "code": "non-finite-amax"}], True),
     ([{"event": "failed", "code": "non-finite"}, {"event": "start"}], False)],
)  # fmt: skip
def test_only_the_newest_attempt_says_whether_a_run_diverged(
    tmp_path: Path, events: list[dict[str, Any]], diverged: bool
) -> None:
    run = series(tmp_path)[0]
    run.folder.mkdir(parents=True)
    with RecordWriter(run.folder / "events.jsonl") as writer:
        for event in events:
            writer.write(event)
    assert run.diverged is diverged and not run.finished


def test_a_validation_loss_that_is_no_number_is_a_divergence(tmp_path: Path) -> None:
    run = series(tmp_path)[0]
    run.folder.mkdir(parents=True)
    with RecordWriter(run.folder / "events.jsonl") as events, RecordWriter(run.folder / "metrics.jsonl") as metrics:
        metrics.write({"step": STEPS, "loss": 9.0, "val_loss": float("nan")})
        events.write({"event": "finished"})
    assert run.diverged and not run.finished


def test_a_divergence_before_the_first_step_is_of_its_job_only(tmp_path: Path) -> None:
    run = series(tmp_path)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "job.toml").write_text(dump_job(run.job))
    with RecordWriter(run.folder / "events.jsonl") as events:
        events.write({"event": "failed", "code": "non-finite"})
    check_folders(series(tmp_path))
    with pytest.raises(RunFolderError):
        check_folders(series(tmp_path, job=a_job(train={"steps": STEPS, "lr": 0.1, "seed": 5})))


@pytest.mark.parametrize(
    "changed",
    [{"train": {"steps": STEPS, "lr": 0.1, "seed": 5}}, {"train": {"steps": STEPS, "seed": 5, "eval_sequences": 8}},
     {"layout": {"dp": 2}}, {"train": {"steps": STEPS, "seed": 5, "micro_batch": 4}}],
)  # fmt: skip
def test_folders_of_other_runs_are_refused_before_anything_starts(tmp_path: Path, changed: dict[str, Any]) -> None:
    trained(series(tmp_path), tmp_path)
    check_folders(series(tmp_path, job=a_job(keep={"every": 7})))  # moves no loss
    with pytest.raises(RunFolderError) as error:
        check_folders(series(tmp_path, job=a_job(**changed)))
    assert error.value.code == "lab-other-runs"
    assert any(name in error.value.message for name in ("lr", "eval_sequences", "layout.dp", "micro_batch"))


def test_progress_tells_run_step_loss_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bessemer.lab.progress.time.monotonic", lambda: now[0])
    runs = series(tmp_path, seeds=2)
    said = io.StringIO()
    progress = Progress(runs, said)
    progress.begin(5, runs[4])
    progress.tell(None)
    for step in range(1, 21):  # a second a step; a line every 15 s
        now[0] += 1.0
        progress.tell({"step": step, "loss": 3.25})
    lines = said.getvalue().splitlines()
    assert lines == [
        "run 5/6  fp8-current seed 6  starts",
        "run 5/6  fp8-current seed 6  step 15/40  loss 3.2500  25.0 s left, 1 min 05 s for all",
    ]


def test_curves_and_tails_are_means_of_windows() -> None:
    found = curves({"bf16": np.arange(200.0).reshape(1, 200)})
    assert list(found.steps[:3]) == [4, 8, 12] and len(found.steps) == 50
    assert list(found.losses["bf16"][0, :2]) == [1.5, 5.5]
    assert tail_mean([float(i) for i in range(20)]) == 18.5 and tail_mean([2.0]) == 2.0


def test_the_report_says_what_the_runs_did(tmp_path: Path) -> None:
    runs = series(tmp_path)
    trained(runs, tmp_path)
    found, lines = analyse("a <job>", {"model": "small & plain"}, runs)
    assert found.verdict("fp8-current") == WITHIN and found.verdict("mxfp8") == WORSE
    compared = found.comparisons["mxfp8"]["val_loss"]
    want = [loss_of(m, STEPS) - loss_of(b, STEPS) for b, _, m in zip(*[iter(runs)] * 3, strict=True)]
    assert compared.differences == pytest.approx(want) and compared.noise == pytest.approx(0.1, abs=0.02)
    text = found.text()
    assert "seed noise 0.1" in text and text.count(WORSE) == 2 and text.count(WITHIN) == 2
    page = report_html(found, lines)
    assert "a &lt;job&gt;" in page and "small &amp; plain" in page and page.count(WORSE) == 2
    for svg in parity_plots(found, lines).values():
        root = ElementTree.fromstring(standalone(svg))
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "fp8-current" in svg and "mxfp8" in svg
    write_report(found, lines, tmp_path)
    written = json.loads((tmp_path / "parity.json").read_text())
    assert written == json.loads(json.dumps(found.as_json()))
    assert {p.name for p in tmp_path.glob("*.svg")} == {f"{name}.svg" for name in parity_plots(found, lines)}


def test_the_verb_refuses_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[precision]\nhistory = 8\n[run]\ndir = "%s"\n' % tmp_path)  # noqa: UP031 - braces of TOML
    for arguments, word in (
        (["--recipes", "mxfp9"], "recipe-unknown"),
        (["--seeds", "1"], "lab-seeds"),
        (["--recipes", "current"], "precision.history"),
        (["--set", "train.stepz=3"], "train.steps"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["lab", "parity", str(file), *arguments])
        assert ended.value.code == 2 and word in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # four runs, each with processes of its own that load torch
def test_real_runs_are_compared_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.loops import small_job

    job = small_job(tmp_path, train={"steps": 6}, keep={"every": 0}, precision={"recipe": "bf16"}, data={"seq_len": 32})
    file = tmp_path / "job.toml"
    file.write_text(dump_job(job))
    report = api.lab.parity(str(file), ["train.lr=0.02"], recipes="current", seeds=2)
    assert report.folder == tmp_path / "runs" / "small-parity"
    found = report.as_json()
    assert found["seeds"] == [1234, 1235] and list(found["recipes"]) == ["bf16", "fp8-current"]
    losses = {name: recipe["losses"]["val_loss"] for name, recipe in found["recipes"].items()}
    assert len({*losses["bf16"], *losses["fp8-current"]}) == 4, "every run has numbers of its own"
    assert all(abs(a - b) < 0.1 for a, b in zip(*losses.values(), strict=True)), "a seed's runs are alike"
    assert Path(found["report"]).read_text().count("fp8-current") > 3
    monkeypatch.setattr("bessemer.api._lab_parity.train_child", lambda *_: pytest.fail("a finished run was trained"))
    assert api.lab.parity(str(file), ["train.lr=0.02"], recipes="fp8-current", seeds=2).as_json() == found
