"""Verdicts on a corpus of run folders, each with a fault that is known: the guilty rank and class are named, victims
never are, and where two explanations fit the verdict says that it isn't sure."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from remains_builder import LOST, RemainsBuilder, ended, enqueue, land, lost, traceback

from bessemer.cli._app import application
from bessemer.core.errors import RequestError
from bessemer.inspect.landing import read_landing
from bessemer.inspect.landing_remains import KernelLine

SURE = 0.5
NAN = "bessemer.core.errors.NonFinite: the output of blocks.1.mlp is not finite (samples 8 to 15) (rank 3, step 21)"
SEGFAULT = (
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
    '  File "/usr/lib/threading.py", line 9, in wait\n\nCurrent thread 0x00007e (most recent call first):\n'
    '  File "/opt/bessemer/ops/native.py", line 77, in attend\n  File "/opt/bessemer/train/step.py", line 5, in run\n'
)
Build = Callable[[RemainsBuilder], None]


@pytest.fixture
def remains(tmp_path: Path) -> RemainsBuilder:
    builder = RemainsBuilder(tmp_path / "run")
    builder.start()
    return builder


def crash(b: RemainsBuilder) -> None:
    b.log("rank-2", traceback("ValueError: injected"))
    b.victims(0, 1, 3)
    ended(b, 2, "crash", "ValueError: injected")


def crash_heard_last(b: RemainsBuilder) -> None:
    b.victims(0, 1, 3)
    b.now += 0.5
    b.log("rank-2", traceback("ValueError: injected"))
    ended(b, 0, "peer-lost", LOST)


def segfault(b: RemainsBuilder) -> None:
    lost(b, 1, signal="SIGSEGV")
    b.log("rank-1", SEGFAULT)
    b.victims(0, 2, 3)
    ended(b, 1)


def bus_error(b: RemainsBuilder) -> None:
    lost(b, 1, signal="SIGBUS")
    ended(b, 1)


def sigkill(b: RemainsBuilder) -> None:
    lost(b, 2, signal="SIGKILL")
    b.victims(0, 1, 3)
    ended(b, 2)


def aborted_victims(b: RemainsBuilder) -> None:
    lost(b, 0, signal="SIGABRT")
    b.log("rank-0", f"terminate called after throwing an instance of 'gloo::IoException'\n  what():  {LOST}\n{LOST}\n")
    b.now += 0.3
    lost(b, 3, signal="SIGKILL")
    ended(b, 0)


def bad_import(b: RemainsBuilder) -> None:
    b.log("rank-1", traceback("ModuleNotFoundError: No module named 'tokenizers'"))
    b.victims(0, 2, 3)
    ended(b, 1, "crash", "ModuleNotFoundError: No module named 'tokenizers'")


def diverged(b: RemainsBuilder) -> None:
    b.steps([1.0] * 10 + [4.0, 30.0, 200.0])
    for rank in range(4):
        b.log(f"rank-{rank}", traceback(NAN))
    ended(b, 3, "non-finite", NAN.partition(": ")[2])


def blew_up_and_collapsed(b: RemainsBuilder) -> None:
    """Within a few steps; in the last ones there is no gradient left."""
    b.steps([1.0, 250.0, 1180.0, 9985.0, 0.0, 0.0])
    for rank in range(4):
        b.log(f"rank-{rank}", traceback(NAN))
    ended(b, 3, "non-finite", NAN.partition(": ")[2])


def broke_at_once(b: RemainsBuilder) -> None:
    b.steps([1.0] * 13)
    for rank in range(4):
        b.log(f"rank-{rank}", traceback(NAN))
    ended(b, 3, "non-finite", NAN.partition(": ")[2])


def bad_shard(b: RemainsBuilder) -> None:
    b.log("rank-1", traceback("bessemer.core.errors.DataError: cache/x/shard-3: 12 bytes, 4096 are listed"))
    b.victims(0, 2, 3)
    ended(b, 1, "shard-damaged", "cache/x/shard-3: 12 bytes, 4096 are listed")


def wrong_request(b: RemainsBuilder) -> None:
    for rank in range(4):
        b.log(f"rank-{rank}", traceback("bessemer.core.errors.RequestError: weights of another model"))
    ended(b, 0, "weights-mismatch", "weights of another model")


def lost_weights(b: RemainsBuilder) -> None:
    """The exception's class says less than the code."""
    b.log("rank-0", traceback("bessemer.core.errors.CheckpointError: /nope has no model.safetensors"))
    b.victims(1, 2, 3)
    ended(b, 0, "weights-files", "/nope has no model.safetensors")


def no_corpus(b: RemainsBuilder) -> None:
    ended(b, None, "corpus-empty", "corpus/*.py matches nothing")


def disk_full(b: RemainsBuilder) -> None:
    b.log("rank-0", traceback("OSError: [Errno 28] No space left on device: 'trace/x'"))
    b.victims(1, 2, 3)
    ended(b, 0, "crash", "OSError: [Errno 28] No space left on device")


def out_of_memory(b: RemainsBuilder) -> None:
    b.log("rank-3", traceback("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"))
    b.victims(0, 1, 2)
    ended(b, 3, "crash", "RuntimeError: [enforce fail]")


def read_error(b: RemainsBuilder) -> None:
    b.log("rank-1", traceback("OSError: [Errno 5] Input/output error: 'cache/shard-1'"))
    b.victims(0, 2, 3)
    ended(b, 1, "crash", "OSError: [Errno 5] Input/output error")


def hidden_by_a_chain(b: RemainsBuilder) -> None:
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    b.log("rank-1", traceback("KeyError: 'blocks.9'") + chain + traceback(LOST))
    b.victims(0, 2, 3)
    ended(b, 0, "peer-lost", LOST)


def one_later(b: RemainsBuilder) -> None:
    b.log("rank-3", traceback("ZeroDivisionError: division by zero"))
    b.now += 5
    b.log("rank-0", traceback("KeyError: 'nobody answered'"))
    ended(b, 0, "crash", "KeyError: 'nobody answered'")


def second_signal(b: RemainsBuilder) -> None:
    b.event("stop_requested", signal="SIGINT")
    ended(b, None, "ended", "a second signal (SIGINT) asked to end at once")


def vault_died(b: RemainsBuilder) -> None:
    b.log("vault", traceback("OSError: [Errno 28] No space left on device"))
    b.event("warning", message="nothing is saved any more: the vault exited with code 1", rank=None)
    ended(b, 0, "vault-lost", "the vault is gone")


CORPUS: list[tuple[Build, int | None, str, float, float, str]] = [
    (crash, 2, "code", 0.7, 1.0, "logs/rank-2.log:7: ValueError: injected"),
    (crash_heard_last, 2, "code", 0.7, 1.0, "step.py:109 run"),
    (sigkill, 2, "unknown", SURE, 1.0, "events.jsonl:3"),
    (segfault, 1, "code", 0.0, 0.49, "native.py:77 attend"),
    (bus_error, 1, "hardware", 0.0, 0.49, "SIGBUS"),
    (aborted_victims, 3, "unknown", SURE, 1.0, "SIGKILL"),
    (bad_import, 1, "code", 0.7, 1.0, "tokenizers"),
    (diverged, None, "code", SURE, 1.0, "blocks.1.mlp"),
    (blew_up_and_collapsed, None, "code", SURE, 1.0, "blocks.1.mlp"),
    (broke_at_once, 3, "data", 0.0, 0.49, "samples 8 to 15"),
    (bad_shard, 1, "data", 0.7, 1.0, "shard-3"),
    (wrong_request, None, "operator", 0.7, 1.0, "ranks 0, 1, 2, 3 failed in the same way"),
    (lost_weights, 0, "operator", 0.7, 1.0, "/nope"),
    (no_corpus, None, "data", 0.7, 1.0, "corpus/*.py"),
    (disk_full, 0, "operator", 0.7, 1.0, "Errno 28"),
    (out_of_memory, 3, "operator", 0.7, 1.0, "DefaultCPUAllocator"),
    (read_error, 1, "hardware", SURE, 1.0, "Errno 5"),
    (hidden_by_a_chain, 1, "code", 0.7, 1.0, "KeyError"),
    (one_later, 3, "code", 0.7, 1.0, "ZeroDivisionError"),
    (second_signal, None, "operator", 0.7, 1.0, "second signal"),
    (vault_died, None, "operator", SURE, 1.0, "logs/vault.log"),
]


@pytest.mark.parametrize(
    ("build", "rank", "kind", "least", "most", "quoted"), CORPUS, ids=[case[0].__name__ for case in CORPUS]
)
def test_corpus(
    remains: RemainsBuilder, build: Build, rank: int | None, kind: str, least: float, most: float, quoted: str
) -> None:  # fmt: skip
    build(remains)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (rank, kind), verdict
    assert least <= verdict.confidence <= most
    assert any(quoted in line for line in verdict.evidence), verdict.evidence
    assert verdict.next
    assert rank not in verdict.victims


def test_the_kernels_word_explains_a_sigkill(remains: RemainsBuilder) -> None:
    sigkill(remains)
    enqueue(remains.box(2).channel("data", range(4), "gloo", blocks=True), finish=True)  # it tells the pid
    remains.now = time.time() + 1
    at = remains.events[-2]["t"]
    said = [KernelLine(at, f"Out of memory: Killed process {os.getpid()} (python) total-vm:9kB")]
    verdict = land(remains, kernel=said).verdict
    assert (verdict.rank, verdict.host, verdict.kind) == (2, socket.gethostname(), "operator")
    assert verdict.confidence > 0.8 and "Out of memory" in verdict.evidence[-1]
    before = [KernelLine(remains.events[0]["t"] - 100, said[0].text)]
    assert land(remains, kernel=before).verdict.kind == "unknown"


def test_victims_alone_accuse_nobody(remains: RemainsBuilder) -> None:
    remains.victims(0, 1, 3)
    ended(remains, 0, "peer-lost", LOST)
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind, verdict.victims) == (None, "unknown", (0, 1, 3))
    assert verdict.confidence < SURE


def test_two_faults_at_once_compete(remains: RemainsBuilder) -> None:
    remains.log("rank-1", traceback("ValueError: one"))
    remains.now += 0.2
    remains.log("rank-2", traceback("KeyError: 'two'"))
    ended(remains, 1, "crash", "ValueError: one")
    verdict = land(remains).verdict
    assert verdict.confidence < SURE
    assert any("competes: logs/rank-2.log" in line for line in verdict.evidence)


@pytest.mark.parametrize("how", ["finished", "stopped"])
def test_no_fault(remains: RemainsBuilder, how: str) -> None:
    if how == "stopped":
        remains.event("stop_requested", signal="SIGTERM")
    remains.event(how, step=12)
    verdict = land(remains).verdict
    assert (verdict.kind, verdict.rank) == ("no fault", None) and verdict.confidence > 0.9


def test_a_run_that_went_on_lists_what_it_lost(remains: RemainsBuilder) -> None:
    remains.event("epoch", epoch=1, step=0, active=[0, 1], term=1)
    for rank, why, code in (
        (0, "rank 0 was killed by SIGKILL", -9),
        (1, "rank 1 is stopped for 1.5 s", None),
        (4, "rank 4 exited with code 1", 1),
    ):
        exited = {} if code is None else {"exit_code": code}
        remains.event("rank_lost", rank=rank, group=rank, why=why, step=5 + rank, phase="training", **exited)
        if code == 1:
            remains.log("rank-4", traceback("ValueError: of one rank"))
        remains.event("epoch", epoch=rank + 2, step=5, active=[2], term=1)
    remains.event("finished", step=60)
    landing = land(remains)
    assert landing.verdict.kind == "no fault"
    found = [(loss.verdict.rank, loss.verdict.kind, loss.step) for loss in landing.losses]
    assert found == [(0, "unknown", 5), (1, "operator", 6), (4, "code", 9)]


def test_a_restart_lists_the_failure_before_it(remains: RemainsBuilder) -> None:
    sigkill(remains)
    remains.now += 10
    remains.start(restart=1)
    remains.event("finished", step=12)
    landing = land(remains)
    assert landing.verdict.kind == "no fault"
    assert [(loss.verdict.rank, loss.verdict.kind) for loss in landing.losses] == [(2, "unknown")]


def test_the_log_of_an_earlier_attempt_accuses_nobody(remains: RemainsBuilder) -> None:
    crash(remains)
    remains.now += 10
    remains.start()
    lost(remains, 3, signal="SIGKILL")
    ended(remains, 3)
    landing = land(remains)
    assert (landing.verdict.rank, landing.verdict.kind) == (3, "unknown")
    assert not any("injected" in line for line in landing.verdict.evidence)
    assert (landing.losses[0].verdict.rank, landing.losses[0].verdict.kind) == (2, "code")


def test_silence_is_unknown(remains: RemainsBuilder) -> None:
    verdict = land(remains).verdict
    assert (verdict.rank, verdict.kind) == (None, "unknown") and verdict.confidence < SURE


def test_damaged_records_make_it_unsure(remains: RemainsBuilder) -> None:
    crash(remains)
    folder = remains.write()
    lines = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join([*lines[:2], "\x00\x00", *lines[2:], ""]))
    landing = read_landing(folder, now=remains.now, kernel=[], running=False)
    assert landing.verdict.rank == 2 and landing.verdict.confidence < SURE
    assert "events.jsonl:3 is damaged" in landing.notes[0]


def test_logs_alone_are_enough(remains: RemainsBuilder) -> None:
    crash(remains)
    folder = remains.write()
    (folder / "events.jsonl").unlink()
    assert read_landing(folder, now=remains.now, kernel=[], running=False).verdict.rank == 2


def test_same_stacks_are_one_cluster(remains: RemainsBuilder) -> None:
    crash(remains)
    assert [cluster.ranks for cluster in land(remains).clusters] == [(0, 1, 3), (2,)]


def test_the_verb(remains: RemainsBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    crash(remains)
    folder = remains.write()
    for words in (["landing", str(folder), "--json"], ["landing", str(folder)]):
        with pytest.raises(SystemExit) as done:
            application()(args=words)
        assert not done.value.code
    out = capsys.readouterr().out
    found, end = json.JSONDecoder().raw_decode(out)
    assert list(found["verdict"]) == ["rank", "host", "class", "confidence", "evidence", "next"]
    assert found["verdict"]["rank"] == 2 and "verdict: rank 2: code" in out[end:]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is no run folder"):
        read_landing(tmp_path)


def test_no_torch_is_imported(remains: RemainsBuilder) -> None:
    crash(remains)
    code = (
        "import sys; from bessemer.api._landing import landing; "
        f"assert landing({str(remains.write())!r}).verdict.rank == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
