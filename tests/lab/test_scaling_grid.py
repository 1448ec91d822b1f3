"""The grid behind a scaling law: its points, its records, its processes, and a tiny one from end to end."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bessemer.api._lab_scaling import scaling_law
from bessemer.core.errors import BessemerError, RequestError, Stopped
from bessemer.lab import scaling_driver
from bessemer.lab.scaling_driver import train_grid
from bessemer.lab.scaling_grid import (
    DEFAULT_MORE,
    GridPoint,
    GridSpec,
    bits_of,
    finished,
    grid,
    quantised_parameters,
    train_point,
)
from bessemer.lab.scaling_page import report_html
from bessemer.lab.scaling_report import analyse

WORKER = """
import json, sys
sys.path.insert(0, {source!r})
from bessemer.lab.scaling_grid import GridPoint
for line in sys.stdin:
    point = GridPoint(**json.loads(line))
    {before}
    print(json.dumps(dict(vars(point), key=point.key, parameters=1, trained_tokens=point.tokens, loss=2.0,
                          cpu_s=0.1, wall_s=0.1)), flush=True)
"""


def _points(count: int) -> list[GridPoint]:
    return [GridPoint(width=64, tokens=10_000 + i, weight="e2m1", inputs="e2m1") for i in range(count)]


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Workers that answer at once, after running a statement."""
    source = str(Path(__file__).parents[2] / "src")

    def install(before: str = "pass") -> None:
        script = tmp_path / "worker.py"
        script.write_text(WORKER.format(source=source, before=before))
        monkeypatch.setattr(scaling_driver, "WORKER", [str(script)])

    return install


def test_points_of_the_default_grid() -> None:
    points = grid(GridSpec(more=DEFAULT_MORE))
    assert len(points) == len({p.key for p in points})
    seeds = {(p.width, p.tokens, p.repeat): p.job("").train.seed for p in points}
    assert all(p.job("").train.seed == seeds[p.width, p.tokens, p.repeat] for p in points)
    assert len(set(seeds.values())) == len(seeds) == 16
    assert {p.width for p in points[:30]} == {64, 96, 160, 256}  # a part of it spans the whole
    assert {p.weight for p in points if p.weight != p.inputs} == {"bf16", "e1m1", "e2m1"}
    assert {bits_of(p.weight) for p in points} >= {(8, 7), (4, 3), (3, 2), (2, 2), (2, 1), (1, 1)}


def test_a_key_holds_what_decides_the_loss() -> None:
    base = GridPoint(width=64, tokens=20_000, weight="e2m1", inputs="e3m2", block=32)
    others = {"width": 96, "tokens": 30_000, "weight": "e2m2", "inputs": "bf16", "block": 0, "repeat": 1}
    keys = {dataclasses.replace(base, **{name: value}).key for name, value in others.items()}
    assert len(keys | {base.key}) == len(others) + 1
    assert dataclasses.replace(base).key == base.key


@pytest.mark.parametrize("name", ["e4", "m3", "e0m3", "e9m1", "e4m8", "fp8", "", "exmy"])
def test_words_that_are_no_format(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        bits_of(name)
    assert caught.value.code == "lab-format"


@pytest.mark.parametrize(("spec", "code"), [({"widths": (40,)}, "lab-width"), ({"tokens": (100,)}, "lab-tokens")])
def test_what_cannot_be_trained_is_refused(spec: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        grid(GridSpec(**spec))
    assert caught.value.code == code


def test_a_restart_trains_only_what_is_missing(tmp_path: Path, quick_workers: Any) -> None:
    """Of six points two are finished, one only as a torn line; the damage is cut off."""
    quick_workers()
    points, results, out = _points(6), tmp_path / "runs" / "results.jsonl", io.StringIO()
    train_grid(points[:2], results, cache="", workers=2, stream=out)
    whole = results.read_text()
    assert out.getvalue().splitlines()[-1].startswith("[####################] 2/2")
    results.write_text(whole + '{"key":"' + points[2].key + '","loss":2.')
    assert set(finished(results)) == {p.key for p in points[:2]}
    out = io.StringIO()
    train_grid(points, results, cache="", workers=2, stream=out)
    assert results.read_text().startswith(whole)
    assert [len(finished(results)), len(results.read_text().splitlines())] == [6, 6]
    said = out.getvalue().splitlines()
    assert len(said) == 4 and "3/6" in said[0] and "6/6" in said[-1]
    train_grid(points, results, cache="", workers=2, stream=io.StringIO())
    assert len(results.read_text().splitlines()) == 6


def test_a_dead_worker_is_named_and_its_neighbours_end(tmp_path: Path, quick_workers: Any) -> None:
    """The third point kills its process, while another would go on for a minute."""
    points = _points(3)
    slow = f"import os, time; os._exit(7) if point.tokens == {points[1].tokens} else time.sleep(0 if point.tokens < "
    quick_workers(f"{slow}{points[1].tokens} else 60)")
    results = tmp_path / "results.jsonl"
    start = time.monotonic()
    with pytest.raises(BessemerError, match="exit code 7") as caught:
        train_grid(points, results, cache="", workers=3, stream=io.StringIO())
    assert caught.value.code == "lab-worker" and time.monotonic() - start < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_on_request_keeps_what_is_finished(tmp_path: Path, quick_workers: Any, number: int) -> None:
    """The second point's process sends the driver a signal and would go on for a minute. A shell hands its background
    jobs an ignored SIGINT, which is no reason not to hear one."""
    points = _points(3)
    stop = f"import os, time; point.tokens == {points[1].tokens} and os.kill({os.getpid()}, {int(number)})"
    quick_workers(f"{stop}; time.sleep(0 if point.tokens == {points[0].tokens} else 60)")
    results = tmp_path / "results.jsonl"
    with pytest.raises(Stopped, match="1 points are kept"):
        train_grid(points, results, cache="", workers=1, stream=io.StringIO())
    assert set(finished(results)) == {points[0].key}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_end_with_their_driver(tmp_path: Path) -> None:
    """A driver that is killed outright leaves nobody behind, and what was finished stays."""
    program = (
        "import sys; from pathlib import Path; from bessemer.lab.scaling_driver import train_grid\n"
        "from bessemer.lab.scaling_grid import GridPoint\n"
        "from bessemer.data import prepare; from bessemer.core.job import DataSection\n"
        "points = [GridPoint(width=64, tokens=n, weight='bf16', inputs='bf16') for n in (600, 50_000_000)]\n"
        "cache = DataSection().cache; prepare(points[0].job(cache))\n"
        "train_grid(points, Path(sys.argv[1]), cache=cache, workers=2)\n"
    )
    results = tmp_path / "results.jsonl"
    driver = subprocess.Popen([sys.executable, "-c", program, str(results)], stderr=subprocess.DEVNULL)
    try:
        _wait(lambda: results.exists() and len(finished(results)) == 1)
        workers = [int(pid) for pid in Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()]
        assert len(workers) == 2
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    _wait(lambda: not any(_runs(pid) for pid in workers))
    assert len(finished(results)) == 1


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + 140
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_grid_from_end_to_end(tmp_path: Path) -> None:
    """Real models: the same point gives the same loss twice, a rounded one another; the laws are fitted, the page is
    written, and a second call trains nothing."""
    flags: dict[str, Any] = {
        "runs": str(tmp_path), "widths": "32,64", "tokens": "5120,10240", "formats": "bf16,e1m1,e2m0", "bootstrap": 20,
    }  # fmt: skip
    found = scaling_law(**flags, probes=False, workers=2)
    assert len(found.records) == 12 and found.missing == 0 and found.diverged == 0
    assert set(found.fits) == {"effective", "float"}
    assert "weights and inputs have the same bits everywhere" in str(found)
    assert "no points with blocks" in found.as_json()["laws"]["float"]["constants"]["t"]["why"]
    assert (tmp_path / "report.html").read_text().count("<svg") >= 4
    json.dumps(found.as_json(), allow_nan=False)
    assert all(2.0 < r["loss"] < 6.0 for r in found.records)
    before = (tmp_path / "results.jsonl").read_text()
    again = scaling_law(**flags, probes=False, workers=2)
    assert (tmp_path / "results.jsonl").read_text() == before
    assert again.as_json()["laws"] == found.as_json()["laws"]
    record = found.records[0]
    point = GridPoint(**{k: record[k] for k in GridPoint.__dataclass_fields__})
    assert train_point(point, "~/.cache/bessemer")["loss"] == record["loss"]
    assert record["parameters"] == quantised_parameters(point.width)
    missing = scaling_law(**flags, probes=True, fit_only=True)
    assert missing.missing > 0 and f"{missing.missing} not trained yet" in str(missing)


def _record(point: GridPoint, loss: float | None) -> dict[str, Any]:
    return {**vars(point), "key": point.key, "parameters": quantised_parameters(point.width),
            "trained_tokens": point.tokens, "loss": loss, "cpu_s": 1.0, "wall_s": 1.0}  # fmt: skip


def test_diverged_models_are_told_and_left_out(tmp_path: Path) -> None:
    points = grid(GridSpec(more=DEFAULT_MORE))
    records = [_record(p, None if i % 7 == 0 else 1.0 + 9 / p.tokens**0.2) for i, p in enumerate(points)]
    found = analyse(records, missing=0, samples=20, folder=tmp_path)
    assert found.diverged == sum(r["loss"] is None for r in records) > 0
    assert f"{found.diverged} diverged" in found.summary() and "diverged" in report_html(found)
    assert len(found.fits["effective"].points) < len(records) - found.diverged


def test_too_few_points_leave_a_law_out(tmp_path: Path) -> None:
    points = grid(GridSpec(widths=(64,), tokens=(10_000, 20_000), probes=False))
    found = analyse([_record(p, 2.0 + p.tokens / 1e6) for p in points], missing=3, samples=20, folder=tmp_path)
    assert set(found.fits) == {"effective"} and "9 constants" in found.refused["float"]
    assert "not fitted" in str(found) and found.as_json()["refused"]


def test_nothing_to_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        scaling_law(runs=str(tmp_path / "none"), fit_only=True)
    assert caught.value.code == "lab-few-points"
    assert not os.listdir(tmp_path)
