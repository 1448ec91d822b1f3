"""The faults of a chaos run: which, when and to whom, from a TOML file.

    seed = 1                  # of all draws: times, kinds, ranks

    [[fault]]
    kind = "kill"             # or a list, of which one is drawn each time
    rank = "active"           # for faults of ranks: a number, "active", "leader", "spare", or "every" active one
    host = 0                  # for faults of hosts: a number, or "any"
    every_s = 60              # or at_step = 40, or at_s = 12.5: seconds since the first step was committed
    spread = 0.2              # of every_s: each gap is drawn between 48 and 72 s
    times = 3                 # of every_s: no more than so many

    [[fault]]
    kind = "stop"             # SIGSTOP
    at_step = 50
    for_s = 3.0               # then SIGCONT; without it never

`KINDS` says what each kind does.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem, nearest, one_of

__all__ = ["KINDS", "Fault", "FaultRule", "Plan", "Schedule", "read_plan"]

KINDS = {
    "kill": "SIGKILL to a rank",
    "term": "SIGTERM to a rank, as a cluster sends that takes a host away",
    "stop": "SIGSTOP to a rank, and SIGCONT after for_s",
    "slow": "a rank stands still for the part `duty` of each half second, for for_s seconds",
    "coordinator": "SIGKILL to the coordinator",
    "vault": "SIGKILL to the vault, which writes the checkpoints",
    "flip": "a bit changes in each tensor of the copies in the vault's memory, and every rank is killed",
    "disk-full": "the vault can write no file of more than 4 KiB for for_s seconds",
    "host": "SIGKILL to everything on one of several hosts, which is started again after for_s (5) seconds",
    "host-stop": "SIGSTOP to everything on one of several hosts, and SIGCONT after for_s",
    "cut": "one of several hosts is cut off from the others for for_s seconds (network namespaces, as root)",
}
OF_RANKS = ("kill", "term", "stop", "slow")
OF_HOSTS = ("host", "host-stop", "cut")
WHO = ("active", "leader", "spare", "every")
_LASTING = ("slow", "disk-full", "host-stop", "cut")
_WHEN = ("at_step", "at_s", "every_s")


@dataclass(frozen=True, kw_only=True)
class FaultRule:
    """One table of the file. Of `at_step`, `at_s` and `every_s` exactly one is given."""

    kind: tuple[str, ...]
    rank: int | str = "active"
    host: int | str = "any"
    at_step: int | None = None
    at_s: float | None = None
    every_s: float | None = None
    spread: float = 0.0
    times: int | None = None
    for_s: float | None = None
    duty: float = 0.5


@dataclass(frozen=True)
class Plan:
    seed: int
    rules: tuple[FaultRule, ...]

    @property
    def cuts(self) -> bool:
        """Whether hosts are cut off."""
        return any("cut" in rule.kind for rule in self.rules)


@dataclass(frozen=True)
class Fault:
    """One fault that is due. `draw`, from [0, 1), picks the rank where several would do."""

    kind: str
    rule: FaultRule
    draw: float


@dataclass
class _Turn:
    rule: FaultRule
    random: random.Random
    next_s: float | None
    done: int = 0


@dataclass
class Schedule:
    """What is due, asked again and again. The draws follow from the seed and each rule's place alone."""

    plan: Plan
    _turns: list[_Turn] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = []
        for number, rule in enumerate(self.plan.rules):
            turn = _Turn(rule, random.Random(f"{self.plan.seed}/{number}"), rule.at_s)
            if rule.every_s is not None:
                turn.next_s = _gap(turn)
            self._turns.append(turn)

    def due(self, step: int, since_s: float) -> list[Fault]:
        """`step`: how many are committed, `since_s`: since the first was."""
        return [fault for turn in self._turns if (fault := _due(turn, step, since_s)) is not None]


def _due(turn: _Turn, step: int, since_s: float) -> Fault | None:
    rule = turn.rule
    if turn.done >= (rule.times or 10**9) or (rule.every_s is None and turn.done):
        return None
    if rule.at_step is not None:
        if step < rule.at_step:
            return None
    elif turn.next_s is None or since_s < turn.next_s:
        return None
    turn.done += 1
    if turn.next_s is not None and rule.every_s is not None:
        turn.next_s += _gap(turn)
    return Fault(turn.random.choice(rule.kind), rule, turn.random.random())


def _gap(turn: _Turn) -> float:
    assert turn.rule.every_s is not None
    return turn.rule.every_s * turn.random.uniform(1 - turn.rule.spread, 1 + turn.rule.spread)


# ---- the file


def read_plan(path: Path) -> Plan:
    """The plan of a faults file. ConfigError with every problem of it at once."""
    problems: list[Problem] = []
    try:
        tree = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        text = f"can't read the faults file: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(
            [
                Problem(
                    code="chaos-faults", where=str(path), what=text, why="", fix="a TOML file, see chaos_faults.toml"
                )
            ],
            str(path),
        ) from error
    for key in tree.keys() - {"seed", "fault"}:
        problems.append(_unknown(key, key, ("seed", "fault")))
    seed, tables = tree.get("seed", 0), tree.get("fault", [])
    if not _is(seed, int):
        problems.append(_wrong("seed", f"seed = {seed!r} is no whole number", "seed = 1"))
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        problems.append(_wrong("fault", "there is no [[fault]]", '[[fault]] with kind = "kill" and every_s = 60'))
        tables = []
    rules = [_rule(table, f"fault {number}", problems) for number, table in enumerate(tables, 1)]
    if problems:
        raise ConfigError(problems, str(path))
    return Plan(seed, tuple(rule for rule in rules if rule is not None))


def _rule(table: Mapping[str, Any], where: str, problems: list[Problem]) -> FaultRule | None:
    before, known = len(problems), tuple(f.name for f in fields(FaultRule))
    problems += [_unknown(key, f"{where}.{key}", known) for key in table if key not in known]
    kinds = table.get("kind")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        problems.append(_wrong(f"{where}.kind", "no kind of fault is named", one_of("kind", sorted(KINDS))))
        return None
    problems += [_unknown(kind, f"{where}.kind", tuple(KINDS), "kind") for kind in kinds if kind not in KINDS]
    problems += _of_when(table, where) + _of_values(table, kinds, where)
    if len(problems) > before:
        return None
    return FaultRule(**{**table, "kind": tuple(kinds)})


def _of_when(table: Mapping[str, Any], where: str) -> list[Problem]:
    given = [key for key in _WHEN if key in table]
    found = []
    if len(given) != 1:
        what = f"{' and '.join(given)} are given" if given else "it is not said when"
        found.append(_wrong(where, what, "one of at_step, at_s and every_s"))
    found += [
        _wrong(f"{where}.{key}", f"{key} goes with every_s", f"remove {key}, or every_s = 60")
        for key in ("spread", "times")
        if key in table and "every_s" not in table
    ]
    return found


def _of_values(table: Mapping[str, Any], kinds: list[str], where: str) -> list[Problem]:
    found = []
    for key, low, high in (("at_s", 0, 1e9), ("every_s", 0.1, 1e9), ("spread", 0, 1), ("for_s", 0, 1e9),
                           ("duty", 0, 1)):  # fmt: skip
        if key in table and not (_is(table[key], int, float) and low <= table[key] <= high):
            text = f"{key} = {table[key]!r} is no number from {low:g}" + ("" if high > 1 else f" to {high:g}")
            found.append(_wrong(f"{where}.{key}", text, f"{key} = {max(low, 0.5):g}"))
    for key in ("at_step", "times"):
        if key in table and not (_is(table[key], int) and table[key] > 0):
            found.append(_wrong(f"{where}.{key}", f"{key} = {table[key]!r} is no whole number above 0", f"{key} = 3"))
    rank = table.get("rank", "active")
    if not (_is(rank, int) and rank >= 0) and rank not in WHO:
        if isinstance(rank, str):
            found.append(_unknown(rank, f"{where}.rank", WHO, "rank"))
        else:
            found.append(_wrong(f"{where}.rank", f"rank = {rank!r} is no rank", 'rank = 0, or rank = "active"'))
    if "rank" in table and not any(kind in OF_RANKS for kind in kinds):
        found.append(_wrong(f"{where}.rank", f"{' and '.join(kinds)} befalls no rank", "remove rank"))
    host = table.get("host", "any")
    if host != "any" and not (_is(host, int) and host >= 0):
        found.append(_wrong(f"{where}.host", f"host = {host!r} is no host", 'host = 0, or host = "any"'))
    if "host" in table and not any(kind in OF_HOSTS for kind in kinds):
        found.append(_wrong(f"{where}.host", f"{' and '.join(kinds)} befalls no host", "remove host"))
    if "for_s" not in table and any(kind in _LASTING for kind in kinds):
        found.append(_wrong(where, f"it is not said for how long {' or '.join(kinds)} lasts", "for_s = 10"))
    return found


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _wrong(where: str, what: str, fix: str) -> Problem:
    return Problem(code="chaos-faults", where=where, what=what, why="", fix=fix)


def _unknown(word: str, where: str, known: tuple[str, ...], key: str = "") -> Problem:
    close = nearest(word, known) or list(known)
    fix = one_of(key, close) if key else " or ".join(close)
    return Problem(code="chaos-faults", where=where, what=f"{word!r} is not known here", why="", fix=fix)
