import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.order import MAX_SAMPLES, Order


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**30))
def test_each_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    places = np.arange(n) + n * epoch
    assert np.array_equal(np.sort(Order(n, seed).samples(places)), np.arange(n))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, MAX_SAMPLES), seed=st.integers(0, 2**63), data=st.data())
def test_any_size_gives_samples_in_range_and_both_ways_agree(n: int, seed: int, data: st.DataObject) -> None:
    last = min(2**63 - 1, 5 * n)
    places = data.draw(st.lists(st.integers(0, last), min_size=30, max_size=40))
    order = Order(n, seed)
    found = order.samples(places)
    assert found.min() >= 0 and found.max() < n
    assert found.tolist() == [order.sample(place) for place in places]


def test_a_million_million_samples_without_repeats() -> None:
    n = 10**12 + 7
    order = Order(n, 3)
    places = np.unique(np.random.default_rng(0).integers(0, n, 50_000))
    found = order.samples(places)
    assert np.unique(found).size == places.size
    tenths = np.bincount(found * 10 // n, minlength=10) / found.size
    assert np.abs(tenths - 0.1).max() < 0.007  # five standard deviations of a tenth of 50,000 draws


def test_seeds_and_epochs_differ_and_the_order_is_not_regular() -> None:
    n = 1000
    first = Order(n, 1).samples(np.arange(n))
    for other in (Order(n, 2).samples(np.arange(n)), Order(n, 1).samples(np.arange(n) + n)):
        assert (first == other).mean() < 0.02
    assert (first == np.arange(n)).mean() < 0.02
    steps = np.diff(first)
    assert np.unique(steps).size > 600
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.15


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_orders_are_all_drawn_alike(n: int) -> None:
    seeds = 4000
    drawn = [tuple(Order(n, seed).samples(np.arange(n)).tolist()) for seed in range(seeds)]
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    expected = seeds / len(kinds)
    assert len(kinds) == [2, 6, 24, 120][n - 2]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(kinds) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run relies on it: these values may only change with a note that old runs can't go on."""
    assert Order(10, 0).samples(np.arange(12)).tolist() == [8, 6, 7, 4, 0, 5, 3, 9, 2, 1, 8, 3]
    assert Order(10**12, 7).sample(123_456_789_012) == 745_515_540_534


@pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1])
def test_sizes_out_of_range_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        Order(n, 0)
