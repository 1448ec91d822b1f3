"""Who saves the last step, and when all may go."""

from __future__ import annotations

from bessemer.keep.conclusion import Conclusion

OVER, CONCLUDE = {"kind": "over"}, {"kind": "conclude"}


def test_all_may_go_once_the_leading_group_is_done_as_a_whole() -> None:
    end = Conclusion(2, 1, [4, 1, 3], told=True)
    end.done(1, 0)
    assert end.decide(0.0) == [] and not end.over
    end.done(1, 1)
    assert end.decide(0.0) == [([1, 3, 4], OVER)] and end.over
    assert end.decide(0.0) == [], "once"


def test_where_it_is_lost_the_next_one_is_asked() -> None:
    end = Conclusion(1, 1, [1, 3, 4], told=True)
    end.gone(3)
    assert end.decide(0.0) == []
    end.gone(1)
    assert end.decide(0.0) == [([4], CONCLUDE)]
    assert end.decide(0.0) == []
    end.done(4, 0)
    assert end.decide(0.0) == [([4], OVER)]


def test_what_a_lost_group_has_done_counts_only_if_it_was_all() -> None:
    end = Conclusion(2, 1, [1, 3], told=True)
    end.done(1, 0)
    end.gone(1)
    assert end.decide(0.0) == [([3], CONCLUDE)]


def test_after_a_takeover_the_first_that_comes_in_time_is_asked() -> None:
    """It says again that it is done, if it is: the coordinator that heard it is gone."""
    end = Conclusion(1, 1, [], told=False, not_before=10.0)
    end.came(3)
    assert end.decide(9.0) == []
    end.came(1)
    assert end.decide(10.0) == [([1], CONCLUDE)]
    end.done(1, 0)
    assert end.decide(10.0) == [([1, 3], OVER)]
