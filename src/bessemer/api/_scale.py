"""The verb `scale`."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import RequestError

__all__ = ["Scaled", "scale"]

ANSWER_S = 30.0


@dataclass(frozen=True)
class Scaled:
    """`started`: groups that are being started; they join once they have the state."""

    before: int
    replicas: int
    started: int

    def as_json(self) -> dict[str, Any]:
        return {"before": self.before, "replicas": self.replicas, "started": self.started}

    def __str__(self) -> str:
        what = f"{self.started} groups are being started" if self.started else "nothing has to be started"
        return f"{self.replicas} groups are wanted from now on (before: {self.before}); {what}"


def scale(run: str, *, replicas: int) -> Scaled:
    """Change how many groups of a running job train, without stopping it.

    For jobs with keep.mode = "zero-interruption". New groups join once they have taken the state from one that trains;
    groups that are too many are let go after a step. The global batch stays what it is.

    run: The run folder.
    replicas: How many groups train from now on.
    """
    if replicas < 1:
        raise RequestError(f"--replicas {replicas} is below 1", code="scale-range", fix="--replicas 1 or more")
    folder = Path(run)
    mode = _job_of(folder).get("keep", {}).get("mode", "restart")
    if mode != "zero-interruption":
        text = f"the run in {folder} has keep.mode = {mode!r}: its number of ranks is fixed"
        raise RequestError(text, code="scale-mode", fix='keep.mode = "zero-interruption", in a new run')
    answer = _ask(folder, {"kind": "scale", "replicas": replicas})
    if answer["kind"] == "refused":
        raise RequestError(str(answer["message"]), code=str(answer["code"]), fix=str(answer["fix"]))
    return Scaled(int(answer["before"]), int(answer["replicas"]), int(answer["started"]))


def _job_of(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "job.toml").read_text())
    except (OSError, ValueError) as error:
        text = f"{folder} is no run folder: it has no job.toml that can be read"
        raise RequestError(text, code="no-run", fix="the folder that `bessemer train` wrote, runs/NAME") from error


def _ask(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's agent answers."""
    from bessemer.keep.elastic_agent import CONTROL
    from bessemer.keep.wire import Frames, pack

    try:
        path = json.loads((folder / CONTROL).read_text())["agent"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(ANSWER_S)
            link.connect(path)
            link.sendall(pack(record))
            frames = Frames()
            while data := link.recv(4096):
                for answer in frames.feed(data):
                    return answer
    except (OSError, ValueError, KeyError) as error:
        text = f"the run in {folder} does not go on here: no agent answers"
        raise RequestError(text, code="not-running", fix="`bessemer train JOB` goes on with it") from error
    raise RequestError(f"the agent of the run in {folder} has just ended", code="not-running")
