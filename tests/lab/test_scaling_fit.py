"""Fits of synthetic grids whose constants are known, and optima that are known in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bessemer.core.errors import RequestError
from bessemer.lab.scaling_fit import LEVEL, Fit, fit
from bessemer.lab.scaling_laws import (
    PUBLISHED_EFFECTIVE,
    PUBLISHED_FLOAT,
    EffectiveParameters,
    FloatFormat,
    Law,
    Points,
    Reference,
    best_precision,
)

EFFECTIVE = np.array([[60.0, 0.3, 900.0, 0.55, 0.9, 1.6, 2.4]])
FLOAT = np.array([[60.0, 0.3, 900.0, 0.55, 0.9, 900.0, 2.5, 1.6, 12.0]])
FORMATS = [(8, 7), (2, 2), (2, 1), (1, 1), (4, 3), (3, 2), (3, 0), (1, 2), (3, 1), (1, 3)]


def _grid() -> Points:
    """12 sizes in 4 formats, one of the four widths in more of them, and with one operand alone or blocks; 4 more sizes
    or seeds in three. Each size and seed is a group."""
    rows = []
    for group, (n, d) in enumerate(itertools.product((8e4, 2e5, 5e5, 1.3e6), (1e5, 2e5, 4e5))):
        formats = FORMATS if n == 2e5 else FORMATS[:4]
        rows += [(n, d, 1 + x + m, 1 + x + m, x, m, 0, group) for x, m in formats]
        if n == 2e5:
            rows += [(n, d, w, i, np.nan, np.nan, 0, group) for w, i in ((3, 16), (16, 3), (4, 16), (16, 4))]
            rows += [(n, d, 1 + x + m, 1 + x + m, x, m, 32, group) for x, m in ((2, 1), (1, 1))]
    for group, n, d in ((12, 8e4, 8e5), (13, 2e5, 8e5), (14, 2e5, 2e5), (15, 2e5, 2e5)):
        rows += [(n, d, 1 + x + m, 1 + x + m, x, m, 0, group) for x, m in ((8, 7), (2, 1), (1, 1))]
    columns = np.array(rows, dtype=float).T
    names = ("parameters", "tokens", "weight_bits", "input_bits", "exponent_bits", "mantissa_bits", "block", "group")
    return Points(**dict(zip(names, columns, strict=True)), loss=np.ones(len(rows)))


def _made(law: Law, natural: np.ndarray, *, noise: float, seed: int) -> Points:
    """`noise`: of each point; five times as much is shared by those of a group, as seeds do."""
    points = _grid()
    points = points.at(law.usable(points))
    at = Reference.of(points)
    loss, _ = law.predict(law.internal(natural, at), points, at)
    rng = np.random.default_rng(seed)
    errors = rng.normal(0, 5 * noise, 16)[points.group.astype(int)] + rng.normal(0, noise, len(points))
    return Points(**{**vars(points), "loss": loss[0] * np.exp(errors)})


CASES = [(EffectiveParameters(), EFFECTIVE), (FloatFormat(), FLOAT)]


@pytest.mark.parametrize(("law", "natural"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_derivatives_are_those_of_the_loss(law: Law, natural: np.ndarray) -> None:
    points = _made(law, natural, noise=0, seed=0)
    at = Reference.of(points)
    internal = law.internal(natural, at)
    assert np.allclose(law.natural(internal, at), natural, rtol=1e-12)
    _, slope = law.predict(internal, points, at)
    for k in range(internal.shape[1]):
        step = np.zeros_like(internal)
        step[:, k] = 1e-6
        difference = law.predict(internal + step, points, at)[0] - law.predict(internal - step, points, at)[0]
        assert np.allclose(slope[..., k], difference / 2e-6, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("law", "natural"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_without_noise_the_constants_come_out_exactly(law: Law, natural: np.ndarray) -> None:
    found = fit(law, _made(law, natural, noise=0, seed=0), cost=1e13, samples=20)
    assert np.allclose(found.natural, natural, rtol=1e-4)
    assert found.scatter < 1e-6
    assert all(not c.why for c in found.constants.values())


@pytest.mark.slow
@pytest.mark.parametrize(("law", "natural"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_intervals_hold_the_truth_as_often_as_they_say(law: Law, natural: np.ndarray) -> None:
    """Of 40 grids with 2 % noise of a seed and 0.4 % of a model: by a binomial test, a coverage of 0.9 gives fewer than
    30 once in 600 constants."""
    hits = np.zeros(natural.shape[1] + 1)
    for seed in range(40):
        found = fit(law, _made(law, natural, noise=0.004, seed=seed), cost=1e13, samples=100, starts=32)
        low, high = np.quantile(found.samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        truth = law.best(natural, 1e13, 0)[0]
        hits += np.append((low <= natural[0]) & (natural[0] <= high), found.optimum.low <= truth <= found.optimum.high)
    print(law.name, hits / 40)
    assert (hits >= 30).all(), hits / 40


def _blind(which: str) -> Fit:
    points = _made(EffectiveParameters(), EFFECTIVE, noise=0.001, seed=1)
    keep = points.weight_bits >= 16 if which == "precision" else points.weight_bits == points.input_bits
    return fit(EffectiveParameters(), points.at(keep), cost=1e13, samples=100)


def test_what_the_points_cannot_tell_is_said() -> None:
    """Only bfloat16 weights: nothing tells gw. One precision for both: nothing tells gw from gi."""
    found = _blind("precision")
    assert found.constants["gw"].why
    assert not found.constants["gi"].why and not found.constants["a"].why
    assert found.optimum.why
    both = _blind("tied").constants
    assert both["gw"].why and both["gi"].why
    assert not both["E"].why


def test_a_model_that_went_wrong_does_not_pull_the_fit() -> None:
    points = _made(EffectiveParameters(), EFFECTIVE, noise=0.001, seed=2)
    clean = fit(EffectiveParameters(), points, cost=1e13, samples=20)
    points.loss[5] *= 1.5
    found = fit(EffectiveParameters(), points, cost=1e13, samples=20)
    assert np.abs(np.log(found.predicted / clean.predicted)).max() < 0.005
    assert np.allclose(found.natural[0, [1, 5, 6]], clean.natural[0, [1, 5, 6]], rtol=0.05)


def test_errors_that_a_group_shares_widen_the_other_constants_alone() -> None:
    """Seeds that scatter five times as much as models: without groups the intervals of what sizes tell are too short,
    and those of precision too long."""
    points = _made(EffectiveParameters(), EFFECTIVE, noise=0.004, seed=3)
    apart = Points(**{**vars(points), "group": np.arange(len(points), dtype=float)})
    grouped, single = (fit(EffectiveParameters(), p, cost=1e13, samples=200).constants for p in (points, apart))
    ratio = {k: np.log(grouped[k].high / grouped[k].low) / np.log(single[k].high / single[k].low) for k in grouped}
    assert ratio["a"] > 1.2 and ratio["gw"] < 0.9 and ratio["gi"] < 0.9


def test_too_few_points_are_refused() -> None:
    points = _made(EffectiveParameters(), EFFECTIVE, noise=0, seed=0)
    with pytest.raises(RequestError, match="7 constants"):
        fit(EffectiveParameters(), points.at(np.arange(7)), cost=1e13)


def test_the_best_precision_of_the_effective_law_is_the_closed_one() -> None:
    """f(P)/P with f = (1 - e^-u)^k is largest where k u = e^u - 1: u = 1.2564 for two parts, 1.9038 for three."""
    for parts, ratio in ((2, 1.25643), (3, 1.90381)):
        assert best_precision([(2.5, 0.0)] * parts) == pytest.approx(2.5 * ratio, abs=1e-3)
    law = EffectiveParameters()
    natural = np.repeat(EFFECTIVE, 2, 0)
    natural[:, 5:7] = 2.5
    natural[1, 1] = 0.1  # neither exponents nor the cost matter
    for cost in (1e12, 1e20):
        assert law.best(natural, cost, 0) == pytest.approx(2.5 * 1.25643, abs=1e-3)
        bits = np.linspace(1, 16, 1501)
        assert bits[law.at_cost(natural, cost, bits, 0).argmin(1)] == pytest.approx(2.5 * 1.25643, abs=0.01)


def test_published_constants_give_the_published_optima() -> None:
    """Kumar et al., section 4.3.2: 7 to 8 bits. Sun et al., section 4.4 (blocks of 128, k = 6/16): 4 to 8 bits from
    1e21 to 1e31, growing; and the optimum is the minimum over N, D and P."""
    assert 6.99 <= best_precision(list(PUBLISHED_EFFECTIVE.values())) <= 8
    law = FloatFormat()
    natural = np.array([[*PUBLISHED_FLOAT.values(), 1.0]])
    found = [law.best(natural, c / (6 / 16), 128)[0] for c in (1e21, 1e26, 1e31)]
    assert 3.9 < found[0] < found[1] < found[2] < 8.1
    bits = np.linspace(2, 12, 1001)
    curve = law.at_cost(natural, 1e26 / (6 / 16), bits, 128)[0]
    assert bits[curve.argmin()] == pytest.approx(found[1], abs=0.05)


def test_bits_are_divided_best() -> None:
    """q P^-s is what the best of all divisions of P - 1 bits leaves."""
    natural = np.array([[*PUBLISHED_FLOAT.values(), 1.0]])
    q, s = FloatFormat()._divided(natural, 128)
    c = PUBLISHED_FLOAT
    exponent = np.linspace(0, 7, 70001)
    left = np.log2(128) / c["g"] / ((exponent + 0.5) ** c["x"] * (7 - exponent + 0.5) ** c["m"])
    assert left.min() == pytest.approx((q * 8**-s)[0], rel=1e-6)
