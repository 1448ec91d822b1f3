"""What a run prints: one line a step in fixed columns, other events as lines of their own, and a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bessemer.core.units import format_bytes, format_rate, format_seconds
from bessemer.keep.run_folder import short_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Printer", "event_line"]

HEADER_EVERY = 50
"""Lines of steps between two headers, so that one is in sight on a usual terminal."""

_SPEED_STEPS = 20  # the time left follows the mean of so many steps, with whatever lies between them
_BAR_CELLS = 24
_DRAW_S = 0.5


class Printer:
    """Prints to `stream`. `quiet`: nothing but warnings. `bar`: not where others print too.

    Columns: step, loss, gradient norm, learning rate, tokens/s, seconds of the step, time left.
    """

    def __init__(self, steps: int, *, quiet: bool = False, bar: bool = True, stream: IO[str] | None = None) -> None:
        self.steps = steps
        self.quiet = quiet
        self._wants_bar = bar and not quiet
        self._stream = stream if stream is not None else sys.stdout
        self._lines = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=_SPEED_STEPS + 1)
        self._at = ""
        self._drawn = 0.0
        self._console: Console | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def open(self) -> None:
        """Shows the bar when it is wanted and there is a terminal to show it on."""
        if self._wants_bar and self._stream.isatty():
            self._open_bar()

    def metric(self, record: Mapping[str, Any]) -> None:
        """A committed step, from its record in metrics.jsonl."""
        step, now = int(record["step"]), time.monotonic()
        if not self._ends:
            self._ends.append((step - 1, now - float(record.get("step_s") or 0)))
        self._ends.append((step, now))
        if self.quiet:
            return
        width = max(5, 2 * len(str(self.steps)) + 1)
        if self._lines % HEADER_EVERY == 0:
            names = ("loss", "grad norm", "lr", "tokens/s", "step s", "left")
            self._print(f"{'step':>{width}}" + "".join(f"{n:>11}" for n in names), "dim")
        self._lines += 1
        columns = (
            _number(record.get("loss"), ".4f"),
            _number(record.get("grad_norm"), ".4f"),
            _number(record.get("lr"), ".2e"),
            _number(record.get("tokens_per_s"), ",.0f"),
            _number(record.get("step_s"), ".3f"),
            _clock(self._left_s(step)),
        )
        self._print(f"{f'{step}/{self.steps}':>{width}}" + "".join(f"{c:>11}" for c in columns))
        self.refresh(step=step)

    def line(self, label: str, text: str, style: str = "") -> None:
        """A line of its own: a save, an evaluation, a warning. Warnings are printed even when quiet."""
        if not self.quiet or style in ("yellow", "red"):
            self._print(f"{label:<10}{text}", style)

    def phase(self, name: str) -> None:
        """What the first rank does now: shown beside the bar."""
        self._at = name

    def refresh(self, step: int | None = None) -> None:
        """Redraws the bar, twice a second at most: a long step shows that it is alive, and drawing costs little."""
        now = time.monotonic()
        if self._bar is None or self._task is None or (step is None and now - self._drawn < _DRAW_S):
            return
        self._drawn = now
        done = self._ends[-1][0] if self._ends else 0
        left = _clock(self._left_s(done)) if self._ends else "--:--"
        shown = step if step is not None else done
        self._bar.update(self._task, completed=shown, left=left, at=self._at)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left_s(self, step: int) -> float:
        """Seconds to the last step, at the pace of the latest ones; what has passed since the last is taken off."""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        pace_s = (end - start) / max(1, last - first)
        return max(0.0, (self.steps - step) * pace_s - (time.monotonic() - end))

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._console = Console(file=self._stream, highlight=False, markup=False, soft_wrap=True)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=_BAR_CELLS),
            TextColumn("{task.percentage:>3.0f} %  {task.completed:.0f}/{task.total:.0f}  {task.fields[left]} left"),
            TextColumn("[dim]{task.fields[at]}"),
            console=self._console,
            auto_refresh=False,  # no thread beside the agent's loop
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=self.steps, left="--:--", at="starting")
        self._bar.start()

    def _print(self, text: str, style: str = "") -> None:
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text(text, style))
        else:
            print(text, file=self._stream, flush=True)


def event_line(event: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Label, text and style of an event that people want to see; None for the rest. Missing fields are left out."""
    name, step = event.get("event"), event.get("step")
    if name == "loaded":
        where = f"step {step} from {short_path(Path(event['path']))}" if event.get("path") else "nothing, a fresh start"
        if event.get("source") in ("memory", "peer"):
            where = f"step {step} from " + ("memory" if event["source"] == "memory" else "another host's memory")
        why = f" ({event['why']})" if event.get("why") else ""
        return "loaded", where + why, "cyan"
    if name == "saved":
        parts = [f"step {step}"]
        if isinstance(event.get("bytes"), int | float):
            parts.append(format_bytes(event["bytes"]))
        if isinstance(event.get("seconds"), int | float):
            parts.append(f"in {format_seconds(event['seconds'])}")
        if event.get("path"):
            parts.append(short_path(Path(event["path"])))
        return "saved", "  ".join(parts), "green"
    if name == "save_failed":
        return "warning", f"step {step} could not be saved: {event.get('error')}", "red"
    if name == "eval":
        return "eval", f"step {step}" + _evaluation(event), "cyan"
    if name == "machine":
        peaks = event.get("peak_flops") or {}
        shown = ", ".join(f"{dtype} {format_rate(peak, 'FLOP')}" for dtype, peak in peaks.items())
        return "machine", f"peak {shown} ({event.get('kind', 'all devices')})", "dim"
    if name == "precision":
        return "precision", _layers(event), "dim"
    if name in _OF_GROUPS:
        return _of_groups(name, event)
    if name == "operators" and event.get("path") == "reference":
        why = f": {event['why']}" if event.get("why") else ""
        return "warning", f"torch's operators are used, the faster native kernels are not{why}", "yellow"
    if name == "finding":
        return "flight", str(event.get("text")), "yellow"
    if name == "evicted":
        return "evicted", f"rank {event.get('rank')}: {event.get('why')}", "yellow"
    if name == "warning":
        rank = f" (rank {event['rank']})" if event.get("rank") is not None else ""
        return "warning", f"{event.get('message')}{rank}", "yellow"
    return None


_OF_GROUPS = ("rank_lost", "joined", "left", "coordinator_lost", "scale")


def _of_groups(name: str, event: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Of a run that goes on while groups of ranks are lost and join."""
    if name == "joined":
        took = format_seconds(event["seconds"])
        return (
            "joined",
            f"step {event.get('step')}  group {event.get('group')} has caught up, {took} after it came",
            "green",
        )
    if name == "left":
        return "left", f"group {event.get('group')} was let go on its own wish", "yellow"
    if name == "coordinator_lost":
        return "lost", "the coordinator; its standby takes over", "yellow"
    if name == "scale":
        return "scale", f"{event.get('replicas')} groups are wanted from now on", "cyan"
    if event.get("why") is None:
        return None  # the end of the run says it
    return (
        "lost",
        f"step {event.get('step')}  {event['why']}; the others go on without group {event.get('group')}",
        "yellow",
    )


def _layers(event: Mapping[str, Any]) -> str:
    """Which kinds of linear layers run in the recipe, in how many blocks, and why others don't."""
    kinds = list(event.get("layers") or ())
    low = [f"{k['layer']} x {k['blocks']}" for k in kinds if not k["why"]]
    high = [f"{k['layer']} x {k['blocks']} ({k['why']})" for k in kinds if k["why"]]
    text = f"{event.get('recipe')}: {', '.join(low) or 'no layer'}"
    return text + (f"; high: {', '.join(high)}" if high else "")


def _evaluation(event: Mapping[str, Any]) -> str:
    text = ""
    for label, key, digits in (
        ("val loss", "loss", ".4f"),
        ("perplexity", "perplexity", ".2f"),
        ("bits/byte", "bits_per_byte", ".4f"),
    ):
        if isinstance(event.get(key), int | float):
            text += f"  {label} {event[key]:{digits}}"
    return text


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _clock(seconds: float) -> str:
    """ "0:07", "12:34", "3:04:05", "2d 03:04": minutes and seconds, with hours or days where there are some."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
