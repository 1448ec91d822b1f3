"""Every scripted fault of the simulated fleet goes through the whole inspection, and only it is found."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from bessemer.inspect.fleet_simulator import FleetSimulator, SimulatedFault
from bessemer.inspect.flight import Flight
from bessemer.inspect.flight_detectors import corrupt_ranks
from bessemer.inspect.flight_records import ADVICE, KINDS, Finding, HashSample, MetricSample, Standstill


def findings_of(steps: int, *faults: SimulatedFault, **fleet_options: Any) -> list[Finding]:
    options = {"copies": 16, "stages": 4, "tensor": 4, "seed": 7} | fleet_options
    fleet = FleetSimulator(faults=faults, **options)
    flight = Flight(fleet.placement)
    return [finding for record in fleet.records(steps) for finding in flight.take(record)]


CASES: dict[str, tuple[int, SimulatedFault, tuple[int, ...]]] = {
    "slow_rank": (60, SimulatedFault(kind="slow_rank", step=10, rank=77, amount=0.15), (77,)),
    "slow_link": (60, SimulatedFault(kind="slow_link", step=10, rank=77, amount=0.8), (76, 77, 78, 79)),
    "data_stall": (60, SimulatedFault(kind="data_stall", step=10, rank=77, amount=0.4), (77,)),
    "memory_growth": (280, SimulatedFault(kind="memory_growth", step=1, rank=77, amount=2e7), (77,)),
    "loss_spike": (100, SimulatedFault(kind="loss_spike", step=90, until=91, amount=1.4), ()),
    "gradient_spike": (100, SimulatedFault(kind="gradient_spike", step=90, until=91, amount=12), ()),
    "expert_imbalance": (80, SimulatedFault(kind="expert_imbalance", step=40, amount=4), ()),
    "corruption": (60, SimulatedFault(kind="corruption", step=10, rank=77), (77,)),
    "hang": (60, SimulatedFault(kind="hang", step=10, rank=77), (77,)),
    "stopped": (60, SimulatedFault(kind="stopped", step=10, rank=77), (77,)),
}


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(KINDS)


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_is_found_and_nothing_else(kind: str) -> None:
    steps, fault, named = CASES[kind]
    findings = findings_of(steps, fault)
    assert {finding.kind for finding in findings} == {kind}, [finding.text for finding in findings]
    assert findings[0].ranks == named
    assert findings[0].step >= fault.step
    assert findings[0].advice in ADVICE
    assert all(Finding.of_event(finding.as_event()).ranks == finding.ranks for finding in findings)
    if named and kind != "slow_link":
        assert findings[0].hosts == (f"node-{77 // 8}",)


def test_a_clean_fleet_raises_no_finding() -> None:
    assert findings_of(300) == []


def test_the_same_seed_gives_the_same_records() -> None:
    fault = SimulatedFault(kind="slow_rank", step=10, rank=77, amount=0.15)
    assert findings_of(40, fault) == findings_of(40, fault)
    assert findings_of(40, fault) != findings_of(40, fault, seed=8)


def test_a_hot_host_is_one_finding() -> None:
    faults = [SimulatedFault(kind="slow_rank", step=1, rank=r, amount=0.25) for r in range(80, 88)]
    findings = findings_of(20, *faults)
    assert [set(finding.ranks) for finding in findings] == [set(range(80, 88))]
    assert findings[0].hosts == ("node-10",) and findings[0].advice == "evict"


def test_a_pair_of_stages_is_named_as_link() -> None:
    (finding, *more) = findings_of(60, SimulatedFault(kind="slow_link", step=10, rank=64, amount=1.0, link="pipeline"))
    assert finding.kind == "slow_link" and finding.ranks == (64, 68) and not more  # 64 is in the first stage


def test_a_hang_says_who_where_and_what_it_was_doing() -> None:
    (finding,) = findings_of(60, CASES["hang"][1])
    assert finding.advice == "evict"
    assert "rank 77 did not come to all_reduce number 10 of group 'tensor' (ranks 76, 77, 78, 79)" in finding.text
    assert any("rank-77" in line and "forward_s, step 10" in line for line in finding.evidence), finding.evidence


def test_standing_still_for_less_than_it_may_is_no_hang() -> None:
    fleet = FleetSimulator(copies=4, stages=2, tensor=2, faults=[SimulatedFault(kind="hang", step=3, rank=5)])
    (record,) = [r for r in fleet.records(10) if isinstance(r, Standstill)]
    early = Standstill(record.t, 9.9, 10.0, 1.5, record.boxes, {5: 1.0})
    flight = Flight(fleet.placement)
    assert flight.take(early) == []
    assert [f.ranks for f in flight.take(record)] == [(5,)]
    assert flight.take(record) == []  # it is told once


def test_a_hang_of_ten_thousand_ranks_is_judged_in_seconds() -> None:
    fleet = FleetSimulator(faults=[SimulatedFault(kind="hang", step=1, rank=4711)])
    (record,) = fleet.records(1)
    start = time.thread_time()
    (finding,) = Flight(fleet.placement).take(record)
    assert time.thread_time() - start < 2.0
    assert finding.ranks == (4711,) and "group 'tensor'" in finding.text


@pytest.mark.parametrize(
    ("hashes", "wrong"),
    [
        ([[5, 5, 6], [7, 7, 7]], [(2,)]),
        ([[6, 5, 5], [8, 7, 7]], [(0,), (3,)]),
        ([[5, 6, 7], [7, 7, 7]], [()]),
        ([[5, 6], [7, 7]], [()]),
        ([[5, 5, 6, 6]], [()]),
    ],
    ids=["one", "a copy", "all differ", "two copies", "two and two"],
)
def test_the_majority_of_hashes(hashes: list[list[int]], wrong: list[tuple[int, ...]]) -> None:
    hash_PC = np.asarray(hashes, dtype=np.uint64)
    rank_PC = np.arange(hash_PC.size).reshape(hash_PC.shape)
    assert [corrupt.wrong for corrupt in corrupt_ranks(HashSample(1, 0.0, hash_PC, rank_PC))] == wrong


def test_a_loss_that_is_not_a_number_is_told_at_once() -> None:
    flight = Flight(FleetSimulator(copies=2, stages=1, tensor=1).placement)
    (finding,) = flight.take(MetricSample(1, 0.0, float("nan"), 1.0))
    assert finding.kind == "loss_spike" and "is not finite" in finding.text
