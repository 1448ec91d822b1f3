"""Black boxes as flight-recorder dumps: what is written, and what torch's own tool finds in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flight_tool import said_by_torch

from bessemer.runtime import ring
from bessemer.runtime.blackbox import Blackbox, read_blackbox
from bessemer.runtime.flight_record import export_flight_record
from bessemer.runtime.phases import Phases
from bessemer.runtime.recorder import Channel, Recorder

ALL_REDUCE, ALL_GATHER, SEND, RECV = (
    ring.OPERATIONS.index(name) for name in ("all_reduce", "all_gather", "send", "recv")
)
Rank = Callable[[int, Recorder], None]


def _boxes(folder: Path, world: int, rank: Rank, num_operations: int = 64) -> list[Blackbox]:
    """The black boxes of ranks that each do `rank(index, recorder)`."""
    for index in range(world):
        path = folder / f"rank-{index}"
        recorder = Recorder(path, rank=index, world=world, job_hash="abc", num_operations=num_operations)
        recorder.dtype("float32", 4)
        rank(index, recorder)
        recorder.close()
    return [read_blackbox(folder / f"rank-{index}") for index in range(world)]


def _do(channel: Channel, *, count: int = 1, elements: int = 8) -> None:
    for _ in range(count):
        channel.finished(channel.enqueued(ALL_REDUCE, 0, elements, elements, ring.NONE, True))


def _dumps(boxes: list[Blackbox], folder: Path) -> list[dict[str, Any]]:
    return [pickle.loads(path.read_bytes()) for path in export_flight_record(boxes, folder)]


def _trains(index: int, recorder: Recorder) -> None:
    """Rank 1 of two doesn't come to the fifth all-reduce over both; all else is in order."""
    world = recorder.channel("world", [0, 1], "gloo", blocks=True)
    pipeline = recorder.channel("pipeline", [0, 1], "gloo", blocks=True)
    phases = Phases()
    phases.attach(recorder)
    for step in range(5):
        phases.at(step=step, micro_batch=0)
        with phases("comm_s"):
            operation = SEND if index == 0 else RECV
            pipeline.finished(pipeline.enqueued(operation, 0, 16, 16, 1 - index, False))
            pipeline.enqueued(ALL_GATHER, 0, 4, 8, ring.NONE, False)  # nobody waits for it
            if step < 4:
                _do(world)
            elif index == 0:
                world.enqueued(ALL_REDUCE, 0, 8, 8, ring.NONE, True)


def test_the_tool_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    export_flight_record(_boxes(tmp_path, 2, _trains), tmp_path / "dumps")
    said = said_by_torch(tmp_path / "dumps")
    assert "Not all ranks joining collective, sequence number: 5\n" in said
    assert "group info: world 0-1\ncollective: gloo:all_reduce\nmissing ranks: {1}" in said
    assert "collective state: scheduled" in said
    assert "comm_s at step 4, micro-batch 0:operation 15" in said
    assert said.count("sequence number") == 1 and "error msg" not in said  # all else matches


def test_the_tool_names_the_message_that_nobody_took(tmp_path: Path) -> None:
    def rank(index: int, recorder: Recorder) -> None:
        pipeline = recorder.channel("pipeline", [0, 1, 2], "gloo", blocks=True)
        for peer in {0: (1, 1), 1: (0, 0, 2), 2: ()}[index]:
            pipeline.enqueued(RECV if peer < index else SEND, 0, 16, 16, peer, False)

    export_flight_record(_boxes(tmp_path, 3, rank), tmp_path / "dumps")
    said = said_by_torch(tmp_path / "dumps")
    assert "Not all ranks joining collective, sequence number: 1\n" in said
    assert "group info: pipeline 1>2\ncollective: gloo:send 0->1\nmissing ranks: {2}" in said
    assert said.count("sequence number") == 1


def test_dumps_have_the_fields_of_torch(tmp_path: Path) -> None:
    dumps = _dumps(_boxes(tmp_path, 2, _trains), tmp_path / "dumps")
    assert [len(dump["entries"]) for dump in dumps] == [15, 14]
    assert dumps[0]["version"] == "2.10"
    assert dumps[0]["pg_config"]["world 0-1"] == {"name": "world 0-1", "desc": "undefined", "ranks": "[0, 1]"}
    send, gather, reduce = dumps[0]["entries"][:3]
    assert send["profiling_name"] == "gloo:send 0->1" and send["is_p2p"] is True
    assert dumps[1]["entries"][0]["profiling_name"] == "gloo:recv 1<-0"
    assert send["process_group"] == dumps[1]["entries"][0]["process_group"] == ("pipeline 0>1", "undefined")
    assert (gather["profiling_name"], gather["input_sizes"], gather["output_sizes"]) == (
        "gloo:_all_gather_base",
        [[4]],
        [[8]],
    )
    assert reduce["state"] == "completed" and reduce["retired"] is True
    assert reduce["time_created_ns"] < reduce["time_discovered_completed_ns"]
    assert [entry["record_id"] for entry in dumps[0]["entries"]] == list(range(15))


def test_what_a_ring_has_lost_does_not_look_missing(tmp_path: Path) -> None:
    def rank(index: int, recorder: Recorder) -> None:
        world = recorder.channel("world", [0, 1], "gloo", blocks=True)
        tensor = recorder.channel("tensor", [0, 1], "gloo", blocks=True)
        _do(world, count=3)
        _do(tensor, count=7 if index == 0 else 9)  # rank 0 stops at the eighth, and still holds one of `world`

    dumps = _dumps(_boxes(tmp_path, 2, rank, num_operations=8), tmp_path / "dumps")
    orders = [[(e["process_group"][0], e["collective_seq_id"]) for e in dump["entries"]] for dump in dumps]
    assert orders[0] == [("tensor 0-1", order) for order in range(2, 8)]
    assert orders[1] == [("tensor 0-1", order) for order in range(2, 10)]
    assert "missing ranks: {0}" in said_by_torch(tmp_path / "dumps")


def test_a_rank_that_never_came_looks_missing_even_when_the_ring_went_round(tmp_path: Path) -> None:
    def rank(index: int, recorder: Recorder) -> None:
        _do(recorder.channel("tensor", [0, 1], "gloo", blocks=True), count=12)
        if index == 1:
            _do(recorder.channel("world", [0, 1], "gloo", blocks=True))

    dumps = _dumps(_boxes(tmp_path, 2, rank, num_operations=8), tmp_path / "dumps")
    assert [e["process_group"][0] for e in dumps[1]["entries"]][-1] == "world 0-1"
    assert [e["collective_seq_id"] for e in dumps[0]["entries"]] == list(range(6, 13))


def test_of_a_group_made_anew_only_the_newest_counts(tmp_path: Path) -> None:
    def rank(index: int, recorder: Recorder) -> None:
        _do(recorder.channel("replica", [0, 1], "gloo", blocks=True), count=2 + index)
        _do(recorder.channel("replica", [0, 1], "gloo", blocks=True), count=2)

    for dump in _dumps(_boxes(tmp_path, 2, rank), tmp_path / "dumps"):
        assert [entry["collective_seq_id"] for entry in dump["entries"]] == [1, 2]


@pytest.mark.parametrize(("blocks", "states"), [(True, ["completed", "scheduled"]), (False, ["scheduled"] * 2)])
def test_the_state_of_what_was_not_waited_for_is_that_of_its_peers(
    tmp_path: Path, blocks: bool, states: list[str]
) -> None:
    def rank(index: int, recorder: Recorder) -> None:
        channel = recorder.channel("data", [0, 1], "gloo" if blocks else "mesh", blocks=blocks)
        for _ in range(2):
            number = channel.enqueued(ALL_REDUCE, 0, 8, 8, ring.NONE, False)
            if index == 0:
                channel.waiting(number)
                channel.finished(number)
        if index == 1:
            channel.waiting(number)  # it is stuck in the second

    dumps = _dumps(_boxes(tmp_path, 2, rank), tmp_path / "dumps")
    assert [entry["state"] for entry in dumps[1]["entries"]] == states
    assert {e["profiling_name"] for e in dumps[1]["entries"]} == {f"{'gloo' if blocks else 'nccl'}:all_reduce"}


def test_groups_of_one_name_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    def rank(index: int, recorder: Recorder) -> None:
        _do(recorder.channel("tensor", [index // 2 * 2, index // 2 * 2 + 1], "gloo", blocks=True), elements=index // 2)
        _do(recorder.channel("data", [index % 2, index % 2 + 2], "gloo", blocks=True))

    dumps = _dumps(_boxes(tmp_path, 4, rank), tmp_path / "dumps")
    assert [list(dump["pg_config"]) for dump in dumps] == [
        ["tensor 0-1", "data 0-2/2"], ["tensor 0-1", "data 1-3/2"],
        ["tensor 2-3", "data 0-2/2"], ["tensor 2-3", "data 1-3/2"],
    ]  # fmt: skip
    assert "sequence number" not in said_by_torch(tmp_path / "dumps")
