"""The vault as the group that leads uses it, in a run that goes on while groups and vaults are lost.

    saver = LeaderSaver(lambda patience_s: VaultClient(socket, patience_s=patience_s))
    saver.leads, saver.tell = (lambda: loop.leads), told

`told` hears of each save that was not made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bessemer.core.errors import CheckpointError
from bessemer.keep.slices import Slice
from bessemer.keep.vault_client import VaultClient

__all__ = ["LeaderSaver"]

_OF_THE_DISK = ("disk-full", "checkpoint-write")
_SAVE_PATIENCE_S, _LAST_PATIENCE_S = 5.0, 60.0
"""For a vault to come that takes a save, and one of which nobody can say any more that the next one will do."""
_AGAIN_S = 0.2
_WRITE_S = 600.0
"""For a save that is made again to be durable: a rank of the group may have heard in time that it was."""
_LOST = ("vault-lost", "checkpoint-dropped")
"""What another try with another vault may mend; the second: a rank of the same group found none."""


class LeaderSaver:
    """The vault, of which only the group that leads is a client, from its first save on and for as long as it leads.
    When the vault dies the agent starts another; what the dead one had not written is saved with the next save. Nor is
    a save that fails for the disk's sake, or for want of a vault, a reason to end: the groups hold the state, and the
    next save may find both. `tell` hears of it. Only the newest one has to succeed by the time of `wait`, whenever its
    failure was heard of. `connect(patience_s)`: waits so long for a vault that is just starting."""

    def __init__(self, connect: Callable[[float], VaultClient]) -> None:
        self._connect = connect
        self._client: VaultClient | None = None
        self._newest: tuple[int, list[Slice], dict[str, Any]] | None = None  # save, since this group leads
        self._failed: CheckpointError | None = None  # that one
        self.leads: Callable[[], bool] = lambda: True
        self.tell: Callable[[CheckpointError], None] = lambda error: None

    def reserve(self, slices: list[Slice], meta: dict[str, Any]) -> None:
        """Memory is reserved with the first save."""

    def save(self, step: int, slices: list[Slice], meta: dict[str, Any]) -> float:
        self._newest, self._failed, start = (step, slices, meta), None, time.perf_counter()
        try:
            return self._with_client(_SAVE_PATIENCE_S, slices, meta, partial(_save, self._newest))
        except CheckpointError as error:
            if error.code != "vault-lost":
                raise
            error.step, self._failed = step, error
            self.tell(error)
            return time.perf_counter() - start

    def hold(self, step: int, slices: list[Slice], meta: dict[str, Any]) -> float:
        """Nobody waits for a vault to come: the next copy is soon due."""
        start = time.perf_counter()
        try:
            return self._with_client(0.0, slices, meta, lambda client: client.hold(step, slices, meta))
        except CheckpointError as error:
            if error.code != "vault-lost":
                raise
            return time.perf_counter() - start

    def poll(self) -> list[dict[str, Any]]:
        if not self.leads():
            self._let_go()  # the vault has heard of another client for this place by now
        if self._client is None:
            return []
        try:
            found = self._client.poll()
        except CheckpointError as error:
            self._go_on_from(error)
            if self._is_newest(error.step):
                self._failed = error
            return []
        dropped, self._client.dropped = self._client.dropped, []
        for step in dropped:
            error = CheckpointError("a rank of this group found no vault", code="checkpoint-dropped", step=step)
            self.tell(error)
            self._failed = error if self._is_newest(step) else self._failed
        return found

    def wait(self) -> list[dict[str, Any]]:
        """For the newest save, which is the last. The state stands still, so that what failed for want of a vault can
        be done again, until there has been none for a minute."""
        if not self.leads():
            self._let_go()
            return []
        until, limit_s = math.inf, None
        while True:
            try:
                return self._wait(limit_s)
            except CheckpointError as error:
                until = min(until, time.monotonic() + _LAST_PATIENCE_S)
                if error.code not in _LOST or self._newest is None or time.monotonic() > until:
                    raise
            self._leave()
            self._failed, limit_s = None, _WRITE_S
            _, slices, meta = self._newest
            try:
                self._with_client(until - time.monotonic(), slices, meta, partial(_save, self._newest))
                until = math.inf
            except CheckpointError as error:
                if error.code not in _LOST or time.monotonic() > until:
                    raise
                self._failed = error
                time.sleep(_AGAIN_S)

    def _let_go(self) -> None:
        """Another group leads, and saves from now on."""
        self._leave()
        self._newest = self._failed = None

    def _is_newest(self, step: int | None) -> bool:
        """Whether an error of that step, or of the vault as a whole, is one of the newest save."""
        return step is None or (self._newest is not None and step == self._newest[0])

    def _wait(self, limit_s: float | None) -> list[dict[str, Any]]:
        if self._failed is not None:
            raise self._failed
        while self._client is not None:
            try:
                return self._client.wait(limit_s)
            except CheckpointError as error:
                if self._is_newest(error.step) or error.code not in (*_OF_THE_DISK, "checkpoint-dropped"):
                    raise
                self.tell(error)  # of an earlier one
        return []

    def _with_client(
        self, patience_s: float, slices: list[Slice], meta: dict[str, Any], work: Callable[[VaultClient], float]
    ) -> float:
        """Once more, with a new vault if the one that was there has died: the error is of what went before."""
        if self._client is not None:
            try:
                return work(self._client)
            except CheckpointError as error:
                self._go_on_from(error)
        try:
            if self._client is None:
                self._client = self._connect(patience_s)
                self._client.reserve(slices, meta)
            return work(self._client)
        except CheckpointError as error:
            if error.code == "vault-lost":
                self._leave()
            raise

    def _go_on_from(self, error: CheckpointError) -> None:
        if error.code in _OF_THE_DISK:
            self.tell(error)
        elif error.code == "vault-lost":
            self._leave()
        else:
            raise error

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _save(what: tuple[int, list[Slice], dict[str, Any]], client: VaultClient) -> float:
    return client.save(*what)
