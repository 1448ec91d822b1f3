"""The vault as its agent sees it: started first, told to finish last, never killed while it writes.

Its standard input is a pipe from the agent. When that ends, because the agent closed it or died, the vault finishes the
write that it is at and ends. It takes no signal as that wish, since Slurm signals every process of a step. It inherits
the run folder's lock, so that no new run starts beside its last write.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bessemer.core.errors import PeerLost
from bessemer.keep.hub import Hub
from bessemer.keep.process import Child, exit_text
from bessemer.keep.run_folder import RunFolder, short_path

__all__ = ["VaultHost"]

START_S = 60.0
"""The vault opens its socket within about a second; a loaded machine gets some more."""
YOUNG_S = 60.0
"""A vault that ends before it is so old has a successor that may end for the same reason."""
PAUSES_S = (0.0, 0.0, 0.0, 0.0, 10.0, 30.0, 60.0, 300.0)
"""Before the next one is started, by how many in a row have ended young; the last for all that follow."""


class VaultHost:
    """`child` is None before `start` and without a command. `exit_code` is set when it was reaped."""

    def __init__(self, command: Sequence[str] | None, folder: RunFolder, place: Path, lock: int | None) -> None:
        self.socket = place / "vault"
        self.log = folder.path / "logs" / "vault.log"
        self.child: Child | None = None
        self.exit_code: int | None = None
        self._opened, self._young = math.inf, 0
        self._folder, self._command = folder, command
        self._lock = () if lock is None else (lock,)

    @property
    def running(self) -> bool:
        return self.child is not None and self.exit_code is None

    def environment(self) -> dict[str, str]:
        """What a rank needs to find the vault."""
        return {} if self._command is None else {"BESSEMER_VAULT": str(self.socket)}

    def start(self, hub: Hub, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts the vault, the first or one in the place of one that died, and waits until its socket is there, so
        that no rank looks for it in vain. `meanwhile` is called again and again: a busy machine may take seconds."""
        if self._command is None:
            return
        self.socket.unlink(missing_ok=True)  # of one that was killed
        self.exit_code = None
        keep = self._folder.job.keep
        command = [*self._command, "--socket", str(self.socket), "--run", str(self._folder.path)]
        command += ["--keep-last", str(keep.keep_last), "--keep-every", str(keep.keep_every)]
        self.child = Child(command, os.environ, self.log, is_vault=True, pass_fds=self._lock)
        self.child.start()
        self._opened = math.inf
        deadline = time.monotonic() + START_S
        while not self.socket.exists():
            code = self.child.exit_code()
            if code is not None or time.monotonic() > deadline:
                how = f"opened no socket within {START_S:g} s" if code is None else exit_text(code)
                tail = "".join(f"\n    | {line}" for line in self.child.tail())
                self.child.kill_session()
                self.reap()
                raise PeerLost(f"the vault {how}\n  log: {self.log}{tail}", code="vault-lost")
            meanwhile()
            time.sleep(0.02)
        self._opened = time.monotonic()
        hub.watch(self.child.pidfd, self)

    def start_again(self, hub: Hub, meanwhile: Callable[[], None]) -> str:
        """Another one in the place of one that died, with nothing of what that held. Returns why it didn't start, or
        nothing."""
        if self.running:
            return ""
        try:
            self.start(hub, meanwhile)
        except (PeerLost, OSError) as error:
            return str(error)
        return ""

    def pause_s(self) -> float:
        """After its end, or a start in vain: how long to wait before the next one."""
        self._young = self._young + 1 if time.monotonic() - self._opened < YOUNG_S else 0
        return PAUSES_S[min(self._young, len(PAUSES_S) - 1)]

    def finish(self) -> None:
        """Tells it that nobody will save any more."""
        if self.child is not None:
            self.child.close_input()

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill_session()

    def lost_text(self, ranks_run: bool) -> str:
        """What to say of a reaped vault: empty for an orderly end, which comes only after the ranks'."""
        if not self.exit_code and not ranks_run:
            return ""
        return f"the vault {exit_text(self.exit_code or 0)}; its log: {short_path(self.log)}"

    def reap(self) -> int:
        """The exit code, once the hub has seen its end."""
        assert self.child is not None
        self.exit_code = self.child.wait(5.0) or 0
        return self.exit_code
