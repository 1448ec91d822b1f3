"""Answers that need a whole run to be read: asked beside the page, kept, and asked again only after a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Answer"]

LEAST_S = 10.0
SHARE = 0.02
"""Of one core's time that may go into asking again and again."""


class Answer:
    """What `ask` returned last, in `value`; the reason where it raised an error of ours, in `why`."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._not_before_s = 0.0
        self._thread: threading.Thread | None = None
        self._of: Any = None
        self.value: Any = None
        self.why = ""

    def wanted(self, state: Any, *, wait: bool = False) -> None:
        """Asks in a thread of its own, unless the answer is of this `state` already or a thread is at it, and not
        before ten seconds and fifty times what asking took have passed. wait: at once, and here."""
        if state == self._of:
            return
        if wait:
            self._run(state)
            return
        with self._lock:
            if time.monotonic() < self._not_before_s or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, args=(state,), daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Waits for a thread that asks."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, state: Any) -> None:
        start = time.thread_time()
        try:
            self.value, self.why = self._ask(), ""
        except Exception as error:  # a run of another version, say: the page goes on without, and doesn't ask at once
            self.value, self.why = None, str(getattr(error, "message", f"{type(error).__name__}: {error}"))
        self._of = state
        self._not_before_s = time.monotonic() + max(LEAST_S, (time.thread_time() - start) / SHARE)
