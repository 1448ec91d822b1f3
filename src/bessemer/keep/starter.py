"""How an agent starts ranks in the midst of a run: forked from a template that has imported what they need, where a
rank is a module's main(); else, and once the template has ended, as fresh interpreters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bessemer.keep.hub import Hub
from bessemer.keep.process import Child
from bessemer.keep.reception import RankState
from bessemer.keep.template import ForkedChild, Template

__all__ = ["Group", "Starter"]

PRELOAD = ("bessemer.train.elastic_worker", "torch._dynamo", "torch._inductor", "torch.onnx",
           "torch.distributed.fsdp", "torch.distributed.tensor")  # fmt: skip
"""What a rank has loaded by its second step."""


@dataclass
class Group:
    """A group of ranks on this host."""

    name: int
    states: list[RankState]
    slot: int  # among the groups of this host: which devices are its
    lost: bool = False
    leaving: bool = False


class Starter:
    """`command` is what each rank runs; `idle` is called while one is waited for."""

    def __init__(self, command: Sequence[str], idle: Callable[[], None]) -> None:
        self.template: Template | None = None
        self._command, self._idle = command, idle

    def start(self, environment: Mapping[str, str], log: Path, hub: Hub) -> None:
        """Begin with the template's imports, whose end the hub then tells of."""
        if tuple(self._command[:-1]) == (sys.executable, "-m"):
            self.template = Template(self._command[-1], PRELOAD, env=environment, log=log)
            self.template.start()
            hub.watch(self.template.child.pidfd, self.template)

    def await_ready(self) -> None:
        if self.template is not None:
            self.template.await_ready()

    def child(self, environment: Mapping[str, str], log: Path) -> Child:
        """Not started yet."""
        if self.template is None:
            return Child(self._command, environment, log)
        return ForkedChild(self.template, self._command, environment, log, self._idle)

    def ended(self) -> str:
        """The template has: what to say of it."""
        assert self.template is not None
        why = self.template.ended()
        return f"new ranks are fresh interpreters from now on, which start more slowly: the template {why}"

    def close(self) -> None:
        if self.template is not None:
            self.template.close()
