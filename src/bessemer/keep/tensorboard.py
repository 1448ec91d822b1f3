"""TensorBoard files from the metric records, through tensorboard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.core.errors import MissingExtra

__all__ = ["BoardWriter"]

_SCALARS = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "val_loss", "val_bits_per_byte", "perplexity")


class BoardWriter:
    """Writes an event file into `folder`. Raises MissingExtra when the package tensorboard is absent."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra("train", "tensorboard", "tensorboard") from error
        self._event, self._log = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def resume(self, step: int) -> None:
        """Tells TensorBoard to forget what it holds after `step`, from which the run goes on."""
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step + 1, session_log=self._log(status=self._log.START))
        )

    def metric(self, record: Mapping[str, Any]) -> None:
        """The scalars of a step, and its phases under `phases/`."""
        scalars = {key: record[key] for key in _SCALARS if isinstance(record.get(key), int | float)}
        phases = record.get("phases") or {}
        scalars |= {f"phases/{name}": value for name, value in phases.items()}
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        when = float(record.get("t") or time.time())
        self._writer.add_event(
            self._event(wall_time=when, step=int(record["step"]), summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()
