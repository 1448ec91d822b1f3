"""`bessemer ledger RUN`: both printed forms, the exit code of a refusal, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_builder import RunBuilder, make_job

from bessemer import api
from bessemer.cli._app import application


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(api.VERBS, "ledger", "bessemer.api._ledger")
    builder = RunBuilder(make_job())
    builder.start(set_up_s=builder.healthy_kernel_s * 1.25)
    builder.steps(1, 9)
    builder.event("finished", step=9)
    return builder.write(tmp_path / "run")


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as done:
        application()(args=[str(w) for w in words])
    return int(done.value.code or 0)


def test_json_has_the_promised_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ledger", run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    names = ["generality", "effective_compute", "node_efficiency", "cluster_efficiency", "stability", "yield"]
    assert list(found)[:7] == [*names, "kinds"]
    assert list(found["kinds"]) == names
    assert found["stability"] == pytest.approx(0.9, rel=1e-3)


def test_table_names_what_lost_most(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ledger", run) == 0
    out = capsys.readouterr().out
    assert "lost most: effective_compute" in out
    assert "cluster_efficiency  1.0000  -" in out and "1 by definition" in out


def test_a_wrong_reference_is_a_wrong_request(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ledger", run, "--reference", run.parent / "absent") == 2
    assert "is no run folder" in capsys.readouterr().err


def test_no_torch_is_imported(run: Path) -> None:
    code = (
        "import sys; from bessemer.api._ledger import ledger; "
        f"assert ledger({str(run)!r}).total.value > 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
