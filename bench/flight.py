"""What the flight inspection finds, what it raises by mistake, and what it costs.

    python bench/flight.py [--json]

Recall and false alarms are of the simulated fleet of 10,240 ranks, whose jitter is correlated by host, stage, batch and
time of day; they are modelled, and follow from the seeds. Costs are processor time, measured here: what is added to a
rank is held against a step of 100 ms (marks) and against a real step of a small model (hashes).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from table import Row, main

from bessemer.inspect.fleet_simulator import FleetSimulator, Jitter, SimulatedFault
from bessemer.inspect.flight import Flight
from bessemer.inspect.flight_meter import RankMeter
from bessemer.inspect.flight_records import KINDS, Standstill, StepSample
from bessemer.inspect.flight_stragglers import StragglerScore
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Recorder
from bessemer.train.alike import parameters_hash

SEEDS, SLOW = 4, 100
CLEAN_WINDOWS = 100
SMALL = {"copies": 16, "stages": 4, "tensor": 4}
SMALL_CASES, SMALL_STEPS = 10, 280
STEP_S, HASH_EVERY, ROUNDS = 0.1, 50, 30


def rows() -> list[Row]:
    return [*_cost_rows(), *_rank_rows(), *_recall_rows(), *_clean_rows(), *_kind_rows()]


# ---- what is found


def _recall_rows() -> list[Row]:
    found = []
    for jitter, steps, excess in ((0.03, 20, 0.1), (0.08, 20, 0.2), (0.03, 200, 0.03), (0.08, 200, 0.05)):
        hits = false = 0
        for seed in range(SEEDS):
            ranks = np.random.default_rng(100 + seed).choice(10_240, SLOW, replace=False).tolist()
            faults = [SimulatedFault(kind="slow_rank", step=1, rank=r, amount=excess) for r in ranks]
            fleet = FleetSimulator(seed=seed, jitter=Jitter(rank=jitter), faults=faults)
            score = StragglerScore(fleet.placement)
            for step in range(1, steps + 1):
                score.update(_sample(fleet, step))
            named = {slow.index for slow in score.slow()}
            hits, false = hits + len(named & set(ranks)), false + len(named - set(ranks))
        name = f"slow rank, +{excess:.0%} at {jitter:.0%} jitter, {steps} steps"
        note = f"modelled; {SEEDS * SLOW} ranks, {false} false"
        found.append(Row(name, hits / (SEEDS * SLOW), "recall", "higher", bar=0.99, note=note))
    return found


def _clean_rows() -> list[Row]:
    """Judged every 20 steps: windows of 20 steps one after the other, those of 200 overlap."""
    found = []
    for jitter in (0.03, 0.08):
        fleet = FleetSimulator(seed=21, jitter=Jitter(rank=jitter))
        score = StragglerScore(fleet.placement)
        alarms, judged = [0, 0], [0, 0]
        step = 0
        while min(judged) < CLEAN_WINDOWS:
            step += 1
            score.update(_sample(fleet, step))
            for place, window in enumerate(score.windows):
                if step % 20 == 0 and step >= window.steps:
                    z_R, mean_R, least_R = score.scores(place)
                    alarms[place] += int(np.count_nonzero((z_R > window.z) & (mean_R > least_R)))
                    judged[place] += 1
        for window, count, number in zip(score.windows, alarms, judged, strict=True):
            name = f"false alarms in {number} clean windows of {window.steps} steps, {jitter:.0%} jitter"
            note = f"modelled; 10,240 ranks over {step} steps"
            found.append(Row(name, count, "ranks", "lower", bar=0, note=note))
    return found


def _kind_rows() -> list[Row]:
    """Each other kind of fault in fleets of 256 ranks: how often it is the first finding and names the right ranks."""
    amounts = {
        "slow_link": (0.8, ", +80%"), "data_stall": (0.4, ", 40% of a step"), "memory_growth": (2e7, ", 20 MB a step"),
        "loss_spike": (1.4, ", x 1.4"), "gradient_spike": (16.0, ", x 16"), "expert_imbalance": (4.0, ", x 4"),
    }  # fmt: skip
    found = []
    for kind in KINDS:
        if kind == "slow_rank":
            continue
        right = others = 0
        amount, shown = amounts.get(kind, (0.0, ""))
        for seed in range(SMALL_CASES):
            rank = int(np.random.default_rng(seed).integers(0, 256))
            step = 1 if kind == "memory_growth" else 90
            until = step + 1 if kind.endswith("spike") else 2**62
            fault = SimulatedFault(kind=kind, step=step, rank=rank, amount=amount, until=until)
            findings = _findings([fault], seed, SMALL_STEPS if kind == "memory_growth" else 130)
            own = [f for f in findings if f.kind == kind]
            named = not own or not own[0].ranks or rank in own[0].ranks
            right += bool(own) and named
            others += len(findings) - len(own)
        note = f"modelled; {SMALL_CASES} fleets of 256 ranks, {others} findings of other kinds"
        found.append(Row(kind.replace("_", " ") + shown, right / SMALL_CASES, "recall", "higher", bar=0.99, note=note))
    return found


def _findings(faults: Sequence[SimulatedFault], seed: int, steps: int) -> list:
    fleet = FleetSimulator(faults=faults, seed=seed, **SMALL)
    flight = Flight(fleet.placement)
    return [finding for record in fleet.records(steps) for finding in flight.take(record)]


def _sample(fleet: FleetSimulator, step: int) -> StepSample:
    compute_R = fleet.compute_s(step)
    ones_R = np.ones_like(compute_R)
    return StepSample(step, 0.0, fleet.step_s, compute_R, ones_R, ones_R, ones_R, ones_R)


# ---- what it costs the watch


def _cost_rows() -> list[Row]:
    fleet = FleetSimulator(seed=0, faults=[SimulatedFault(kind="hang", step=41, rank=4711)])
    score, flight = StragglerScore(fleet.placement), Flight(fleet.placement)
    scoring, whole, hang_s = [], [0.0], 0.0
    for record in fleet.records(41):
        if isinstance(record, StepSample):
            scoring.append(_spent(lambda record=record: (score.update(record), score.slow())))
            whole.append(0.0)
        spent = _spent(lambda record=record: flight.take(record))
        if isinstance(record, Standstill):
            hang_s = spent
        else:
            whole[-1] += spent
    median_ms, worst_ms = 1e3 * statistics.median(scoring), 1e3 * max(scoring)
    step_ms = 1e3 * statistics.median(whole[21:])
    return [
        Row("scoring 10,240 ranks, a step", median_ms, "ms", "lower", bar=50, note=f"at most {worst_ms:.1f}"),
        Row("all detectors on 10,240 ranks, a step", step_ms, "ms", "lower"),
        Row("verdict on a hang of 10,240 ranks", 1e3 * hang_s, "ms", "lower"),
    ]


def _spent(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


# ---- what it costs a rank


def _rank_rows() -> list[Row]:
    marks = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0"
        recorder = Recorder(path, rank=0, world=1, job_hash="bench")
        phases, meter = Phases(), RankMeter(path)
        phases.attach(recorder)
        written, read = [], []
        for step in range(1, ROUNDS + 1):
            phases.at(step=step)
            written.append(_spent(lambda: _marks(phases)))
            read.append(_spent(lambda: meter.poll(time.monotonic())))
        marks = 2 * MARKS
        recorder.close()
    step_s, hash_s = _step_and_hash()
    part = hash_s / HASH_EVERY / step_s
    return [
        Row(f"{marks} marks of a step", 100 * statistics.median(written) / STEP_S, "% of 100 ms", "lower", bar=0.5),
        Row(f"reading {marks} marks of a rank", 1e3 * statistics.median(read), "ms of the watch", "lower"),
        Row(
            f"hash of the parameters every {HASH_EVERY} steps", 100 * part, "% of a step", "lower", bar=0.3,
            note=f"{1e3 * hash_s:.2f} ms of 5.8 M parameters, step {1e3 * step_s:.0f} ms of 512 tokens",
        ),
    ]  # fmt: skip


MARKS = 20
"""Phases of a step: each is two marks."""


def _marks(phases: Phases) -> None:
    for _ in range(MARKS // 2):
        with phases("backward_s"), phases("comm_s"):
            pass


def _step_and_hash() -> tuple[float, float]:
    """(processor seconds of a step of the default model with 512 tokens, of a hash of its parameters)."""
    from bessemer.core.hf_config import resolve_model
    from bessemer.core.job import Job
    from bessemer.parallel.mesh import Mesh
    from bessemer.train.assembly import assemble

    torch.set_num_threads(1)
    train = {"global_batch": 2, "micro_batch": 2}
    job = Job.model_validate({"train": train})
    parts = assemble(job, resolve_model(job.model), Mesh.alone(torch.device("cpu")))
    tokens_BS = torch.randint(0, parts.spec.vocab_size, (2, job.data.seq_len + 1))
    batch = {
        "tokens_BS": tokens_BS[:, :-1].contiguous(),
        "labels_BS": tokens_BS[:, 1:].contiguous(),
        "weights_BS": torch.ones(2, job.data.seq_len),
        "segments_BS": torch.zeros(2, job.data.seq_len, dtype=torch.int32),
    }
    params = list(parts.optimizer.params.values())
    steps, hashes = [], []
    for step in range(6):
        steps.append(_spent(lambda step=step: parts.step.run(step, iter([batch]), 1)))
        hashes.append(_spent(lambda: parameters_hash(params)))
    return statistics.median(steps[1:]), statistics.median(hashes[1:])


if __name__ == "__main__":
    main(rows)
