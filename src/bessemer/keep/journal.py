"""What a run leaves behind and shows: the records of its processes go to the files, the screen and TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bessemer.keep.progress import Printer, event_line
from bessemer.keep.records import RecordWriter
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.tensorboard import BoardWriter

__all__ = ["Journal"]

_ENDS = ("finished", "stopped", "failed")
_DURABLE = ("start", *_ENDS, "saved", "rank_lost", "stop_requested")


class Journal:
    """The one writer of metrics.jsonl and events.jsonl, in the process that holds the run folder's lock.

    `step` is the last committed step. `saved` is step and path of what a next start goes on from: until something is
    loaded, the newest checkpoint of the folder; then what was loaded, since a newer one was refused; then what was
    saved. On a full disk lines wait until there is room. When one can't be written for another reason (`broken` says
    why), nothing more is: a file with a hole would lie.
    """

    def __init__(self, folder: RunFolder, printer: Printer) -> None:
        self.folder, self.printer = folder, printer
        self.step = 0
        self.saved = folder.newest_saved()
        self.end = ""
        self.broken = ""
        self._waits = False
        self.loaded = False
        self._before = folder.manifests()
        self._board: BoardWriter | None = None
        self._files: dict[Literal["metrics", "events"], RecordWriter] = {}
        self._open_files()
        printer.open()

    def _open_files(self) -> None:
        folder = self.folder
        self._board = BoardWriter(folder.path / "tensorboard") if folder.job.run.tensorboard else None
        self._files = {"metrics": RecordWriter(folder.metrics_file), "events": RecordWriter(folder.events_file)}

    def metric(self, record: Mapping[str, Any]) -> None:
        self._write("metrics", record)
        self.step = int(record.get("step", self.step))
        self.printer.metric(record)
        if self._board is not None:
            self._board.metric(record)

    def event(self, name: str, /, **fields: Any) -> None:
        """A line of events.jsonl; `t` is now unless the record brings it. The first `loaded` cuts the metrics back.
        What the watch still finds of a run that has finished is left out: scripts ask the last line whether it has."""
        if self.end == "finished" and name == "finding":
            return
        record = {"t": fields.pop("t", time.time()), "event": name, **fields}
        if name == "loaded" and not self.loaded:
            self.loaded = True
            self._go_on_from(int(record.get("step") or 0))
        if name in ("loaded", "saved") and record.get("source") not in ("memory", "peer"):  # they end with this run
            self.saved = (int(record.get("step") or 0), Path(record["path"])) if record.get("path") else None
        if name in _ENDS:
            self.end = name
        self._write("events", record)
        if name in _DURABLE:
            self._sync()
        shown = event_line(record)
        if shown is not None:
            self.printer.line(*shown)

    def start_again(self) -> None:
        """The ranks are started again: the next `loaded` is again the first."""
        self.tell_untold()
        self.loaded, self.end = False, ""

    def tell_untold(self) -> None:
        """Records a checkpoint that this attempt made durable after the rank that would have told of it was gone."""
        now = self.folder.manifests()
        made = {folder for folder, mark in now.items() if self._before.get(folder) != mark}
        newest = self.folder.newest_saved()
        if newest is not None and newest[1] in made and newest != self.saved:
            self.event("saved", step=newest[0], path=str(newest[1]))

    def close(self) -> None:
        self._close_files()
        self.printer.close()

    def _close_files(self) -> None:
        for writer in self._files.values():
            try:
                writer.close()
            except OSError as error:
                self._note_broken(error)
        if self._board is not None:
            self._board.close()
        self._files, self._board = {}, None

    def _go_on_from(self, step: int) -> None:
        """Drops metrics after `step`: those steps are done again. TensorBoard is told the same."""
        self.step = step
        waited = self._files["metrics"].withdraw()
        self._files["metrics"].close()
        dropped, last = self.folder.cut_metrics(step)
        self._files["metrics"] = RecordWriter(self.folder.metrics_file)
        for record in waited:
            if int(record["step"]) <= step:
                self._write("metrics", record)
            else:
                dropped, last = dropped + 1, dict(record)
        if last is not None:
            # the ledger tells redone work from downtime by when the last of them was done
            fields = {"step": step, "steps": dropped, "last_t": last.get("t")}
            self._write("events", {"t": time.time(), "event": "cut", **fields})
            self.printer.line("resumed", f"{dropped} steps after step {step} were not saved and are done again", "cyan")
        if self._board is not None:
            self._board.resume(step)

    def _write(self, of: Literal["metrics", "events"], record: Mapping[str, Any]) -> None:
        if self.broken:
            return
        try:
            self._files[of].write(record)
        except OSError as error:
            self._note_broken(error)
        if self._waits != any(writer.waiting for writer in self._files.values()):
            self._waits = not self._waits
            say = (
                "no space is left for the records: they wait in memory" if self._waits else "there is room for records"
            )
            self.printer.line("warning", f"{self.folder.path}: {say}", "red")

    def _sync(self) -> None:
        try:
            for writer in self._files.values():
                writer.sync()
        except OSError as error:
            self._note_broken(error)

    def _note_broken(self, error: OSError) -> None:
        if not self.broken:
            self.broken = f"records of {self.folder.path} can't be written: {error.strerror or error}"
            self.printer.line("warning", self.broken, "red")
