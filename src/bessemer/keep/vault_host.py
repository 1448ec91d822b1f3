"""The vault as its agent sees it: started first, told to finish last, never killed while it writes.

Its standard input is a pipe from the agent. When that ends, because the agent closed it or died, the vault finishes the
write that it is at and ends. It takes no signal as that wish, since Slurm signals every process of a step. It inherits
the run folder's lock, so that no new run starts beside its last write.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

from bessemer.core.errors import PeerLost
from bessemer.keep.hub import Hub
from bessemer.keep.process import Child, exit_text
from bessemer.keep.run_folder import RunFolder, short_path

__all__ = ["VaultHost"]

START_S = 60.0
"""The vault opens its socket within about a second; a loaded machine gets some more."""
STOPPED_S = 5.0
YOUNG_S = 60.0
"""A vault that ends before it is so old has a successor that may end for the same reason."""
HURRY_S = 1.0
"""Between two starts, where what is to be saved is the last."""
PAUSES_S = (0.0, 0.0, 0.0, 0.0, 10.0, 30.0, 60.0, 300.0)
"""Before the next one is started, by how many in a row have ended young; the last for all that follow."""


class VaultHost:
    """`child` is None before `start` and without a command. `exit_code` is set when it was reaped. Where the run goes
    on without it (`lose`), `tend` starts another one when its time has come."""

    def __init__(self, command: Sequence[str] | None, folder: RunFolder, place: Path, lock: int | None) -> None:
        self.socket = place / "vault"
        self.log = folder.path / "logs" / "vault.log"
        self.child: Child | None = None
        self.exit_code: int | None = None
        self._spawned = 0.0
        self._opened = math.inf
        self._young, self._due = 0, math.inf
        self._why = ""  # it was ended
        self.finishing = False
        self._folder, self._command = folder, command
        self._lock = () if lock is None else (lock,)

    @property
    def running(self) -> bool:
        return self.child is not None and self.exit_code is None

    def environment(self) -> dict[str, str]:
        """What a rank needs to find the vault."""
        return {} if self._command is None else {"BESSEMER_VAULT": str(self.socket)}

    def start(self, hub: Hub) -> None:
        """Starts the vault and waits until its socket is there, so that no rank looks for it in vain. PeerLost
        (vault-lost), OSError."""
        if self._command is None:
            return
        self._spawn()
        assert self.child is not None
        while not self.socket.exists():
            code = self.child.exit_code()
            if code is not None or time.monotonic() > self._spawned + START_S:
                how = f"opened no socket within {START_S:g} s" if code is None else exit_text(code)
                tail = "".join(f"\n    | {line}" for line in self.child.tail())
                self.child.kill_session()
                self.reap()
                raise PeerLost(f"the vault {how}\n  log: {self.log}{tail}", code="vault-lost")
            time.sleep(0.02)
        self._opened = time.monotonic()
        hub.watch(self.child.pidfd, self)

    def ready(self, hub: Hub) -> str:
        """Starts one where none runs, and waits for it. Returns why there is none, or nothing."""
        try:
            if not self.running:
                self.start(hub)
        except (PeerLost, OSError) as error:
            return str(error)
        if self.child is None:  # without a command
            return ""
        ended = select.poll()  # without reaping it, which is left to whoever hears of its end
        ended.register(self.child.pidfd, select.POLLIN)
        while not self.socket.exists():
            if time.monotonic() > self._spawned + START_S or ended.poll(20):
                return f"the vault opens no socket; its log: {short_path(self.log)}"
        return ""

    def _spawn(self) -> None:
        assert self._command is not None
        self._opened, self._why, self._due = math.inf, "", math.inf
        self.socket.unlink(missing_ok=True)  # of one that was killed
        keep = self._folder.job.keep
        command = [*self._command, "--socket", str(self.socket), "--run", str(self._folder.path)]
        command += ["--keep-last", str(keep.keep_last), "--keep-every", str(keep.keep_every)]
        child = Child(command, os.environ, self.log, is_vault=True, pass_fds=self._lock)
        self._spawned, self.finishing = time.monotonic(), False
        child.start()
        self.child, self.exit_code = child, None

    def lose(self) -> str:
        """It has ended and was reaped, or couldn't be started, and the run goes on: another one is due after a pause,
        with nothing of what it held. Returns what to say."""
        self._young = self._young + 1 if time.monotonic() - self._opened < YOUNG_S else 0
        pause_s = PAUSES_S[min(self._young, len(PAUSES_S) - 1)]
        self._due = time.monotonic() + pause_s
        in_s = f" in {pause_s:g} s" if pause_s else ""
        return f"{self.lost_text(ranks_run=True)}; another is started{in_s}, and saves from the next save on"

    def tend(self, hub: Hub, lease_s: float = STOPPED_S, *, hurry: bool = False) -> str:
        """To be called a few times a second: starts one that is due, without waiting for it, and ends one that has been
        stopped for so long, which a save would wait for, or that doesn't open its socket. hurry: what is to be saved
        now is the last. Returns what to say, if anything."""
        now = time.monotonic()
        if self.running and self.child is not None:
            if self._opened == math.inf and self.socket.exists():
                self._opened = now
            if self.child.stopped_s() > lease_s:
                self._end(f"was stopped for {lease_s:g} s and ended")
            elif self._opened == math.inf and now > self._spawned + START_S:
                self._end(f"opened no socket within {START_S:g} s")
        elif now >= min(self._due, self._spawned + HURRY_S if hurry and self._due < math.inf else math.inf):
            try:
                self._spawn()
            except OSError as error:
                self._why = f"can't be started: {error.strerror or error}"
                return self.lose()
            assert self.child is not None
            hub.watch(self.child.pidfd, self)
        return ""

    def _end(self, why: str) -> None:
        self._why = why
        self.kill()

    def finish(self) -> None:
        """Tells it that nobody will save any more."""
        self.finishing = True
        if self.child is not None:
            self.child.close_input()

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill_session()

    def lost_text(self, ranks_run: bool) -> str:
        """What to say of a reaped vault: empty for an orderly end, which comes only after the ranks', and where it was
        to be replaced, since a save that failed for want of it was told by its rank."""
        if not ranks_run and (not self.exit_code or self._due < math.inf):
            return ""
        return f"the vault {self._why or exit_text(self.exit_code or 0)}; its log: {short_path(self.log)}"

    def reap(self) -> int:
        """The exit code, once the hub has seen its end."""
        assert self.child is not None
        self.exit_code = self.child.wait(5.0) or 0
        return self.exit_code
