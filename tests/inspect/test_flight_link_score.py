"""Which of a few groups is called slow: one that its own link slows down, none that shares its hosts with others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bessemer.inspect.flight_detectors import LinkScore
from bessemer.inspect.flight_records import LinkSample

PAIRS = ((0, 1), (2, 3))


def found(score: LinkScore, rows: Sequence[Sequence[float]], kind: str = "tensor all_reduce", step_s: float = 0.1,
          groups: tuple[tuple[int, ...], ...] = PAIRS) -> set[tuple[int, ...]]:  # fmt: skip
    """The groups that are slow at some time while these samples come, in ms."""
    named = set()
    for step, row in enumerate(rows):
        sample = LinkSample(step, 0.0, kind, groups, np.asarray(row) / 1e3, step_s)
        named |= {groups[index] for index, _, _ in score.update(sample)}
    return named


def test_one_of_two_pairs_is_slow() -> None:
    score = LinkScore()
    assert found(score, [(10.0, 11.0)] * 30) == set()
    assert found(score, [(10.0, 40.0)] * 17) == set(), "nine of ten of the last 20"
    assert found(score, [(10.0, 40.0)] * 3) == {(2, 3)}


def test_what_slows_down_all_is_no_link() -> None:
    score = LinkScore()
    assert found(score, [(10.0, 11.0)] * 30) == set()
    assert found(score, [(38.0, 45.0)] * 40) == set()
    assert found(score, [(38.0, 160.0)] * 20) == {(2, 3)}, "it is four times as slow as the others have become"


def test_bursts_are_no_slow_link() -> None:
    score = LinkScore()
    assert found(score, [(10.0, 11.0)] * 30) == set()
    assert found(score, [(10.0, 11.0 if step % 5 == 0 else 60.0) for step in range(60)]) == set()


def test_little_of_a_step_is_taken_for_a_fiftieth_of_it() -> None:
    assert found(LinkScore(), [(0.1, 0.1)] * 30 + [(0.1, 5.0)] * 30, step_s=0.1) == set()
    assert found(LinkScore(), [(0.1, 0.1)] * 30 + [(0.1, 7.0)] * 30, step_s=0.1) == {(2, 3)}
    assert found(LinkScore(), [(0.1, 0.1)] * 30 + [(0.1, 5.0)] * 30, step_s=0.0) == {(2, 3)}, "a millisecond at least"


def test_a_group_without_its_like_is_held_against_three_quarters_of_all() -> None:
    world = ((0, 1, 2, 3),)
    score = LinkScore()
    for slower, named in ((1.0, set()), (4.0, set())):
        assert found(score, [(10.0 * slower, 11.0 * slower)] * 30) == set()
        assert found(score, [(12.0 * slower,)] * 30, "world all_reduce", groups=world) == named
    assert found(score, [(12.0 * 16,)] * 30, "world all_reduce", groups=world) == set(world)
