"""Pipeline schedules: every list can be executed, does each pass once, and has the bubble of its closed form."""

import numpy as np
import pytest

from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES, Action, rank_of_stage, schedule, schedule_actions
from bessemer.plan.pipeline import bubble_s, in_flight

IDS = {name: i for i, name in enumerate(SCHEDULES)}
SHAPES = [
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 8, 3),
    ("1f1b", 4, 2, 1),
    ("zb-h1", 4, 8, 1),
    ("zb-h1", 6, 7, 1),
    ("zb-h2", 4, 12, 1),
    ("zb-v", 4, 10, 1),
    ("dualpipe", 4, 8, 1),
    ("dualpipe", 8, 20, 1),
    ("dualpipev", 4, 9, 1),
]


def execute(name, pp, num_micro, virtual, seconds=(1.0, 1.0, 1.0)):
    """Runs the lists as the ranks would: (makespan, work of the busiest rank, activations held at most by each)."""
    kind = schedule(name)
    ranks = schedule_actions(name, pp, num_micro, virtual)
    chunks = kind.chunks or virtual
    num_stages = pp if kind.shape == "two-way" else pp * chunks
    cost = {"F": seconds[0], "I": seconds[1], "W": seconds[2], "B": seconds[1] + seconds[2]}
    clock, at, held, peak = [0.0] * pp, [0] * pp, [0] * pp, [0] * pp
    ends, wires = {}, set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                ready = ready_at(action, ends, wires, num_stages)
                if ready is None:
                    break
                finish(action, rank, ready, (clock, held, peak, ends, wires, cost))
                at[rank] += 1
                moved = True
    assert at == [len(a) for a in ranks], "deadlock"
    assert held == [0] * pp
    assert not wires, "a message was never received"
    work = [sum(cost.get(a.kind, 0) for a in actions) for actions in ranks]
    return max(clock), max(work), peak


def ready_at(action, ends, wires, num_stages):
    kind, stage, micro, _ = action
    if kind.startswith("send"):
        return 0.0
    if kind.startswith("recv"):
        source = ("send_F", stage - 1, micro) if kind == "recv_F" else ("send_B", stage + 1, micro)
        return 0.0 if source in wires else None
    needs = []
    if kind == "F" and stage > 0:
        needs.append(("F", stage - 1, micro))
    if kind in "BI":
        needs.append(("F", stage, micro))
        if stage < num_stages - 1:
            needs.append(("G", stage + 1, micro))
    if kind == "W":
        needs.append(("G", stage, micro))
    return None if any(n not in ends for n in needs) else max((ends[n] for n in needs), default=0.0)


def finish(action, rank, ready, state):
    clock, held, peak, ends, wires, cost = state
    kind, stage, micro, _ = action
    if kind.startswith("send"):
        wires.add((kind, stage, micro))
        return
    if kind.startswith("recv"):
        wires.remove(("send_F", stage - 1, micro) if kind == "recv_F" else ("send_B", stage + 1, micro))
        return
    clock[rank] = max(clock[rank], ready) + cost[kind]
    key = ("G" if kind in "BI" else kind, stage, micro)
    assert key not in ends, "a pass was done twice"
    ends[key] = clock[rank]
    held[rank] += {"F": 1, "W": -1, "B": -1}.get(kind, 0)
    peak[rank] = max(peak[rank], held[rank])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_list_runs_and_does_each_pass_once(shape):
    name, pp, num_micro, virtual = shape
    kind = schedule(name)
    stages = pp if kind.shape == "two-way" else pp * (kind.chunks or virtual)
    passes = [a for actions in schedule_actions(*shape) for a in actions if a.kind in ("F", "B", "I", "W")]
    kinds = ("F", "I", "W") if kind.split_backward else ("F", "B")
    assert len(passes) == len(set(passes)) == len(kinds) * stages * num_micro
    execute(*shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_only_run_their_own_stages(shape):
    name, pp, num_micro, _ = shape
    kind = schedule(name)
    for rank, actions in enumerate(schedule_actions(*shape)):
        for a in actions:
            assert rank_of_stage(kind, pp, a.stage, a.micro, num_micro) == rank


@pytest.mark.parametrize(
    ("name", "virtual", "seconds"),
    [
        ("gpipe", 1, (1.0, 1.2, 0.8)),
        ("1f1b", 1, (1.0, 1.2, 0.8)),
        ("1f1b", 4, (1.0, 1.2, 0.8)),
        ("zb-h1", 1, (1.0, 1.0, 1.0)),
        ("zb-h1", 1, (1.0, 1.2, 0.9)),
        ("zb-h2", 1, (1.0, 1.0, 1.0)),
        ("zb-v", 1, (1.0, 1.0, 1.0)),
    ],
)
def test_closed_form_of_one_step_is_what_execution_takes(name, virtual, seconds):
    for pp, num_micro in ((4, 16), (8, 32)):
        span, work, _ = execute(name, pp, num_micro, virtual, seconds)
        chunks = schedule(name).chunks or virtual
        whole = [s * chunks for s in seconds]
        idle = bubble_s(IDS[name], pp, virtual, *whole, isolated=True)
        assert span - work == pytest.approx(float(idle), rel=0.01)


def test_dualpipe_stays_within_its_published_bubble():
    for pp, num_micro in ((4, 16), (8, 32)):
        span, work, peak = execute("dualpipe", pp, num_micro, 1)
        assert span - work <= float(bubble_s(IDS["dualpipe"], pp, 1, 1, 1, 1, isolated=True))
        assert max(peak) == pp + 1  # as its README says


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 1)])
def test_activations_in_flight_are_those_of_the_execution(name, virtual):
    pp, num_micro = 4, 16
    _, _, peak = execute(name, pp, num_micro, virtual)
    chunks = schedule(name).chunks or virtual
    held = in_flight(np.full(pp, IDS[name]), pp, virtual, num_micro, np.arange(pp)) * chunks
    assert peak == held.round().astype(int).tolist()


def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b():
    one = bubble_s(IDS["1f1b"], 8, 1, 1.0, 1.0, 1.0)
    assert float(bubble_s(IDS["zb-h1"], 8, 1, 1.0, 1.0, 1.0)) == pytest.approx(float(one) / 3)
    assert float(bubble_s(IDS["zb-v"], 8, 1, 1.0, 1.0, 1.0)) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("1f2b", 4, 8), "schedule-unknown"),
        (("1f1b", 4, 6, 2), "schedule-shape"),
        (("dualpipe", 3, 12), "schedule-shape"),
        (("dualpipe", 4, 6), "schedule-shape"),
        (("dualpipev", 4, 6), "schedule-shape"),
        (("zb-h1", 4, 8, 3), "schedule-shape"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, code):
    with pytest.raises(ConfigError) as error:
        schedule_actions(*arguments)
    assert error.value.problems[0].code == code
    assert error.value.problems[0].fix


def test_actions_name_their_peer():
    first = schedule_actions("1f1b", 2, 2)[0]
    assert first[:2] == [Action("F", 0, 0), Action("send_F", 0, 0, 1)]
    assert Action("recv_B", 0, 0, 1) in first
