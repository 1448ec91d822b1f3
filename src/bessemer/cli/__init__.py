"""The command `bessemer`: each verb's flags come from the function of that name in `bessemer.api`.

    bessemer check job.toml --set train.steps=50

Exit codes: 0 done; 1 the run failed; 2 the request was wrong and nothing was started; 3 stopped on request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line (default: this process's) and exits with its code, always by SystemExit."""
    # A team of threads that spins while it waits makes a step up to five times slower as soon as another program wants
    # a core, and gains 2 to 6 % on an idle machine (docs/log.md). It must be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from bessemer.cli._app import application

    application()(args=None if arguments is None else list(arguments), prog_name="bessemer")
