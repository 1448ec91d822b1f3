"""Programs of pipeline ranks: none can deadlock, transfers find their receives open, torch's schedules agree."""

from unittest.mock import Mock

import pytest
from torch.distributed.pipelining import schedules as oracle

from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES, Action, schedule, schedule_actions
from bessemer.parallel.program import Step, Transfer, forward_actions, rank_program, transfer_order

SHAPES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("1f1b", 2),
    ("1f1b", 3),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zb-v", 1),
    ("dualpipev", 1),
]
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}


def chunks_of(name, virtual):
    return schedule(name).chunks or virtual


def programs_of(ranks):
    order = transfer_order(ranks)
    return [rank_program(rank, actions, order) for rank, actions in enumerate(ranks)]


def every(name, virtual, *, training=True):
    """(pp, micro-batches, lists of actions) for pp 2 to 8 and numbers of micro-batches around its multiples."""
    for pp in range(2, 9):
        for num_micro in sorted({1, 2, pp - 1, pp, pp + 1, 2 * pp, 2 * pp + 1, 3 * pp}):
            try:
                ranks = (schedule_actions if training else forward_actions)(name, pp, num_micro, virtual)
            except ConfigError:
                continue
            yield pp, num_micro, ranks


def finishes(programs, *, blocking):
    """Whether all ranks come to their end where a transfer is done once both ends have posted it and all that either
    posted before it is done. Blocking: a rank goes on after a post only when the transfer is done."""
    at, head = [0] * len(programs), [0] * len(programs)
    posted: list[list[Transfer]] = [[] for _ in programs]
    done: set[Transfer] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and step(program[at[rank]], posted[rank], done, blocking):
                at[rank] += 1
                moved = True
            while head[rank] < len(posted[rank]):
                transfer = posted[rank][head[rank]]
                ends = [posted[r][head[r] : head[r] + 1] for r in (transfer.source, transfer.target)]
                if ends != [[transfer], [transfer]]:
                    break
                done.add(transfer)
                head[transfer.source] += 1
                head[transfer.target] += 1
                moved = True
    return all(a == len(program) for a, program in zip(at, programs, strict=True))


def step(next_step, posted, done, blocking):
    """Whether the rank gets past its next step."""
    if next_step.do in ("send", "receive"):
        if next_step.transfer not in posted:
            posted.append(next_step.transfer)
        return not blocking or next_step.transfer in done
    return next_step.do not in ("arrive", "sent") or next_step.transfer in done


def as_listed(ranks):
    """The lists executed as they stand: receives are posted where they are needed, and awaited there."""
    programs = []
    for rank, actions in enumerate(ranks):
        program = []
        for kind, stage, micro, peer in actions:
            if kind.startswith("send"):
                program.append(Step("send", stage, micro, Transfer(kind[-1], stage, micro, rank, peer)))
            elif kind.startswith("recv"):
                maker = stage - 1 if kind == "recv_F" else stage + 1
                transfer = Transfer(kind[-1], maker, micro, peer, rank)
                program += [Step("receive", stage, micro, transfer), Step("arrive", stage, micro, transfer)]
        programs.append(program)
    return programs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_nothing_deadlocks(name, virtual, training):
    count = 0
    for pp, num_micro, ranks in every(name, virtual, training=training):
        programs = programs_of(ranks)
        assert finishes(programs, blocking=False), (pp, num_micro)
        assert finishes(programs, blocking=True), (pp, num_micro)
        count += 1
    assert count >= 14


def test_the_lists_as_they_stand_would_deadlock():
    """So the test above can fail: neighbours in 1f1b each send first."""
    assert not finishes(as_listed(schedule_actions("1f1b", 2, 4)), blocking=False)
    assert finishes(as_listed(schedule_actions("gpipe", 2, 4)), blocking=False)


def test_a_program_out_of_order_deadlocks():
    programs = programs_of(schedule_actions("1f1b", 2, 4))
    posts = [i for i, s in enumerate(programs[1]) if s.do in ("send", "receive")]
    swap = next(i for i in posts if programs[1][i].do == "send")
    other = posts[posts.index(swap) - 1]
    programs[1][swap], programs[1][other] = programs[1][other], programs[1][swap]
    assert not finishes(programs, blocking=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_programs_hold_what_they_need(name, virtual, training):
    """Passes as listed, each with its inputs there, each result sent or taken once, few buffers open."""
    for pp, num_micro, ranks in every(name, virtual, training=training):
        last = pp * chunks_of(name, virtual) - 1
        for rank, program in enumerate(programs_of(ranks)):
            passes = [(s.do, s.stage, s.micro) for s in program if s.do in UNITS]
            assert passes == [a[:3] for a in ranks[rank] if a.kind in UNITS]
            received, unsent = replay(program, last)
            assert received <= 4 and unsent <= 7, (pp, num_micro)


def replay(program, last):
    """Most receives open, and most sends on their way, over a program that keeps its word."""
    streams, posted, peak = set(), {}, {"receive": 0, "send": 0}
    for do, stage, micro, transfer in program:
        if do in peak:
            if do == "send":
                streams.remove(transfer[:3])
            posted[transfer] = do
            peak[do] = max(peak[do], list(posted.values()).count(do))
        elif do in ("arrive", "sent"):
            assert posted.pop(transfer) == ("receive" if do == "arrive" else "send")
            if do == "arrive":
                streams.add(transfer[:3])
        elif do == "F":
            if stage > 0:
                streams.remove(("F", stage - 1, micro))
            if stage < last:
                streams.add(("F", stage, micro))
        elif do in "BI":
            if stage < last:
                streams.remove(("B", stage + 1, micro))
            if stage > 0:
                streams.add(("B", stage, micro))
    assert not streams and not posted
    return peak["receive"], peak["send"]


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_what_is_sent_finds_its_receive_open(name, virtual):
    """So a transfer runs from when it is made to when it is needed, if passes take what the order assumes; waiting for
    sends costs nothing. (The two open receives are too few for 3 of some 1000 transfers of interleaved 1f1b.)"""
    for pp in (2, 4, 8):
        ranks = schedule_actions(name, pp, 4 * pp, virtual)
        posted, end = times(programs_of(ranks))
        late = [t for do, t in posted if do == "send" and posted["receive", t] > posted["send", t]]
        assert len(late) <= 0.005 * len(posted) / 2
        assert end == span(ranks)


def times(programs):
    """(when each transfer was posted by (do, transfer), when the last rank is done), if transfers take no time."""
    at, clock, posted = [0] * len(programs), [0] * len(programs), {}
    while any(a < len(program) for a, program in zip(at, programs, strict=True)):
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                do, _, _, transfer = program[at[rank]]
                other = {"arrive": "send", "sent": "receive"}.get(do)
                if do in ("send", "receive"):
                    posted[do, transfer] = clock[rank]
                elif other is None:
                    clock[rank] += UNITS.get(do, 0)
                elif (other, transfer) in posted:
                    clock[rank] = max(clock[rank], posted[other, transfer])
                else:
                    break
                at[rank] += 1
    return posted, max(clock)


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_messages_of_a_rank_in_closed_form(name, virtual):
    """2 v m streams leave a rank of a loop, m fewer from each end; 4 m a rank of a V, and from its ends half."""
    for pp, num_micro, ranks in every(name, virtual):
        for rank, program in enumerate(programs_of(ranks)):
            sends, receives = (sum(s.do == do for s in program) for do in ("send", "receive"))
            if schedule(name).shape == "v":
                expected = 2 * num_micro * (1 + (0 < rank < pp - 1))
            else:
                expected = num_micro * (2 * virtual - (rank in (0, pp - 1)))
            assert sends == receives == expected, (pp, num_micro, rank)


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_a_stage_is_complete_once_and_after_its_last_pass(name, virtual):
    for pp, _, ranks in every(name, virtual):
        for program in programs_of(ranks):
            complete = {s.stage: i for i, s in enumerate(program) if s.do == "complete"}
            assert sum(s.do == "complete" for s in program) == len(complete) == chunks_of(name, virtual), pp
            assert all(complete[s.stage] > i for i, s in enumerate(program) if s.do in UNITS)
    early = programs_of(schedule_actions("zb-v", 4, 8))[0]
    assert max(i for i, s in enumerate(early) if s.do in "IW") > min(
        i for i, s in enumerate(early) if s.do == "complete"
    )


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
def test_forward_alone_fills_the_ranks(name, virtual):
    """Each pass once; ranks wait no longer than it takes to fill and empty the pipeline."""
    chunks = chunks_of(name, virtual)
    for pp, num_micro, ranks in every(name, virtual, training=False):
        passes = [a[1:3] for actions in ranks for a in actions if a.kind == "F"]
        assert len(passes) == len(set(passes)) == pp * chunks * num_micro
        assert span(ranks) <= chunks * num_micro + chunks * (pp - 1)
    assert span(forward_actions(name, 4, 8, virtual)) >= 8 * chunks + 3


def span(ranks):
    """Units of time until the last rank is done, if transfers take none."""
    at, clock, made = [0] * len(ranks), [0] * len(ranks), {}
    while any(a < len(actions) for a, actions in zip(at, ranks, strict=True)):
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions):
                kind, stage, micro, _ = actions[at[rank]]
                if kind.startswith("recv"):
                    key = (kind[-1], stage - 1 if kind == "recv_F" else stage + 1, micro)
                    if key not in made:
                        break
                    clock[rank] = max(clock[rank], made[key])
                elif kind.startswith("send"):
                    made[kind[-1], stage, micro] = clock[rank]
                else:
                    clock[rank] += UNITS[kind]
                at[rank] += 1
    return max(clock)


class Recorded(oracle.Schedule1F1B):
    """torch's 1f1b of one rank on a stage that only notes its passes."""

    def __init__(self, pp, rank, num_micro):
        self.passes = []
        self._num_stages, self._n_microbatches, self.scale_grads = pp, num_micro, False
        self._stage = Mock(stage_index=rank, is_last=False)
        for way in ("fwd", "bwd"):
            getattr(self._stage, f"get_{way}_recv_ops").return_value = []
            getattr(self._stage, f"get_{way}_send_ops").return_value = []
        self._stage.forward_one_chunk = lambda micro, *_, **__: self.passes.append(Action("F", rank, micro))
        self._stage.backward_one_chunk = lambda micro, **__: self.passes.append(Action("B", rank, micro))
        self._internal_losses, self._loss_fn = [], None
        self._step_microbatches()

    def _check_inputs(self, *_):
        return [()] * self._n_microbatches, [{}] * self._n_microbatches

    def _initialize_stage(self, *_):
        pass


def of_torch(name, pp, num_micro, virtual):
    """The order of passes of each rank in torch's class of the schedule."""
    if (name, virtual) == ("1f1b", 1):
        return [Recorded(pp, rank, num_micro).passes for rank in range(pp)]
    made = object.__new__(oracle.ScheduleGPipe if name == "gpipe" else oracle.ScheduleInterleaved1F1B)
    # its constructor wants stages; the order needs these numbers alone
    made._num_stages, made._n_microbatches = pp * virtual, num_micro
    made.pp_group_size, made.n_local_stages, made.microbatches_per_round = pp, virtual, pp
    if name == "gpipe":
        ranks = made._get_pipeline_order()
    else:
        ranks = {rank: made._calculate_single_rank_operations(rank) for rank in range(pp)}
    return [list(flat(ranks[rank])) for rank in range(pp)]


def flat(actions):
    for action in actions:
        if action is not None and action.computation_type != oracle.REDUCE_GRAD:
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3)])
def test_passes_come_in_the_order_of_torchs_schedules(name, virtual, pp):
    for num_micro in (pp, 2 * pp, 5 * pp):
        ours = schedule_actions(name, pp, num_micro, virtual)
        assert [[a for a in actions if a.kind in UNITS] for actions in ours] == of_torch(name, pp, num_micro, virtual)


def test_every_schedule_is_covered():
    assert {name for name, _ in SHAPES} == set(SCHEDULES) - {"dualpipe"}
