"""The run folder `runs/<name>/`: who may write in it, which job it belongs to, and what it remembers.

job.toml        the resolved job of the latest start
run.json        identity of the job, attempts, a token that proves to several hosts that they see the same folder
lock            held by the process that writes here, and by the vault while it finishes a checkpoint
metrics.jsonl   one line a committed step         events.jsonl    one line an event
checkpoints/    step-N/                           logs/           rank-R.log: what each rank printed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bessemer.core.errors import RunFolderError
from bessemer.core.job import Job
from bessemer.keep.records import cut_records, last_record, read_records, write_atomically

__all__ = ["RunFolder", "short_path"]


class RunFolder:
    """The run folder of a job. Nothing is created before `lock`.

    folder = RunFolder(job)
    folder.lock()       # one writer: raises RunFolderError naming the other one
    folder.claim()      # job.toml and run.json; raises RunFolderError when the folder belongs to another job
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.path = job.run.folder.expanduser().absolute()
        self._lock = -1

    @property
    def job_file(self) -> Path:
        return self.path / "job.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log_file(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def metrics(self) -> Iterator[dict[str, Any]]:
        return read_records(self.metrics_file)

    def events(self) -> Iterator[dict[str, Any]]:
        return read_records(self.events_file)

    def newest_saved(self) -> tuple[int, Path] | None:
        """Step and path of the newest checkpoint that has its manifest; it was not verified here."""
        return max(((_step_of(folder), folder) for folder in self.manifests()), default=None)

    def manifests(self) -> dict[Path, tuple[int, int]]:
        """The folder of each checkpoint that has its manifest, and what tells that manifest from one written later."""
        found: dict[Path, tuple[int, int]] = {}
        for manifest in self.checkpoints.glob("step-*/manifest.json"):
            with contextlib.suppress(FileNotFoundError):  # retention may be deleting it
                status = manifest.stat()
                if _step_of(manifest.parent) >= 0:
                    found[manifest.parent] = (status.st_ino, status.st_mtime_ns)
        return found

    def lock(self, wait_s: float = 0.0) -> int:
        """Takes the folder for this process and returns the lock's descriptor.

        The kernel gives the lock back when the last process that has the descriptor ends, however it ends. Ranks never
        inherit it; the vault does, so that no new run starts beside a checkpoint that is still being written. While
        the holder is gone and only its vault is left, up to `VAULT_WAIT_S` are waited for that.
        """
        path = self.path / "lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} can't be written: {error.strerror}",
                code="run-folder-unwritable",
                fix="--set run.dir=a directory that you can write in",
            ) from error
        start = time.monotonic()
        while not _try_lock(handle):
            holder = _read_holder(path)
            patience_s = wait_s if _alive(holder) else max(wait_s, VAULT_WAIT_S)
            if time.monotonic() - start >= patience_s:
                os.close(handle)
                raise self._in_use(holder)
            time.sleep(0.05)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
        self._lock = handle
        return handle

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def claim(self) -> dict[str, Any]:
        """Writes job.toml and run.json, after checking that the folder is new or of the same identity, or that no step
        of the other job was ever committed in it (then its events are kept under another name).

        Returns what run.json now holds. Raises RunFolderError that names each field which differs, old -> new.
        """
        from bessemer.core.job_file import dump_job

        old = _read_run(self.path / "run.json")
        self._check_identity(old)
        self._check_never()
        run = {
            "identity": self.job.identity,
            "job_hash": self.job.hash,
            "attempt": int(old.get("attempt", 0)) + 1,
            "token": secrets.token_hex(8),
            "fields": self.job.identity_fields(),
        }
        (self.path / "logs").mkdir(exist_ok=True)
        write_atomically(self.job_file, dump_job(self.job))
        write_atomically(self.path / "run.json", json.dumps(run, indent=1) + "\n")
        return run

    def last_step(self) -> int:
        """The newest step that has its metrics; 0 where none has."""
        return int((last_record(self.metrics_file) or {}).get("step", 0))

    def cut_metrics(self, step: int) -> tuple[int, dict[str, Any] | None]:
        """Drops the metrics of steps after `step`, from which the run goes on; returns how many lines went and the
        record of the last of them."""
        return cut_records(self.metrics_file, lambda record: int(record.get("step", 0)) > step)

    def _check_identity(self, old: Mapping[str, Any]) -> None:
        if not old:
            return
        then, now = _flat(old["fields"]), _flat(self.job.identity_fields())
        differ = [k for k in sorted({*then, *now}) if _show(then, k) != _show(now, k)]
        if not differ:
            return
        saved = self.newest_saved()
        if saved is None and next(self.metrics(), None) is None:  # a start that failed before its first step
            if self.events_file.exists():
                self.events_file.rename(self.path / f"events-{old['identity']}.jsonl")
            return
        lines = "".join(f"\n    {k}: {_show(then, k)} -> {_show(now, k)}" for k in differ[:12])
        more = f"\n    and {len(differ) - 12} more" if len(differ) > 12 else ""
        start = f" (add --set run.resume={saved[1]} to start from its newest checkpoint)" if saved else ""
        raise RunFolderError(
            f"{self.path} belongs to another job; these fields differ:{lines}{more}",
            code="other-job",
            fix=f"--set run.name={self.job.run.name}-2 for a run of its own{start}, or put the old values back",
        )

    def _check_never(self) -> None:
        if self.job.run.resume != "never":
            return
        last, saved = self.last_step(), self.newest_saved()
        if last or saved:
            raise RunFolderError(
                f'run.resume = "never", but {self.path} already holds a run up to step {max(last, (saved or (0,))[0])}',
                code="run-exists",
                fix=f'--set run.name={self.job.run.name}-2, or run.resume = "auto" to go on, or delete the folder',
            )

    def _in_use(self, holder: Mapping[str, Any]) -> RunFolderError:
        pid, host = holder.get("pid"), holder.get("host", "an unknown host")
        another = f"--set run.name={self.job.run.name}-2"
        if pid is None:
            return RunFolderError(f"{self.path} is in use by another process", code="run-in-use", fix=another)
        if not _alive(holder):
            return RunFolderError(
                f"{self.path} is in use: process {pid} is gone, but its vault is still writing a checkpoint",
                code="run-in-use",
                fix=f"wait until that is done and start again, or {another}",
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
        return RunFolderError(
            f"{self.path} is in use by process {pid} on {host} since {since}",
            code="run-in-use",
            fix=f"`kill {pid}` on {host} stops it after a save, or {another} starts a run of its own",
        )


def short_path(path: Path) -> str:
    """The path as people like to read and type it: relative when it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


VAULT_WAIT_S = 20.0
"""How long a start waits for the vault of a dead run to end; beyond that it says so and gives up."""


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"the file system of the run folder has no locks ({error.strerror}), so two runs could write there at once",
            code="run-folder-unwritable",
            fix="--set run.dir=a directory on a local disk, or on NFS mounted with locks",
        ) from error
    return True


def _alive(holder: Mapping[str, Any]) -> bool:
    """Whether the process that wrote the lock still runs; of another host's process we know only that it is locked."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read_holder(path: Path) -> dict[str, Any]:
    """What the lock file says; empty while its holder is just writing it."""
    try:
        value = json.loads(path.read_text())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_run(path: Path) -> dict[str, Any]:
    """What run.json says; empty when there is none. Raises RunFolderError when it is damaged."""
    if not path.exists():
        return {}
    try:
        run = json.loads(path.read_text())
        return {"fields": dict(run["fields"]), "attempt": int(run["attempt"]), "identity": str(run["identity"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{path} is damaged ({type(error).__name__}: {error}), so it can't be told which job the folder belongs to",
            code="damaged-run",
            fix=f"delete {path} if you are sure that the folder belongs to this job, or start under another run.name",
        ) from error


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _show(fields: Mapping[str, Any], key: str) -> str:
    return json.dumps(fields[key]) if key in fields else "(not set)"
