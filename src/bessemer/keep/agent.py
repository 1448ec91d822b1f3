"""The agent of a local run: starts the vault and the ranks, watches them, and alone writes the run's records.

    code = run(job)          # 0 done, 1 failed, 2 wrong request (raised), 3 stopped on request

One thread, no torch. Ranks and vault live in sessions of their own, so Ctrl-C reaches only the agent, which passes the
wish on; when the agent is killed the kernel ends the ranks, and the vault ends after the write that it is at.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bessemer.core.errors import BessemerError, RequestError
from bessemer.core.job import Job
from bessemer.keep.hub import Heard, Hub, Interrupted, Wishes, signals_into, signals_raise
from bessemer.keep.journal import Journal
from bessemer.keep.manifest import steps_in
from bessemer.keep.process import Child, usable_cores
from bessemer.keep.progress import Printer
from bessemer.keep.reception import RankState, Reception
from bessemer.keep.restarts import Ladder
from bessemer.keep.run_folder import RunFolder, short_path
from bessemer.keep.vault_host import VaultHost
from bessemer.keep.verdict import Ending, cause_of, stopped_early
from bessemer.keep.wire import private_dir, short_temp_dir
from bessemer.runtime.host_state import raise_open_files

__all__ = ["Agent", "Options", "Timeouts", "run"]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. `grace_s`: the other ranks have this long to end by themselves when one failed; `kill_s`: from SIGTERM
    to SIGKILL; `stop_s`: to finish the step and save after a wish to stop; `vault_s`: for the vault's last write."""

    grace_s: float = 10.0
    kill_s: float = 5.0
    stop_s: float = 120.0
    vault_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """`command` is what each rank runs, `vault` the vault's command (None: no vault), `nproc` the number of ranks
    (default: the job's world size), `again` what to type to go on (default: train on the folder's job.toml), `prepare`
    what has to be done once before the ranks start, `beside` what runs beside the agent, given folder and socket."""

    command: Sequence[str] = (sys.executable, "-m", "bessemer.train.worker")
    vault: Sequence[str] | None = (sys.executable, "-m", "bessemer.keep.vault")
    nproc: int | None = None
    quiet: bool = False
    again: str = ""
    prepare: Callable[[Printer], None] | None = None
    beside: Callable[[Path, Path], AbstractContextManager[object]] = lambda folder, agent: contextlib.nullcontext()
    timeouts: Timeouts = field(default_factory=Timeouts)


def run(job: Job, options: Options | None = None) -> int:
    """Trains `job` on this host and returns the exit code: 0 done, 1 failed, 3 stopped on request and saved.

    Prints progress on stdout, and on stderr what failed, what is saved and what to type. Raises RequestError (wrong
    number of ranks, missing TensorBoard) and RunFolderError (in use, another job's) before anything is started.
    """
    options = options or Options()
    world_size = job.layout.world_size
    if options.nproc not in (None, world_size):
        raise RequestError(
            f"{options.nproc} processes were asked for, but the layout has {world_size} ranks",
            code="world-size",
            fix=f"--nproc {world_size}, or change layout.dp; for several hosts use torchrun, srun or mpirun",
        )
    folder = RunFolder(job)
    lock = folder.lock()
    try:
        claimed = folder.claim()
        journal = Journal(folder, Printer(job.train.steps, quiet=options.quiet))
        try:
            fields = {"job_hash": job.hash, "identity": job.identity, "world_size": world_size}
            journal.event("start", **fields, attempt=claimed["attempt"], host=socket.gethostname())
            code = _prepare(options, journal)
            if code is not None:
                return code
            kind: type[Agent] = Agent
            if job.keep.mode == "zero-interruption":
                from bessemer.keep.elastic_agent import ElasticAgent

                kind = ElasticAgent
            with _workplace(lock) as place, options.beside(folder.path, place / "agent"):
                return kind(folder, journal, options, place, lock).run()
        finally:
            journal.close()
    finally:
        folder.unlock()


def _prepare(options: Options, journal: Journal) -> int | None:
    """What comes before the ranks; a failure there ends the attempt in the records too. Returns the exit code where a
    signal broke it off, which it may do anywhere, since tokenising goes on behind its finished shards."""

    def stopped(name: str) -> int:
        journal.event("stop_requested", signal=name)
        return stopped_early(
            journal,
            "while the data was prepared; finished token shards stay",
            _again(options, journal.folder),
        )

    with signals_raise() as wishes:
        try:
            if options.prepare is not None:
                with contextlib.suppress(Interrupted):
                    options.prepare(journal.printer)
        except BessemerError as error:
            journal.event("failed", code=error.code, message=error.message, rank=error.rank, step=journal.step)
            raise
        if wishes.names:
            return stopped(wishes.names[0])
    return stopped(wishes.names[0]) if wishes.names else None


def _again(options: Options, folder: RunFolder) -> str:
    return options.again or f"bessemer train {short_path(folder.job_file)}"


class Agent:
    """One attempt of a run. `run` may be called once."""

    def __init__(self, folder: RunFolder, journal: Journal, options: Options, place: Path, lock: int) -> None:
        self.folder, self.journal, self.options = folder, journal, options
        self.job, self.timeouts = folder.job, options.timeouts
        self.place = place
        self.world_size = self.job.layout.world_size
        self.ranks = {rank: RankState(rank) for rank in range(self.world_size)}
        self.reception = Reception(self.ranks, journal, on_failed=self._on_failed, on_stop=self._stop)
        self.vault = VaultHost(options.vault, folder, place, lock)
        self._hub = Hub(place / "agent")
        self._plan: list[tuple[float, Callable[[], None]]] = []
        self._failing = False
        self._ladder = Ladder(self.job.keep.restarts)
        self._restarts, self._source = 0, ""
        self._killed = ""  # why we ended ranks by force

    def run(self) -> int:
        raise_open_files()
        with signals_into(self._hub) as wishes:
            try:
                self._start()
            except BessemerError as error:
                self.journal.event("failed", code=error.code, message=error.message, rank=error.rank, step=error.step)
                self._clear()
                raise
            try:
                self._watch_to_the_end(wishes)
                while self._start_again(wishes):
                    self._watch_to_the_end(wishes)
                self._end_vault(wishes)
            finally:
                self._clear()
        return self._conclude()

    def _watch_to_the_end(self, wishes: Wishes) -> None:
        while any(not state.gone for state in self.ranks.values()):
            self._turn(wishes)

    def _clear(self) -> None:
        """Whatever happened, no child outlives this."""
        for child in [state.child for state in self.ranks.values()] + [self.vault.child]:
            if child is not None:
                child.kill_session()
        self._hub.close()

    # ---- start

    def _start(self) -> None:
        self.vault.start(self._hub)
        self._start_ranks()
        name, ranks = short_path(self.folder.path), self.world_size
        self.journal.printer.line("run", f"{name}  {ranks} rank{'s' if ranks > 1 else ''}, job {self.job.hash}", "bold")

    def _start_ranks(self) -> None:
        for state in self.ranks.values():
            state.child = Child(self.options.command, self._environment(state.rank), self.folder.log_file(state.rank))
            try:
                state.child.start()
            except OSError as error:
                raise RequestError(
                    f"the ranks' command {self.options.command[0]!r} can't be run: {error.strerror}", code="bad-command"
                ) from error
            self._hub.watch(state.child.pidfd, state)
            self.journal.event("rank_started", rank=state.rank, pid=state.child.pid)

    def _start_again(self, wishes: Wishes) -> bool:
        """After the end of all ranks: start them again, where one has died and another start may end otherwise."""
        cause = cause_of(self._judged())
        wished = wishes.names or self.reception.stopping or self._killed or self.journal.broken
        if cause is None or wished or not self._ladder.budget:
            return False
        source = self._ladder.climb(cause, self.journal.step, len(steps_in(self.folder.path / "checkpoints")))
        if source is None:
            return False
        self.journal.start_again()
        self._restarts += 1
        about = {"job_hash": self.job.hash, "identity": self.job.identity, "world_size": self.world_size}
        self.journal.event("start", **about, restart=self._restarts, source=source, host=socket.gethostname())
        text = f"all ranks, in place, from {source.partition(':')[0]} ({self._ladder.taken} of {self._ladder.budget})"
        self.journal.printer.line("restart", text, "yellow")
        self._source = source
        self._plan, self._failing = [], False
        self._killed = self.vault.ready(self._hub)
        if self._killed:
            return False
        self._reset_ranks()
        return True

    def _reset_ranks(self) -> None:
        """New ranks in the places of those that have ended; the vault lives on."""
        for rank in self.ranks:
            self.ranks[rank] = RankState(rank)
        self._start_ranks()

    def _environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set, and where agent, vault, store and run folder are. The user's own settings of
        threads and network interface stay."""
        threads = str(max(1, usable_cores() // self.world_size))
        usual = {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
        ours = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # unused: the ranks meet in a file, since a TCP store would listen on all interfaces
            "BESSEMER_STORE": str(self.place / f"store{self._restarts}"),  # that of dead ranks is full of their keys
            "BESSEMER_AGENT": str(self.place / "agent"),
            "BESSEMER_RUN": str(self.folder.path),
            "BESSEMER_RESTORE": self._source,
            "PYTHONUNBUFFERED": "1",
        }
        return {**usual, **os.environ, **ours, **self.vault.environment()}

    # ---- watch

    def _turn(self, wishes: Wishes) -> None:
        """One round: what was heard, what was wished, what is due."""
        next_at = min((at for at, _ in self._plan), default=time.monotonic() + 1.0)
        for heard in self._hub.poll(min(1.0, next_at - time.monotonic())):
            self._take(heard)
        self._heed(wishes)
        now = time.monotonic()
        due = [action for at, action in self._plan if at <= now]
        self._plan = [(at, action) for at, action in self._plan if at > now]
        for action in due:
            action()
        if self.journal.broken and not self.reception.stopping:
            self._stop("")
        self.journal.printer.refresh()

    def _take(self, heard: Heard) -> None:
        if isinstance(heard.watched, RankState):
            self._on_end(heard.watched)
        elif isinstance(heard.watched, VaultHost):
            self._on_vault_end()
        elif heard.record is not None and heard.record.get("kind") == "evict":
            self._evict(int(heard.record["rank"]), str(heard.record["why"]))
        else:
            self.reception.take(heard)

    def _evict(self, rank: int, why: str) -> None:
        """End a rank that does harm, as the watch beside the run asks where the job lets it."""
        state = self.ranks.get(rank)
        if state is not None and state.child is not None and not state.gone:
            self.journal.event("evicted", rank=rank, why=why)
            state.child.signal(signal.SIGKILL)

    def _heed(self, wishes: Wishes) -> None:
        if wishes.names and not self.reception.stopping:
            self._stop(wishes.names[0])
        if len(wishes.names) > 1 and not self._killed:
            self._kill(f"a second signal ({wishes.names[1]}) asked to end at once")

    def _stop(self, signal_name: str) -> None:
        """Passes the wish on. Ranks that have not connected yet get no signal, which would end them half-started and
        leave the others waiting: they hear it at their hello."""
        if signal_name:
            self.journal.event("stop_requested", signal=signal_name)
            hint = "again to end at once" if signal_name == "SIGINT" else "a second signal ends it at once"
            self.journal.printer.line("stopping", f"{signal_name}: finishing the step and saving ({hint})", "yellow")
        for state in self.reception.ask_to_stop():
            if state.child is not None:
                state.child.signal(signal.SIGTERM)
        self._later(
            self.timeouts.stop_s,
            lambda: self._kill(f"the ranks did not finish and save within {self.timeouts.stop_s:g} s of the stop"),
        )

    def _on_failed(self, state: RankState) -> None:
        """A rank said that it fails, or ended badly: the others get some time to notice and to say so themselves."""
        if self._failing:
            return
        self._failing = True
        self._later(self.timeouts.grace_s, lambda: self._signal_rest(signal.SIGTERM))
        self._later(self.timeouts.grace_s + self.timeouts.kill_s, lambda: self._signal_rest(signal.SIGKILL))

    def _on_end(self, state: RankState) -> None:
        assert state.child is not None
        state.child.kill_session()  # what it left running, while its number can't be anybody else's yet
        state.exit_code, state.gone = state.child.exit_code(), True
        if state.exit_code in (0, 3) or state.told_to_end:
            return
        if state.report is None:
            code = state.exit_code or 0
            how = {"signal": signal.Signals(-code).name} if code < 0 else {"exit_code": code}
            self.journal.event("rank_lost", rank=state.rank, **how, step=state.step, phase=state.phase)
        state.failed_at = state.failed_at or time.monotonic()
        self._on_failed(state)

    def _on_vault_end(self) -> None:
        self.vault.reap()
        lost = self.vault.lost_text(any(not state.gone for state in self.ranks.values()))
        if lost:
            self.journal.event("warning", message=f"nothing is saved any more: {lost}", rank=None)

    def _kill(self, why: str) -> None:
        self._killed = self._killed or why
        self._signal_rest(signal.SIGKILL)

    def _signal_rest(self, number: signal.Signals) -> None:
        for state in self.ranks.values():
            if state.child is not None and not state.gone:
                state.told_to_end = True
                state.child.signal(number)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._plan.append((time.monotonic() + delay_s, action))

    # ---- end

    def _end_vault(self, wishes: Wishes) -> None:
        """Lets the vault finish what it writes. A second signal, or `vault_s`, ends it by force."""
        self._plan = []
        self.vault.finish()
        if self.vault.running:
            self.journal.printer.phase("waiting for the vault")
            self._later(self.timeouts.vault_s, lambda: self._kill_vault(f"within {self.timeouts.vault_s:g} s"))
        while self.vault.running:
            self._turn(wishes)
            self.vault.tend(self._hub)
            if len(wishes.names) > 1:
                self._kill_vault("before the second signal")

    def _kill_vault(self, when: str) -> None:
        self._killed = self._killed or f"the vault did not finish its write {when}"
        self.vault.kill()

    def _judged(self) -> Iterable[RankState]:
        """The ranks whose ends decide how the run has ended."""
        return self.ranks.values()

    def _conclude(self) -> int:
        ranks = list(self._judged())
        first = self._ladder.first
        lost = "" if self.journal.end in ("finished", "stopped") else self.vault.lost_text(ranks_run=False)
        if first is not None and cause_of(ranks) is not None:
            ranks = [first]  # what came after it may be no more than its consequence
        return Ending(
            ranks=ranks,
            journal=self.journal,
            stopping=self.reception.stopping,
            trouble=self._killed or self.journal.broken or lost,
            again=_again(self.options, self.folder),
        ).conclude()


@contextmanager
def _workplace(lock: int) -> Iterator[Path]:
    """A directory for this run's sockets and the file in which the ranks meet; only this user can enter it.

    Its name follows from the run folder's lock file, which is held: so what a killed agent left is cleared by the next
    start, and nobody else's is, not even where a run folder was deleted and made again under a run that still goes on.
    """
    base = private_dir(short_temp_dir() / f"bessemer-{os.getuid()}")
    held = os.fstat(lock)
    place = base / hashlib.sha256(f"{held.st_dev}:{held.st_ino}".encode()).hexdigest()[:12]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
