"""The verb `takeoff`, and the short check before training."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.api._check import check
from bessemer.api._extras import need
from bessemer.core.counts import parameter_counts
from bessemer.core.errors import ConfigError, PeerLost, RequestError
from bessemer.core.machine import DEFAULT_CACHE, load_machine
from bessemer.core.paths import user_path
from bessemer.core.rank_memory import MASTER_BYTES, moment_bytes
from bessemer.inspect.takeoff import Takeoff, check_this_host, hosts_text, summary
from bessemer.inspect.takeoff_history import (
    History,
    checksums_after,
    checksums_file,
    host_lines,
    read_checksums,
    write_checksums,
)
from bessemer.inspect.takeoff_patrol import Rule, out_of_service, patrol_line, slower_than_before
from bessemer.inspect.takeoff_records import Fleet, Request
from bessemer.inspect.takeoff_rules import Floors, judge
from bessemer.inspect.takeoff_verdict import verdict_of
from bessemer.keep.launch import Launch, find_launch
from bessemer.keep.records import write_atomically
from bessemer.runtime.host import usable_cores

if TYPE_CHECKING:
    from bessemer.core.job import Job
    from bessemer.core.model import ModelSpec
    from bessemer.inspect.takeoff_worker import Site

__all__ = ["before_training", "takeoff"]

FLOOR = 0.4
"""Of a GPU's published peak and memory bandwidth: less than any product of this size reaches on a sound device."""
_MOST_RANKS = 8


def takeoff(  # noqa: PLR0913
    job_path: str | None = None,
    sets: Sequence[str] = (),
    *,
    ranks: int | None = None,
    minutes: float | None = None,
    hosts: int | None = None,
    hosts_file: str | None = None,
    patrol: bool = False,
    every: float = 30.0,
    rounds: int | None = None,
    history: str | None = None,
    quarantine: int = 2,
    release: int = 3,
) -> Takeoff:
    """Check the machines before a job starts on them, and say which host is bad and why.

    Products with known answers under load, memory, disks, clocks, versions, limits, links, messages between all pairs
    and collectives. Starts ranks on this host; under torchrun, Slurm or MPI it takes part as the rank that the launcher
    made it, and rank 0 prints. Exit code 0: all good; 4: a host is bad.

    job_path: The job file (TOML): its device, folders and ranks are checked. Without one: this host as it is.
    sets: Override a field of the job: --set train.steps=50. May be repeated.
    ranks: Ranks to start on this host; default: one a device, or a CPU core (at most 8), or those of the job.
    minutes: Burn in for so long, instead of the short check of under 20 seconds.
    hosts: How many hosts the job gets; the others are spares. Default: as the job needs, else all.
    hosts_file: Write the good hosts that the job gets into this file, one a line.
    patrol: Repeat the check, keep a history for each host, and take hosts out of service by it.
    every: With --patrol: minutes from one check to the next.
    rounds: With --patrol: how many checks; default: until Ctrl-C.
    history: With --patrol: the folder of the history; default: takeoff/hosts in the cache.
    quarantine: With --patrol: so many bad results (of twice as many) take a host out of service.
    release: With --patrol: so many good results in a row put it back.
    """
    need("takeoff", "train")
    _refuse(ranks=ranks, minutes=minutes, hosts=hosts, every=every, rounds=rounds, quarantine=quarantine,
            release=release)  # fmt: skip
    if not patrol and (rounds is not None or history is not None):
        raise RequestError("--rounds and --history go with --patrol", code="takeoff-patrol", fix="add --patrol")
    asked = _asked(job_path, sets, minutes, hosts)
    where = _Where(asked, find_launch(), ranks)
    file = None if hosts_file is None else user_path(hosts_file)
    if not patrol:
        last = _one(asked, where, 1, None, file)
    else:
        folder = user_path(history) if history is not None else checksums_file(asked.cache).parent / "hosts"
        watch = _Watch(History(folder), Rule(bad=quarantine, good=release))
        last = _patrol(partial(_one, asked, where, watch=watch, file=file), watch, every * 60, rounds)
    if last is None:
        raise SystemExit(where.code)  # rank 0 prints for all
    return last


def _patrol(one: Callable[[int], Takeoff | None], watch: _Watch, every_s: float, rounds: int | None) -> Takeoff | None:
    """The last check, after so many rounds or Ctrl-C."""
    last = None
    for number in itertools.count(1):
        start = time.monotonic()
        try:
            last = one(number)
            if last is not None:
                print(patrol_line(number, last.verdict, watch.out), file=sys.stderr, flush=True)
            if number == rounds:
                break
            time.sleep(max(0.0, every_s + start - time.monotonic()))
        except KeyboardInterrupt:
            if last is None:
                raise
            break
    return last


@dataclass(frozen=True)
class _Asked:
    """A request and what the verdict needs of the job."""

    request: Request
    floors: Floors
    cache: str
    places: int | None
    ranks: int | None  # of a host, as the job has them


class _Where:
    """This host alone, or all that a launcher has started ranks on. `code`: how the last check ended."""

    def __init__(self, asked: _Asked, launch: Launch | None, ranks: int | None) -> None:
        self.ranks = ranks or asked.ranks or _default_ranks(asked.request.device)
        self.code = 0
        self._site: Site | None = None
        if launch is not None:
            if ranks is not None:
                what = f"--ranks {ranks}: {launch.launcher} has started the ranks already"
                raise RequestError(what, code="takeoff-ranks", fix="leave --ranks out")
            from bessemer.inspect.takeoff_launch import meet

            self._site = meet(launch)
        self._of_round = self._site

    def check(self, request: Request, number: int) -> Fleet | None:
        """The fleet's record; None where rank 0 of the launch has it."""
        if self._site is None:
            return check_this_host(request, self.ranks)
        from bessemer.inspect.takeoff_worker import check as check_rank

        self._of_round = self._site.of_round(number)
        return check_rank(request, self._of_round)

    def agree(self, code: int | None) -> None:
        if self._of_round is not None:
            from bessemer.inspect.takeoff_launch import agree

            self.code = agree(self._of_round, code)


@dataclass
class _Watch:
    """What a patrol keeps from round to round. `out`: hosts that are out of service."""

    history: History
    rule: Rule
    out: list[str] = field(default_factory=list)


def _one(asked: _Asked, where: _Where, number: int, watch: _Watch | None, file: Path | None) -> Takeoff | None:
    """One check and its verdict, where this process has it."""
    fleet = where.check(asked.request, number)
    if fleet is None:
        where.agree(None)
        return None
    result = _judged(asked, fleet, watch)
    if file is not None:
        write_atomically(file, hosts_text(result.verdict))
    where.agree(result.exit_code)
    return result


def _judged(asked: _Asked, fleet: Fleet, watch: _Watch | None) -> Takeoff:
    """The verdict, by what is stored of earlier checks, which this one adds to."""
    file = checksums_file(asked.cache)
    stored = read_checksums(file)
    findings = judge(fleet, stored, asked.floors)
    hosts = [state.host for state in fleet.hosts]
    try:
        write_checksums(file, checksums_after(fleet, stored), hosts)
    except OSError as error:
        print(f"take-off: the answers are not kept: {file}: {error.strerror}", file=sys.stderr)
    out: list[str] = []
    if watch is not None:
        findings += slower_than_before(fleet, watch.history)
        watch.history.append(host_lines(fleet, findings, time.time()))
        out = watch.out = out_of_service(watch.history, hosts, watch.rule)
    return Takeoff(fleet, verdict_of(hosts, findings, asked.places, out))


def before_training(job: Job, spec: ModelSpec, launch: Launch | None) -> tuple[int, object]:
    """(0, or the exit code with which no rank starts; what must be kept while the ranks train).

    Called on every rank that a launcher has started; rank 0 prints. Where those can't meet nothing is checked: training
    then says why, by the services of each host. Without a launch this host is checked, where the job says "always".
    """
    several = launch is not None and launch.local_world_size < launch.world_size
    if job.run.takeoff == "never" or (job.run.takeoff == "auto" and not several):
        return 0, None
    if launch is None:
        asked = _of_job(job, spec, None, None)
        return _told(_judged(asked, check_this_host(asked.request, asked.ranks or 1), None)), None
    from bessemer.inspect.takeoff_launch import agree, meet, several_hosts
    from bessemer.inspect.takeoff_worker import check as check_rank

    try:
        site = meet(launch)
    except (RequestError, PeerLost):
        return 0, None
    if job.run.takeoff == "auto" and not several_hosts(site):
        return 0, site
    asked = _of_job(job, spec, None, None)
    fleet = check_rank(asked.request, site)
    if fleet is None:
        return agree(site, None), site
    try:
        code = _told(_judged(asked, fleet, None))
    except BaseException:
        agree(site, 1)  # nobody waits for a verdict that won't come
        raise
    return agree(site, code), site


def _told(result: Takeoff) -> int:
    print("\n".join(summary(result)), file=sys.stderr, flush=True)
    return result.exit_code


def _asked(job_path: str | None, sets: Sequence[str], minutes: float | None, hosts: int | None) -> _Asked:
    if job_path is None:
        if sets:
            raise RequestError("--set overrides fields of a job, and none is given", code="no-job", fix="name the job")
        request = Request(device=_kind_here(), minutes=minutes)
        return _Asked(request, Floors(), DEFAULT_CACHE, hosts, None)
    checked = check(job_path, sets)
    if checked.problems or checked.job is None or checked.spec is None:
        raise ConfigError(checked.problems, job_path)
    return _of_job(checked.job, checked.spec, minutes, hosts)


def _of_job(job: Job, spec: ModelSpec, minutes: float | None, hosts: int | None) -> _Asked:
    machine = load_machine(job.machine.name)
    folder = job.run.folder.expanduser().absolute()
    facts = {"job": job.hash}
    request = Request(
        device=machine.device, minutes=minutes, run_folder=str(folder), need_bytes=_need(job, spec), facts=facts
    )
    floors = Floors()
    if machine.device != "cpu":
        peaks = machine.peak_flops_per_s.model_dump(exclude_none=True)
        floors = Floors(
            {name: FLOOR * peak for name, peak in peaks.items()}, FLOOR * (machine.memory_bytes_per_s or 0.0)
        )
    world, a_host = job.layout.world_size, job.machine.gpus_per_node
    ranks = min(world, a_host)
    return _Asked(request, floors, job.data.cache, math.ceil(world / a_host) if hosts is None else hosts, ranks)


def _need(job: Job, spec: ModelSpec) -> int:
    """Bytes of the checkpoints that the job will keep, and one that is being written, beyond those that are there."""
    each = parameter_counts(spec).total_with_mtp * (MASTER_BYTES + moment_bytes(job.precision.moments))
    folder = job.run.folder.expanduser() / "checkpoints"
    there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    written = -(-job.train.steps // job.keep.every) if job.keep.every else 1
    for_ever = job.train.steps // job.keep.keep_every if job.keep.keep_every else 0
    return int(max(each, (min(job.keep.keep_last + 1, written) + for_ever) * each - there))


def _kind_here() -> str:
    """The kind of device, without torch where there is plainly none but the CPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(Path("/dev").glob("mtgpu*")):
        return "cpu"
    from bessemer.runtime.device import available_kinds

    return available_kinds()[0]


def _default_ranks(kind: str) -> int:
    if kind == "cpu":
        return min(usable_cores(), _MOST_RANKS)
    import torch

    return int(getattr(torch, kind).device_count())


def _refuse(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and value <= 0:
            flag = f"--{name}"
            raise RequestError(f"{flag} {value:g}: more than 0", code="takeoff-number", fix=f"{flag} 1")
