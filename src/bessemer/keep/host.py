"""The services of one host under somebody else's launcher: `python -m bessemer.keep.host`, started by local rank 0.

They take the records of the host's ranks and run their vault; on the host of global rank 0 they also hold the run
folder's lock, write its files and print the progress. They end when the host's ranks have, after the vault's last
write. Signals are left to the ranks: Slurm sends them to every process of a step, and the last save must outlive them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from bessemer.core.errors import BessemerError
from bessemer.core.job import Job
from bessemer.keep.agent import Options, Timeouts
from bessemer.keep.hub import Hub, signals_into
from bessemer.keep.join import SERVICES_S, is_listening
from bessemer.keep.journal import Journal
from bessemer.keep.progress import Printer
from bessemer.keep.reception import RankState, Reception
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.vault_host import VaultHost
from bessemer.keep.verdict import Ending
from bessemer.runtime.host_state import raise_open_files

__all__ = ["Services", "main"]

LOCK_WAIT_S = 30.0
"""An earlier attempt of the same launch (torchrun restarts its ranks) gets this long to finish its last write."""


class Services:
    """`local_ranks` processes of this host, one of them global rank `rank` (local rank 0). `run` returns when all of
    them have ended, or when those that never came have had `SERVICES_S`."""

    def __init__(self, job: Job, place: Path, *, rank: int, local_ranks: int, vault: bool, token: str) -> None:
        self.folder = RunFolder(job)
        self.writes = rank == 0
        self.local_ranks = local_ranks
        self.journal: Journal | None = None
        self.ranks: dict[int, RankState] = {}
        (place / "agent").unlink(missing_ok=True)  # of a launch that was killed
        for old in place.glob("v*"):
            if not is_listening(old / "vault"):  # else it still finishes its last write
                shutil.rmtree(old, ignore_errors=True)
        self.hub = Hub(place / "agent")
        self._place = place
        self._inner = Path(tempfile.mkdtemp(prefix="v", dir=place))  # an earlier vault may still hold the old one
        token_flag = ("--token", token) if token else ()
        self._vault_command = (*(Options().vault or ()), *token_flag) if vault else None
        self.vault: VaultHost | None = None

    def run(self) -> int:
        """0, or what the ranks' ending asks for. A set-up that fails is told to every rank that comes."""
        raise_open_files()
        try:
            with signals_into(self.hub):
                self._set_up()
                self._watch()
                self._end_vault()
            return self._conclude()
        except BessemerError as error:
            print(f"failed [{error.code}] {error}", file=sys.stderr, flush=True)
            self._refuse(error)
            return error.exit_code
        finally:
            if self.vault is not None and self.vault.running:
                self.vault.kill()
            if self.journal is not None:
                self.journal.close()
            self.hub.close()
            self.folder.unlock()
            shutil.rmtree(self._inner, ignore_errors=True)
            with contextlib.suppress(OSError):  # a next attempt may be in there already
                self._place.rmdir()

    def _set_up(self) -> None:
        lock = None
        if self.writes:
            lock = self.folder.lock(LOCK_WAIT_S)
            claimed = self.folder.claim()
            job = self.folder.job
            self.journal = Journal(self.folder, Printer(job.train.steps, bar=False))
            fields = {"job_hash": job.hash, "identity": job.identity, "world_size": job.layout.world_size}
            self.journal.event("start", **fields, attempt=claimed["attempt"], host=socket.gethostname())
        self.vault = VaultHost(self._vault_command, self.folder, self._inner, lock)
        self.vault.start(self.hub)
        self.reception = Reception(
            self.ranks, self.journal, on_failed=self._on_failed, on_stop=self._on_stop, places=self.local_ranks
        )
        self.reception.welcome = {"kind": "welcome", "vault": self.vault.environment().get("BESSEMER_VAULT")}

    def _watch(self) -> None:
        start = time.monotonic()
        while True:
            self._turn()
            all_came = len(self.ranks) == self.local_ranks or time.monotonic() - start > SERVICES_S
            if all_came and all(state.gone for state in self.ranks.values()):
                return

    def _turn(self) -> None:
        for heard in self.hub.poll(1.0):
            if heard.watched is not None and self.vault is not None:
                self.vault.reap()
                lost = self.vault.lost_text(any(not state.gone for state in self.ranks.values()))
                if lost and self.journal is not None:
                    self.journal.event("warning", message=f"nothing is saved any more: {lost}", rank=None)
            elif heard.record is not None and heard.record.get("kind") == "evict":
                self._evict(int(heard.record["rank"]), str(heard.record["why"]))
            elif heard.link is not None:
                self.reception.take(heard)
                if heard.record is None and heard.link.rank is not None:
                    self._on_gone(self.ranks[heard.link.rank])

    def _on_gone(self, state: RankState) -> None:
        """The end of a rank's connection: an orderly one, or its death, whose exit code only the launcher knows."""
        state.gone = True
        if state.said in (0, 3) or (state.said is not None and state.report is not None):
            return
        state.failed_at = state.failed_at or time.monotonic()
        if state.report is None and self.journal is not None:
            self.journal.event("rank_lost", rank=state.rank, exit_code=None, step=state.step, phase=state.phase)

    def _on_failed(self, state: RankState) -> None:
        """A wrong request that one rank found holds for all of them, and they may be waiting for that one."""
        report = state.report or {}
        if report.get("exit_code") != 2:
            return
        refusal = {"kind": "refused", **{key: report[key] for key in ("code", "message", "fix", "rank")}}
        self.reception.welcome = refusal
        for other in self.ranks.values():
            if other.link is not None and other is not state:
                other.link.send(refusal)

    def _evict(self, rank: int, why: str) -> None:
        """End a rank of this host that does harm, as the watch asks where the job lets it. What follows is the
        launcher's doing."""
        state = self.ranks.get(rank)
        if self.journal is None or state is None:
            if self.journal is not None:
                text = f"rank {rank} is to be evicted, but is on another host than the one that could end it: {why}"
                self.journal.event("warning", message=text, rank=rank)
        elif state.link is not None and not state.gone:
            with contextlib.suppress(OSError):
                pid = state.link.peer()
                if pid > 0:  # 0: in a container that isn't seen from here
                    os.kill(pid, signal.SIGKILL)
                    self.journal.event("evicted", rank=rank, why=why)

    def _on_stop(self, name: str) -> None:
        if self.journal is not None:
            self.journal.event("stop_requested", signal=name)
            self.journal.printer.line("stopping", f"{name}: finishing the step and saving", "yellow")
        self.reception.ask_to_stop()

    def _end_vault(self) -> None:
        assert self.vault is not None
        self.vault.finish()
        deadline = time.monotonic() + Timeouts().vault_s
        while self.vault.running:
            self._turn()
            if time.monotonic() > deadline:
                self.vault.kill()

    def _conclude(self) -> int:
        if self.journal is None:
            return 0
        saved = self.vault is None or self.journal.end in ("finished", "stopped")
        lost = "" if saved or self.vault is None else self.vault.lost_text(ranks_run=False)
        return Ending(
            ranks=self.ranks.values(),
            journal=self.journal,
            stopping=self.reception.stopping,
            trouble=self.journal.broken or lost,
            again="the same command",
        ).conclude()

    def _refuse(self, error: BessemerError) -> None:
        """Tells each rank of the host why nothing starts, for as long as one may still come."""
        refusal = {"kind": "refused", "code": error.code, "message": error.message, "fix": error.fix}
        told: set[int] = set()
        deadline = time.monotonic() + SERVICES_S
        while len(told) < self.local_ranks and time.monotonic() < deadline:
            for heard in self.hub.poll(1.0):
                if heard.link is not None and heard.record is not None and heard.record.get("kind") == "hello":
                    heard.link.send(refusal)
                    told.add(heard.record["rank"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bessemer.keep.host", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--place", type=Path, required=True, help="the directory of this launch's sockets, mode 0700")
    parser.add_argument("--rank", type=int, required=True, help="global rank of local rank 0")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of this host")
    parser.add_argument("--token", default="", help="of this attempt, the same on all hosts")
    parser.add_argument("--no-vault", action="store_true", help="for tests")
    given = parser.parse_args(arguments)
    job = Job.model_validate(tomllib.loads(sys.stdin.read()))
    return Services(
        job, given.place, rank=given.rank, local_ranks=given.ranks, vault=not given.no_vault, token=given.token
    ).run()


if __name__ == "__main__":
    sys.exit(main())
