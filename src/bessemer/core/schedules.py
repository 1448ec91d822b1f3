"""Pipeline schedules: their names, how stages lie on ranks, and each rank's list of actions.

One description for three readers: the trainer executes the list, the planner's replay times it, and the planner's
closed forms (`bessemer.plan.pipeline`) are tested against it. `layout.RUNNABLE` says which of them the trainer runs.

A *stage* is a consecutive slice of the layers. A micro-batch passes the stages in order in its forward (F) and in
reverse in its backward (B). Schedules that split the backward have I (gradient of the input, what the stage before
waits for) and W (gradient of the weights, which nobody waits for) instead of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bessemer.core.errors import ConfigError
from bessemer.core.problem import Problem, nearest, one_of

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "check_shape",
    "rank_of_stage",
    "schedule",
    "schedule_actions",
    "stages_of_rank",
]

Kind = Literal["F", "B", "I", "W", "send_F", "recv_F", "send_B", "recv_B"]


class Action(NamedTuple):
    """One thing that a rank does: a pass of `micro` through `stage`, or a transfer with rank `peer`.

    send_F/recv_F carry the activations that `stage` made or needs; send_B/recv_B the gradients of its input or output.
    """

    kind: Kind
    stage: int
    micro: int
    peer: int = -1


@dataclass(frozen=True)
class Schedule:
    """`shape` says how stages lie on ranks: "loop" stage s on rank s mod pp, "v" down the ranks and back up, "two-way"
    stage r and, for the micro-batches of the other direction, stage pp-1-r. `chunks`: stages of a rank; None: the
    layout's `virtual_stages`."""

    name: str
    shape: Literal["loop", "v", "two-way"]
    chunks: int | None
    split_backward: bool
    what: str


SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        Schedule(
            "1f1b", "loop", None, False, "one forward, one backward; virtual stages interleave it (arXiv 2104.04473)"
        ),
        Schedule("gpipe", "loop", 1, False, "all forwards, then all backwards (arXiv 1811.06965)"),
        Schedule("zb-h1", "loop", 1, True, "split backward, a third of the bubble of 1f1b (arXiv 2401.10241)"),
        Schedule("zb-h2", "loop", 1, True, "split backward, no drain, twice the memory of 1f1b (arXiv 2401.10241)"),
        Schedule("zb-v", "v", 2, True, "two chunks in a V, no drain at the memory of 1f1b (arXiv 2405.15362)"),
        Schedule("dualpipe", "two-way", 2, True, "from both ends, forward under backward (arXiv 2412.19437)"),
        Schedule("dualpipev", "v", 2, True, "the V-shaped half of dualpipe, without its second copy of the weights"),
    )
}
"""In the order of their ids in `bessemer.plan.space.Layouts`."""


def schedule(name: str) -> Schedule:
    """ConfigError with the nearest names for one that isn't known."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    fix = one_of("layout.schedule", [f'"{n}"' for n in nearest(name.lower(), SCHEDULES) or SCHEDULES])
    raise _refusal("schedule-unknown", f"{name!r} is not a pipeline schedule", fix)


def stages_of_rank(kind: Schedule, pp: int, chunks: int, rank: int) -> tuple[int, ...]:
    """The stages on pipeline rank `rank`, in order of chunk."""
    if kind.shape == "v":
        return (rank, 2 * pp - 1 - rank)
    if kind.shape == "two-way":
        return (rank, pp - 1 - rank)
    return tuple(range(rank, pp * chunks, pp))


def rank_of_stage(kind: Schedule, pp: int, stage: int, micro: int, num_micro: int) -> int:
    """Where `stage` works on `micro`; with "two-way" the second half of the micro-batches comes from the other end."""
    if kind.shape == "v":
        return stage if stage < pp else 2 * pp - 1 - stage
    if kind.shape == "two-way":
        return stage if micro < num_micro // 2 else pp - 1 - stage
    return stage % pp


def schedule_actions(name: str, pp: int, num_micro: int, virtual_stages: int = 1) -> list[list[Action]]:
    """Each rank's actions in the order in which it starts them, transfers included.

    ConfigError where the schedule can't be built: virtual stages need a number of micro-batches divisible by pp,
    DualPipe an even pp and an even number of at least 2 pp micro-batches, DualPipeV at least 2 pp.
    """
    kind = schedule(name)
    check_shape(name, pp, num_micro, virtual_stages)
    if name == "gpipe":
        order: list[Kind] = ["F", "B"]
        ranks = [[Action(k, r, m) for k in order for m in range(num_micro)] for r in range(pp)]
    elif name == "1f1b":
        ranks = [_one_f_one_b(r, pp, num_micro, virtual_stages) for r in range(pp)]
    elif name == "zb-h1":
        ranks = [_zb_h1(r, pp, num_micro) for r in range(pp)]
    elif name == "dualpipe":
        ranks = [_dualpipe(r, pp, num_micro) for r in range(pp)]
    elif name == "dualpipev":
        ranks = [_dual_steps(r, pp, num_micro, (r, 2 * pp - 1 - r), (0, 0)) for r in range(pp)]
    else:
        ranks = _zero_bubble(kind, pp, num_micro)
    chunks = virtual_stages if kind.chunks is None else kind.chunks
    return [_with_transfers(kind, pp, num_micro, actions, chunks) for actions in ranks]


def _refusal(code: str, what: str, fix: str) -> ConfigError:
    why = "schedules: " + ", ".join(SCHEDULES) if code == "schedule-unknown" else "its micro-batches wouldn't fit"
    return ConfigError([Problem(code=code, where="layout.schedule", what=what, why=why, fix=fix)])


def check_shape(name: str, pp: int, num_micro: int, virtual_stages: int) -> None:
    """ConfigError where the schedule can't be built, as `schedule_actions` raises it."""
    kind, given = schedule(name), f"{num_micro} micro-batches on {pp} ranks"
    if kind.chunks is not None and virtual_stages not in (1, kind.chunks):
        raise _refusal("schedule-shape", f"{name} with {virtual_stages} virtual stages", "layout.virtual_stages = 1")
    if virtual_stages > 1 and kind.chunks is None and num_micro % pp:
        raise _refusal("schedule-shape", f"{name} with virtual stages, {given}", f"a multiple of {pp} micro-batches")
    if name == "dualpipe" and (pp % 2 or num_micro % 2 or num_micro < 2 * pp):
        fix = f"an even pp and an even number of at least {2 * pp} micro-batches"
        raise _refusal("schedule-shape", f"{name} with {given}", fix)
    if name == "dualpipev" and num_micro < 2 * pp:
        raise _refusal("schedule-shape", f"{name} with {given}", f"at least {2 * pp} micro-batches")


def _one_f_one_b(rank: int, pp: int, num_micro: int, chunks: int) -> list[Action]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    total = num_micro * chunks
    warm = pp - rank - 1 if chunks == 1 else (pp - rank - 1) * 2 + (chunks - 1) * pp
    warm = min(warm, total)

    def at(index: int, backward: bool) -> tuple[int, int]:
        if chunks == 1:
            return rank, index
        group, inside = divmod(index, pp * chunks)
        chunk, micro = divmod(inside, pp)
        return (chunks - 1 - chunk if backward else chunk) * pp + rank, group * pp + micro

    forward = [Action("F", *at(i, False)) for i in range(total)]
    backward = [Action("B", *at(i, True)) for i in range(total)]
    actions = forward[:warm]
    for i in range(total - warm):
        actions += [forward[warm + i], backward[i]]
    return actions + backward[total - warm :]


def _zb_h1(rank: int, pp: int, num_micro: int) -> list[Action]:
    """1f1b whose W of rank r come r micro-batches late: they fill the drain, and pp activations are held at most."""
    warm = min(pp - rank - 1, num_micro)
    actions = [Action("F", rank, m) for m in range(warm)]
    for micro in range(num_micro):
        if warm + micro < num_micro:
            actions.append(Action("F", rank, warm + micro))
        actions.append(Action("I", rank, micro))
        if micro >= rank:
            actions.append(Action("W", rank, micro - rank))
    return actions + [Action("W", rank, m) for m in range(max(num_micro - rank, 0), num_micro)]


def _zero_bubble(kind: Schedule, pp: int, num_micro: int) -> list[list[Action]]:
    """List scheduling with equal unit times for F, I and W: I before F before W, as far as memory allows.

    A rank may hold `limit` activations between F and W: 2 pp - 1 for ZB-H2, on every rank, since the later ones put
    their W off to answer the earlier ones at once; 2 pp half stages for ZB-V.
    """
    v_shape = kind.shape == "v"
    num_stages = pp * (2 if v_shape else 1)
    limit = 2 * pp if v_shape else 2 * pp - 1
    stages = [stages_of_rank(kind, pp, 1, rank) for rank in range(pp)]
    state = _Progress(num_stages, num_micro)
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    held = [0] * pp
    while state.left:
        chosen = [state.choose(stages[rank], held[rank] < limit) for rank in range(pp)]
        for rank, action in enumerate(chosen):
            if action is not None:
                state.start(action)
                held[rank] += {"F": 1, "W": -1}.get(action.kind, 0)
                ranks[rank].append(action)
        state.clock += 1
    return ranks


class _Progress:
    """Which passes have ended at `clock`, of a schedule whose passes all take one unit."""

    def __init__(self, num_stages: int, num_micro: int) -> None:
        self.num_stages, self.num_micro = num_stages, num_micro
        self.left = 3 * num_micro * num_stages
        self.clock = 0
        self._ends: dict[tuple[str, int, int], int] = {}
        self._next = {(kind, stage): 0 for kind in "FIW" for stage in range(num_stages)}

    def start(self, action: Action) -> None:
        self._ends[action.kind, action.stage, action.micro] = self.clock + 1
        self._next[action.kind, action.stage] += 1
        self.left -= 1

    def choose(self, stages: tuple[int, ...], room: bool) -> Action | None:
        """The next action of a rank that holds `stages`, or None where it must wait."""
        candidates: list[tuple[tuple[int, int, int], Action]] = []
        last = self.num_stages - 1
        for stage in stages:
            micro = self._next["I", stage]
            ready = micro < self.num_micro and self._ended("F", stage, micro)
            if ready and (stage == last or self._ended("I", stage + 1, micro)):
                candidates.append(((0, micro, -stage), Action("I", stage, micro)))
            micro = self._next["F", stage]
            if room and micro < self.num_micro and (stage == 0 or self._ended("F", stage - 1, micro)):
                # the later stage first: it is nearer to the backward that frees memory
                candidates.append(((1, -stage, micro), Action("F", stage, micro)))
            micro = self._next["W", stage]
            if micro < self.num_micro and self._ended("I", stage, micro):
                candidates.append(((2, micro, -stage), Action("W", stage, micro)))
        return min(candidates)[1] if candidates else None

    def _ended(self, kind: str, stage: int, micro: int) -> bool:
        return self._ends.get((kind, stage, micro), self.clock + 1) <= self.clock


def _dualpipe(rank: int, pp: int, num_micro: int) -> list[Action]:
    """Both halves of the ranks mirror each other: the nearer end of the pipeline is direction 0."""
    half, near_half = num_micro // 2, rank < pp // 2
    near = rank if near_half else pp - 1 - rank
    return _dual_steps(near, pp // 2, half, (near, pp - 1 - near), (0, half) if near_half else (half, 0))


def _dual_steps(
    rank: int, ranks: int, num_micro: int, stages: tuple[int, int], offsets: tuple[int, int]
) -> list[Action]:
    """The eight steps of DualPipe for a rank at distance `rank` of `ranks` from its end, `num_micro` each way."""
    actions: list[Action] = []
    given = {(kind, way): 0 for kind in "FI" for way in (0, 1)}
    weights: list[tuple[int, int]] = []  # W that wait for a gap

    def forward(way: int) -> None:
        actions.append(Action("F", stages[way], given["F", way] + offsets[way]))
        given["F", way] += 1

    def backward(way: int, *, split: bool = False) -> None:
        where = stages[way], given["I", way] + offsets[way]
        given["I", way] += 1
        actions.append(Action("I", *where))
        if split:
            weights.append(where)
        else:
            actions.append(Action("W", *where))

    def weight() -> None:
        actions.append(Action("W", *weights.pop(0)))

    behind = ranks - rank - 1
    for _ in range(2 * behind):  # 1
        forward(0)
    for _ in range(rank + 1):  # 2
        forward(0)
        forward(1)
    for _ in range(behind):  # 3
        backward(1, split=True)
        weight()
        forward(1)
    for _ in range(num_micro - 2 * ranks + rank + 1):  # 4
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(behind):  # 5
        backward(1)
        forward(1)
        backward(0)
    for i in range(rank + 1):  # 6
        backward(1, split=i > rank // 2)
        backward(0, split=i > rank // 2)
    for _ in range(behind):  # 7
        if weights:
            weight()
        backward(0, split=True)
    while weights:  # 8
        weight()
    return actions


def _with_transfers(kind: Schedule, pp: int, num_micro: int, actions: list[Action], chunks: int) -> list[Action]:
    """Puts a receive before each pass whose input another rank made, and a send after each whose result one needs."""
    num_stages = pp if kind.shape == "two-way" else pp * chunks
    out: list[Action] = []
    for action in actions:
        stage, micro = action.stage, action.micro
        here = rank_of_stage(kind, pp, stage, micro, num_micro)
        before = rank_of_stage(kind, pp, stage - 1, micro, num_micro) if stage > 0 else here
        after = rank_of_stage(kind, pp, stage + 1, micro, num_micro) if stage + 1 < num_stages else here
        source, target = (before, after) if action.kind == "F" else (after, before)
        way = "F" if action.kind == "F" else "B"
        if action.kind == "W" or (source == here and target == here):
            out.append(action)
            continue
        if source != here:
            out.append(Action("recv_F" if way == "F" else "recv_B", stage, micro, source))
        out.append(action)
        if target != here:
            out.append(Action("send_F" if way == "F" else "send_B", stage, micro, target))
    return out
