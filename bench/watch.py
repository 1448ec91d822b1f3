"""What the live page costs with 10,240 ranks at one frame a second: CPU time of the server and of Chromium's renderer.

    python bench/watch.py [--json]

A fleet is simulated beforehand, and a server hands out its steps, one a second, to the page in headless Chromium. CPU
time is read from /proc, since the load of a shared machine stretches the wall clock and not that. Without a Chromium
there are only the rows of the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from table import Row, main

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.inspect.fleet_simulator import FleetSimulator, SimulatedFault
from bessemer.inspect.flight_records import MetricSample, StepSample
from bessemer.inspect.watch_ranks import Ranks, SampleFeed
from bessemer.inspect.watch_run import RunWatch
from bessemer.inspect.watch_server import application, listen, serve

FIRST, SECONDS = 30, 40  # steps that are there at the start, seconds that are measured
BAR = 0.3  # of a core, at a frame a second
CHROMIUM = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")


def rows() -> list[Row]:
    found = [*_frame_rows()]
    browser = next((path for path in CHROMIUM if Path(path).exists()), None)
    if browser is None:
        print("no Chromium: the page is not measured", file=sys.stderr)
        return found
    with tempfile.TemporaryDirectory() as folder:
        return [*found, *_page_rows(Path(folder), browser)]


def _fleet() -> FleetSimulator:
    return FleetSimulator(faults=[SimulatedFault(kind="slow_rank", step=5, rank=4711, amount=0.12)], hash_every=0)


def _frame_rows() -> list[Row]:
    """Scoring, packing and ranking one step of all ranks, without HTTP."""
    fleet, costs, size = _fleet(), [], 0
    feed = SampleFeed(fleet.placement)
    ranks = Ranks(feed)
    for record in fleet.records(FIRST):
        if isinstance(record, StepSample):
            feed.take(record)
            begin = time.thread_time()
            ranks.read({}, hung=False, ended=False)
            size = len(ranks.frame()[1])
            ranks.worst(20)
            ranks.summary()
            costs.append(time.thread_time() - begin)
    return [
        Row("frame of 10,240 ranks", size / 1024, "KiB", "lower", 105.0, "three phases, score and state"),
        Row("score, pack and rank a step of 10,240 ranks", 1e3 * median(costs), "CPU ms", "lower", None,
            f"worst {1e3 * max(costs):.1f}"),
    ]  # fmt: skip


def _page_rows(folder: Path, browser: str) -> list[Row]:
    from playwright.sync_api import sync_playwright

    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(folder)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_function("page.runs[0]?.frame", timeout=120_000)
            page.evaluate(
                "() => { page.shown = []; const t = Run.prototype.take; "
                "Run.prototype.take = function (a, b) { page.shown.push(a.ranks.step); t.call(this, a, b); } }"
            )
            page.evaluate("document.querySelector('#ranks').scrollIntoView()")  # what can't be seen isn't painted
            page.wait_for_timeout(3000)
            before, begin = _cpu_s(server.pid), time.monotonic()
            shown = page.evaluate("new Set(page.shown).size")
            page.wait_for_timeout(1000 * SECONDS)
            after, took = _cpu_s(server.pid), time.monotonic() - begin
            shown = page.evaluate("new Set(page.shown).size") - shown
            chromium.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    used = {kind: 1e3 * (after[kind] - before[kind]) / max(1, shown) for kind in before}  # CPU ms a frame
    return [
        Row("page of 10,240 ranks: frames drawn", shown / took, "a second", "higher", 0.9, f"in {took:.0f} s"),
        Row("page of 10,240 ranks: renderer and server, a frame", used["renderer"] + used["server"], "CPU ms", "lower",
            1e3 * BAR, f"renderer {used['renderer']:.1f}, server {used['server']:.1f}; one a second"),
        Row("page of 10,240 ranks: all of Chromium and the server, a frame", sum(used.values()), "CPU ms", "lower",
            None, f"painting without a GPU {used['gpu-process']:.1f}, browser {used['browser']:.1f}"),
    ]  # fmt: skip


def _cpu_s(server: int) -> dict[str, float]:
    """CPU seconds so far of the server, and of Chromium's processes by kind, which descend from this one."""
    used = {"server": _seconds(server), "renderer": 0.0, "gpu-process": 0.0, "browser": 0.0}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for pid in parents:
        at, line = pid, []
        while at in parents and at != os.getpid():
            line.append(at)
            at = parents[at]
        if at != os.getpid() or server in line:
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "chrom" in command.split(" ")[0]:
            kind = next((k for k in ("renderer", "gpu-process") if f"--type={k}" in command), "browser")
            used[kind] += _seconds(pid)
    return used


def _seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serve(folder: Path) -> None:
    """The server's process: a run folder and a feed that both get a step a second."""
    layout: dict[str, Any] = {"dp": 160, "pp": 8, "tp": 8}
    model = {"family": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128}  # fmt: skip
    job = Job.model_validate(
        {"run": {"name": "bench"}, "model": model, "layout": layout, "train": {"global_batch": 160}}
    )
    (folder / "job.toml").write_text(dump_job(job))
    fleet = _fleet()
    records = list(fleet.records(FIRST + 3 * SECONDS, start_t=time.time()))
    samples = [record for record in records if isinstance(record, StepSample)]
    metrics = [record for record in records if isinstance(record, MetricSample)]
    feed = SampleFeed(fleet.placement)
    events = {"t": time.time(), "event": "start", "world_size": len(fleet.placement), "host": "node-0"}
    (folder / "events.jsonl").write_text(json.dumps(events) + "\n")
    with (folder / "metrics.jsonl").open("w", buffering=1) as file:

        def step(number: int) -> None:
            feed.take(samples[number])
            told = {"step": number + 1, "loss": metrics[number].loss, "grad_norm": metrics[number].grad_norm,
                    "step_s": samples[number].step_s, "tokens_per_s": 1e6, "t": time.time()}  # fmt: skip
            file.write(json.dumps(told) + "\n")

        def go_on() -> None:
            for number in range(FIRST, len(samples)):
                time.sleep(1.0)
                step(number)

        for number in range(FIRST):
            step(number)
        sock = listen("127.0.0.1", 0)
        print(sock.getsockname()[1], flush=True)
        threading.Thread(target=go_on, daemon=True).start()
        serve(application([RunWatch(folder, feed=feed)]), sock)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(Path(sys.argv[2]))
    else:
        main(rows)
