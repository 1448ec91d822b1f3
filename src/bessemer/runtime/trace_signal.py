"""SIGUSR2, which asks a rank for a trace of its next step: from a rank's first moment on it must not end it. No torch.

A rank starts with the signal blocked (`keep.process`, for those that our agent starts), so that one that comes early
waits; who can take it lets it through.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

__all__ = ["TRACE_SIGNAL", "hold_trace_signal", "take_trace_signal"]

TRACE_SIGNAL = signal.SIGUSR2


def hold_trace_signal() -> None:
    """Have it wait from now on, in this thread and in whatever it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {TRACE_SIGNAL})


def take_trace_signal(asked: Callable[[], None]) -> None:
    """Call `asked` for each one, also for one that waits. For the main thread."""
    signal.signal(TRACE_SIGNAL, lambda number, frame: asked())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {TRACE_SIGNAL})
