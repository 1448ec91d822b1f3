"""The verb `coordinator`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.api._check import check
from bessemer.api._secret import read_secret
from bessemer.core.errors import ConfigError, RequestError

__all__ = ["Served", "coordinator"]


@dataclass(frozen=True)
class Served:
    exit_code: int

    def __str__(self) -> str:
        return ""


def coordinator(
    job_path: str,
    sets: Sequence[str] = (),
    *,
    address: str = "tcp:127.0.0.1:29400",
    secret_file: str = "",
    standby_of: str = "",
    recover: bool = False,
) -> Served:
    """Run the coordinator of a job alone, in the foreground, for ranks that others start.

    Needed only where something else than `bessemer train` starts the ranks: its agents, also those of several hosts,
    have coordinators of their own. The secret that ranks and agents must know comes from BESSEMER_SECRET or a file.
    Ends when the run has finished.

    job_path: The job file (TOML).
    sets: Override a field: --set train.steps=50. May be repeated.
    address: Where to listen, unix:PATH or tcp:HOST:PORT. Other hosts reach it only where HOST is an address of theirs.
    secret_file: A file with the secret, which only its owner can read.
    standby_of: Stand by for the coordinator at that address, and take over when it ends.
    recover: Go on from the decisions that are in the run folder, where no coordinator and no standby is left.
    """
    checked = check(job_path, sets)
    if checked.problems:
        raise ConfigError(checked.problems, job_path)
    assert checked.job is not None, "a job without problems was read"
    job = checked.job
    if job.keep.mode != "zero-interruption":
        text = f"keep.mode = {job.keep.mode!r} has no coordinator"
        raise RequestError(text, code="coordinator-mode", fix="--set keep.mode=zero-interruption")
    if not address.startswith(("unix:", "tcp:")) or (
        address.startswith("tcp:") and not address.rpartition(":")[2].isdigit()
    ):
        raise RequestError(f"{address!r} is no address", code="coordinator-address", fix="unix:PATH or tcp:HOST:PORT")
    from bessemer.keep.coordinate import Post, serve

    log = job.run.folder.expanduser().absolute() / "decisions.jsonl"
    post = Post(address, read_secret(secret_file), log, job.keep.lease_s or 1.5, standby_of, recover)
    try:
        return Served(serve(job, post))
    except OSError as error:
        text = f"the coordinator can't serve at {address}: {error}"
        raise RequestError(text, code="coordinator-address", fix="--address tcp:HOST:PORT that is free") from error
