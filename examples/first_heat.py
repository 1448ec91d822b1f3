"""The demonstration behind `make demo`: from one job file to a trained, evaluated, exported and measured model.

It types the same commands that you would, each printed before it runs, and ends with a table of what came out. In the
midst of the training it kills one of the two workers, to show that the other goes on and a spare takes its place. It
leaves a page with all that the run recorded.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
BESSEMER = [sys.executable, "-m", "bessemer.cli"]
KILL_AT_STEP = 60
PROMPT = "class Reader:\n    def __init__(self, path):"
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    start = time.perf_counter()
    name = free_name("first-heat")
    run = f"runs/{name}"
    job = [os.path.relpath(HERE / "first_heat.toml"), "--set", f"run.name={name}"]
    say("check", *job)
    say("takeoff")
    killer = threading.Thread(target=kill_a_worker, args=(Path(run),), daemon=True)
    killer.start()
    say("train", *job)
    evaluated = ask("eval", run, "--sequences", "128")
    say("export", run, "--to", f"{run}/hf")
    say("generate", run, "--prompt", PROMPT, "--max-new-tokens", "100", "--temperature", "0.7", "--top-k", "40")
    say("landing", run)
    say("watch", run, "--report", f"{run}/report.html")
    ledger = ask("ledger", run)
    console.print(summary(evaluated, ledger, run, time.perf_counter() - start))
    return 0


def kill_a_worker(run: Path) -> None:
    """Wait until the run has come so far, then `kill -9` a rank of the second group."""
    while True:
        time.sleep(0.2)
        steps = records(run / "metrics.jsonl")
        if steps and steps[-1]["step"] >= KILL_AT_STEP:
            break
    events = records(run / "events.jsonl")
    active = [event for event in events if event["event"] == "epoch"][-1]["active"]
    started = [event for event in events if event["event"] == "rank_started" and event["group"] == active[-1]][-1]
    console.print(f"$ kill -9 {started['pid']}   # worker {started['rank']}, on purpose", style="bold", markup=False)
    os.kill(started["pid"], signal.SIGKILL)


def records(file: Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def free_name(stem: str) -> str:
    """The first of stem, stem-2, stem-3 ... that has no run folder yet."""
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 10_000))
    return next(name for name in names if not Path("runs", name).exists())


def say(*words: str) -> None:
    """Run a verb and let it print; a failure ends the demonstration with its exit code."""
    console.print(f"\n$ bessemer {shlex.join(words)}", style="bold", markup=False)
    sys.stdout.flush()
    done = subprocess.run([*BESSEMER, *words], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def ask(*words: str) -> dict[str, Any]:
    """Run a verb for the reader's eyes, then once more as JSON for the table."""
    say(*words)
    done = subprocess.run([*BESSEMER, *words, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def summary(evaluated: dict[str, Any], ledger: dict[str, Any], run: str, seconds: float) -> Table:
    """What came out, and where it lies."""
    table = Table(title="first heat", title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("validation loss", f"{evaluated['loss']:.3f} nats per token at step {evaluated['step']}")
    table.add_row("unigram entropy", f"{evaluated['unigram_entropy']:.3f} nats: what token frequencies alone give")
    table.add_row("bits per byte", f"{evaluated['bits_per_byte']:.3f}")
    for factor in ("generality", "effective_compute", "node_efficiency", "cluster_efficiency", "stability", "yield"):
        value = ledger[factor]
        table.add_row(factor.replace("_", " "), "not known" if value is None else f"{value:.3f}")
    table.add_row("checkpoints", f"{run}/checkpoints")
    table.add_row("Hugging Face", f"{run}/hf")
    table.add_row("report page", f"{run}/report.html")
    table.add_row("records", f"{run}/metrics.jsonl, {run}/events.jsonl")
    table.add_row("took", f"{seconds:.0f} s in all")
    return table


if __name__ == "__main__":
    sys.exit(main())
