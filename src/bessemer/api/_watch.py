"""The verb `watch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.api._extras import need
from bessemer.core.errors import BessemerError, ConfigError, RequestError

if TYPE_CHECKING:
    from bessemer.inspect.watch_run import Prediction, RunWatch

__all__ = ["Watched", "watch"]

PORT = 8711


@dataclass(frozen=True)
class Watched:
    """The report that was written; empty after a page that was served."""

    report: str = ""

    def __str__(self) -> str:
        return f"wrote {self.report}" if self.report else ""


def watch(
    runs: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    secret_file: str = "",
    report: str | None = None,
) -> Watched:
    """Show runs on a page in the browser, live or finished; several are compared.

    Loss, speed and yield against the plan, all ranks as a heat map, the slowest of them, events, checkpoints, spares,
    and why a run stands still. Reads the run folders and changes nothing. Prometheus finds its figures at /metrics.
    Ends with Ctrl-C.

    runs: Run folders, runs/NAME. The first one's ranks are shown, the others' curves are laid over its own.
    host: The address to listen on. Others than this computer's own need a secret, BESSEMER_SECRET or --secret-file.
    port: The port to listen on; 0 takes a free one.
    secret_file: A file with the secret, which only its owner can read. A browser asks for it as the password.
    report: Write the page with all its data to this one HTML file instead, which needs no server.
    """
    from bessemer.inspect.watch_run import RunWatch

    if not 0 <= port <= 65535:
        raise RequestError(f"{port} is no port", code="watch-address", fix=f"--port {PORT}, or 0 for a free one")
    found = [RunWatch(Path(run), predicted(Path(run) / "job.toml")) for run in _distinct(runs)]
    if report is not None:
        return Watched(_report(found, Path(report)))
    need("watch", "watch")
    _serve(found, host, port, secret_file)
    return Watched()


def predicted(job_path: Path) -> Prediction:
    """What the planner expects of a job, or why it expects nothing."""
    from bessemer.api._plan_inputs import job_request
    from bessemer.inspect.watch_run import Prediction
    from bessemer.plan.axes import request_problems
    from bessemer.plan.figures import prices_of, yield_factors
    from bessemer.plan.outcome import layout_problems
    from bessemer.plan.replayed import with_replay

    if not job_path.is_file():
        return Prediction(why="the run has no job.toml")
    try:
        job, request, layouts = job_request(str(job_path))
        problems = request_problems(request) + layout_problems(request, layouts)
        if problems:
            raise ConfigError(problems, str(job_path))
        priced = with_replay(prices_of(request, layouts))
    except ConfigError as error:
        return Prediction(why=f"the planner can't price this job: {error.problems[0].what}")
    except BessemerError as error:
        return Prediction(why=f"the planner can't price this job: {error.message}")
    step_s = float(priced.prices.step_s[0])
    return Prediction(
        step_s=step_s,
        low_s=float(priced.prices.low_s[0]),
        high_s=float(priced.prices.high_s[0]),
        tokens_per_s=job.train.global_batch * job.data.seq_len / step_s,
        memory_bytes=float(priced.prices.memory_bytes[0]),
        factors=yield_factors(priced, 0),
    )


def _distinct(runs: Sequence[str]) -> list[str]:
    if not runs:
        raise RequestError("no run was named", code="no-run", fix="bessemer watch runs/NAME")
    twice = next((run for run in runs if sum(Path(run).resolve() == Path(r).resolve() for r in runs) > 1), None)
    if twice is not None:
        raise RequestError(f"{twice} is named twice", code="watch-twice", fix="each run folder once")
    return list(runs)


def _report(found: Sequence[RunWatch], path: Path) -> str:
    from bessemer.inspect.watch_page import write_report

    for run in found:
        run.look(wait=True)
    try:
        write_report(found, path)
    except OSError as error:
        text = f"can't write {path}: {error.strerror}"
        raise RequestError(
            text, code="watch-report", fix="--report FILE.html in a folder that you can write in"
        ) from error
    return str(path)


def _serve(found: Sequence[RunWatch], host: str, port: int, secret_file: str) -> None:
    from bessemer.api._secret import read_secret
    from bessemer.inspect.watch_server import LOOPBACK, application, listen, serve

    secret = "" if host in LOOPBACK and not secret_file else read_secret(secret_file)
    sock = listen(host, port)
    bound = int(sock.getsockname()[1])
    app = application(found, hosts=LOOPBACK if host in LOOPBACK else ("*",), secret=secret)
    shown = f"[{host}]" if ":" in host else host
    print(f"watching {', '.join(run.name for run in found)} at http://{shown}:{bound}/  (Ctrl-C ends)", flush=True)
    try:
        serve(app, sock)
    except KeyboardInterrupt:
        pass
    finally:
        sock.close()
