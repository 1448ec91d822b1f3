"""The corpus of crashes: what fails in each run, and what landing should then say.

Names end with the mode: without an ending all ranks depend on each other ("restart", without restarts), with "-zero"
groups of one rank are lost and the others go on. Rank 1 is the guilty one where nothing else is said. Classes are those
of docs/landing.md: of a SIGKILL without a trace "unknown" is right, since nobody can know who sent it.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from crash_runs import NOWHERE, PATIENCE_S, CrashRun, Scenario, Truth
from disks import fill_up

__all__ = ["SCENARIOS", "by_name"]

STEP, PACE_S = 12, 0.05
ANY = ()
ZERO = {"mode": "zero-interruption", "sums": "exact", "min_replicas": 1, "every": 0}
HOSTS = ("127.0.0.2", "127.0.0.3")
FULL = (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1])


def plan(do: str, at: str = "forward", ranks: tuple[int, ...] = (1,), **more: Any) -> dict[str, Any]:
    return {"do": do, "at": at, "ranks": list(ranks), "step": STEP, "pace_s": PACE_S, **more}


SLOW = plan("nothing", NOWHERE)
"""Nothing but steps between which somebody can act."""


# ---- what happens from outside


def hangs(run: CrashRun) -> None:
    """It stands still until the watch beside it says so, and somebody presses Ctrl-C twice; or it ends by itself."""
    agent = run.start()
    deadline = time.monotonic() + PATIENCE_S
    while agent.poll() is None and not any(e["kind"] in ("hang", "stopped") for e in run.events("finding")):
        assert time.monotonic() < deadline, f"{run.scenario.name} goes on\n{run.told()}"
        time.sleep(0.1)
    run.interrupt(2)


def interrupted(run: CrashRun, times: int = 1, number: int = signal.SIGINT) -> None:
    run.start()
    run.until_step(2)
    run.interrupt(times, number)


def agent_killed(run: CrashRun) -> None:
    agent = run.start()
    run.until_step(4)
    agent.kill()
    agent.wait()


def killed(module: str) -> Any:
    """A process beside the ranks."""

    def play(run: CrashRun) -> None:
        agent = run.start()
        run.until_step(8)
        os.kill(run.child(module), signal.SIGKILL)
        run.end_of(agent)

    return play


def first_lost(run: CrashRun) -> None:
    """One of two groups is killed; the one that is started in its place and joins then fails as planned."""
    agent = run.start()
    run.until_step(4)
    os.kill(run.events("rank_started")[1]["pid"], signal.SIGKILL)
    run.end_of(agent)


def vault_full(run: CrashRun) -> None:
    agent = run.start()
    run.until_step(2)
    resource.prlimit(run.child("bessemer.keep.vault"), resource.RLIMIT_FSIZE, FULL)
    run.end_of(agent)


def disk_full(run: CrashRun) -> None:
    """A small file system, full until landing has read what is on it."""
    disk = run.base / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], check=True, capture_output=True)
    run.mounted = disk
    agent = run.start()
    run.until_step(4)
    fill_up(disk / "filler")
    run.end_of(agent)


def _token_files(run: CrashRun) -> list[Path]:
    found = sorted(Path(run.job.data.cache).rglob("*.train.tokens"))
    assert found, "the corpus was tokenised"
    return found


def shard_damaged(run: CrashRun) -> None:
    """After a sound run the token shards are damaged; the next one finds it as it starts."""
    run.end_of(run.start({}))
    for path in _token_files(run):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    shutil.rmtree(run.run)
    run.to_the_end()


def shard_truncated(run: CrashRun) -> None:
    agent = run.start()
    run.until_step(4)
    for path in _token_files(run):
        os.truncate(path, 0)
    run.end_of(agent)


def checkpoint_damaged(run: CrashRun) -> None:
    """The only checkpoint, between two starts."""
    run.start()
    run.until_event("saved", step=10)
    run.interrupt(1)
    for path in sorted((run.run / "checkpoints").rglob("*.safetensors")):
        data = bytearray(path.read_bytes())
        data[-8] ^= 1
        path.write_bytes(bytes(data))
    run.to_the_end()


def checkpoint_missing(run: CrashRun) -> None:
    """run.resume names a folder that holds no checkpoint."""
    Path(run.job.run.resume).mkdir()
    run.to_the_end()


def wrong_field(run: CrashRun) -> None:
    """Refused before there is a run folder."""
    run.job = run.job.model_copy(update={"train": run.job.train.model_copy(update={"global_batch": 7})})
    assert run.to_the_end() == 2


def host_environment(number: int, port: int) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(len(HOSTS)), "BESSEMER_HOSTS": ",".join(HOSTS),
            "MASTER_PORT": str(port), "BESSEMER_SECRET": "a secret of the scenarios"}  # fmt: skip


def free_port() -> int:
    with socket.socket() as link:
        link.bind((HOSTS[0], 0))
        return int(link.getsockname()[1])


def port_in_use(run: CrashRun) -> None:
    """Of two hosts the first one finds somebody else at the coordinator's port."""
    with socket.socket() as other:
        other.bind((HOSTS[0], 0))
        other.listen()
        run.end_of(run.start(environment=host_environment(0, other.getsockname()[1])))


def host_lost(number: int) -> Any:
    """All processes of the second of two hosts are killed or stopped; the first one finishes without them."""

    def play(run: CrashRun) -> None:
        port = free_port()
        first = run.start(environment=host_environment(0, port))
        second = run.start(environment=host_environment(1, port))
        run.until_step(8)
        run.signal_tree(second, number)
        run.end_of(first)

    return play


# ---- the corpus


def _restart(name: str, truth: Truth, does: dict[str, Any], **more: Any) -> Scenario:
    return Scenario(name, truth, does, **more)


def _zero(name: str, truth: Truth, does: dict[str, Any], *, dp: int = 2, **more: Any) -> Scenario:
    """More than two groups share out twelve samples."""
    sections = dict(more.pop("sections", {}))
    batch = 12 if dp % 2 or dp > 2 else 8
    train = {"steps": 60, "global_batch": batch, "eval_every": 0} | sections.pop("train", {})
    keep = ZERO | sections.pop("keep", {})
    whole = {"layout": {"dp": dp}, "train": train, "keep": keep, **sections}
    return Scenario(f"{name}-zero", truth, does, sections=whole, **more)


def _guilty(kind: str) -> Truth:
    return Truth(kind, (1,))


def _lost(*kinds: tuple[int, str]) -> Truth:
    return Truth("no fault", losses=kinds)


def _three(steps: int = 40, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"layout": {"dp": 3}, "train": {"steps": steps, "global_batch": 12, "eval_every": 0}, **sections}


NO_FAULT, OF_ALL = Truth("no fault"), (None, 0)
NOT_FINITE = Truth("hardware", (1,), also=((0, "unknown"), (1, "hardware")))
"""Each group ends by itself, so that the others may have noted its end before they come to theirs."""
SAVING = {"keep": {"every": 10}}
SCENARIOS: tuple[Scenario, ...] = (
    # a rank dies
    _restart("kill-forward", _guilty("unknown"), plan("SIGKILL")),
    _restart("kill-backward", _guilty("unknown"), plan("SIGKILL", "backward")),
    _restart("kill-sum", _guilty("unknown"), plan("SIGKILL", "sum")),
    _zero("kill-forward", _lost((1, "unknown")), plan("SIGKILL")),
    _zero("kill-backward", _lost((1, "unknown")), plan("SIGKILL", "backward")),
    _zero("kill-sum", _lost((1, "unknown")), plan("SIGKILL", "sum")),
    _zero("kill-after-vote", _lost((1, "unknown")), plan("SIGKILL", "voted")),
    _zero("kill-after-commit", _lost((1, "unknown")), plan("SIGKILL", "committed")),
    _zero("kill-joiner", _lost((1, "unknown"), (2, "unknown")), plan("SIGKILL", "joiner", (2,)),
          play=first_lost),
    _zero("kill-all-but-one", _lost((1, "unknown"), (2, "unknown")), plan("SIGKILL", ranks=(1, 2)), dp=3),
    _zero("kill-all", Truth("unknown", (None, 0, 1), also=((0, "unknown"), (1, "unknown"))),
          plan("SIGKILL", ranks=(0, 1))),
    _restart("segfault", _guilty("code"), plan("segv")),
    _zero("segfault", _lost((1, "code")), plan("segv")),
    _restart("abort", _guilty("code"), plan("abort")),
    _zero("abort", _lost((1, "code")), plan("abort")),
    _restart("terminated-at-start", _guilty("operator"), plan("SIGTERM", "start")),
    _restart("terminated", NO_FAULT, plan("SIGTERM")),
    _zero("terminated", NO_FAULT, plan("SIGTERM")),
    # memory, files, disks
    _restart("memory-limit", _guilty("operator"), plan("allocate")),
    _zero("memory-limit", _lost((1, "operator")), plan("allocate")),
    _restart("memory-kernel", _guilty("operator"), plan("out-of-memory"), needs="cgroup"),
    _zero("memory-kernel", _lost((1, "operator")), plan("out-of-memory"), needs="cgroup"),
    _restart("too-many-files", _guilty("operator"), plan("files")),
    _restart("disk-full-vault", Truth("operator", OF_ALL), SLOW, play=vault_full, sections=SAVING),
    _zero("disk-full-last-save", Truth("operator", OF_ALL), SLOW, play=vault_full),
    _restart("disk-full", Truth("operator", OF_ALL), SLOW, play=disk_full, needs="root",
             sections=SAVING | {"run": {"dir": "disk"}}),
    # values
    _restart("gradient-nan-once", _guilty("hardware"), plan("nothing", "gradient")),
    _zero("gradient-nan-once", NOT_FINITE, plan("nothing", "gradient")),
    _restart("activation-nan", _guilty("code"), plan("nothing", "activation")),
    _restart("weight-infinite", _guilty("hardware"), plan("nothing", "parameters", add="inf")),
    _zero("weight-infinite", NOT_FINITE, plan("nothing", "parameters", add="inf")),
    _zero("weight-infinite-saved", _lost((0, "hardware")), plan("nothing", "save", (0,), step=20),
          sections={"keep": {"every": 10}}),
    _restart("weight-flipped", _lost((1, "hardware")), plan("nothing", "parameters", add="1e-3"),
             sections=_three(120, inspect={"hash_every": 5})),
    _zero("weight-flipped", _lost((1, "hardware")), plan("nothing", "parameters", add="1e-3"), dp=3,
          sections={"inspect": {"hash_every": 5}}),
    _zero("sum-flipped", _lost((1, "hardware")), plan("nothing", "digest"), dp=3),
    _restart("diverges", Truth("code"), {}, sections={"train": {"steps": 400, "lr": 100.0, "eval_every": 0}}),
    # data
    _restart("token-beyond", _guilty("data"), plan("nothing", "tokens")),
    _zero("token-beyond", _lost((1, "data")), plan("nothing", "tokens")),
    _restart("shard-damaged", Truth("data"), {}, play=shard_damaged),
    _restart("shard-truncated", Truth("data", (None, 0, 1)), plan("nothing", NOWHERE), play=shard_truncated,
             sections={"train": {"steps": 400, "eval_every": 0}}),
    _restart("data-stalls", _guilty("data"), plan("load-slowly", "data"), play=hangs),
    _zero("data-stalls", _lost((1, "data")), plan("load-slowly", "data")),
    # code
    _restart("error", _guilty("code"), plan("raise")),
    _zero("error", _lost((1, "code")), plan("raise")),
    _restart("error-of-all", Truth("code"), plan("raise", ranks=ANY)),
    _zero("error-of-all", Truth("code", also=((0, "code"), (1, "code"))), plan("raise", ranks=(0, 1))),
    _restart("other-library", _guilty("code"), plan("library", "start")),
    _restart("loop", _guilty("code"), plan("loop"), play=hangs),
    _zero("loop", _lost((1, "code")), plan("loop")),
    _restart("sum-of-other-size", _guilty("code"), plan("nothing", "size"), play=hangs, sections=_three()),
    _restart("other-operation", _guilty("code"), plan("nothing", "operation"), play=hangs, sections=_three()),
    _restart("sum-skipped", _guilty("code"), plan("nothing", "skip"), play=hangs, sections=_three()),
    # people
    _restart("stopped", _guilty("operator"), plan("SIGSTOP"), play=hangs),
    _zero("stopped", _lost((1, "operator")), plan("SIGSTOP")),
    _restart("interrupted", NO_FAULT, SLOW, play=interrupted),
    _zero("interrupted", NO_FAULT, SLOW, play=interrupted),
    _restart("interrupted-twice", Truth("operator"), SLOW | {"pace_s": 4.0},
             play=lambda run: interrupted(run, times=2)),
    _restart("agent-terminated", NO_FAULT, SLOW, play=lambda run: interrupted(run, number=signal.SIGTERM)),
    _restart("agent-killed", Truth("unknown"), SLOW, play=agent_killed),
    _restart("wrong-field", Truth("no run"), {}, play=wrong_field),
    _restart("checkpoint-not-there", Truth("operator", OF_ALL), {}, play=checkpoint_missing,
             sections={"run": {"resume": "nowhere"}}),
    # services, checkpoints, hosts
    _restart("vault-killed", Truth("unknown"), SLOW, play=killed("bessemer.keep.vault"), sections=SAVING),
    _zero("vault-killed", NO_FAULT, SLOW, play=killed("bessemer.keep.vault"), sections=SAVING),
    _zero("coordinator-killed", NO_FAULT, SLOW, play=killed("bessemer.keep.coordinate")),
    _restart("checkpoint-damaged", Truth("hardware", OF_ALL), SLOW, play=checkpoint_damaged, sections=SAVING),
    _zero("port-in-use", Truth("operator"), {}, play=port_in_use),
    _zero("host-killed", _lost((1, "unknown")), SLOW, play=host_lost(signal.SIGKILL)),
    _zero("host-silent", _lost((1, "operator")), SLOW, play=host_lost(signal.SIGSTOP)),
    _restart("finishes", NO_FAULT, {}),
)  # fmt: skip


def by_name(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)
