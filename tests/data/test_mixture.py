from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.mixture import Mixture
from bessemer.data.weights import MAX_PERIOD, period_of, shares_of


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_every_prefix_is_exact_to_less_than_one_sample(weights: list[int]) -> None:
    mixture = Mixture([float(w) for w in weights])
    shares, counts = shares_of(weights), [0] * len(weights)
    for sample in range(2 * mixture.period + 3):
        corpus, place = mixture.locate(sample)
        assert place == counts[corpus], "each corpus is read in its own order, without gaps"
        counts[corpus] += 1
        for share, count in zip(shares, counts, strict=True):
            assert abs(share * (sample + 1) - count) < 1


def test_decimal_weights_are_taken_as_written() -> None:
    assert shares_of([0.1, 0.2, 0.7]) == [Fraction(1, 10), Fraction(1, 5), Fraction(7, 10)]
    assert period_of([1, 1, 1]) == 3


def test_far_away_samples_cost_nothing() -> None:
    mixture = Mixture([0.7, 0.3])
    far = 10**15
    corpora = [mixture.locate(far + i)[0] for i in range(10)]
    assert sorted(corpora) == [0] * 7 + [1] * 3
    assert mixture.locate(far)[1] in (7 * far // 10, 3 * far // 10)


def test_weights_that_need_too_long_a_table_are_refused() -> None:
    with pytest.raises(ValueError, match=str(MAX_PERIOD)):
        Mixture([1.0, 0.1234567])
    with pytest.raises(ValueError, match="positive"):
        Mixture([1.0, 0.0])
