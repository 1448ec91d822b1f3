"""Chaos: the faults file, who is hit, the arithmetic of what it cost, and one real run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from keep.checkpoint_tools import running_vault
from train.loops import small_job

from bessemer import api
from bessemer.core.errors import CheckpointError, ConfigError, RequestError
from bessemer.core.job_file import dump_job
from bessemer.inspect.chaos import Commits
from bessemer.inspect.chaos_faults import Plan, Schedule, read_plan
from bessemer.inspect.chaos_flip import flip_and_kill
from bessemer.inspect.chaos_target import Standing, child_running, is_child
from bessemer.keep.checkpoint import Slice
from bessemer.keep.memory_copies import MemoryCopies
from bessemer.keep.vault_client import VaultClient

EXAMPLES = Path(__file__).parents[2] / "examples"


def plan_of(folder: Path, text: str) -> Plan:
    file = folder / "faults.toml"
    file.write_text(text)
    return read_plan(file)


def fired(plan: Plan, seconds: float, step_s: float = 0.5) -> list[tuple[float, str]]:
    schedule = Schedule(plan)
    found = []
    for tick in range(int(seconds * 10)):
        found += [(tick / 10, fault.kind) for fault in schedule.due(int(tick / 10 / step_s), tick / 10)]
    return found


# ---- the file


def test_faults_come_at_steps_times_and_intervals(tmp_path: Path) -> None:
    text = """
        [[fault]]
        kind = "kill"
        at_step = 4
        [[fault]]
        kind = "stop"
        at_s = 3.5
        for_s = 1
        [[fault]]
        kind = "coordinator"
        every_s = 2
        times = 3
    """
    assert fired(plan_of(tmp_path, text), 20) == [
        (2.0, "kill"), (2.0, "coordinator"), (3.5, "stop"), (4.0, "coordinator"), (6.0, "coordinator"),
    ]  # fmt: skip


def test_draws_follow_from_the_seed(tmp_path: Path) -> None:
    text = 'seed = {}\n[[fault]]\nkind = ["kill", "term"]\nevery_s = 3\nspread = 0.5\n'
    first, again, other = (fired(plan_of(tmp_path, text.format(seed)), 300) for seed in (1, 1, 2))
    assert first == again != other
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(first)]
    assert min(gaps) >= 1.3 and max(gaps) <= 4.7 and max(gaps) - min(gaps) > 1
    assert {kind for _, kind in first} == {"kill", "term"}


@pytest.mark.parametrize("name", ["chaos_faults.toml", "chaos_mixed.toml", "chaos_hosts_faults.toml"])
def test_the_examples_are_read(name: str) -> None:
    assert read_plan(EXAMPLES / name).rules


@pytest.mark.parametrize(
    ("line", "where", "fix"),
    [
        ('kind = "kil"\nat_s = 1', "fault 1.kind", "kind = kill"),
        ('kind = "kill"\nat_s = 1\nfor = 1', "fault 1.for", "for_s"),
        ('kind = "kill"', "fault 1", "one of at_step"),
        ('kind = "kill"\nat_s = 1\nat_step = 2', "fault 1", "one of at_step"),
        ('kind = "kill"\nat_s = -1', "fault 1.at_s", "at_s ="),
        ('kind = "kill"\nat_step = 1.5', "fault 1.at_step", "at_step ="),
        ('kind = "kill"\nat_s = 1\nrank = "leeder"', "fault 1.rank", "leader"),
        ('kind = "kill"\nat_s = 1\nrank = true', "fault 1.rank", "rank = 0"),
        ('kind = "vault"\nat_s = 1\nrank = 1', "fault 1.rank", "remove rank"),
        ('kind = "slow"\nat_s = 1', "fault 1", "for_s = 10"),
        ('kind = "cut"\nat_s = 1', "fault 1", "for_s = 10"),
        ('kind = "host"\nat_s = 1\nhost = "one"', "fault 1.host", 'host = "any"'),
        ('kind = "kill"\nat_s = 1\nhost = 1', "fault 1.host", "remove host"),
        ('kind = "kill"\nat_s = 1\ntimes = 2', "fault 1.times", "remove times"),
        ("at_s = 1", "fault 1.kind", "kind ="),
    ],
)
def test_a_bad_fault_is_named(tmp_path: Path, line: str, where: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(tmp_path, f"[[fault]]\n{line}\n")
    [problem] = raised.value.problems
    assert (problem.code, problem.where) == ("chaos-faults", where)
    assert fix in problem.fix


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(tmp_path, 'sead = 1\n[[fault]]\nkind = "kill"\n[[fault]]\nkind = "x"\nat_s = 1\n')
    assert [p.where for p in raised.value.problems] == ["sead", "fault 1", "fault 2.kind"]
    for text in ("seed = 1", "fault = 3", "not toml"):
        with pytest.raises(ConfigError):
            plan_of(tmp_path, text)


# ---- who is hit


def test_the_records_say_who_is_active_leads_and_waits(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"event": "start"}]
    events += [{"event": "rank_started", "rank": n, "group": n // 2, "pid": 100 + n} for n in range(6)]
    events += [{"event": "arrived", "group": g, "place": p} for g in range(3) for p in range(2)]
    events.append({"event": "epoch", "epoch": 1, "active": [0, 1], "joining": []})
    standing = Standing(tmp_path)

    def tell(*more: dict[str, Any]) -> None:
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write("".join(json.dumps(e) + "\n" for e in more))
        standing.refresh()

    def who(what: int | str) -> list[int]:
        return [rank.number for rank in standing.candidates(what)]

    tell(*events)
    assert (who("active"), who("leader"), who("spare"), who(3), who(9)) == ([0, 1, 2, 3], [0, 1], [4, 5], [3], [])
    assert who("every") == who("active")
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "t": 1}\n{"step": 7, "t": 2}\n{"step": 8')
    tell({"event": "rank_lost", "rank": 1, "group": 0}, {"event": "group_lost", "group": 0})
    assert (standing.step, who("active"), who("leader"), who(1)) == (7, [2, 3], [2, 3], [])
    tell({"event": "epoch", "epoch": 2, "active": [1], "joining": [2]})
    assert (who("spare"), standing.finished) == ([], False)
    assert [standing.lead(hosts) for hosts in (1, 3)] == [0, 0]
    tell({"event": "epoch", "epoch": 3, "active": [1], "joining": [2], "term": 5})
    assert standing.lead(3) == 2, "terms are shared out among the hosts"
    tell({"event": "finished"}, {"event": "start"})
    assert (standing.finished, who("active"), who(3)) == (True, [], [])


def test_without_groups_each_rank_is_hit_by_itself(tmp_path: Path) -> None:
    standing = Standing(tmp_path)
    starts = [{"event": "start"}, *({"event": "rank_started", "rank": n, "pid": 100 + n} for n in range(3))]
    for event in starts:
        standing.note(event)
    assert [rank.pid for rank in standing.candidates("active")] == [100, 101, 102]
    standing.note({"event": "rank_lost", "rank": 1, "signal": "SIGKILL"})
    assert [rank.number for rank in standing.candidates("active")] == [0, 2]
    for event in starts:
        standing.note(event)
    assert len(standing.candidates("every")) == 3


def test_only_our_own_children_are_hit() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(300)", "some.module"]
    with subprocess.Popen(command) as child:
        try:
            assert is_child(child.pid, os.getpid()) and not is_child(child.pid, 1)
            deadline = time.monotonic() + 20
            while child_running(os.getpid(), "some.module") != child.pid:
                assert time.monotonic() < deadline
        finally:
            child.send_signal(signal.SIGKILL)
    assert not is_child(child.pid, os.getpid()) and child_running(os.getpid(), "some.module") is None


def test_flipped_bits_are_in_each_tensor_of_each_copy_and_found(tmp_path: Path) -> None:
    state = [Slice.whole("x", torch.arange(50_000.0)), Slice.whole("y", torch.ones(3)), Slice.whole("z", torch.ones(0))]
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with running_vault(tmp_path) as vault, VaultClient(vault.socket) as client:
            assert not flip_and_kill(vault.process.pid, [rank.pid]) and rank.poll() is None, "there is no copy yet"
            for step in (1, 2):
                client.hold(step, state, {})
            assert flip_and_kill(vault.process.pid, [rank.pid])
            assert rank.wait(60) == -signal.SIGKILL
            with MemoryCopies(vault.socket) as copies:
                assert copies.steps(state) == [1, 2]
                for step in (1, 2):
                    for s in state[:2]:
                        with pytest.raises(CheckpointError, match="checksum differs"):
                            copies.read_into(step, [Slice.whole(s.name, torch.zeros_like(s.tensor))])
        assert not flip_and_kill(vault.process.pid, []), "it has gone"
    finally:
        rank.kill()
        rank.wait()


# ---- what it cost


def commits(gaps: list[float]) -> Commits:
    times = [1000.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Commits(tuple(range(1, len(times) + 1)), tuple(times))


def test_effective_time_is_the_steps_at_the_controls_pace_over_the_time() -> None:
    assert commits([0.5] * 20).effective_time(0.5) == pytest.approx(1.0)
    assert commits([0.5] * 18 + [2.5, 0.5]).effective_time(0.5) == pytest.approx(20 * 0.5 / 12)
    assert commits([0.5] * 20).effective_time(0.45) == pytest.approx(0.9)


def test_a_faults_loss_is_what_its_long_intervals_took_above_the_usual() -> None:
    found = commits([0.5] * 10 + [1.7, 0.6, 0.9] + [0.5] * 10 + [3.0] + [0.5] * 5)
    assert found.lost_s(1005.2, 1010.0) == pytest.approx(1.2 + 0.4)
    assert found.lost_s(1010.0, 1030.0) == pytest.approx(2.5)
    assert found.lost_s(1000.0, 1004.9) == 0


def test_the_control_is_cut_where_it_waited() -> None:
    before, after = commits([0.5] * 20).split(8)
    assert (before.steps[-1], after.steps[0], len(after.times)) == (8, 9, 13)
    assert commits([0.5] * 3).split(4)[1].steps == ()


def test_the_usual_step_is_a_median_and_leaves_out_the_cold_ones() -> None:
    found = commits([9.0] * 5 + [0.5] * 10 + [5.5])
    assert found.usual_s == pytest.approx(0.5)
    assert found.mean_s == pytest.approx(10.5 / 11)


def test_too_few_steps_have_no_pace() -> None:
    with pytest.raises(RequestError, match="too few"):
        _ = commits([0.5] * 3).usual_s


# ---- the verb


def chaos_job(folder: Path, **keep: Any) -> Path:
    job = small_job(
        folder,
        layout={"dp": 2},
        train={"steps": 40, "global_batch": 32, "micro_batch": 4},
        keep={"every": 15, "mode": "zero-interruption", "spares": 1, "sums": "exact", **keep},
    )
    file = folder / "job.toml"
    file.write_text(dump_job(job))
    return file


def test_wrong_requests_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "kill"\nat_step = 5\n')
    job = str(chaos_job(tmp_path))
    with pytest.raises(RequestError, match="both say how long"):
        api.chaos(job, faults=str(faults), quick=True, minutes=3.0)
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[[fault]]\nkind = ["host", "cut"]\nat_step = 5\nfor_s = 1\n')
    with pytest.raises(RequestError, match="cut, host befall one of several hosts"):
        api.chaos(job, faults=str(hosts))
    with pytest.raises(RequestError, match="holds something"):
        api.chaos(job, faults=str(faults), runs=str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_under_chaos_ends_with_the_bits_of_its_control(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "kill"\nrank = "leader"\nat_step = 8\n')
    found = api.chaos(str(chaos_job(tmp_path)), faults=str(faults), runs=str(tmp_path / "chaos"))
    assert found.finished and found.bitwise_equal
    assert (found.steps_lost, found.restarts) == (0, 0)
    [fault] = found.faults
    assert (fault["kind"], fault["leader"], fault["skipped"]) == ("kill", True, "")
    assert fault["step"] >= 8
    assert 0 < found.effective_time_all_devices < found.effective_time
    assert len(found.control_step_s) == len(found.control_effective_time) in (1, 2)
    assert found.as_json()["effective_time"] == found.effective_time
    assert "bit for bit" in str(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_death_of_every_rank_at_once_costs_a_restart_in_place(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "kill"\nrank = "every"\nat_step = 20\n')
    job = chaos_job(tmp_path, restarts=3, spares=0)
    found = api.chaos(str(job), faults=str(faults), runs=str(tmp_path / "chaos"))
    assert found.finished and found.bitwise_equal and found.restarts == 0
    assert [fault["skipped"] for fault in found.faults] == [""]
    lines = (tmp_path / "chaos" / "faults" / "events.jsonl").read_text().splitlines()
    assert len([e for e in map(json.loads, lines) if e["event"] == "loaded"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_several_hosts_one_dies_and_comes_back(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "host"\nhost = 1\nat_step = 8\nfor_s = 1\n')
    job = chaos_job(tmp_path, spares=0, min_replicas=2)
    found = api.chaos(str(job), faults=str(faults), hosts=2, runs=str(tmp_path / "chaos"))
    assert found.finished and found.bitwise_equal and (found.steps_lost, found.restarts) == (0, 0)
    assert [(fault["kind"], fault["host"], fault["skipped"]) for fault in found.faults] == [("host", 1, "")]
    lines = (tmp_path / "chaos" / "faults" / "events.jsonl").read_text().splitlines()
    assert [e["number"] for e in map(json.loads, lines) if e["event"] == "host_started"] == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_for_contrast_a_run_without_groups_starts_again_from_its_newest_save(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "kill"\nat_step = 20\n')
    keep = {"every": 15, "restarts": 3}
    job = small_job(tmp_path, layout={"dp": 2}, train={"steps": 40, "global_batch": 32, "micro_batch": 4}, keep=keep)
    (tmp_path / "job.toml").write_text(dump_job(job))
    found = api.chaos(str(tmp_path / "job.toml"), faults=str(faults), runs=str(tmp_path / "chaos"))
    assert found.finished and found.bitwise_equal and found.restarts == 0
    [fault] = found.faults
    assert (fault["kind"], fault["skipped"]) == ("kill", "") and fault["rank"] in (0, 1)
    assert found.steps_lost >= fault["step"] - 15 > 0 or fault["step"] >= 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_damaged_copy_is_refused_when_all_are_lost(tmp_path: Path) -> None:
    """A bit changes in each tensor of the memory's copies, and every rank dies: the run starts again in place, sees
    the damage, and goes on from disk."""
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "flip"\nat_step = 20\n')
    job = chaos_job(tmp_path, memory_every=2, restarts=3, spares=0)
    found = api.chaos(str(job), faults=str(faults), runs=str(tmp_path / "chaos"))
    assert found.finished and found.bitwise_equal and found.restarts == 0
    assert [fault["skipped"] for fault in found.faults] == [""]
    lines = (tmp_path / "chaos" / "faults" / "events.jsonl").read_text().splitlines()
    loaded = [e for e in map(json.loads, lines) if e["event"] == "loaded"]
    assert [(e["source"], e["step"]) for e in loaded] == [("seed", 0), ("disk", 15)]
    assert "in memory refused by rank 0" in loaded[1]["why"] and "checksum differs" in loaded[1]["why"]
    assert found.steps_lost >= 1
