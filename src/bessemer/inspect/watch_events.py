"""The events of a run in words, and what they say of its checkpoints, groups and spares now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bessemer.inspect.flight_records import EVENT as FINDING
from bessemer.keep.progress import event_line

__all__ = ["Event", "Kept", "event_of"]

DETAIL = (
    "adapted", "arrived", "checked", "deleted", "kernels", "machine", "operators", "precision", "rank_started", "save",
    "watch",
)  # fmt: skip
"""Of interest only to who looks for them."""
GOOD = ("ready", "loaded", "saved", "joined", "finished", "eval")
BAD = ("rank_lost", "group_lost", "failed", "coordinator_lost", "save_failed")
LONGEST = 400


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl as the page shows it. level: detail, info, good, warn or bad; `t` in unix seconds. kind:
    of a finding."""

    t: float
    name: str
    level: str
    text: str
    step: int | None
    ranks: tuple[int, ...]
    kind: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"t": self.t, "name": self.name, "level": self.level, "text": self.text, "step": self.step,
                "ranks": list(self.ranks), "kind": self.kind}  # fmt: skip


def event_of(record: Mapping[str, Any]) -> Event | None:
    """The event of a line; None for one without name or time."""
    name, t = record.get("event"), record.get("t")
    if not isinstance(name, str) or not isinstance(t, int | float):
        return None
    step, rank = (record.get(key) if isinstance(record.get(key), int) else None for key in ("step", "rank"))
    ranks = record.get("ranks") or ([] if rank is None else [rank])
    return Event(float(t), name, _level(name, record), _text(name, record), step, tuple(ranks), record.get("kind"))


def _level(name: str, record: Mapping[str, Any]) -> str:
    if name == FINDING:
        return {"evict": "bad", "watch": "warn"}.get(str(record.get("advice")), "info")
    if name in BAD:
        return "bad"
    if name in ("warning", "stop_requested"):
        return "warn"
    return "detail" if name in DETAIL else "good" if name in GOOD else "info"


def _text(name: str, record: Mapping[str, Any]) -> str:
    if isinstance(told := record.get("text"), str):
        return told[:LONGEST]
    try:
        said = event_line(record)
    except (KeyError, TypeError):  # a line of another version: its fields are shown as they are
        said = None
    if said is not None:
        text = said[1]
    else:
        fields = {k: v for k, v in record.items() if k not in ("t", "event") and v not in (None, "", [], {})}
        text = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in fields.items())
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value[:16]) + (" ..." if len(value) > 16 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in list(value.items())[:8])
    return str(value)


@dataclass
class Kept:
    """What the events so far say of checkpoints and groups. A group's state: active, spare, joining, lost, left."""

    saved: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step, those that weren't deleted
    saving: int | None = None
    failed_saves: int = 0
    stall_s: float = 0.0
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    wanted: int | None = None
    losses: int = 0
    lost_ranks: set[int] = field(default_factory=set)
    attempt: int = 0
    attempt_t: float = 0.0
    world: int = 0
    started_t: float | None = None
    end: dict[str, Any] | None = None  # finished, stopped or failed
    host: str = ""
    watch: dict[str, Any] = field(default_factory=dict)  # what the samples of the precision watch are of
    machine: dict[str, Any] = field(default_factory=dict)
    fallen: dict[str, int] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """The next line of events.jsonl."""
        taker = getattr(self, f"_on_{record.get('event')}", None)
        if taker is not None:
            taker(record)

    def as_json(self) -> dict[str, Any]:
        """Newest checkpoint first."""
        saved = [{"step": step, **about} for step, about in sorted(self.saved.items(), reverse=True)]
        groups = [{"group": number, **about} for number, about in sorted(self.groups.items())]
        return {"saved": saved[:8], "kept": len(saved), "saving": self.saving, "failed": self.failed_saves,
                "stall_s": self.stall_s, "groups": groups, "wanted": self.wanted, "losses": self.losses}  # fmt: skip

    def _on_start(self, record: Mapping[str, Any]) -> None:
        self.attempt += 1
        self.attempt_t = float(record["t"])
        self.world = int(record.get("world_size") or 0)
        self.host = str(record.get("host") or "")
        self.end, self.saving = None, None
        self.groups.clear()
        self.lost_ranks.clear()
        if self.started_t is None:
            self.started_t = float(record["t"])

    def _on_save(self, record: Mapping[str, Any]) -> None:
        self.saving = record.get("step")
        self.stall_s += float(record.get("stall_s") or 0.0)

    def _on_saved(self, record: Mapping[str, Any]) -> None:
        self.saved[int(record["step"])] = {key: record.get(key) for key in ("t", "bytes", "seconds")}
        self.saving = None

    def _on_save_failed(self, record: Mapping[str, Any]) -> None:
        self.failed_saves += 1
        self.saving = None

    def _on_deleted(self, record: Mapping[str, Any]) -> None:
        self.saved.pop(int(record["step"]), None)

    def _on_rank_started(self, record: Mapping[str, Any]) -> None:
        if record.get("group") is not None:
            ranks = self._group(record["group"], "spare", record).setdefault("ranks", [])
            ranks.append(record.get("rank"))

    def _on_epoch(self, record: Mapping[str, Any]) -> None:
        active, joining = set(record.get("active") or ()), set(record.get("joining") or ())
        for number in active | joining:
            self._group(number, "active" if number in active else "joining", record)

    def _on_joined(self, record: Mapping[str, Any]) -> None:
        self._group(record["group"], "active", record)

    def _on_left(self, record: Mapping[str, Any]) -> None:
        self._group(record["group"], "left", record)

    def _on_group_lost(self, record: Mapping[str, Any]) -> None:
        self._group(record["group"], "lost", record)

    def _on_rank_lost(self, record: Mapping[str, Any]) -> None:
        self.losses += 1
        if isinstance(record.get("rank"), int):
            self.lost_ranks.add(record["rank"])
        if record.get("group") is not None:
            self._group(record["group"], "lost", record)

    def _on_scale(self, record: Mapping[str, Any]) -> None:
        self.wanted = record.get("replicas")

    def _on_watch(self, record: Mapping[str, Any]) -> None:
        self.watch = dict(record)
        self.fallen |= record.get("fallen") or {}

    def _on_warning(self, record: Mapping[str, Any]) -> None:
        self.fallen |= dict.fromkeys(record.get("fall_back") or (), int(record.get("step") or 0))

    def _on_machine(self, record: Mapping[str, Any]) -> None:
        self.machine = dict(record)

    def _ended(self, record: Mapping[str, Any]) -> None:
        self.end = dict(record)

    _on_finished = _on_stopped = _on_failed = _ended

    def _group(self, number: int, state: str, record: Mapping[str, Any]) -> dict[str, Any]:
        known = self.groups.setdefault(int(number), {})
        if known.get("state") != state and known.get("state") not in ("lost", "left"):
            known |= {"state": state, "since_t": record["t"], "step": record.get("step")}
        return known
