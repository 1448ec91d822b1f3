"""Every exception that Bessemer raises on purpose, and the exit code that the command line gives it.

    BessemerError            code, rank, step; exit 1: the run failed
    |- RequestError          exit 2: the request was wrong, nothing was started
    |  |- ConfigError        one or more problems in the job, model or machine (carries them)
    |  |- MissingExtra       an optional dependency is not installed
    |  `- RunFolderError     the run folder is in use, or belongs to another job
    |- DataError             exit 2: a corpus, tokenizer or token shard can't be used
    |- CheckpointError       a checkpoint can't be written, or none can be read
    |- PeerLost              a rank of the run died or fell silent
    |- NonFinite             a loss, gradient or tensor is NaN or infinite
    `- Stopped               exit 3: stopped on request; the same command goes on

`docs/errors.md` lists each code as text -> cause -> fix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bessemer.core.problem import Problem

__all__ = [
    "BessemerError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MissingExtra",
    "NonFinite",
    "PeerLost",
    "RequestError",
    "RunFolderError",
    "Stopped",
]


class BessemerError(Exception):
    """Base of all: `code` is stable and documented; `fix` says what to type; rank and step where they apply."""

    exit_code = 1
    code = "failed"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        fix: str = "",
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.fix = fix
        self.rank = rank
        self.step = step

    def __str__(self) -> str:
        at = ", ".join(f"{k} {v}" for k, v in (("rank", self.rank), ("step", self.step)) if v is not None)
        text = f"{self.message} ({at})" if at else self.message
        return f"{text}\n  -> {self.fix}" if self.fix else text


class RequestError(BessemerError):
    exit_code = 2
    code = "request"


class ConfigError(RequestError):
    """All problems found in one request; `str()` prints them as `bessemer check` does."""

    code = "config"

    def __init__(self, problems: Sequence[Problem], source: str = "the job") -> None:
        from bessemer.core.problem import render

        super().__init__(render(problems, source))
        self.problems = tuple(problems)
        self.source = source


class MissingExtra(RequestError):
    """An optional dependency is absent; names the line that installs it."""

    code = "missing-extra"

    def __init__(self, verb: str, extra: str, missing: str) -> None:
        super().__init__(
            f"`bessemer {verb}` needs the package {missing!r}, which is not installed",
            fix=f"pip install 'bessemer[{extra}]'",
        )


class RunFolderError(RequestError):
    code = "run-folder"


class DataError(BessemerError):
    exit_code = 2  # what the job names as its data is part of the request, and is read before anything starts
    code = "data"


class CheckpointError(BessemerError):
    code = "checkpoint"


class PeerLost(BessemerError):
    code = "peer-lost"


class NonFinite(BessemerError):
    code = "non-finite"


class Stopped(BessemerError):
    exit_code = 3
    code = "stopped"
