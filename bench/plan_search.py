"""Layouts a second through the whole search, and the space of GPT-3 175B on 512 A100, beside other planners.

    python bench/plan_search.py [--json]

One process, one core's worth of numpy (OMP_NUM_THREADS=1 is set here). Rates count CPU seconds of the whole search:
enumerating, cutting, pricing time and memory, ranking, replaying the best. calculon and SimuMax are measured in the
same run where their checkouts are named by the environment variables CALCULON and SIMUMAX (they aren't part of this
repository); without them only the figures of this project are printed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from table import Row, main

from bessemer.core.machine import load_machine
from bessemer.core.presets import preset
from bessemer.plan.axes import Request, parse_fixes
from bessemer.plan.search import Found, search

GPT3 = ["graph=false", "offload_activations=false"]
CALCULON_SPACE = 6_582_816
"""Executions of calculon's search space for GPT-3 175B on 512 A100 (its own generator, counted)."""
ALONE_S = 20.0


def rows() -> list[Row]:
    gpt, gpt_cpu_s, peak = _gpt3()
    llama, llama_cpu_s = _timed(
        Request(
            spec=preset("llama-3-70b"), machine=load_machine("h100"), num_gpus=1024, global_batch=2048, seq_len=8192
        )
    )
    rate = gpt.searched / gpt_cpu_s
    found = [
        Row("layouts through the whole search", rate, "/CPU s", "higher", bar=100_000,
            note=f"GPT-3 175B, 512 A100, wide space: {gpt.searched:,} priced"),
        Row("that space, CPU time", gpt_cpu_s, "s", "lower", bar=60, note=f"{gpt.seconds:.1f} s wall-clock here"),
        Row("that space, layouts", gpt.searched, "", "higher", bar=CALCULON_SPACE, note="calculon's has 6,582,816"),
        Row("that space, peak memory", peak / 1e9, "GB", "lower", bar=2),
        Row("ranking llama-3-70b on 1,024 H100", llama_cpu_s, "CPU s", "lower", bar=10,
            note=f"{llama.searched:,} priced, {llama.seconds:.1f} s wall-clock here"),
    ]  # fmt: skip
    for name, per_s in (("calculon", _calculon()), ("SimuMax", _simumax())):
        if per_s is not None:
            found.append(Row(f"{name}, estimates", per_s, "/CPU s", "higher", note="same machine, this run"))
            found.append(Row(f"this search over {name}", rate / per_s, "x", "higher"))
    return found


def _timed(request: Request) -> tuple[Found, float]:
    start = time.process_time()
    found = search(request)
    return found, time.process_time() - start


def _gpt3() -> tuple[Found, float, float]:
    request = Request(
        spec=preset("gpt-3-175b"), machine=load_machine("a100-80gb"), num_gpus=512, global_batch=512, seq_len=2048,
        space="wide", fixed=parse_fixes(GPT3),
    )  # fmt: skip
    found, cpu_s = _timed(request)
    return found, cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _calculon() -> float | None:
    """Evaluations a CPU second over executions of GPT-3 175B on 512 A100, those that don't fit included."""
    folder = os.environ.get("CALCULON")
    if folder is None:
        return None
    script = f"""
import itertools, json, logging, time
from calculon.llm import Llm
from calculon.system import System
log = logging.Logger("x")
read = lambda p: json.load(open(p))
app, system = Llm.Application(read("models/gpt3-175B.json")), System(read("systems/a100_80g.json"))
base = read("examples/3072_t4_p64_d12_mbs4_full.json")
start, count = time.process_time(), 0
kinds = ["full", "attn_only", "none"]
for tp, pp, mbs, recompute in itertools.cycle(itertools.product([1, 2, 4, 8], [1, 2, 4, 8, 16, 32], [1, 2, 4], kinds)):
    if 512 % (tp * pp):
        continue
    one = {{**base, "num_procs": 512, "tensor_par": tp, "pipeline_par": pp, "data_par": 512 // tp // pp,
           "batch_size": 512, "microbatch_size": mbs, "activation_recompute": recompute, "pipeline_interleaving": 1}}
    try:
        execution = Llm.Execution.from_json(one)
    except AssertionError:
        continue
    model = Llm(app, log)
    try:
        model.compile(system, execution)
        model.run(system)
    except Llm.Error:
        pass
    count += 1
    if time.process_time() - start > {ALONE_S / 2}:
        break
print(count / (time.process_time() - start))
"""
    return _ask(script, folder)


def _simumax() -> float | None:
    """Warm estimates a CPU second of its Llama-3 8B example on 8 devices."""
    folder = os.environ.get("SIMUMAX")
    if folder is None:
        return None
    script = f"""
import time, os
os.environ["SIMU_CHECK"] = "0"
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM
from simumax.utils import get_simu_model_config, get_simu_strategy_config, get_simu_system_config
perf = PerfLLM()
perf.configure(strategy_config=StrategyConfig.init_from_config_file(get_simu_strategy_config("tp1_pp2_dp4_mbs1")),
               model_config=ModelConfig.init_from_config_file(get_simu_model_config("llama3-8b")),
               system_config=SystemConfig.init_from_config_file(get_simu_system_config("a100_pcie")))
perf.run_estimate(); perf.analysis_mem(); perf.analysis_cost()
start, count = time.process_time(), 0
while time.process_time() - start < {ALONE_S / 2}:
    perf.run_estimate(); perf.analysis_mem(); perf.analysis_cost()
    count += 1
print(count / (time.process_time() - start))
"""
    return _ask(script, folder)


def _ask(script: str, folder: str) -> float | None:
    """Runs another planner's script in its checkout with this interpreter; its last line is the rate."""
    python = str(Path(folder) / ".venv" / "bin" / "python")
    command = [python if Path(python).exists() else sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        print(json.dumps({"failed": folder, "error": done.stderr[-400:]}), file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main(rows)
