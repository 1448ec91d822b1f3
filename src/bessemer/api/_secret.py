"""The secret of a run, which never stands in a job file: from the environment, or a file that only its owner reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bessemer.core.errors import RequestError

__all__ = ["LEAST_SECRET", "read_secret"]

LEAST_SECRET = 16


def read_secret(path: str) -> str:
    """The secret from the file at `path`, or with "" from BESSEMER_SECRET. RequestError where it can't be had."""
    from bessemer.keep.links import SECRET

    if not path:
        secret = os.environ.get(SECRET, "")
    else:
        try:
            if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
                text = f"others can read the secret in {path}"
                raise RequestError(text, code="secret-open", fix=f"chmod 600 {path}")
            secret = Path(path).read_text().strip()
        except OSError as error:
            raise RequestError(f"can't read {path}: {error.strerror}", code="secret-missing") from error
    if len(secret) < LEAST_SECRET:
        text = (
            f"the run's secret has {len(secret)} characters: without one anybody could join, and a short one is guessed"
        )
        fix = f"{SECRET}=$(openssl rand -hex 32), or --secret-file with {LEAST_SECRET} characters or more"
        raise RequestError(text, code="secret-missing", fix=fix)
    return secret
