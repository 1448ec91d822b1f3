"""The verb `watch`: what it refuses, the report, the plan beside a run, and a server that stops when it is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from watch_builder import LiveRun, finished_run

from bessemer import api
from bessemer.api._watch import predicted
from bessemer.core.errors import RequestError

pytestmark = pytest.mark.timeout(120)


def refusal(*runs: Path, **options: object) -> RequestError:
    with pytest.raises(RequestError) as error:
        api.watch([str(run) for run in runs], **options)  # type: ignore[arg-type]
    assert error.value.exit_code == 2 and error.value.fix
    return error.value


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).code == "no-run"


def test_one_run_twice_is_refused(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run").folder
    assert refusal(run, tmp_path / "other" / ".." / "run").code == "watch-twice"


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    assert refusal(LiveRun(tmp_path / "run").folder, port=70_000).code == "watch-address"


def test_other_hosts_need_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESSEMER_SECRET", raising=False)
    run = LiveRun(tmp_path / "run").folder
    assert refusal(run, host="0.0.0.0").code == "secret-missing"
    secret = tmp_path / "secret"
    secret.write_text("long enough for a secret")
    secret.chmod(0o644)
    assert refusal(run, host="0.0.0.0", secret_file=str(secret)).code == "secret-open"


def test_a_report_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    assert refusal(run, report=str(tmp_path / "missing" / "report.html")).code == "watch-report"


def test_a_report_is_one_file_with_all_data(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path / "a", "first"), finished_run(tmp_path / "b", "second")
    (first / "logs" / "rank-0.log").write_text("</script><script>alert(1)</script>\n")
    report = tmp_path / "report.html"
    assert str(api.watch([str(first), str(second)], report=str(report))) == f"wrote {report}"
    text = report.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', text), "it asks for nothing else"
    recorded = json.loads(re.search(r'id="recorded">(.*?)</script>', text, flags=re.DOTALL)[1])  # type: ignore[index]
    assert [one["told"]["run"]["name"] for one in recorded] == ["first", "second"]
    assert recorded[0]["details"]["0"]["log"] == ["</script><script>alert(1)</script>"]
    assert recorded[0]["told"]["ledger"]["yield"] > 0 and recorded[0]["told"]["verdict"]["words"] == "No fault"


def test_the_plan_is_that_of_explain(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "llama-3-8b"\n[layout]\ndp = 8\ntp = 8\n[train]\nglobal_batch = 64\n'
        '[machine]\nname = "h100"\n[data]\nseq_len = 4096\n'
    )
    plan, explained = predicted(job), api.plan.explain(str(job)).as_json()
    assert plan.why == "" and plan.step_s == pytest.approx(explained["step_s"])
    assert [plan.low_s, plan.high_s] == pytest.approx(explained["band"])
    assert plan.tokens_per_s == pytest.approx(64 * 4096 / explained["step_s"])
    assert plan.factors["yield"] == pytest.approx(explained["mfu"])


def test_where_nothing_can_be_planned_the_reason_is_told(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npreset = "llama-3-8b"\n[machine]\nname = "no-such-machine"\n')
    assert "no-such-machine" in predicted(job).why


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    command = [sys.executable, "-m", "bessemer.cli", "watch", str(run.folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("watching live at http://127.0.0.1:")
        address = line.split()[3]
        with urllib.request.urlopen(address + "metrics", timeout=60) as answer:
            assert b'bessemer_run_state{run="live",state="running"}' in answer.read()
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert time.monotonic() - begin < 60
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
