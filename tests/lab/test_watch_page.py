"""`bessemer lab precision`: reading the samples of a run, the advice, the table and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train.loops import rank_main, small_job, vault

from bessemer import api
from bessemer.cli import main
from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.data import prepare
from bessemer.lab.watch import Watched, read_watch
from bessemer.lab.watch_advice import Advice, advise
from bessemer.lab.watch_page import page_html

NAMES = [f"layers.{layer}.{kind}" for layer in range(2) for kind in ("attn.q", "mlp.down")]
EXPONENTS = (-24, 16)


def figures(**changed: Any) -> dict[str, Any]:
    """A sample in which everything is well; `x_error=[...]` replaces a figure."""
    ones = [1.0] * len(NAMES)
    role = {
        "amax": ones, "scale_low": ones, "scale_high": ones, "saturated": [0.0] * 4, "flushed": [1e-5] * 4,
        "histogram": [[-3, 1000, 4000, 5000]] * 4,
    }  # fmt: skip
    sample = {r: role | {"error": [e] * 4} for r, e in (("x", 0.0265), ("weight", 0.0265), ("grad", 0.053))}
    sample["x"] = sample["x"] | {"spread": [1.0] * 4}
    for name, values in changed.items():
        key, _, figure = name.partition("_")
        sample[key] = sample[key] | {figure: values}
    return sample | {"result": [0.0375] * 4}


def write_run(
    folder: Path, samples: dict[int, dict[str, Any]], *, falls: list[dict[str, Any]] | None = None, **precision: Any
) -> Path:
    job = Job.model_validate(
        {
            "run": {"name": folder.name, "dir": str(folder.parent)},
            "train": {"steps": 100, "warmup_steps": 2},
            "precision": {"recipe": "fp8-current", "watch_every": 1} | precision,
        }
    )
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(dump_job(job))
    events: list[dict[str, Any]] = [{"t": 0.0, "event": "start", "world_size": 1}]
    if job.precision.watch_every:
        events.append({"t": 1.0, "event": "watch", "every": 1, "names": NAMES, "exponents": EXPONENTS, "fallen": {}})
    events += [{"t": 50.0, "event": "warning", "message": "..."} | fall for fall in falls or []]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    lines = [
        {"step": step, "samples": [0, 1], "step_s": 1.0, "t": 2.0 + step} | ({"precision": s} if s else {})
        for step, s in samples.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def found_in(run: Path, name: str = "layers.0.attn.q", role: str = "x") -> Advice:
    [advice] = [a for a in advise(read_watch(run)) if (a.name, a.role) == (name, role)]
    return advice


def steadily(sample: dict[str, Any], count: int = 6) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(1, count + 1), sample)


def with_amax(values: list[float], role: str = "x") -> dict[int, dict[str, Any]]:
    """In each sample the first tensor has the next amax."""
    return {i: figures(**{f"{role}_amax": [v, 1.0, 1.0, 1.0]}) for i, v in enumerate(values, 1)}


@pytest.mark.parametrize(
    ("amaxes", "advice"),
    [
        ([1.0, 1.1, 1.0, 1.2, 1.1], "delayed"),
        ([1.0, 1.1, 1.0, 1.6, 1.1], "margin"),
        ([1.0, 1.1, 1.0, 2.5, 1.1], "current"),
        ([1.0, 8.0, 1.0, 1.1, 1.0, 1.0], "delayed"),  # the burst is of the warm-up
        ([8.0, 4.0, 2.0, 1.0, 0.5, 0.25], "delayed"),  # falling costs a few of the smallest numbers, and clips none
    ],
)
def test_how_an_amax_moves_decides_between_tensor_scales(tmp_path: Path, amaxes: list[float], advice: str) -> None:
    found = found_in(write_run(tmp_path / "run", with_amax(amaxes)))
    assert found.advice == advice, found
    counted = amaxes[2:]
    rise = max(0.0, *(np.log2(b / max(counted[:i])) for i, b in enumerate(counted[1:], 1)))
    assert found.burst == pytest.approx(rise) and found.amax == amaxes[-1]


def test_recorded_histories_count_rather_than_samples(tmp_path: Path) -> None:
    """Under delayed scaling every step is in the histories: a burst between two samples is known."""
    sample = figures(grad_burst=[2.0, 0.1, 0.6, 0.1], grad_jump=[3.0, 0.1, 0.6, 0.1])
    run = write_run(tmp_path / "run", steadily(sample), recipe="fp8-delayed")
    assert [found_in(run, n, "grad").advice for n in NAMES] == ["current", "delayed", "margin", "delayed"]
    assert found_in(run, NAMES[0], "grad").jump == 3.0


@pytest.mark.parametrize(
    ("recipe", "changed", "name", "advice"),
    [
        ("fp8-current", {"x_flushed": [0.02] * 4}, "layers.0.attn.q", "block"),
        ("fp8-current", {"x_error": [0.05] * 4}, "layers.0.attn.q", "block"),
        ("fp8-current", {"x_flushed": [0.02] * 4, "x_spread": [6.0] * 4}, "layers.0.mlp.down", "smooth"),
        ("fp8-current", {"x_flushed": [0.02] * 4, "x_spread": [6.0] * 4}, "layers.0.attn.q", "block"),
        ("fp8-current", {"x_flushed": [0.02] * 4, "x_spread": [4.0] * 4}, "layers.0.mlp.down", "block"),
        ("fp8-row", {"x_flushed": [0.02] * 4}, "layers.0.mlp.down", "block"),
        ("fp8-block128", {"x_flushed": [0.02] * 4}, "layers.0.mlp.down", "mxfp8"),
        ("mxfp8", {"x_flushed": [0.02] * 4}, "layers.0.mlp.down", "bf16"),
        ("fp8-delayed", {"x_saturated": [0.002] * 4}, "layers.0.mlp.down", "current"),
        ("fp8-delayed", {"x_saturated": [0.0001] * 4, "x_error": [0.05] * 4}, "layers.0.mlp.down", "current"),
        ("fp8-delayed", {"x_saturated": [0.0001] * 4, "x_error": [0.03] * 4}, "layers.0.mlp.down", "delayed"),
    ],
)
def test_what_a_scale_loses_decides_the_grain(
    tmp_path: Path, recipe: str, changed: dict[str, Any], name: str, advice: str
) -> None:
    run = write_run(tmp_path / "run", steadily(figures(**changed)), recipe=recipe)
    assert found_in(run, name).advice == advice
    assert found_in(run, name, "weight").advice == "delayed", "another role isn't touched"


def test_smoothing_that_is_on_is_not_advised(tmp_path: Path) -> None:
    sample = figures(x_flushed=[0.02] * 4, x_spread=[6.0] * 4)
    run = write_run(tmp_path / "run", steadily(sample), smooth=True)
    assert found_in(run, "layers.0.mlp.down").advice == "block"


FALL = {"step": 4, "fall_back": ["layers.1.mlp.down"], "why": "layers.1.mlp.down: error of grad <0.2>"}


def test_what_fell_back_comes_first_and_missing_figures_are_no_zeros(tmp_path: Path) -> None:
    gone = {r: {"error": [0.0265, 0.0265, 0.0265, None]} for r in ("x", "weight", "grad")}
    later = figures() | {r: figures()[r] | gone[r] | {"histogram": [[0, 10000]] * 3 + [None]} for r in gone}
    run = write_run(tmp_path / "run", steadily(figures(), 4) | {5: later, 6: later}, falls=[FALL], fall_back=True)
    watched = read_watch(run)
    assert watched.fallen == {"layers.1.mlp.down": (4, FALL["why"])}
    assert [(a.name, a.advice) for a in advise(watched)[:3]] == [("layers.1.mlp.down", "fell back")] * 3
    assert np.isnan(watched.figures["x"]["error"][-1]).tolist() == [False, False, False, True]
    assert watched.histograms["x"][3].sum() == pytest.approx(1.0), "the mean of the samples that it is in"


def test_a_fall_of_steps_that_were_done_again_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steadily(figures(), 3), falls=[FALL], fall_back=True)
    assert read_watch(run).fallen == {}


def test_histograms_are_placed_by_their_first_exponent(tmp_path: Path) -> None:
    sample = figures(x_histogram=[[-3, 2500, 7500], [15, 10000], [-24, 10000], None])
    watched = read_watch(write_run(tmp_path / "run", steadily(sample)))
    places = [np.flatnonzero(row) + EXPONENTS[0] for row in watched.histograms["x"]]
    assert [p.tolist() for p in places] == [[-3, -2], [15], [-24], []]
    assert watched.histograms["x"][0][21:23].tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("samples", "precision", "said"),
    [
        (steadily({}), {"watch_every": 0}, "precision.watch_every = 0"),
        (steadily({}), {}, "no sample is in"),
    ],
)
def test_a_run_without_samples_is_told(
    tmp_path: Path, samples: dict[int, Any], precision: dict[str, Any], said: str
) -> None:
    run = write_run(tmp_path / "run", samples, **precision)
    with pytest.raises(RequestError, match=said) as caught:
        read_watch(run)
    assert caught.value.code == "no-watch" and "watch_every" in caught.value.fix
    with pytest.raises(RequestError) as caught:
        read_watch(tmp_path)
    assert caught.value.code == "no-run"


def check_page(page: str, watched: Watched) -> None:
    """Nothing from the network, nothing unescaped, and each plot is there with each kind of tensor."""
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert page.count("<svg") == 5 and page.count("</svg>") == 5
    for text in ("error of grad", "clipped, weight", "lost to 0, x", "e4m3", "Amax over time"):
        assert text in page
    for kind in {name.split(".", 2)[2] for name in watched.names}:
        assert page.count(f">{kind}</text>") == 5
    assert not re.search(r'[=", ]-?(nan|inf)[", ]', page.partition("<script>")[0])


def test_the_page_escapes_and_has_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steadily(figures()), falls=[FALL], fall_back=True)
    watched = read_watch(run)
    page = page_html(watched, advise(watched))
    check_page(page, watched)
    assert "&lt;0.2&gt;" in page and "<0.2>" not in page
    assert page.count('class="fell"') == 10, "in each heat map"


def test_zeros_and_a_single_sample_can_be_drawn(tmp_path: Path) -> None:
    """The gradient of a layer that learns nothing has amax 0 and no other figure."""
    sample = figures()
    sample["grad"] = {"amax": [0.0] * 4, "histogram": [None] * 4}
    watched = read_watch(write_run(tmp_path / "run", {5: sample}))
    found = advise(watched)
    check_page(page_html(watched, found), watched)
    assert {a.error for a in found if a.role == "grad"} == {None}


def test_many_layers_and_samples_stay_light(tmp_path: Path) -> None:
    """96 layers and 400 samples: lines are thinned, and the page stays below 8 MB."""
    watched = read_watch(write_run(tmp_path / "run", steadily(figures(), 3)))
    names = tuple(f"layers.{i}.{k}" for i in range(96) for k in ("attn.q", "attn.o", "mlp.gate", "mlp.up", "mlp.down"))
    draw = np.random.default_rng(0)
    shape = (400, len(names))
    roles = {r: {k: draw.random(shape) for k in watched.figures[r]} for r in watched.figures}
    many = Watched(
        **{
            **watched.__dict__,
            "names": names,
            "steps": np.arange(1, 401),
            "figures": roles,
            "results": draw.random(shape),
            "histograms": {r: draw.dirichlet(np.ones(40), len(names)) for r in roles},
        }
    )
    assert len(page_html(many, advise(many))) < 2**23


def test_the_verb_prints_the_worst_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steadily(figures(grad_flushed=[0.0, 0.5, 0.0, 0.0])), falls=[FALL])
    with pytest.raises(SystemExit) as ended:
        main(["lab", "precision", str(run), "--rows", "4"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("fp8-current, 4 tensors, 6 samples from step 1 to 6")
    assert [line.split()[:2] for line in lines[3:7]] == [
        ["layers.1.mlp.down", "x"], ["layers.1.mlp.down", "weight"], ["layers.1.mlp.down", "grad"],
        ["layers.0.mlp.down", "grad"],
    ]  # fmt: skip
    assert lines[6].endswith("block") and "50.00%" in lines[6]
    assert f"page: {run / 'precision.html'}" in lines
    assert (run / "precision.html").read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit):
        main(["lab", "precision", str(run), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert len(told["tensors"]) == 12 and told["fallen"]["layers.1.mlp.down"]["step"] == 4
    with pytest.raises(RequestError, match="nothing to print"):
        api.lab.precision(str(run), rows=0)


def test_a_real_run_is_read(tmp_path: Path) -> None:
    """What the loop records is what is read: each figure has its numbers, of each tensor and sample."""
    model = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 257}
    job = small_job(
        tmp_path,
        model=model,
        train={"steps": 6, "warmup_steps": 1},
        precision={"recipe": "fp8-delayed", "watch_every": 2},
    )
    prepare(job)
    with vault(job.run.folder) as socket:
        made = rank_main(0, 1, job, str(socket), None)
    folder = job.run.folder
    (folder / "job.toml").write_text(dump_job(job))
    events = [{"t": 0.0, "event": "start", "world_size": 1}, *({"t": 1.0} | e for e in made["events"])]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in made["metrics"]))
    watched = read_watch(folder)
    assert watched.steps.tolist() == [2, 4, 6] and len(watched.names) == 14
    for role, by_figure in watched.figures.items():
        for figure, values in by_figure.items():
            assert values.shape == (3, 14)
            assert np.isfinite(values).all() or (figure == "spread" and role != "x"), (role, figure)
        assert watched.histograms[role].sum(1) == pytest.approx(1.0, abs=5e-3)
    check_page(page_html(watched, advise(watched)), watched)
