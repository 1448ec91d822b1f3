"""How a run ended, in words: which rank was the cause, what is saved, and what to type to go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.core.errors import BessemerError
from bessemer.keep.journal import Journal
from bessemer.keep.member import sounds_like_a_lost_peer
from bessemer.keep.process import exit_text
from bessemer.keep.reception import RankState
from bessemer.keep.run_folder import short_path

__all__ = ["Ending", "cause_of", "failure_text", "saved_text", "stopped_early"]

TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Everything that decides how a run ended: its ranks, whether somebody asked it to stop, and `trouble`, why it
    failed although no rank did (killed by us, vault lost). `again` is what to type to go on."""

    ranks: Collection[RankState]
    journal: Journal
    stopping: bool
    trouble: str
    again: str

    def conclude(self) -> int:
        """Writes the last event, says the last words, and returns the exit code."""
        journal, cause = self.journal, cause_of(self.ranks)
        journal.tell_untold()
        steps = journal.folder.job.train.steps
        if cause is not None:
            journal.event("failed", **_failure_event(cause))
            self._say(failure_text(cause, journal.folder.log_file(cause.rank)))
            report = cause.report or {"exit_code": 1, "fix": "", "code": ""}
            if not journal.loaded and report["code"].startswith("checkpoint"):
                return int(report["exit_code"])  # what lies there was refused, and the report says what to do
            return self._say_saved(report["exit_code"], has_fix=bool(report["fix"]))
        nobody = not self.ranks and not self.stopping and journal.end != "finished"
        trouble = self.trouble or ("no rank was left that could finish it" if nobody else "")
        if trouble:
            journal.event("failed", code="ended", message=trouble, rank=None, step=journal.step)
            self._say(f"failed [ended] {trouble}")
            return self._say_saved(1)
        stopped = self.stopping or any(3 in (r.exit_code, r.said) for r in self.ranks)
        if stopped and journal.end != "finished":
            if journal.end != "stopped":
                journal.event("stopped", step=journal.step)
            self._say(f"stopped on request after step {journal.step} of {steps}")
            return self._say_saved(3)
        if journal.end != "finished":
            journal.event("finished", step=journal.step)
        journal.printer.line("finished", f"step {journal.step} of {steps}", "green")
        return 0

    def _say_saved(self, code: int, *, has_fix: bool = False) -> int:
        if code != 2 or self.journal.step:  # else a wrong request: nothing was started
            again = "" if has_fix else self.again  # the same command would fail again
            self._say(saved_text(self.journal.saved, self.journal.step, again))
        return code

    def _say(self, text: str) -> None:
        self.journal.printer.close()
        print(text, file=sys.stderr, flush=True)


def stopped_early(journal: Journal, when: str, again: str) -> int:
    """The end of an attempt that was asked to stop before it had ranks: says so, and returns the exit code."""
    journal.event("stopped", step=journal.step)
    journal.printer.close()
    print(f"stopped on request {when}\n{saved_text(journal.saved, journal.step, again)}", file=sys.stderr, flush=True)
    return 3


def cause_of(ranks: Iterable[RankState]) -> RankState | None:
    """The rank whose failure explains the others'; None when none failed by itself.

    A rank that loses its peer fails too, and may be heard first. So a death by signal comes before a report, a report
    before an abort (which NCCL and gloo use when a peer is gone), those before a report of a lost peer; among equals,
    the earliest.
    """
    failed = [r for r in ranks if r.failed_at is not None]
    return min(failed, key=lambda r: (_distance(r), r.failed_at), default=None)


def _distance(state: RankState) -> int:
    if state.report is not None:
        return 3 if state.report["code"] == "peer-lost" else 1
    code = state.exit_code or 0
    if code < 0:
        return 2 if -code == signal.SIGABRT else 0
    tail = state.child.tail(3) if state.child is not None else []
    return 3 if any(sounds_like_a_lost_peer(line) for line in tail) else 1


def _failure_event(state: RankState) -> dict[str, Any]:
    """The fields of the event `failed`."""
    if state.report is not None:
        return {key: state.report[key] for key in ("code", "message", "rank", "step")}
    how = _how(state)
    return {"code": "rank-lost", "message": f"rank {state.rank} {how}", "rank": state.rank, "step": state.step}


def failure_text(state: RankState, log: Path) -> str:
    """What is printed for the cause: its own report, or how it died and the end of its log."""
    if state.report is not None:
        report = state.report
        error = BessemerError(
            report["message"], fix=report["fix"], rank=report["rank"] if report["rank"] is not None else state.rank,
            step=report["step"] or None,
        )  # fmt: skip
        more = "" if report["code"] != "crash" else _tail(state)
        where = f"\n  traceback: {short_path(log)}{more}" if log.exists() else ""  # else the launcher has it
        return f"failed [{report['code']}] {error}{where}"
    where = f"at step {state.step} ({state.phase})" if state.step else f"while {state.phase}"
    how = _how(state)
    kept = f"\n  log: {short_path(log)}{_tail(state)}" if log.exists() else ""
    return f"failed [rank-lost] rank {state.rank} {how}, {where}{kept}"


def _how(state: RankState) -> str:
    return "ended without a word" if state.exit_code is None else exit_text(state.exit_code)


def _tail(state: RankState) -> str:
    lines = state.child.tail(TAIL_LINES) if state.child is not None else []
    return "".join(f"\n    | {line}" for line in lines)


def saved_text(saved: tuple[int, Path] | None, step: int, again: str) -> str:
    """What is saved, and what to type to go on when `again` is given. `step` is the last committed step."""
    if saved is None:
        lost = f"; {step} step{'s' if step != 1 else ''} will be done again" if step else ""
        text, effect = f"nothing is saved yet{lost}", "starts from the beginning"
    else:
        lost = f"; steps {saved[0] + 1} to {step} will be done again" if step > saved[0] else ""
        text, effect = f"saved up to step {saved[0]} in {short_path(saved[1])}{lost}", "goes on from there"
    return f"{text}\n  -> {again}   {effect}" if again else text
