"""The page: its files as the server hands them out, or one file with the data of finished runs inside.

The scripts are plain ones that share one scope, so that the same text works from a server and inside of a report.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from bessemer.inspect.watch_run import RunWatch, Seen
from bessemer.keep.records import write_atomically

__all__ = ["CSP", "REPORT_CSP", "page", "report_html", "script", "style", "write_report"]

SCRIPTS = ("numbers.js", "source.js", "chart.js", "heat.js", "map.js", "panels.js", "tables.js", "main.js")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
REPORT_CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_HEAD = '<link rel="stylesheet" href="page.css">'
_FOOT = '<script src="page.js"></script>'


def page() -> str:
    """The HTML that asks the server for the rest."""
    return _file("page.html")


def style() -> str:
    return _file("page.css")


def script() -> str:
    return '"use strict";\n' + "\n".join(_file(name) for name in SCRIPTS)


def report_html(runs: Sequence[RunWatch]) -> str:
    """The page with all that it would be told of `runs` now; needs no server and no network."""
    recorded: list[dict[str, Any]] = []
    for run in runs:
        told, frame = run.told(Seen())
        details = {str(rank): run.detail(rank) for rank in _shown(told)}
        recorded.append({"told": told, "frame": base64.b64encode(frame).decode(), "details": details})
    # "<" can't end the script element early, and the two line separators are no ends of lines
    text = json.dumps(recorded, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{REPORT_CSP}"><style>{style()}</style>'
    foot = f'<script type="application/json" id="recorded">{text}</script><script>{script()}</script>'
    html = page()
    assert _HEAD in html and _FOOT in html, "the page's links are where they are replaced"
    return html.replace(_HEAD, head).replace(_FOOT, foot)


def write_report(runs: Sequence[RunWatch], path: Path) -> None:
    """Writes `report_html`, whole or not at all. OSError where it can't be written."""
    write_atomically(path, report_html(runs))


MOST_DETAILS = 64


def _shown(told: dict[str, Any]) -> list[int]:
    """The ranks whose details go into a report: all of a small run, the worst of a large one."""
    place, ranks = told.get("place"), told.get("ranks")
    if place is None or ranks is None:
        return []
    from bessemer.runtime.ring import unfold

    every = unfold(place["ranks"])
    return list(every) if len(every) <= MOST_DETAILS else [row["rank"] for row in ranks["worst"]]


def _file(name: str) -> str:
    return (files("bessemer.inspect") / "page" / name).read_text(encoding="utf-8")
