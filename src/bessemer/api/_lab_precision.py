"""The verb `lab precision`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.api._extras import need
from bessemer.core.errors import RequestError

if TYPE_CHECKING:
    from bessemer.lab.watch import Watched
    from bessemer.lab.watch_advice import Advice

__all__ = ["PrecisionReport", "precision"]


@dataclass(frozen=True)
class PrecisionReport:
    """The samples of a run, the advice, and the page."""

    watched: Watched
    found: list[Advice]
    page: Path
    shown: int

    def as_json(self) -> dict[str, Any]:
        watched = self.watched
        return {
            "run": str(watched.folder),
            "recipe": watched.job.precision.recipe,
            "every": watched.every,
            "steps": watched.steps.tolist(),
            "fallen": {name: {"step": step, "why": why} for name, (step, why) in watched.fallen.items()},
            "tensors": [advice.as_json() for advice in self.found],
            "page": str(self.page),
        }

    def __str__(self) -> str:
        from bessemer.lab.watch_text import watch_text

        return f"{watch_text(self.watched, self.found, self.shown)}\n\npage: {self.page}"


def precision(run: str, *, rows: int = 12) -> PrecisionReport:
    """What the precision watch saw in a run, and which way of scaling each tensor asks for.

    Reads only the records of the run folder, so it may be asked while the run goes on. Writes precision.html there.

    run: The folder of a run with precision.watch_every above 0, runs/NAME.
    rows: How many of the most urgent tensors are printed; --json has all.
    """
    need("lab precision", "train")
    if rows < 1:
        raise RequestError(f"--rows {rows}: there is nothing to print", code="lab-rows", fix="--rows 12")
    from bessemer.lab.watch import read_watch
    from bessemer.lab.watch_advice import advise
    from bessemer.lab.watch_page import write_page

    watched = read_watch(Path(run))
    found = advise(watched)
    page = watched.folder / "precision.html"
    write_page(watched, found, page)
    return PrecisionReport(watched, found, page, rows)
