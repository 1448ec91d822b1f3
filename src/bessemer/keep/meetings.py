"""Where ranks that make a process group together leave their addresses for each other: at the coordinator.

A meeting is a store of short texts under a name that its ranks agree on, and lasts as long as one of them is connected.

    meet -> hello{proof, role: "meet", meeting}   set{key, value}   get{key}   add{key, by}   check{keys}
    meet <- value{value}    to get, once somebody has set it; to add, what is there now; to check, whether all are there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bessemer.keep.switchboard import Peer

__all__ = ["Meetings"]


@dataclass
class _Meeting:
    found: dict[str, Any] = field(default_factory=dict)
    here: set[Peer] = field(default_factory=set)
    waiting: list[tuple[Peer, str]] = field(default_factory=list)


class Meetings:
    """`send` is how a peer is told something."""

    def __init__(self, send: Callable[[Peer, Mapping[str, Any]], None]) -> None:
        self._send = send
        self._by_name: dict[str, _Meeting] = {}
        self._of: dict[Peer, str] = {}

    def come(self, peer: Peer, name: str) -> None:
        self._of[peer] = name
        self._by_name.setdefault(name, _Meeting()).here.add(peer)

    def gone(self, peer: Peer) -> None:
        """A connection has ended."""
        name = self._of.pop(peer, None)
        if name is None:
            return
        meeting = self._by_name[name]
        meeting.here.discard(peer)
        meeting.waiting = [(one, key) for one, key in meeting.waiting if one is not peer]
        if not meeting.here:
            del self._by_name[name]

    def take(self, peer: Peer, record: Mapping[str, Any]) -> None:
        """ValueError, KeyError, TypeError: that is no request."""
        meeting, kind = self._by_name[self._of[peer]], record["kind"]
        if kind == "set":
            self._set(meeting, str(record["key"]), record["value"])
        elif kind == "get":
            meeting.waiting.append((peer, str(record["key"])))
            self._answer(meeting)
        elif kind == "add":
            key = str(record["key"])
            self._set(meeting, key, int(meeting.found.get(key, 0)) + int(record["by"]))
            self._send(peer, {"kind": "value", "value": meeting.found[key]})
        elif kind == "check":
            self._send(peer, {"kind": "value", "value": all(str(key) in meeting.found for key in record["keys"])})
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _set(self, meeting: _Meeting, key: str, value: Any) -> None:
        meeting.found[key] = value
        self._answer(meeting)

    def _answer(self, meeting: _Meeting) -> None:
        ready = [(peer, key) for peer, key in meeting.waiting if key in meeting.found]
        if ready:
            meeting.waiting = [(peer, key) for peer, key in meeting.waiting if key not in meeting.found]
        for peer, key in ready:
            self._send(peer, {"kind": "value", "value": meeting.found[key]})
