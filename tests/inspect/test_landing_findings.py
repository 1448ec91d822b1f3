"""Verdicts that rest on what the watch beside a run found, on votes, and on what errors of few words say: each as a
real run left it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from remains_builder import RemainsBuilder, ended, enqueue, finding, land, lost, traceback

from bessemer.inspect.landing import read_landing

SURE = 0.5
STACK = "logs/rank-1.log: stack, innermost first: "
WAITS_FOR_DATA = (
    'File "/usr/lib/python3.11/threading.py", line 320 in wait <- File "/opt/bessemer/data/reader.py", line 59 in '
    "__next__"
)
ENDLESS = (
    'File "/home/me/losses.py", line 12 in normalise <- File "/opt/bessemer/train/passes.py", line 140 in _straight'
)
NONFINITE = "bessemer.core.errors.NonFinite: "
BUS_ERROR = (
    "Fatal Python error: Bus error\n\nCurrent thread 0x00007e (most recent call first):\n"
    '  File "/opt/bessemer/data/stream.py", line 31 in read\n  File "/opt/bessemer/data/dataset.py", line 88 in batch\n'
)
BAD_INDEX = (
    '  File "/opt/bessemer/models/model.py", line 40, in forward\n    x = self.embed(tokens_BS)\n'
    '  File "/opt/torch/nn/functional.py", line 2546, in embedding\n    return torch.embedding(weight, input)\n'
)


@pytest.fixture
def remains(tmp_path: Path) -> RemainsBuilder:
    builder = RemainsBuilder(tmp_path / "run")
    builder.start()
    return builder


def ended_by_hand(b: RemainsBuilder) -> None:
    b.event("stop_requested", signal="SIGINT")
    ended(b, None, "ended", "a second signal (SIGINT) asked to end at once")


@pytest.mark.parametrize(
    ("kind", "evidence", "expected"),
    [
        ("stopped", "", "operator"),
        ("hang", WAITS_FOR_DATA, "data"),
        ("hang", ENDLESS, "code"),
        ("hang", 'File "/opt/bessemer/models/parts.py", line 9 in forward', "unknown"),
        ("hang", "", "unknown"),
    ],
)
def test_a_standstill_that_was_ended_by_hand_is_the_rank_that_stood_still(
    remains: RemainsBuilder, kind: str, evidence: str, expected: str
) -> None:
    finding(remains, kind, (1,), evidence=(STACK + evidence,) if evidence else ())
    remains.now += 2
    ended_by_hand(remains)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (1, expected), verdict
    assert verdict.confidence > SURE and "finding" in verdict.evidence[0]


def test_a_standstill_that_passed_says_nothing_of_the_end(remains: RemainsBuilder) -> None:
    finding(remains, "hang", (1,))
    remains.now += 2
    remains.steps([1.0])
    remains.now += 2
    ended_by_hand(remains)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (None, "operator") and "second signal" in verdict.evidence[-1]


@pytest.mark.parametrize(("why", "expected"), [(ENDLESS, "code"), (WAITS_FOR_DATA, "data")])
def test_a_group_given_up_for_standing_still_has_the_class_of_its_stack(
    remains: RemainsBuilder, why: str, expected: str
) -> None:
    finding(remains, "hang", (1,), evidence=(STACK + why,))
    remains.now += 2
    lost(remains, 1, group=1, why="rank 1 makes no progress in training", silent_s=10.0)
    remains.event("epoch", epoch=2, step=5, active=[0], term=1)
    remains.event("finished", step=20)
    (loss,) = land(remains).losses
    assert (loss.verdict.rank, loss.verdict.kind) == (1, expected)
    assert any("finding hang" in line for line in loss.verdict.evidence)


def test_a_group_that_a_vote_put_out_is_hardware(remains: RemainsBuilder) -> None:
    for rank in range(3):
        remains.event("rank_started", rank=rank, group=rank, pid=rank + 10)
    remains.event("group_ended", group=1, code="fenced", message="its sum of step 6 differs from the majority's")
    lost(remains, 1, group=1, why="rank 1 exited with code 1", exit_code=1, silent_s=0.0)
    remains.event("epoch", epoch=2, step=5, active=[0, 2], term=1)
    remains.event("finished", step=20)
    landing = land(remains)
    (loss,) = landing.losses
    assert landing.verdict.kind == "no fault"
    assert (loss.verdict.rank, loss.verdict.kind) == (1, "hardware") and loss.verdict.confidence > SURE
    assert any("majority" in line for line in loss.verdict.evidence)


def test_a_copy_that_differs_is_told_even_where_the_run_finished(remains: RemainsBuilder) -> None:
    finding(remains, "corruption", (2,), advice="evict", text="the parameters of rank 2 differ from the majority")
    remains.event("finished", step=20)
    landing = land(remains)
    assert landing.verdict.kind == "no fault"
    assert [(each.verdict.rank, each.verdict.kind) for each in landing.losses] == [(2, "hardware")]


def test_a_bad_value_after_a_copy_was_found_to_differ_is_that_copys(remains: RemainsBuilder) -> None:
    finding(remains, "corruption", (2,), advice="evict", text="the parameters of rank 2 differ from the majority")
    bad = "the output of blocks.1.mlp is not finite (samples 8 to 15) (rank 0, step 21)"
    for rank in range(4):
        remains.log(f"rank-{rank}", traceback(NONFINITE + bad))
    ended(remains, 0, "non-finite", bad)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (2, "hardware") and verdict.confidence > SURE
    assert "corruption" in verdict.evidence[0]


def test_copies_of_which_no_majority_is_right_accuse_nobody(remains: RemainsBuilder) -> None:
    finding(remains, "corruption", (0, 1), advice="watch", text="no majority says whose are right")
    remains.event("finished", step=20)
    assert not land(remains).losses


def test_a_finding_shortly_before_the_end_is_quoted(remains: RemainsBuilder) -> None:
    finding(remains, "memory_growth", (1,), text="the memory of rank 1 grows by 9.00 MB a step")
    finding(remains, "slow_rank", (3,), text="rank 3 computes 40% longer")
    remains.now += 5
    lost(remains, 1, signal="SIGKILL")
    ended(remains, 1)
    evidence = "\n".join(land(remains).verdict.evidence)
    assert "memory of rank 1 grows" in evidence and "rank 3" not in evidence


def test_a_finding_of_another_version_does_no_harm(remains: RemainsBuilder) -> None:
    remains.event("finding", kind="hang", who=[1])
    ended_by_hand(remains)
    assert land(remains).verdict.kind == "operator"


NOWHERE_ELSE = "parameter embed is not finite, but finite in 1 of 2 copies (samples 8 to 15) (rank 1, step 3)"
NEVER_AGAIN = ", and no pass gives a bad value when it is run again"
ONCE = f"the gradient of embed is not finite{NEVER_AGAIN}"


@pytest.mark.parametrize("text", [NOWHERE_ELSE, f"{ONCE} (samples 1 to 8) (rank 1, step 3)"])
def test_a_bad_value_that_nothing_repeats_is_hardware(remains: RemainsBuilder, text: str) -> None:
    for rank in range(4):
        remains.log(f"rank-{rank}", traceback(NONFINITE + text))
    ended(remains, 1, "non-finite", text)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (1, "hardware") and verdict.confidence > SURE


def group_ends(b: RemainsBuilder, rank: int, text: str) -> None:
    b.log(f"rank-{rank}", traceback(f"{NONFINITE}{text} (samples 1 to 8) (rank {rank}, step 3)"))
    lost(b, rank, group=rank, why=f"rank {rank} exited with code 1", exit_code=1, silent_s=0.0)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("own", ["parameter embed is not finite", ONCE])
def test_the_group_whose_own_value_is_bad_is_named_before_those_that_only_have_the_sum(
    remains: RemainsBuilder, own: str, first: int
) -> None:
    summed = f"the summed gradient of embed is not finite{NEVER_AGAIN}"
    for rank in (first, 1 - first):
        group_ends(remains, rank, own if rank == 1 else summed)
    ended(remains, first, "non-finite", "is not finite")
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (1, "hardware") and verdict.confidence > SURE


def test_a_state_that_only_the_leading_group_holds_so_is_hardware(remains: RemainsBuilder) -> None:
    group_ends(remains, 0, "embed is not finite after step 20, which is not saved")
    remains.event("epoch", epoch=2, step=20, active=[1], term=1)
    remains.event("finished", step=40)
    (loss,) = land(remains).losses
    assert (loss.verdict.rank, loss.verdict.kind) == (0, "hardware")


@pytest.mark.parametrize(
    ("log", "how", "kind"),
    [
        (traceback("IndexError: index out of range in self", BAD_INDEX), {"exit_code": 1}, "data"),
        (traceback("IndexError: index out of range in self"), {"exit_code": 1}, "code"),
        (BUS_ERROR, {"signal": "SIGBUS"}, "data"),
        (traceback("OSError: [Errno 24] Too many open files: '/dev/null'"), {"exit_code": 1}, "operator"),
    ],
)
def test_errors_of_few_words(remains: RemainsBuilder, log: str, how: dict[str, Any], kind: str) -> None:
    remains.log("rank-1", log)
    lost(remains, 1, **how)
    remains.victims(0, 2, 3)
    ended(remains, 1)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (1, kind) and verdict.confidence > SURE


def test_a_dead_vault_is_not_the_fault_of_the_rank_that_asked_for_it(remains: RemainsBuilder) -> None:
    remains.event(
        "warning", message="nothing is saved any more: the vault was killed by SIGKILL; its log: x", rank=None
    )
    gone = "no vault answers at /tmp/v: it was not started, or it died and took unfinished saves with it"
    for rank in (0, 1):
        remains.log(f"rank-{rank}", traceback(f"bessemer.core.errors.CheckpointError: {gone}"))
    ended(remains, 0, "vault-lost", gone)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (None, "unknown") and "SIGKILL" in "".join(verdict.evidence)


def test_a_coordinator_that_found_its_port_taken(tmp_path: Path) -> None:
    """On several hosts nothing is recorded before a coordinator leads."""
    remains = RemainsBuilder(tmp_path / "run")
    remains.log("coordinator-0", traceback("OSError: [Errno 98] Address already in use"))
    landing = read_landing(remains.folder, now=remains.now, kernel=[], running=False)
    assert (landing.verdict.rank, landing.verdict.kind) == (None, "operator")
    assert "MASTER_PORT" in landing.verdict.next


def test_a_host_whose_agent_left_no_word(remains: RemainsBuilder) -> None:
    for rank in range(4):
        remains.event("rank_started", rank=rank, group=rank, pid=rank + 10)
    remains.event("epoch", epoch=2, step=5, active=[0, 2], term=1, t=remains.now + 1)
    for rank in (1, 3):
        remains.event("group_lost", group=rank, state="active", step=5, why="host node-b is silent for 1.5 s")
    remains.event("finished", step=40)
    remains.event("group_lost", group=0, state="active", step=40, why="its connection ended")
    assert [(each.verdict.rank, each.verdict.kind) for each in land(remains).losses] == [(1, "unknown"), (3, "unknown")]


def test_groups_that_end_one_after_the_other_as_they_were_asked_to_are_not_lost(remains: RemainsBuilder) -> None:
    for rank in range(2):
        remains.event("rank_started", rank=rank, group=rank, pid=rank + 10)
    remains.event("stop_requested", signal="SIGINT")
    remains.event("group_lost", group=1, state="active", step=3, why="its connection ended")
    remains.event("stopped", step=3)
    remains.event("epoch", epoch=2, step=3, active=[0], term=1)
    landing = land(remains)
    assert landing.verdict.kind == "no fault" and not landing.losses


def test_whoever_finds_the_disk_of_the_run_folder_full_is_not_to_blame(remains: RemainsBuilder) -> None:
    text = f"{remains.folder}/checkpoints: 164,016 bytes are needed and 0 are free"
    ended(remains, 1, "disk-full", text)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (None, "operator") and text in verdict.evidence[0]


HOLDS = """
import fcntl, os, subprocess, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
child = subprocess.Popen(["sleep", "60"], pass_fds=(lock,), stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_run_whose_agent_was_killed_does_not_go_on_while_its_vault_still_writes(remains: RemainsBuilder) -> None:
    folder = remains.write()
    command = [sys.executable, "-c", HOLDS, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        vault = int(agent.stdout.readline())
        try:
            assert read_landing(folder, kernel=[]).verdict.kind == "no fault"
            agent.kill()
            agent.wait()
            assert read_landing(folder, kernel=[]).verdict.kind == "unknown"
        finally:
            os.kill(vault, signal.SIGKILL)


def test_a_full_disk_may_be_why_no_end_is_recorded(remains: RemainsBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.inspect.landing_remains._free_bytes", lambda folder: 0)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (None, "operator") and "0 bytes are left" in verdict.evidence[0]


def test_the_one_that_calls_another_size_than_most_is_named(remains: RemainsBuilder) -> None:
    for rank in range(3):
        channel = remains.box(rank).channel("data", (0, 1, 2), "gloo", blocks=True)
        enqueue(channel, finish=False, elements=16 if rank == 1 else 8)
    remains.now = time.time() + 300
    verdict = land(remains, running=True).verdict
    assert (verdict.rank, verdict.kind) == (1, "code") and verdict.confidence > SURE


def test_the_one_that_waits_elsewhere_than_most_is_named(remains: RemainsBuilder) -> None:
    """Rank 1 has left out a sum, and is at the next one, of another group."""
    for rank in range(3):
        recorder = remains.box(rank)
        channels = {name: recorder.channel(name, (0, 1, 2), "gloo", blocks=True) for name in ("world", "replica")}
        enqueue(channels["replica" if rank == 1 else "world"], finish=False)
    remains.now = time.time() + 300
    verdict = land(remains, running=True).verdict
    assert (verdict.rank, verdict.kind) == (1, "code") and verdict.confidence > SURE
