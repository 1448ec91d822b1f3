"""Some of the crashes that `bench/landing.py` plays, as tests: real runs, and what landing says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_runs import crashed, judged
from crash_scenarios import SCENARIOS, by_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "name",
    [
        "too-many-files",
        "token-beyond",
        "gradient-nan-once-zero",
        "sum-flipped-zero",
        "shard-truncated",
        "port-in-use-zero",
    ],
)
def test_a_crash_is_explained(tmp_path: Path, name: str) -> None:
    scenario = by_name(name)
    with crashed(tmp_path, scenario) as (run, landing):
        found = judged(landing, scenario.truth)
        assert found.right, f"{found.told}, not {scenario.truth}: {landing and landing.as_json()}\n{run.told()}"


def test_scenarios_have_names_of_their_own() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS) >= 25
