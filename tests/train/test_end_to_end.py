"""The command line from a job file to an exported model, with real agents, ranks and launchers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from train.loops import small_job

from bessemer import api
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job

STEPS = 60
BESSEMER = [sys.executable, "-m", "bessemer.cli"]


def write_job(folder: Path) -> Path:
    """A job of two ranks whose steps are long enough (about 20 ms) to be interrupted between two saves."""
    job = small_job(
        folder,
        layout={"dp": 2},
        train={"steps": STEPS, "global_batch": 32, "micro_batch": 4},
        keep={"every": 10, "keep_last": 2},
    )
    path = folder / "job.toml"
    path.write_text(dump_job(job))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "small" / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "small" / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == name]


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*BESSEMER, "train", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path.parent
    )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    file = folder / "runs" / "small" / "metrics.jsonl"
    while time.monotonic() < deadline:
        if file.exists() and any(m["step"] >= step for m in metrics(folder)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    raise TimeoutError(f"no step {step} within 90 s")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=90)
    return process.returncode, output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stopped_killed_and_resumed_equals_torchrun_in_one_go(tmp_path: Path) -> None:
    """SIGTERM, then kill -9 of a rank, then the end: the same losses, bit for bit, as a run under torchrun."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    straight.mkdir()
    cut.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [*launch, "-m", "bessemer.cli", "train", str(write_job(straight))],
        cwd=straight, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [m["step"] for m in metrics(straight)] == list(range(1, STEPS + 1))

    path = write_job(cut)
    process = start(path)
    wait_for_step(cut, 3, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 3, output
    assert re.search(r"stopped on request after step \d+", output), output
    assert f"bessemer train {path}" in output
    stopped_at = metrics(cut)[-1]["step"]
    assert events(cut, "saved")[-1]["step"] == stopped_at < STEPS

    process = start(path)
    wait_for_step(cut, stopped_at + 12, process)
    victim = next(p for p in children(process.pid) if "bessemer.train.worker" in p[1])
    os.kill(victim[0], signal.SIGKILL)
    code, output = finish(process)
    assert code == 1, output
    assert "was killed by SIGKILL" in output
    assert events(cut, "rank_lost"), output

    code, output = finish(start(path))
    assert code == 0, output
    resumed = [e["step"] for e in events(cut, "loaded")]
    assert resumed[:2] == [0, stopped_at]
    assert resumed[2] >= stopped_at
    keys = ("step", "samples", "loss", "grad_norm", "lr")
    assert [[m[k] for k in keys] for m in metrics(cut)] == [[m[k] for k in keys] for m in metrics(straight)]
    steps = sorted(int(p.name.split("-")[1]) for p in (cut / "runs/small/checkpoints").glob("step-*"))
    assert len(steps) == 2, "keep_last = 2"
    assert steps[-1] == STEPS

    delivers(cut, tmp_path)


def children(pid: int) -> list[tuple[int, str]]:
    """(pid, command line) of the direct children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found.append((int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")))
        except (OSError, ValueError):
            continue
    return found


def delivers(folder: Path, tmp_path: Path) -> None:
    """What was trained is evaluated, exported, used and accounted for."""
    run = str(folder / "runs" / "small")
    evaluated = api.eval(run)
    assert evaluated.step == STEPS
    assert evaluated.loss < evaluated.unigram_entropy, "less than token frequencies alone give: it has learnt"
    assert evaluated.bits_per_byte == pytest.approx(evaluated.loss / 0.6931471805599453, rel=0.1)  # a token is a byte
    shown = subprocess.run([*BESSEMER, "eval", run, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["loss"] == pytest.approx(evaluated.loss, rel=1e-6)

    exported = api.export(run, to=str(tmp_path / "hf"), dtype="fp32")
    same_logits(run, Path(exported.folder))
    first, second = (api.generate(run, prompt="def ", max_new_tokens=20, seed=5) for _ in range(2))
    assert first == second
    assert first.startswith("def ")

    ledger = api.ledger(run).as_json()
    factors = ("generality", "effective_compute", "node_efficiency", "cluster_efficiency", "stability")
    product = 1.0
    for factor in factors:
        assert ledger[factor] is not None, ledger
        product *= ledger[factor]
    assert ledger["yield"] == pytest.approx(product, rel=1e-9)
    assert ledger["stability"] < 0.9, "two restarts of so short a run must show"


def same_logits(run: str, folder: Path) -> None:
    import torch
    import transformers

    from bessemer.train.opened import open_trained

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    ours = open_trained(run).module()
    tokens = torch.arange(40)[None] % 257
    with torch.no_grad():
        assert (ours.logits(tokens) - theirs(tokens).logits).abs().max() < 2e-5


def test_a_job_with_problems_starts_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    done = subprocess.run(
        [*BESSEMER, "train", str(path), "--set", "layout.dp=16"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "[train.global_batch]" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_job_of_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    from bessemer.core.job_file import load_job

    job = load_job(write_job(tmp_path))
    assert isinstance(job, Job)
    assert load_job(write_job(tmp_path)).identity == job.identity
