"""The launches of torch's operators, for who subscribed to them (`runtime/tracing.py`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.runtime.tracing import LAUNCHES, Activity, tell_begin, tell_end

__all__ = ["LaunchWatch"]

_clock = time.perf_counter


class LaunchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of each operator that torch dispatches between enter and exit. On a GPU an end says when the host had
    handed the kernel over, not when it was done."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Of a compiled graph the operators that it calls are seen."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a DTensor: it calls the local operators next
        if not LAUNCHES:
            return func(*args, **(kwargs or {}))
        activity = tell_begin(Activity("launch", str(func), _clock()))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            tell_end(activity, _clock())
