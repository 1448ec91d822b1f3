"""One link among several real ones becomes slow: the watch of the run names it and no other."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from linked_ranks import Wire, start_ranks
from train.toy import toy_job

from bessemer.core.job_file import dump_job
from bessemer.inspect.flight_records import Finding
from bessemer.inspect.flight_watch import FlightWatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLEAN_STEPS = 60
RATE = "4mbit"
PATIENCE_S = 400.0


class Watched:
    """The watch of a run in `folder`, asked by the test instead of each second."""

    def __init__(self, folder: Path, layout: dict[str, int]) -> None:
        self.found: list[Finding] = []
        model = {"num_hidden_layers": 3}
        job = toy_job(model=model, layout=layout, train={"steps": 1_000_000, "global_batch": 8})
        (folder / "job.toml").write_text(dump_job(job))
        (folder / "events.jsonl").write_text(json.dumps({"t": time.time(), "event": "start"}) + "\n")
        self._watch = FlightWatch(folder, job, self.found.append, lambda rank, why: None)

    @property
    def step(self) -> int:
        return self._watch._done

    @property
    def slow_links(self) -> list[Finding]:
        return [finding for finding in self.found if finding.kind == "slow_link"]

    def turn(self) -> None:
        time.sleep(0.25)
        self._watch.turn(time.monotonic())


@pytest.mark.parametrize(
    ("layout", "slow"), [({"dp": 2, "tp": 2}, (2, 3)), ({"pp": 3}, (1, 2))], ids=["collectives", "messages"]
)
def test_a_slow_link_is_named(tmp_path: Path, layout: dict[str, int], slow: tuple[int, int]) -> None:
    """Tensor-parallel pairs beside each other, and stages of a pipeline."""
    world = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    watched = Watched(tmp_path, layout)
    with Wire(world) as wire:
        ranks = start_ranks(tmp_path, wire)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while watched.step < CLEAN_STEPS:
                watched.turn()
                assert all(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline
            before, begin_s = watched.step, time.monotonic()
            assert watched.slow_links == []
            wire.slow(*slow, RATE)
            while not watched.slow_links:
                watched.turn()
                assert all(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    print(f"{layout}: named {time.monotonic() - begin_s:.1f} s and {watched.step - before} steps after it became slow")
    assert {tuple(sorted(finding.ranks)) for finding in watched.slow_links} == {slow}, watched.slow_links
    assert {host for finding in watched.slow_links for host in finding.hosts} == {f"host-{rank}" for rank in slow}
