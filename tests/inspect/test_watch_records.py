"""What the live page reads a little at a time: records, curves, events."""

from __future__ import annotations

import json

import pytest

from bessemer.inspect.flight_records import Finding
from bessemer.inspect.watch_events import Kept, event_of
from bessemer.inspect.watch_series import MOST_ROWS, Series

pytestmark = pytest.mark.timeout(60)


def test_a_reader_of_curves_gets_only_what_is_new() -> None:
    series = Series()
    for step in (1, 2, 3):
        series.add({"step": step, "loss": 1.0 / step, "t": 100.0 + step})
    told = series.handed(-1, 0)
    assert told["rows"] == 3 and told["columns"]["step"] == [1, 2, 3]
    assert "val_loss" not in told["columns"]
    series.add({"step": 4, "loss": 0.5, "val_loss": 0.7, "t": 104.0})
    told = series.handed(told["generation"], 3)
    assert told["from"] == 3
    assert told["columns"]["step"] == [4] and told["columns"]["val_loss"] == [0.7]


def test_steps_that_are_done_again_replace_the_old_ones() -> None:
    series = Series()
    for step in (1, 2, 3, 4):
        series.add({"step": step, "loss": float(step), "t": step})
    before = series.generation
    series.add({"step": 3, "loss": 30.0, "t": 9.0})
    assert series.generation == before + 1
    told = series.handed(before, 4)  # a reader of the old rows gets all of the new ones
    assert told["from"] == 0
    assert told["columns"]["step"] == [1, 2, 3] and told["columns"]["loss"] == [1, 2, 30]


def test_a_long_curve_is_thinned_and_keeps_its_spike() -> None:
    series = Series()
    for step in range(1, 5 * MOST_ROWS):
        series.add({"step": step, "loss": 99.0 if step == 7777 else 2.0, "t": step})
    told = series.handed(-1, 0)
    steps = told["columns"]["step"]
    assert len(steps) <= MOST_ROWS + 2 and steps[0] == 1 and steps[-1] == 5 * MOST_ROWS - 1
    assert told["columns"]["loss"][steps.index(7777)] == 99


def test_curves_have_the_worst_layer_and_the_worst_tensor() -> None:
    series = Series()
    series.add({"step": 1, "t": 1.0, "experts": {"imbalance": [1.5, 3.0], "dropped": 4},
                "precision": {"x": {"saturated": [0.0, 0.25], "flushed": [None, 0.5]}, "grad": {"saturated": [0.1]}},
                "phases": {"comm_s": 0.5}})  # fmt: skip
    assert series.last("imbalance") == 3.0 and series.last("dropped") == 4
    assert series.last("saturated") == 0.25 and series.last("flushed") == 0.5 and series.last("waiting_s") == 0.5


def test_json_of_curves_has_null_for_what_is_not_finite() -> None:
    series = Series()
    series.add({"step": 1, "t": 1.0, "loss": None, "grad_norm": float("inf")})
    series.add({"step": 2, "t": 2.0, "loss": 1.0, "grad_norm": 1.0})
    text = json.dumps(series.handed(-1, 0), allow_nan=False)
    assert json.loads(text)["columns"]["loss"] == [None, 1]


def test_findings_have_their_words_and_the_weight_of_their_advice() -> None:
    finding = Finding(kind="slow_rank", t=5.0, step=12, ranks=(3, 4), text="rank 3 is slow", advice="evict")
    event = event_of({"event": "finding", **finding.as_event()})
    assert event is not None
    assert (event.level, event.text, event.kind, event.ranks) == ("bad", "rank 3 is slow", "slow_rank", (3, 4))
    watch = event_of({"event": "finding", **finding.as_event(), "advice": "watch"})
    assert watch is not None and watch.level == "warn"


@pytest.mark.parametrize(
    ("record", "level", "words"),
    [
        ({"event": "saved", "step": 5, "bytes": 2048, "seconds": 0.5}, "good", "2.00 KiB"),
        ({"event": "rank_lost", "rank": 1, "why": "it died", "step": 3}, "bad", "it died"),
        ({"event": "kernels", "step": 3, "kernel_s": 0.25}, "detail", "kernel s 0.25"),
        ({"event": "joined", "group": 2}, "good", "group 2"),  # of another version: a field is missing
        ({"event": "something_new", "a_field": [1, 2]}, "info", "a field 1, 2"),
    ],
)
def test_events_are_told_in_words(record: dict[str, object], level: str, words: str) -> None:
    event = event_of({"t": 1.0, **record})
    assert event is not None
    assert event.level == level and words in event.text


def test_what_is_no_event_is_left_out() -> None:
    assert event_of({"t": 1.0}) is None
    assert event_of({"event": "start"}) is None


def test_events_tell_of_checkpoints_and_groups() -> None:
    kept = Kept()
    for record in [
        {"event": "start", "world_size": 2, "host": "a"},
        *({"event": "rank_started", "rank": r, "group": r} for r in range(3)),
        {"event": "epoch", "active": [0, 1], "joining": [], "step": 0},
        {"event": "save", "step": 10, "stall_s": 0.5}, {"event": "saved", "step": 10, "bytes": 5},
        {"event": "save", "step": 20, "stall_s": 0.25},
        {"event": "rank_lost", "rank": 1, "group": 1, "step": 21},
        {"event": "epoch", "active": [0], "joining": [2], "step": 21},
        {"event": "deleted", "step": 10},
    ]:  # fmt: skip
        kept.take({"t": 1.0, **record})
    told = kept.as_json()
    assert told["saved"] == [] and told["saving"] == 20 and told["stall_s"] == 0.75 and told["losses"] == 1
    assert [group["state"] for group in told["groups"]] == ["active", "lost", "joining"]
    assert kept.lost_ranks == {1}
    kept.take({"t": 2.0, "event": "start", "world_size": 4})
    assert kept.as_json()["groups"] == [] and kept.lost_ranks == set() and kept.attempt == 2
