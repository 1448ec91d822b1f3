"""Quantiles against tables, the exact test against counting, and how often a verdict is wrong or right."""

import math

import numpy as np
import pytest

from bessemer.lab.statistics import (
    BETTER,
    LEVEL,
    UNTOLD,
    WITHIN,
    WORSE,
    chi_square_cdf,
    compare,
    deviation_interval,
    least_flip_p,
    quantile,
    sign_flip_p,
    student_cdf,
    student_quantile,
)

RUNS = 4000


@pytest.mark.parametrize(
    ("p", "freedom", "t"),  # any printed table of Student's distribution
    [
        (0.95, 1, 6.3138), (0.95, 2, 2.9200), (0.95, 3, 2.3534), (0.95, 4, 2.1318), (0.95, 9, 1.8331),
        (0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 5, 2.5706), (0.975, 30, 2.0423), (0.995, 10, 3.1693),
    ],
)  # fmt: skip
def test_students_quantiles_are_those_of_the_table(p: float, freedom: int, t: float) -> None:
    assert student_quantile(p, freedom) == pytest.approx(t, abs=5e-5)
    assert student_quantile(1 - p, freedom) == pytest.approx(-t, abs=5e-5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 12])
def test_students_distribution_is_the_integral_of_its_density(freedom: int) -> None:
    x = np.linspace(0, 2.5, 20001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    area = np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
    assert student_cdf(2.5, freedom) == pytest.approx(0.5 + area, abs=1e-8)
    assert student_cdf(-2.5, freedom) == pytest.approx(0.5 - area, abs=1e-8)


@pytest.mark.parametrize(
    ("p", "freedom", "x"),
    [(0.95, 1, 3.8415), (0.95, 2, 5.9915), (0.05, 2, 0.10259), (0.95, 5, 11.0705), (0.05, 9, 3.3251)],
)
def test_chi_squares_quantiles_are_those_of_the_table(p: float, freedom: int, x: float) -> None:
    assert quantile(lambda v: chi_square_cdf(v, freedom), p, 0.0) == pytest.approx(x, abs=5e-5)


def test_three_seeds_know_their_own_spread_to_a_factor() -> None:
    low, high = deviation_interval(1.0, 3)
    assert (low, high) == pytest.approx((0.5777, 4.4154), abs=1e-4)  # sqrt(2 / 5.9915), sqrt(2 / 0.10259)


def test_flipped_signs_are_counted() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0]) == 0.25  # +++ and --- of eight
    assert sign_flip_p([1.0, 2.0, -3.0]) == 1.0  # the sum is zero: all are as large
    assert sign_flip_p([1.0, -2.0, 3.0]) == 0.75  # only the two of |sum| 0 are smaller
    assert sign_flip_p([0.1] * 10) == 2 / 1024 == least_flip_p(10)
    assert sign_flip_p([0.1] * 16) == 2 / 65536 == least_flip_p(16)


def test_signs_of_many_seeds_are_drawn() -> None:
    """Twenty equal differences but two of the other sign: |sum| >= 16 in 2 (1 + 20 + 190) of 2^20 ways."""
    ones = [1.0] * 18 + [-1.0] * 2
    exact = 2 * (1 + 20 + 190) / 2**20
    found = sign_flip_p(ones)
    assert found == pytest.approx(exact, abs=4 * (exact / 65536) ** 0.5) and found == sign_flip_p(ones)
    assert sign_flip_p([1.0, -1.0] * 10) == 1.0
    assert sign_flip_p([0.1] * 40) == least_flip_p(40) == 1 / 65537


def test_a_worked_example() -> None:
    """Student's own data (sleep gained by ten patients under two drugs): t = 4.0621 with 9 degrees, p = 0.00283."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = compare(second, first)
    assert found.mean == pytest.approx(1.58)
    assert found.p_value == pytest.approx(0.00283, abs=5e-6)
    assert (found.low, found.high) == pytest.approx((0.8670, 2.2930), abs=1e-4)
    assert found.noise == pytest.approx(1.78901, abs=1e-5)
    assert found.verdict == UNTOLD


def test_the_verdict_is_where_the_interval_lies() -> None:
    reference = [1.00, 1.02, 0.98]  # noise 0.02
    jitter = [0.0, 0.001, -0.001]  # half an interval: 2.92 x 0.001 / sqrt(3) = 0.0017

    def verdict(shift: float, spread: float = 1.0) -> str:
        moved = [r + shift + spread * j for r, j in zip(reference, jitter, strict=True)]
        return compare(moved, reference).verdict

    assert verdict(0.0) == verdict(0.018) == verdict(-0.018) == WITHIN
    assert verdict(0.019) == verdict(0.021) == verdict(-0.021) == UNTOLD
    assert verdict(0.022) == WORSE
    assert verdict(-0.022) == BETTER
    assert verdict(0.0, spread=20) == UNTOLD  # the differences spread as widely as the seeds


def test_equal_runs_and_constant_shifts_need_no_spread() -> None:
    assert compare([1.0, 2.0], [1.0, 2.0]).verdict == WITHIN
    assert compare([1.0, 2.0], [1.0, 2.0]).p_value == 1.0
    shifted = compare([3.0, 4.0], [1.0, 2.0])
    assert (shifted.mean, shifted.p_value, shifted.verdict) == (2.0, 0.0, WORSE)


def verdicts(shift: float, spread: float, seeds: int, *, known: bool = False) -> dict[str, float]:
    """Shares of the verdicts over simulated experiments: seeds spread by 1, differences by `spread` about `shift`.
    `known`: the reference's sample is scaled so that its spread is the true one."""
    rng = np.random.default_rng(7)
    found: dict[str, float] = {}
    for _ in range(RUNS):
        reference = rng.normal(size=seeds)
        if known:
            reference /= reference.std(ddof=1)
        verdict = compare(list(reference + shift + spread * rng.normal(size=seeds)), list(reference)).verdict
        found[verdict] = found.get(verdict, 0) + 1 / RUNS
    return found


@pytest.mark.parametrize("seeds", [3, 8])
def test_at_the_margin_either_error_has_the_stated_level(seeds: int) -> None:
    found = verdicts(1.0, 0.3, seeds, known=True)
    error = 4 * math.sqrt(LEVEL * (1 - LEVEL) / RUNS)
    assert found[WITHIN] == pytest.approx(LEVEL, abs=error)
    assert found[WORSE] == pytest.approx(LEVEL, abs=error)


def test_no_difference_is_seldom_called_worse_and_mostly_within() -> None:
    """With three seeds whose spread isn't known either; differences spread a fifth as widely as seeds."""
    found = verdicts(0.0, 0.2, 3)
    assert found.get(WORSE, 0) + found.get(BETTER, 0) < LEVEL
    assert found[WITHIN] > 0.8


def test_a_large_difference_is_found_and_never_within() -> None:
    found = verdicts(3.0, 0.2, 3)
    assert found[WORSE] > 0.85
    assert found.get(WITHIN, 0) < 0.01


def test_more_seeds_tell_more() -> None:
    shares = [verdicts(0.3, 0.5, seeds).get(UNTOLD, 0) for seeds in (2, 3, 5, 10)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.7 and shares[-1] < 0.2
