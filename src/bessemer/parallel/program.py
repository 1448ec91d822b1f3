"""What a pipeline rank does, step by step: the passes of its schedule, and when each transfer is started and awaited.

The lists of `core.schedules` say which passes a rank runs and which transfers each needs. They can't be executed as
they stand where a send completes only once its receive is posted, and transfers between two ranks follow each other in
the order in which each of them posted (NCCL): two neighbours that both send first would wait for each other. So all
ranks post their transfers in one common order, that in which the schedule makes them if F, I and W take one unit of
time each and transfers none. Then nothing can deadlock, even if every post waited for its counterpart: of all transfers
not yet done take the first in the order. Its ends have done all that they post before it. The sender comes to make it,
since what it needs until then was made, hence posted, earlier; so does the receiver come to post it, since all that it
awaits until then it has posted earlier. Waiting for a send can thus stand anywhere after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from bessemer.core.schedules import Action, rank_of_stage, schedule

__all__ = ["Step", "Transfer", "forward_actions", "rank_program", "transfer_order"]

_UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
_AHEAD = 2
"""Receives open beside the one that is awaited: one for each direction that a schedule alternates between."""
_UNSENT = 4
"""Sends to one rank whose buffers are kept, at most, before the next one is posted."""


class Transfer(NamedTuple):
    """The stream after `stage` ("F") or the gradient of the stream before it ("B"), from rank to rank."""

    way: Literal["F", "B"]
    stage: int
    micro: int
    source: int
    target: int


class Step(NamedTuple):
    """F, B, I, W: that pass of `micro` through `stage`. send, receive: start the transfer; arrive, sent: wait until it
    is done. complete: the last pass that adds to gradients of `stage` is done."""

    do: Literal["F", "B", "I", "W", "send", "receive", "arrive", "sent", "complete"]
    stage: int
    micro: int
    transfer: Transfer | None = None


def forward_actions(name: str, pp: int, num_micro: int, virtual_stages: int) -> list[list[Action]]:
    """Each rank's actions of forward passes alone, with the stages where the schedule has them: any number of
    micro-batches. In each unit of time a rank takes, of the passes whose input is there, that of its latest stage."""
    kind = schedule(name)
    num_stages = pp * (virtual_stages if kind.chunks is None else kind.chunks)
    home = [rank_of_stage(kind, pp, stage, 0, num_micro) for stage in range(num_stages)]
    ended = [0] * num_stages  # micro-batches that have passed each stage
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    while ended[-1] < num_micro:
        ready = [num_micro, *ended[:-1]]
        free = set(range(pp))
        for stage in reversed(range(num_stages)):
            rank, micro = home[stage], ended[stage]
            if rank not in free or micro >= ready[stage]:
                continue
            free.remove(rank)
            ended[stage] += 1
            if stage > 0 and home[stage - 1] != rank:
                ranks[rank].append(Action("recv_F", stage, micro, home[stage - 1]))
            ranks[rank].append(Action("F", stage, micro))
            if stage + 1 < num_stages and home[stage + 1] != rank:
                ranks[rank].append(Action("send_F", stage, micro, home[stage + 1]))
    return ranks


def transfer_order(ranks: Sequence[Sequence[Action]]) -> list[Transfer]:
    """All transfers of the ranks' lists in the order in which they are posted (see the top of the file)."""
    at, clock = [0] * len(ranks), [0] * len(ranks)
    made: dict[Transfer, int] = {}
    while any(at[rank] < len(actions) for rank, actions in enumerate(ranks)):
        before = sum(at)
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind in _UNITS:
                    clock[rank] += _UNITS[action.kind]
                elif action.kind.startswith("send"):
                    made[_transfer(action, rank)] = clock[rank]
                elif (transfer := _transfer(action, rank)) in made:
                    clock[rank] = max(clock[rank], made[transfer])
                else:
                    break
                at[rank] += 1
        assert sum(at) > before, "the schedule's lists wait for each other"
    # one rank makes one thing at a time, so that no two have the same key
    return sorted(made, key=lambda transfer: (made[transfer], transfer.source))


def rank_program(rank: int, actions: Sequence[Action], order: Sequence[Transfer]) -> list[Step]:
    """The steps of `rank`, whose list is `actions`; `order`: of all ranks' transfers.

    A transfer is posted when it is made or needed, and all before it in the order with it. Two receives ahead are
    posted before a pass, unless a send that isn't made yet comes before them.
    """
    program = _Program(rank, [t for t in order if rank in (t.source, t.target)])
    adds = ("B", "I", "W", "send_B")
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in adds}
    for i, action in enumerate(actions):
        if action.kind in _UNITS:
            program.look_ahead()
            program.steps.append(Step(action.kind, action.stage, action.micro))  # type: ignore[arg-type]
        elif action.kind.startswith("send"):
            program.send(_transfer(action, rank))
        else:
            program.arrive(_transfer(action, rank))
        if action.kind in adds and last[action.stage] == i:
            program.steps.append(Step("complete", action.stage, action.micro))
    program.end()
    return program.steps


class _Program:
    """A rank's steps as they are written down, and its transfers in their order."""

    def __init__(self, rank: int, queue: list[Transfer]) -> None:
        self.steps: list[Step] = []
        self._rank = rank
        self._queue = queue
        self._place = {transfer: i for i, transfer in enumerate(queue)}
        self._posted = 0
        self._open = 0  # receives that are posted and not awaited yet
        self._unsent: list[Transfer] = []

    def send(self, transfer: Transfer) -> None:
        """The rank has just made it."""
        to_peer = [t for t in self._unsent if t.target == transfer.target]
        self._sent(to_peer[: max(0, len(to_peer) - _UNSENT + 1)])
        self._post_until(transfer)

    def arrive(self, transfer: Transfer) -> None:
        """The rank needs it now. Its sender has then posted all before it, so what it was sent has arrived."""
        self._post_until(transfer)
        self._add("arrive", transfer)
        self._open -= 1
        place = self._place[transfer]
        self._sent([t for t in self._unsent if t.target == transfer.source and self._place[t] < place])

    def look_ahead(self) -> None:
        while self._open < _AHEAD and self._posted < len(self._queue) and not self._is_send(self._posted):
            self._post()

    def end(self) -> None:
        assert self._posted == len(self._queue)
        self._sent(list(self._unsent))

    def _is_send(self, place: int) -> bool:
        return self._queue[place].source == self._rank

    def _post_until(self, transfer: Transfer) -> None:
        while self._posted <= self._place[transfer]:
            self._post()

    def _post(self) -> None:
        transfer = self._queue[self._posted]
        if self._is_send(self._posted):
            self._unsent.append(transfer)
            self._add("send", transfer)
        else:
            self._open += 1
            self._add("receive", transfer)
        self._posted += 1

    def _sent(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._unsent.remove(transfer)
            self._add("sent", transfer)

    def _add(self, do: Literal["send", "receive", "arrive", "sent"], transfer: Transfer) -> None:
        self.steps.append(Step(do, transfer.stage, transfer.micro, transfer))


def _transfer(action: Action, rank: int) -> Transfer:
    """What a send or a receive of `rank` moves."""
    way: Literal["F", "B"] = "F" if action.kind.endswith("F") else "B"
    if action.kind.startswith("send"):
        return Transfer(way, action.stage, action.micro, rank, action.peer)
    stage = action.stage - 1 if way == "F" else action.stage + 1
    return Transfer(way, stage, action.micro, action.peer, rank)
